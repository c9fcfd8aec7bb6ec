"""The entry point of the plug-in."""

from __future__ import annotations

import sys

from ... import settings


def register() -> None:
    """Entry point: activate the plug-in if the environment asks for it, else watch for arguments.

    Raises:
        SettingError: CUTE_KERNELS_VLLM is neither 0 nor 1.
        BackendUnavailable: this release of vLLM, or of torch, was not run.
    """
    if settings.vllm():
        from . import activation

        activation.activate()
    engine_arguments = sys.modules.get("vllm.engine.arg_utils")
    if engine_arguments is not None:
        from . import arguments

        arguments.watch(engine_arguments.EngineArgs)
