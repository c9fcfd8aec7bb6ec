"""The entry point of the plug-in."""

from __future__ import annotations

import sys

from ... import settings


def register() -> None:
    """Entry point: watch the engine's arguments, and activate the plug-in if the environment asks.

    vLLM calls this once a process, even if it raises.  What raises here is raised again by the
    watched `EngineArgs`, so that no later engine of the process runs stock layers in its place.

    Raises:
        SettingError: CUTE_KERNELS_VLLM is neither 0 nor 1.
        BackendUnavailable: the interface of this vLLM is another one.
    """
    engine_arguments = sys.modules.get("vllm.engine.arg_utils")
    if engine_arguments is not None:
        from . import arguments

        arguments.watch(engine_arguments.EngineArgs)
    if settings.vllm():
        from . import activation

        activation.activate()
