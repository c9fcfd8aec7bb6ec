"""Publication by several ranks: all gather, rank 0 writes, all get the outcome."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..errors import CuteKernelsError, ManifestError
from . import publish
from .manifest import Manifest


def published_by_rank_0(
    path: str | os.PathLike,
    module: torch.nn.Module,
    copied: Callable[[torch.Tensor, bool], torch.Tensor | None],
    zero_stage: int,
    **options: object,
) -> Manifest:
    """Run ``publish.publish_weights`` on rank 0; every rank returns its manifest, or raises.

    Args:
        path: As there; rank 0's counts.
        module: Its parameters and persistent buffers are published, one at a time.
        copied: ``copied(parameter, keep)``, a collective: the whole parameter in the CPU's memory
            if ``keep``, else None.
        zero_stage: For the manifest.
        options: More of ``publish_weights``.

    Raises:
        On rank 0: as ``publish_weights``.  ManifestError elsewhere, with the same message.
    """
    joined = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
    # This comes first: FSDP2 reshards what a forward left whole when it is asked for names.
    names = list(module.state_dict())
    parameters = dict(module.named_parameters(remove_duplicate=False))
    parameters |= dict(module.named_buffers(remove_duplicate=False))
    copies, tensors = {}, {}
    for name in names:
        if name not in parameters:
            continue
        # A tied parameter is gathered once, and kept once, so that it is seen to be one.
        if id(parameters[name]) not in copies:
            copies[id(parameters[name])] = copied(parameters[name], rank == 0)
        tensors[name] = copies[id(parameters[name])]
    manifest, refusal = None, None
    if rank == 0:
        layout = publish.Layout(zero_stage, world, rank)
        try:
            manifest = publish.publish_weights(path, tensors, layout=layout, **options)
        except (CuteKernelsError, OSError) as error:
            refusal = error
    if world > 1:
        outcome = [manifest, None if refusal is None else str(refusal)]
        dist.broadcast_object_list(outcome, src=0)
        if rank and outcome[1] is not None:
            raise ManifestError(f"rank 0 did not publish: {outcome[1]}")
        manifest = outcome[0]
    if refusal is not None:
        raise refusal
    return manifest
