"""The three SM90 backward kernels on this CPU: compiled for sm_90a and run by tests/ptxsim.

`backward` is what a launcher does: workspace, three launches on one stream, outputs.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from cute_kernels.schedulers.mask import BlockMask
from cute_kernels.schedulers.schedule import Schedule
from cute_kernels.sparse_attn import kernel_bwd_post_sm90 as post_kernel
from cute_kernels.sparse_attn import kernel_bwd_pre_sm90 as pre_kernel
from cute_kernels.sparse_attn import kernel_bwd_sm90 as main_kernel
from cute_kernels.sparse_attn import masks, reference
from tests import ptxsim, sim

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@functools.cache
def pre(dtype: str, head_dim: int, tile_m: int, dlse: bool):
    return pre_kernel.build(dtype, head_dim, tile_m, dlse, compile=ptxsim.compile)


@functools.cache
def main(config: main_kernel.BackwardConfig):
    return main_kernel.build(config, compile=ptxsim.compile)


@functools.cache
def post(dtype: str, head_dim: int, tile_m: int):
    return post_kernel.build(dtype, head_dim, tile_m, compile=ptxsim.compile)


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

    def drawn(length: int, n: int) -> torch.Tensor:
        return torch.randn(batch, length, n, head_dim, generator=generator).to(dtype)

    q, dout = drawn(mask.q_len, heads), drawn(mask.q_len, heads)
    k, v = drawn(mask.kv_len, kv_heads), drawn(mask.kv_len, kv_heads)
    scale = head_dim**-0.5
    out, lse = reference.attention(q, k, v, mask.to_dense(), scale=scale, softcap=softcap)
    return Case(q, k, v, dout, out.to(dtype), lse.float(), mask, scale, softcap)


def factors(scale: float, softcap: float) -> tuple[float, float]:
    """The kernel's (c, inner), as kernel_fwd_sm90.py defines them."""
    log2_e = math.log2(math.e)
    if softcap:
        return softcap * log2_e, 2.0 * log2_e * scale / softcap
    return scale * log2_e, 0.0


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
    ctas: int = 132,
    dlse: torch.Tensor | None = None,
    kernel=main,
    poison: str = "nan",
) -> Gradients:
    """The three kernels.  Everything that they write starts as NaN, counters included."""
    batch, q_len, heads, dim = case.q.shape
    lowered, dtype = case.lowered, NAMES[case.q.dtype]
    config = main_kernel.configure(dtype, dim, lowered.form, ordered, case.softcap > 0)
    tiles, rows = -(-q_len // config.tile_m), config.tile_m
    lse2 = sim.poisoned((batch, heads, tiles, rows), torch.float32, poison)
    delta = sim.poisoned((batch, heads, tiles, rows), torch.float32, poison)
    total = sim.poisoned((batch, heads, tiles, rows * dim), torch.float32, poison)
    semaphore = torch.full((batch, heads, tiles), -77, dtype=torch.int32)
    counter = torch.full((1,), 12345, dtype=torch.int32)
    pre(dtype, dim, rows, dlse is not None)(
        case.out,
        case.dout,
        case.lse,
        dlse,
        lse2.flatten(2),
        delta.flatten(2),
        total,
        semaphore,
        counter,
    )
    order, list_of_head, offset, entry, rank = schedule.tensors("cpu")
    if len(entry) == 0:  # a kernel takes no empty tensor; nothing will read this one
        entry, rank = torch.zeros(2, 1, dtype=torch.int32)
    bits = lowered.form == "bits"
    tile = masks.entry_tiles(lowered, schedule) if bits else torch.full((1,), -1).int()
    dk, dv = (sim.poisoned(t.shape, t.dtype, poison) for t in (case.k, case.v))
    kernel(config)(
        case.q,
        case.k,
        case.v,
        case.dout,
        lse2,
        delta,
        total,
        dk,
        dv,
        semaphore,
        counter,
        order,
        list_of_head,
        offset,
        entry,
        rank,
        tile,
        lowered.words,
        case.scale,
        *factors(case.scale, case.softcap),
        lowered.lo,
        lowered.hi,
        min(ctas, len(order)),
    )
    if ordered:
        assert semaphore.sum() == expected_visits(case, schedule, rows)
    dq = sim.poisoned(case.q.shape, case.q.dtype, poison)
    post(dtype, dim, rows)(total, dq, case.scale)
    return Gradients(dq, dk, dv, total)


def expected_visits(case: Case, schedule: Schedule, tile_m: int) -> int:
    """Turns taken in all: one per (query head, entry, tile of it that begins inside Sq)."""
    q_len, group = case.q.shape[1], case.q.shape[2] // case.k.shape[2]
    visits = 0
    for _, _, entries in schedule.tickets():
        for m, _, _ in entries:
            visits += -(-(min(q_len, (m + 1) * 128) - m * 128) // tile_m)
    return visits * group


def check(case: Case, found: Gradients, dlse: torch.Tensor | None = None) -> float:
    """Asserts that the gradients are within the bound of `reference`; the largest share of it."""
    inputs = [t.double().requires_grad_() for t in (case.q, case.k, case.v)]
    allowed = case.mask.to_dense()
    out, lse = reference.attention(*inputs, allowed, scale=case.scale, softcap=case.softcap)
    value = (out * case.dout.double()).sum()
    if dlse is not None:
        value = value + (lse * dlse).nan_to_num(0.0).sum()
    wanted = torch.autograd.grad(value, inputs)
    bounds = reference.error_bounds(case.q, case.k, case.v, case.dout, allowed, scale=case.scale)
    worst = 0.0
    for name, got, want in zip(("dq", "dk", "dv"), found, wanted, strict=False):
        error, bound = (got.double() - want).abs(), getattr(bounds, name)
        assert got.isfinite().all(), f"{name}: not finite"
        assert (error <= bound).all(), f"{name}: {(error / bound).max():.2f} of its bound"
        worst = max(worst, float((error / bound.clamp(min=1e-30)).max()))
    return worst
