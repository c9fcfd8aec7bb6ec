"""Exchanges between the parts of a cut model, forward and backward.

Collectives only move bytes.  What every rank has whole has the same bytes on each of them, and so
have gradients: a gather's gradient is the rank's part of the upstream gradient.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...rowwise import op as rowwise
from ...runtime import main_grad as destination
from ...runtime import process_groups
from ...runtime.torch_ops import detach_view
from . import checks


def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's part of a parameter, whose gradient is the part of the parameter's gradient."""
    if not hasattr(tensor, "to_local"):
        return tensor
    return _Local.apply(tensor) if torch.is_grad_enabled() else tensor.to_local()


class _Local(torch.autograd.Function):
    """``DTensor.to_local`` that passes on no gradient where none comes (one of a main_grad)."""

    @staticmethod
    def forward(ctx, tensor):
        ctx.set_materialize_grads(False)
        ctx.layout = tensor.device_mesh, tensor.placements
        ctx.sizes = {"shape": tensor.shape, "stride": tensor.stride()}
        return detach_view(tensor.to_local())

    @staticmethod
    def backward(ctx, gradient):
        if gradient is None:
            return None
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(gradient, *ctx.layout, run_check=False, **ctx.sizes)


def unchanged(results, parameter: torch.Tensor):
    """``results`` of a module, one or several, whose backward refuses a parameter that changed.

    A backward reads this rank's part.  torch counts a write to a DTensor, as of an optimizer, at
    the DTensor alone, so that the part that autograd saved seems to be as it was.
    """
    several = isinstance(results, tuple)
    outputs = results if several else (results,)
    if hasattr(parameter, "placements") and any(t.requires_grad for t in outputs):
        outputs = _Unchanged.apply(parameter, *outputs)
    return tuple(outputs) if several else outputs[0]


class _Unchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter, *results):
        ctx.set_materialize_grads(False)
        # Not a saved tensor: hooks that move those to the host would move parameters.
        ctx.parameter, ctx.version = parameter, parameter._version
        return tuple(t.detach() for t in results)

    @staticmethod
    def backward(ctx, *gradients):
        checks.not_changed(ctx.parameter, ctx.version)
        return None, *gradients


def joined(part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate the parts of all ranks along a dimension, in the order of ranks; no gradient."""
    if group.size() == 1:
        return part
    return torch.cat(process_groups.all_gather(part, group).unbind(), dim)


def part_of(whole: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of a tensor that every rank has; no gradient."""
    size = whole.shape[dim] // group.size()
    return whole.narrow(dim, group.rank() * size, size)


def gather(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Whole rows [..., N] of the parts [..., N / ranks] of all ranks."""
    return part if group.size() == 1 else _Exchange.apply(part, joined, part_of, group)


def split(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's columns [..., N / ranks] of rows [..., N] that every rank has."""
    return whole if group.size() == 1 else _Exchange.apply(whole, part_of, joined, group)


class _Exchange(torch.autograd.Function):
    """Exchange columns between ranks; gradients come back by the opposite exchange."""

    @staticmethod
    def forward(ctx, t, function, opposite, group):
        ctx.opposite, ctx.group = opposite, group
        return detach_view(function(t, -1, group))

    @staticmethod
    def backward(ctx, gradient):
        return ctx.opposite(gradient, -1, ctx.group), None, None, None


# ---- embedding ----------------------------------------------------------------------------------


def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    padding: int,
    main_grad: torch.Tensor | None,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Rows [..., D] of a table whose entries [V / ranks, D] follow each other on the ranks.

    ``padding``: the entry of all whose tokens have no gradient; -1: none.  dweight of a rank's
    entries is that of one rank: an entry's tokens are added in their order.
    """
    return _Embedding.apply(ids, weight, padding, main_grad, group)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, padding, main_grad, group):
        index = ids.to(torch.int64) - group.rank() * weight.shape[0]
        here = (index >= 0) & (index < weight.shape[0])
        # The gradient skips tokens of entry -1.
        ctx.save_for_backward(torch.where(here & (ids != padding), index, -1))
        ctx.vocab = weight.shape[0]
        if main_grad is not None:
            destination.check_no_alias(main_grad, ids=ids, weight=weight)
        # Not a saved tensor: backward of an earlier micro-batch may write it before ours reads it.
        ctx.main_grad = main_grad if ctx.needs_input_grad[1] else None
        rows = torch.embedding(weight, torch.where(here, index, 0))
        return _select(torch.where(here[..., None], rows, 0), group)

    @staticmethod
    def backward(ctx, dy):
        (ids,) = ctx.saved_tensors
        target = destination.targets(ctx, (True, True), {1: ctx.main_grad}, (dy,))[1]
        if target.into is not None:
            rowwise.embedding_gradient_(dy, ids, -1, target.into)
            target.written()
        dweight = rowwise.embedding_gradient(dy, ids, -1, ctx.vocab) if target.returned else None
        return None, dweight, None, None, None


def _select(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Each row from the one rank that has it; the others have zeros there.

    The bits are added as integers: a number plus zeros is itself, in any order, -0.0 and NaN too.
    """
    if group.size() > 1 and rows.numel():
        width = rows.shape[-1] * rows.element_size()
        bits = rows.view(torch.int32 if width % 4 == 0 else torch.uint8)
        dist.all_reduce(bits, group=group)
    return rows
