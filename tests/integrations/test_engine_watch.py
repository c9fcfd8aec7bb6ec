"""Calls of an engine that is killed raise; the client's parts are vLLM's by name."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace

import pytest

from cute_kernels.errors import ArgumentTypeError
from cute_kernels.integrations.engine_watch import watch_engine
from tests.hang import HANG_SECONDS


class EngineDeadError(Exception):
    """Stand-in for vLLM's."""


@pytest.fixture
def engine(monkeypatch):
    """(duck type of a ``vllm.LLM``, its process)."""
    for name in ("vllm", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.exceptions"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.v1.engine.exceptions"].EngineDeadError = EngineDeadError
    code = f"import time; time.sleep({HANG_SECONDS})"
    process = subprocess.Popen([sys.executable, "-c", code])
    sentinel = os.pidfd_open(process.pid)  # readable once the process has ended
    manager = SimpleNamespace(processes=[SimpleNamespace(sentinel=sentinel)])
    core = SimpleNamespace(
        resources=SimpleNamespace(engine_manager=manager, engine_dead=False),
        outputs_queue=queue.Queue(),
        utility_results={},
    )
    yield SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core)), process
    process.kill()
    process.wait()
    core.resources.engine_dead = True
    os.close(sentinel)


def test_what_waits_for_a_killed_engine_raises(engine):
    llm, process = engine
    core = llm.llm_engine.engine_core
    answered, waiting, late = Future(), Future(), Future()
    answered.set_result("before")
    core.utility_results.update({1: answered, 2: waiting})
    thread = watch_engine(llm)
    os.kill(process.pid, signal.SIGKILL)
    assert isinstance(core.outputs_queue.get(timeout=HANG_SECONDS), EngineDeadError)
    assert isinstance(waiting.exception(HANG_SECONDS), EngineDeadError)
    # One that was entered before the client knew.
    core.utility_results[3] = late
    core.resources.engine_dead = True
    assert isinstance(late.exception(HANG_SECONDS), EngineDeadError)
    thread.join(HANG_SECONDS)
    assert answered.result() == "before" and core.outputs_queue.empty()


def test_an_engine_that_lives_is_left_alone(engine):
    llm, _ = engine
    core = llm.llm_engine.engine_core
    core.utility_results[1] = waiting = Future()
    thread = watch_engine(llm)
    assert thread.daemon and thread.is_alive()
    assert not waiting.done() and core.outputs_queue.empty()


def test_other_engines(engine):
    llm, _ = engine
    core = llm.llm_engine.engine_core
    with pytest.raises(ArgumentTypeError, match=r"llm: expected a vllm\.LLM, got object"):
        watch_engine(object())
    core.resources.engine_manager = SimpleNamespace()
    with pytest.raises(
        ArgumentTypeError, match=r"llm: expected .* on this host, got one of Simple"
    ):
        watch_engine(llm)
    llm.llm_engine.engine_core = SimpleNamespace()  # one that computes in this process
    assert watch_engine(llm) is None
