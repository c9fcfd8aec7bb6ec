"""FSDP2 (``fully_shard``): log-probabilities, policy losses, publication.

    fully_shard(model)                                 # and any of its layers, and the head
    logps = token_logps(model, input_ids)              # token_logps.py, as policy_loss
    publish_weights(path, model)

The model and the head are called as modules: FSDP2's own hooks gather the head before its forward
and again before its backward, and reshard it after both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch.distributed.fsdp import FSDPModule

from ..errors import ArgumentTypeError, expected
from . import publish

#: The manifest's name for the layout: parameters, gradients and optimizer states are all cut.
STAGE = 3


def publish_weights(
    path: str | os.PathLike,
    model: torch.nn.Module,
    metadata: Mapping[str, object] | None = None,
    **options: object,
) -> publish.Manifest:
    """Publish a sharded model's weights; every rank calls it, and rank 0 writes.

    Parameters are gathered one at a time, and kept by rank 0 alone, in the CPU's memory.  The
    manifest calls the layout stage 3, which is what FSDP2 does.

    Args, Returns, Raises: as ``deepspeed.publish_weights``, with a model for the engine.
    """
    if not isinstance(model, FSDPModule):
        want = "a module that fully_shard was applied to"
        raise ArgumentTypeError(expected("model", want, type(model).__name__))
    options["metadata"] = metadata
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A forward without a backward leaves the outermost one whole.
            module.reshard()
    return publish.published_by_rank_0(path, model, _copied, STAGE, **options)


def _copied(parameter: torch.Tensor, keep: bool) -> torch.Tensor | None:
    t = parameter.detach()
    t = t.full_tensor() if hasattr(t, "full_tensor") else t
    return t.to("cpu", copy=True) if keep else None
