"""Register all parts of the plug-in, once a process."""

from __future__ import annotations

import functools
from types import ModuleType

from . import releases

#: Parts that are registered: a call after a failed one goes on behind them.
_registered: list[ModuleType] = []


@functools.cache
def activate() -> None:
    """Register layers, attention backend, samplers and the check of the built model.

    A call that raises is not remembered: the next one raises again.

    Raises:
        BackendUnavailable: the interface of this vLLM is another one; an op has no backend.
        PatchError: another plug-in has replaced a layer already.
    """
    releases.check()
    from . import (
        attention,
        head,
        layers,
        mixtures,
        model_check,
        pointwise,
        rotary,
        sampler_v1,
        sampler_v2,
    )

    parts = layers, head, mixtures, pointwise, rotary, attention, sampler_v1, sampler_v2
    for part in (*parts, model_check):
        if part not in _registered:
            part.register()
            _registered.append(part)
