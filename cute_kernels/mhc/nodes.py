"""Shared parts of mhc's autograd nodes: weights as kernels take them, gradient destinations.

A backward op returns a gradient for each tensor; an empty one for those that were not asked for, or
whose gradient went into a main_grad.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import UnsupportedTransformError
from ..runtime import main_grad as destination
from ..runtime.dispatch import Launches, plan_launches
from ..runtime.torch_ops import define_op, own_result
from .config import mappings
from .tensors import Gates, Mapping, Parts

#: Elements of alpha: of pre, post and res.
_ALPHAS = 3
#: First columns of alpha and beta in the parts of both.
_FIRST = (0, _ALPHAS)


def _fp32(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.float32).contiguous()


def mapping(phi: torch.Tensor, norm_weight: torch.Tensor | None, precision: str, n: int) -> Mapping:
    """Return phi and norm_weight for the kernels."""
    weight = None if norm_weight is None else _fp32(norm_weight)
    return Mapping(_pad_rows(_fp32(phi), mappings(n)), weight, precision)


def gates(alpha, beta, eps: float, pre_eps: float, post_scale: float, n: int) -> Gates:
    """Return alpha and beta for the kernels."""
    alpha = _pad_rows(_fp32(alpha), _ALPHAS)
    return Gates(alpha, _pad_rows(_fp32(beta).view(-1), mappings(n)), eps, pre_eps, post_scale)


def _pad_rows(t: torch.Tensor, rows: int) -> torch.Tensor:
    """Pad the rows of a head, which has those of H_pre only, with zeros that are not read."""
    return t if len(t) == rows else torch.cat([t, t.new_zeros(rows - len(t), *t.shape[1:])])


def shaped(result: torch.Tensor, *shape: int) -> torch.Tensor:
    """View an op's result in the operands' shape; the caller may write it in place."""
    return own_result(result.view(*shape))


def empty_result(like: torch.Tensor) -> torch.Tensor:
    """Empty placeholder for a gradient that was not requested; the fake has the same dtype."""
    return like.new_empty(0, dtype=torch.float32)


def gradient(t: torch.Tensor | None, like: torch.Tensor, need: bool) -> torch.Tensor:
    """Return a gradient of ``like``, or a placeholder; ``t`` is None where there are no tokens."""
    if not need:
        return empty_result(like)
    return like.new_empty(like.shape) if t is None else t


def requested(gradients, needs, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keep the requested gradients and replace the others by empty tensors."""
    pairs = zip(gradients, needs, strict=True)
    return tuple(t if need else empty_result(like) for t, need in pairs)


def zeros(tensors, needs) -> list[torch.Tensor]:
    """Return zero gradients of an input without tokens; unrequested tensors may be None."""
    pairs = zip(tensors, needs, strict=True)
    return [t.new_zeros(t.shape) if need else empty_result(tensors[0]) for t, need in pairs]


def finish_weights(
    launch: Launches,
    parts: Parts | None,
    mapping: Mapping,
    weights: tuple,
    into: tuple,
    needs: tuple[bool, bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (dphi, dnorm_weight), added to ``into`` if given; ``weights``: the caller's.

    ``needs``: of the two.
    """
    phi, norm_weight = weights
    if not any(needs):
        return empty_result(phi), empty_result(phi)
    sums = [
        _accumulator(phi, into[0], len(mapping.phi)),
        None if norm_weight is None else _accumulator(norm_weight, into[1], len(norm_weight)),
    ]
    of_phi, of_weight = sums[0], sums[1] if needs[1] else None
    if parts is not None:
        launch("mhc_weights", phi, parts, mapping, of_phi, of_weight)
    d_phi = _returned(sums[0], phi, into[0], needs[0])
    if norm_weight is None:
        return d_phi, empty_result(phi)
    return d_phi, _returned(sums[1], norm_weight, into[1], needs[1])


def finish_parts(
    launch: Launches, parts: Parts | None, like: torch.Tensor, into: torch.Tensor | None, need: bool
) -> torch.Tensor:
    """Sum parts [P, L] to the gradient of one vector, ``like``."""
    if not need:
        return empty_result(like)
    total = _accumulator(like, into, len(like))
    if parts is not None:
        launch("mhc_add_parts", parts.values, parts, total)
    return _returned(total, like, into, need)


def finish_gates(
    launch: Launches, parts: Parts | None, gates: tuple, into: tuple, needs: tuple[bool, bool]
):
    """Return (dalpha, dbeta) of parts of both, in one sum: a launch costs more than its numbers."""
    if parts is None or not any(needs):
        pairs = zip(gates, into, needs, strict=True)
        return tuple(finish_parts(launch, None, like, main, need) for like, main, need in pairs)
    total = parts.values.new_zeros(parts.values.shape[1])
    columns = [
        total[first : first + gate.numel()] for gate, first in zip(gates, _FIRST, strict=True)
    ]
    for main, column in zip(into, columns, strict=True):
        if main is not None:
            column.copy_(main.flatten())
    launch("mhc_add_parts", parts.values, parts, total)
    results = []
    for gate, main, need, column in zip(gates, into, needs, columns, strict=True):
        if need and main is not None:
            main.copy_(column.view(main.shape))
        returned = need and main is None
        results.append(
            column.to(gate.dtype, copy=True).view(gate.shape) if returned else empty_result(gate)
        )
    return tuple(results)


def _accumulator(like: torch.Tensor, into: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Accumulator for sums over tokens: contiguous, fp32, of as many rows as kernels make.

    The first rows of a head's phi start from ``into``: elements are independent, so they get the
    bytes that ``into`` itself would get.
    """
    if into is None:
        return like.new_zeros(rows, *like.shape[1:], dtype=torch.float32)
    return _pad_rows(into if into.is_contiguous() else into.contiguous(), rows)


def _returned(total, like, into, need: bool) -> torch.Tensor:
    if into is not None:
        if need and total is not into:
            into.copy_(total[: len(into)])
        return empty_result(into)
    return (
        total[: len(like)].to(like.dtype, copy=len(like) < len(total))
        if need
        else empty_result(like)
    )


def fake_gradients(tensors, needs, into) -> tuple[torch.Tensor, ...]:
    """Fake of a backward op: a gradient for each tensor that needs one and has no main_grad."""
    return tuple(
        t.new_empty(t.shape) if need and main is None else empty_result(tensors[0])
        for t, need, main in zip(tensors, needs, into, strict=True)
    )


def refuse_double(name: str) -> None:
    """Refuse to differentiate a backward."""
    if torch.is_grad_enabled():
        raise UnsupportedTransformError(
            f"cute_kernels.mhc.{name}: double backward (create_graph=True) is not available"
        )


def _vmap_refused(info, in_dims, *args):
    raise UnsupportedTransformError(
        "cute_kernels.mhc: torch.func.vmap is not supported; leading dimensions do the same"
    )


def define(schema: str, function: Callable, **options: object) -> Callable:
    """Define an op without vmap; ``function(launch, *args)`` computes it."""
    return define_op(schema, plan=plan_launches(function), vmap=_vmap_refused, **options)


def save_context(ctx, inputs, mains: range) -> None:
    """Save on ``ctx`` which inputs are tensors, and the main_grads of weights."""
    ctx.tensors = [True if isinstance(t, torch.Tensor) else None for t in inputs]
    # Not saved tensors: backward of an earlier micro-batch may write them before ours reads them.
    ctx.main_grads = [inputs[i] for i in mains]
    ctx.set_materialize_grads(False)


def targets(
    ctx, positions: tuple[int, ...], *upstream: torch.Tensor | None
) -> list[destination.Target]:
    """Gradient destinations of the weights at some positions of a node's inputs."""
    mains = dict(zip(positions, ctx.main_grads, strict=True))
    by_position = destination.targets(ctx, ctx.tensors, mains, upstream)
    return [by_position[position] for position in positions]


def input_gradients(
    gradients, needs, targets: dict[int, destination.Target]
) -> list[torch.Tensor | None]:
    """Return the gradients of a node's first inputs: None where a main_grad has them."""
    for target in targets.values():
        target.written()
    returned = [targets[i].returned if i in targets else need for i, need in enumerate(needs)]
    return [t if want else None for t, want in zip(gradients, returned, strict=True)]


def rows(t: torch.Tensor) -> torch.Tensor:
    """Return fp32 rows whose last stride is 1, as kernels read coefficients."""
    return t if t.stride(-1) == 1 else t.contiguous()


def check_no_alias(mains: dict[str, torch.Tensor | None], **operands: torch.Tensor | None) -> None:
    """Check that no main_grad shares memory with a tensor that is read, or with another one."""
    named_mains = {
        f"main_grads[{name!r}]": main for name, main in mains.items() if main is not None
    }
    for argument, main in named_mains.items():
        other_mains = {name: t for name, t in named_mains.items() if name != argument}
        destination.check_no_alias(main, argument, **operands, **other_mains)
