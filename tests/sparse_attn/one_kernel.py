"""Forwards by one kernel, of tiles, which calls over long key buffers may not take on SM90."""

from __future__ import annotations

from torch import Tensor

from cute_kernels import arch
from cute_kernels.runtime import dispatch
from cute_kernels.sparse_attn import launch, lowering
from cute_kernels.sparse_attn.op import NAME


def causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of [B, S, H, D], aligned at the last query; window: as in `causal_attention`."""
    facts = lowering.window(window)
    mask = lowering.mask_of_op([], facts, q.shape[1], k.shape[1], str(q.device))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    operands = q, k, v, mask, scale, softcap, sinks
    if dispatch.backend(NAME, str(q.device), q.dtype) != arch.CUTE_SM90:
        return dispatch.launcher(NAME, q.device, q.dtype)(*operands)
    return launch.plan_one_kernel(*operands).run(*operands)


def of_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of spans on the device, by the SM90 kernel."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    operands = q, k, v, spans, scale, softcap, sinks
    return launch.plan_one_kernel_of_ranges(*operands).run(*operands)
