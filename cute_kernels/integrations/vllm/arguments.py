"""Arguments of the engine: what asks for the plug-in, the defaults that it sets, the checks."""

from __future__ import annotations

import functools
import os

from ... import settings
from . import options

_VARIABLE = f"{settings.PREFIX}VLLM"
_WATCHED = "_cute_kernels_watched"


def watch(engine_args: type) -> None:
    """Wrap ``EngineArgs.create_engine_config``, once: defaults before it, checks around it."""
    create = engine_args.create_engine_config
    if hasattr(create, _WATCHED):
        return

    @functools.wraps(create)
    def create_engine_config(self, *args, **kwargs):
        is_on = settings.vllm()
        if not options.asked_for(self.additional_config, is_on):
            return create(self, *args, **kwargs)
        if not is_on:
            # Workers are other processes, which know the environment only.
            os.environ[_VARIABLE] = "1"
            settings.reload()
        from . import activation, refusals, releases

        activation.activate()
        refusals.check_arguments(self)
        releases.set_defaults(self)
        config = create(self, *args, **kwargs)
        refusals.check_config(config, releases.device_type())
        return config

    setattr(create_engine_config, _WATCHED, True)
    engine_args.create_engine_config = create_engine_config
