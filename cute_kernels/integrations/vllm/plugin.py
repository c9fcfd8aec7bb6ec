"""The entry point of the plug-in: what asks for it, and the registration of its parts.

vLLM loads this file in each of its processes: it imports neither torch nor vLLM by itself.
"""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType

from ... import settings
from ...errors import ArgumentValueError, expected, one_of
from . import KEY

#: Names of options.
OPTIONS = ("order",)
_VARIABLE = f"{settings.PREFIX}VLLM"
_WATCHED = "_cute_kernels_watched"
#: Parts that are registered: a call of `activate` after a failed one goes on behind them.
_registered: list[ModuleType] = []


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
        watch(engine_arguments.EngineArgs)
    if settings.vllm():
        activate()


@functools.cache
def activate() -> None:
    """Register layers, attention backend, samplers and the check of the built model, once.

    A call that raises is not cached: the next one raises again.

    Raises:
        BackendUnavailable: the interface of this vLLM is another one; an op has no backend.
        PatchError: another plug-in has replaced a layer already.
    """
    from . import releases

    releases.check()
    from . import attention, layers, mixtures, model_check, recurrent, rotary, samplers

    for part in (layers, mixtures, recurrent, rotary, attention, samplers, model_check):
        if part not in _registered:
            part.register()
            _registered.append(part)


def watch(engine_args: type) -> None:
    """Wrap ``EngineArgs.create_engine_config``, once: defaults before it, checks around it."""
    create = engine_args.create_engine_config
    if hasattr(create, _WATCHED):
        return

    @functools.wraps(create)
    def create_engine_config(self, *args, **kwargs):
        is_on = settings.vllm()
        if not asked_for(self.additional_config, is_on):
            return create(self, *args, **kwargs)
        if not is_on:
            # Workers are other processes, which know the environment only.
            os.environ[_VARIABLE] = "1"
            settings.reload()
        activate()
        from . import refusals, releases

        refusals.check_arguments(self)
        releases.set_defaults(self)
        config = create(self, *args, **kwargs)
        releases.set_hybrid_defaults(config)
        refusals.check_config(config, releases.device_type())
        return config

    setattr(create_engine_config, _WATCHED, True)
    engine_args.create_engine_config = create_engine_config


def asked_for(additional_config: object, is_on: bool) -> bool:
    """Whether an engine is to run the plug-in.

    Args:
        additional_config: The engine's.
        is_on: Whether the plug-in is on in this process, which it then is for every engine.

    Raises:
        ArgumentValueError: a key that is almost `KEY`, a value that is neither a bool nor options,
            an option that there is not, or False where the plug-in is on.
    """
    if not isinstance(additional_config, dict):
        return is_on
    for key in additional_config:
        if key != KEY and _plain(key) == _plain(KEY):
            raise ArgumentValueError(expected("additional_config", f"the key {KEY!r}", repr(key)))
    if KEY not in additional_config:
        return is_on
    name, value = f"additional_config[{KEY!r}]", additional_config[KEY]
    if isinstance(value, dict) and value:
        for option in value:
            if option not in OPTIONS:
                raise ArgumentValueError(one_of(f"option of {name}", OPTIONS, option))
        return True
    if not isinstance(value, bool):
        want = "True, False or options by name, such as {'order': 'tree'}"
        raise ArgumentValueError(expected(name, want, repr(value)))
    if is_on and not value:
        want = "no False: the plug-in is on in this process, for all of its engines"
        raise ArgumentValueError(expected(name, want, value))
    return value


def _plain(key: object) -> str:
    """A key without case, separators and plural."""
    return str(key).lower().replace("-", "").replace("_", "").replace(" ", "").rstrip("s")
