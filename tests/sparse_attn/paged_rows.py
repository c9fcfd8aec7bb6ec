"""Rows of a batch over paged caches beside a dense forward of each sequence, in the simulator."""

from __future__ import annotations

from torch import Tensor

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks.rules import Band
from cute_kernels.sparse_attn import launch, masks
from tests import contract
from tests.sparse_attn import simulated
from tests.sparse_attn.paged_cases import Batch


def dense(batch: Batch, n: int) -> tuple[Tensor, Tensor]:
    """(out [rows, Hq, Dv], lse [Hq, rows]) of a sequence by the dense forward, in the simulator."""
    q, keys = batch.q[batch.queries(n)], len(batch.keys[n])
    left, right = batch.window
    first = keys - len(q)
    lo, hi = (None if left is None else first - left), (None if right is None else first + right)
    mask = BlockMask.from_rule(Band(lo, hi), len(q), keys)
    with simulated.simulated():
        out, lse = launch.forward(
            *(q[None], batch.keys[n][None], batch.values[n][None]),
            *(masks.lower(mask), batch.scale, batch.softcap, batch.sinks),
        )
    return out[0], lse[0]


def require_rows(batch: Batch, out: Tensor, lse: Tensor) -> None:
    """Every row is its row in the dense forward of its sequence; other tokens are empty."""
    end = int(batch.cu_seqlens_q[-1])
    assert (out[end:] == 0).all() and (lse[:, end:] == -float("inf")).all()
    for n in range(len(batch.seqlens_k)):
        rows = batch.queries(n)
        if rows.start < rows.stop:
            want, want_lse = dense(batch, n)
            assert contract.same_bytes(out[rows], want), (n, rows)
            assert contract.same_bytes(lse[:, rows].contiguous(), want_lse), (n, rows)
