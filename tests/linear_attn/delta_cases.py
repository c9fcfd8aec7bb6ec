"""Calls of the gated delta rule: a batch or a pack, with states and several v heads to a k head.

With gates by channel they are calls of Kimi delta attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.linear_attn.op_delta import RULE
from cute_kernels.linear_attn.tensors import DeltaRule
from tests.oracles import linear_attn as oracle
from tests.runtime.cached_calls import drawn

from . import cases

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Case(NamedTuple):
    """One call; ``lengths``: of a pack's sequences, or one number of a batch of ``batch``."""

    lengths: tuple[int, ...]
    batch: int = 0
    heads: tuple[int, int] = (2, 4)  # of k and of v
    sizes: tuple[int, int] = (16, 24)  # K and V
    dtype: torch.dtype = BF16
    beta: torch.dtype = BF16
    initial: bool = True
    behind: int = 0  # rows behind the last sequence of a pack
    channels: bool = False  # whether g has one for each

    rows, count = cases.Case.rows, cases.Case.count
    offsets, sequences = cases.Case.offsets, cases.Case.sequences
    launcher, options = "delta_rule", 0.25  # of the module of launchers, and its scale
    op, selective, of_heads = RULE, False, ("v", "g", "beta", "initial")

    @property
    def public(self) -> tuple[str, tuple[str, ...]]:
        """The public function, and its names of operands."""
        name = "chunk_kda" if self.channels else "chunk_gated_delta_rule"
        return name, (*DeltaRule._fields[:-1], "initial_state")

    @property
    def flags(self) -> dict[str, bool]:
        return {"output_final_state": True}


def operands(case: Case, seed: int = 0) -> DeltaRule:
    """Rows [N, ...]: k of about unit length, gates from slow to -20, beta from 0 to 2."""
    (heads, v_heads), (k, v), n = case.heads, case.sizes, case.rows
    rows = [drawn(n, heads, k, seed=seed + i, dtype=FP32) * k**-0.5 for i in range(2)]
    of_g = (v_heads, k) if case.channels else (v_heads,)
    g = -drawn(n, *of_g, seed=seed + 3, dtype=FP32).exp2() * 0.3
    beta = drawn(n, v_heads, seed=seed + 4, dtype=FP32).sigmoid()
    for i, (decay, step) in enumerate([(0.0, 1.0), (-20.0, 2.0), (0.0, 0.0)]):
        g[i::11], beta[i::7] = decay, step
    if case.channels:
        g[6::13, :, ::3] = -20.0
    initial = None
    if case.initial:
        initial = drawn(case.count, v_heads, k, v, seed=seed + 5, dtype=FP32)
    return DeltaRule(
        *(t.to(case.dtype) for t in rows),
        drawn(n, v_heads, v, seed=seed + 2, dtype=case.dtype),
        g,
        beta.to(case.beta),
        initial,
    )


def upstream(case: Case, seed: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the rows and of the last states."""
    v_heads, (k, v) = case.heads[1], case.sizes
    d_out = drawn(case.rows, v_heads, v, seed=seed, dtype=case.dtype)
    return d_out, drawn(case.count, v_heads, k, v, seed=seed + 1, dtype=FP32)


def gate_parameters(case: Case, seed: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    """A_log and dt_bias of the gate that g goes through."""
    heads = case.heads[1]
    channels = heads * case.sizes[0] if case.channels else heads
    return drawn(heads, seed=seed), drawn(channels, seed=seed + 1, dtype=FP32)


def exact(
    case: Case, o: DeltaRule, scale: float, norm: bool = False, gate: tuple = (), bound=None
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """(o, last states, float64 leaves) by the recurrence, sequence by sequence.

    norm: Of q and k before it.  gate, bound: (A_log, dt_bias or None) of the gate before it.
    """
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in (*o, *gate)]
    *rows, initial = leaves[:6]
    if norm:
        rows[:2] = (oracle.l2norm(t, 1e-6) for t in rows[:2])
    if gate:
        rows[3] = oracle.decay(rows[3].flatten(1), *leaves[6:], bound).view_as(rows[3])
    outs, lasts = [], []
    for s, (first, end) in enumerate(case.sequences.bounds()):
        zeros = rows[0].new_zeros(case.heads[1], *case.sizes)
        state = zeros if initial is None else initial[s]
        out, last = oracle.delta_rule(*(t[first:end] for t in rows), state, scale)
        outs.append(out)
        lasts.append(last)
    return torch.cat(outs), torch.stack(lasts), leaves


CASES = {
    "batch": Case((70,), batch=2),
    "batch, one head": Case((9,), batch=3, heads=(1, 1), sizes=(8, 8), initial=False),
    "pack": Case((5, 0, 66, 1, 130), behind=3),
    "fp32": Case((65,), batch=1, dtype=FP32, beta=FP32, sizes=(32, 8)),
    "fp16": Case((3, 64), dtype=FP16, beta=FP32, heads=(2, 2), sizes=(40, 16)),
}
#: Those of Kimi delta attention.
CHANNELS = {
    "channels": Case((70,), batch=2, channels=True),
    "channels, pack": Case((5, 0, 66, 1, 130), behind=3, channels=True),
    "channels, fp32": Case(
        (65,), batch=1, dtype=FP32, beta=FP32, sizes=(32, 8), channels=True, heads=(1, 3)
    ),
}
#: v heads that share a k head.
SHARED = Case((66,), batch=1, heads=(1, 3), dtype=FP32, beta=FP32)
