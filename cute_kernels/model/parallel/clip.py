"""``clip_grad_norm_`` of a model that is cut over ranks, with the bytes of one rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...cpu.ieee import ieee_on
from ...rowwise import checks as rowwise_checks
from ...rowwise import op as rowwise
from . import checks


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    main_grad: bool = False,
) -> torch.Tensor:
    """``ck.clip_grad_norm_`` for parameters of which a rank has parts: DTensors, and whole ones.

    One gradient after the other is gathered whole, and its squares are added in the order of one
    rank.  Every rank calls it with the same parameters in the same order.

    Args, Returns: As ``ck.clip_grad_norm_``.

    Raises:
        ArgumentTypeError: a gradient is a sum that ranks have yet to add (a partial DTensor).
        PatchError: ``fully_shard`` has cut the halves of experts' gate and up.
        Others: as ``ck.clip_grad_norm_``.
    """
    listed = rowwise_checks._parameters(parameters)
    for i, parameter in enumerate(listed):
        checks.no_partial_gradient(f"parameters[{i}]", parameter)
        checks.packed_alone(f"parameters[{i}]", getattr(parameter, "placements", ()))
    # The checks, and the scaling in place, are those of this rank's parts.
    parts = [_part(parameter) for parameter in listed]
    problem = rowwise_checks.clip(parts, max_norm, norm_type, error_if_nonfinite, main_grad)
    if not problem.gradients:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    gradients = [g for p in listed if (g := _gradient(p, main_grad)) is not None]
    with torch.no_grad():
        total = _total_norm(gradients, problem.largest)
        if error_if_nonfinite:
            rowwise_checks.finite(total)
        rowwise.clip(problem.gradients, total, problem.max_norm)
    return rowwise.fp32_norm(total)


def _gradient(parameter: torch.Tensor, main_grad: bool) -> torch.Tensor | None:
    into = getattr(parameter, "main_grad", None) if main_grad else None
    return parameter.grad if into is None else into


def _part(parameter: object) -> object:
    """A parameter of this rank's part, whose gradients share memory with those of the whole."""
    if not hasattr(parameter, "placements"):
        return parameter
    part = parameter.detach().to_local().requires_grad_()
    if parameter.grad is not None:
        part.grad = parameter.grad.to_local()
    if getattr(parameter, "main_grad", None) is not None:
        part.main_grad = parameter.main_grad.to_local()
    return part


def _total_norm(gradients: list[torch.Tensor], largest: bool) -> torch.Tensor:
    """As ``rowwise.op.total_norm``, with one gradient whole at a time."""
    terms = []
    for gradient in gradients:
        whole = gradient.full_tensor() if hasattr(gradient, "placements") else gradient
        if largest:
            terms.append(rowwise.total_norm((whole,), largest=True))
        else:
            with ieee_on(whole):
                terms.append(rowwise.square_sum(whole))
    with ieee_on(terms[0]):
        stacked = torch.stack(terms)
        return stacked.amax() if largest else rowwise.add_sums(stacked).sqrt()
