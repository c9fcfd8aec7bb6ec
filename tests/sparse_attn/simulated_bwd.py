"""The three SM90 backward kernels on this CPU: compiled for sm_90a and run by ptxsim.

`backward` calls the launcher, and sees that every turn was taken.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.order.schedule import Schedule
from cute_kernels.sparse_attn import config, launch, masks
from cute_kernels.sparse_attn.tensors import Grads, Saved
from tests.oracles import sparse_attn as reference
from tests.sparse_attn import against_float64, simulated


class Case(NamedTuple):
    """One attention, its mask, and what the forward would have left, rounded from float64."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    mask: BlockMask
    scale: float
    softcap: float = 0.0

    @property
    def lowered(self) -> masks.LoweredMask:
        return masks.lower(self.mask)

    @property
    def kv_heads(self) -> int:
        """(batch, KV head) pairs: the heads of a schedule."""
        return self.k.shape[0] * self.k.shape[2]


def case(
    mask: BlockMask,
    *,
    head_dim: int = 128,
    heads: int = 1,
    kv_heads: int = 1,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    softcap: float = 0.0,
    seed: int = 0,
) -> Case:
    """Random inputs; out and lse are the float64 forward's, rounded to what a kernel stores."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(length: int, n: int, columns: int) -> torch.Tensor:
        return torch.randn(batch, length, n, columns, generator=generator).to(dtype)

    of_values = config.VALUE_DIMS[head_dim]
    q, dout = (drawn(mask.q_len, heads, columns) for columns in (head_dim, of_values))
    k, v = (drawn(mask.kv_len, kv_heads, columns) for columns in (head_dim, of_values))
    scale = head_dim**-0.5
    out, lse = reference.attention(q, k, v, mask.to_dense(), scale=scale, softcap=softcap)
    return Case(q, k, v, dout, out.to(dtype), lse.float(), mask, scale, softcap)


def holes(head_dim: int) -> tuple[Case, Schedule]:
    """The second query block and the third key block of four see nothing and are seen by none."""
    allowed = torch.ones(1, 1, 400, 400, dtype=torch.bool).tril()
    allowed[..., 128:256, :] = allowed[..., 256:384] = False
    drawn = case(BlockMask.from_dense(allowed), head_dim=head_dim)
    return drawn, kinds.spt(drawn.lowered.mask, heads=1)


class Gradients(NamedTuple):
    """dq, dk, dv as a caller gets them, and the fp32 accumulator of dQ [B, Hq, Mt, tile_m * D]."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    accumulator: torch.Tensor


def backward(
    case: Case,
    schedule: Schedule,
    *,
    ordered: bool = True,
    dlse: torch.Tensor | None = None,
    **options,
) -> Gradients:
    """The launcher's three kernels; ``options``: see `simulated.simulated`."""
    lowered = case.lowered
    order = masks.order_of(lowered, schedule)
    grads = Grads(case.dout, dlse)
    saved = Saved(case.q, case.k, case.v, case.out, case.lse)
    with simulated.simulated(**options) as used:
        out = launch.backward(grads, saved, lowered, order, case.scale, case.softcap, ordered)
    (held,) = used
    if ordered:
        tile_m = held.lse2.shape[3]
        turns = held.semaphore.numel() // held.lse2[..., 0].numel()
        parts = 1 if case.q.shape[3] <= 128 else 2
        assert held.semaphore.sum() == expected_visits(case, schedule, tile_m) * turns * parts
    return Gradients(*out, held.total)


def expected_visits(case: Case, schedule: Schedule, tile_m: int) -> int:
    """Turns taken in all: one per (query head, entry, tile of it that begins inside Sq)."""
    q_len, group = case.q.shape[1], case.q.shape[2] // case.k.shape[2]
    visits = 0
    for _, _, entries in schedule.tickets():
        for m, _, _ in entries:
            visits += -(-(min(q_len, (m + 1) * 128) - m * 128) // tile_m)
    return visits * group


def check(case: Case, grads: Gradients, dlse: torch.Tensor | None = None) -> float:
    """Asserts that the gradients are within the bound of `reference`; the largest share of it."""
    scores = reference.Scores(case.scale, case.softcap)
    operands = case.q, case.k, case.v
    exact = against_float64.exact(operands, case.mask.to_dense(), case.dout, dlse, scores)
    expected, bounds = (of_each[2:] for of_each in exact)
    worst = 0.0
    for name, got, want, bound in zip(("dq", "dk", "dv"), grads, expected, bounds, strict=False):
        error = (got.double() - want).abs()
        assert got.isfinite().all(), f"{name}: not finite"
        assert (error <= bound).all(), f"{name}: {(error / bound).max():.2f} of its bound"
        worst = max(worst, float((error / bound.clamp(min=1e-30)).max()))
    return worst
