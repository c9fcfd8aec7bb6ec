"""Register all parts of the plug-in, once a process."""

from __future__ import annotations

import functools

from . import releases


@functools.cache
def activate() -> None:
    """Register layers, attention backend, samplers and the check of the built model.

    Raises:
        BackendUnavailable: this release of vLLM, or of torch, was not run; an op has no backend.
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
        part.register()
