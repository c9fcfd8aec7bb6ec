"""End the call in flight of a vLLM engine whose process is killed.

``vllm.LLM`` computes in a process of its own unless VLLM_ENABLE_V1_MULTIPROCESSING=0.  When that
process is killed, vLLM marks the engine as dead, and every later call raises ``EngineDeadError``.
The call that waits at that moment, ``generate`` or ``collective_rpc``, waits forever: the thread
that receives answers ends without a word (0.25.1 and 0.32.0).  With `watch_engine` it raises too,
so that a trainer can start another engine, load the published weights and draw again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import InvalidStateError
from multiprocessing import connection
from typing import Any

from ..errors import ArgumentTypeError, expected

__all__ = ["watch_engine"]

_PAUSE_S = 0.05


def watch_engine(llm: object) -> threading.Thread | None:
    """Make calls of a ``vllm.LLM`` raise ``EngineDeadError`` once its process is killed.

    Args:
        llm: An engine that has started; call this once for each.

    Returns:
        The daemon thread that waits for the process, or None: the engine computes in this one.

    Raises:
        ArgumentTypeError: ``llm`` is no ``vllm.LLM``, or its processes are not this host's.
    """
    core = getattr(getattr(llm, "llm_engine", None), "engine_core", None)
    if core is None:
        raise ArgumentTypeError(expected("llm", "a vllm.LLM", type(llm).__name__))
    manager = getattr(getattr(core, "resources", None), "engine_manager", None)
    if manager is None:
        return None
    if not hasattr(manager, "processes"):
        want = "an engine whose processes run on this host"
        raise ArgumentTypeError(expected("llm", want, f"one of {type(manager).__name__}"))
    # Not the client itself: a reference from a thread would keep it from being collected.
    arguments = list(manager.processes), core.resources, core.outputs_queue, core.utility_results
    thread = threading.Thread(target=_wait, args=arguments, name="engine_watch", daemon=True)
    thread.start()
    return thread


def _wait(processes: list, resources: Any, outputs: Any, calls: dict) -> None:
    """Wait until one process ends, then end what waits for it."""
    from vllm.v1.engine.exceptions import EngineDeadError

    connection.wait([process.sentinel for process in processes])
    outputs.put_nowait(EngineDeadError())
    while True:
        # A call that saw a live engine is among these: it is entered before it looks.
        dead = resources.engine_dead
        for call in list(calls.values()):
            with contextlib.suppress(InvalidStateError):  # it had its answer
                call.set_exception(EngineDeadError())
        if dead:
            return
        time.sleep(_PAUSE_S)
