"""Attention sinks on a card: python -m tests.sparse_attn.gpu_sinks [DEVICE]

Values and gradients against float64, repeats, sequences of a pack against themselves alone, and
spans that the kernel reads against runs.  Prints "ok" at the end.
"""

from __future__ import annotations

import math
import sys

import torch

import cute_kernels as ck
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import api
from cute_kernels.sparse_attn.config import VALUE_DIMS
from tests.contract import same_bytes
from tests.sparse_attn import cases, pack_cases
from tests.sparse_attn.sink_cases import CASES, MASKS, S, drawn_sinks, excess

REPEATS = 20


def main(device: str = "cuda") -> None:
    for case in CASES:
        for with_lse in (True, False):
            values(case, with_lse, device)
    for dim in VALUE_DIMS:
        rows_without_keys(dim, device)
    pack_cases.DEVICE = device
    for dim in VALUE_DIMS:
        lengths = [130, 1, 61, 700]
        inputs = pack_cases.drawn(sum(lengths), heads=(4, 2), dim=dim)
        options = {"sinks": drawn_sinks(4).detach().to(device)}
        packed_results = pack_cases.packed(inputs, lengths, **options)
        require(
            f"a pack, D = {dim}",
            not pack_cases.differing(packed_results, pack_cases.alone(inputs, lengths, **options)),
        )
        for rows in (1, 5, 200):
            spans(dim, rows, device)
    print("ok")


def values(case: tuple, with_lse: bool, device: str) -> None:
    dim, dtype, form, softcap = case
    x, mask = cases.inputs(2, 4, 2, S, S, dim, dtype, seed=dim), MASKS[form]()
    sinks = drawn_sinks(4, torch.float32 if dim == 64 else dtype)
    leaves = [t.detach().to(device).requires_grad_() for t in (*x.leaves(), sinks)]
    upstream = x.dout.to(device), x.dlse.to(device)

    def run() -> list[torch.Tensor]:
        options = {"sinks": leaves[3], "softcap": softcap, "return_lse": True}
        out = ck.block_sparse_attention(*leaves[:3], mask.to(device), **options)
        count = 2 if with_lse else 1
        grads = torch.autograd.grad(out[:count], leaves, upstream[:count])
        return [t.detach() for t in (*out, *grads)]

    first = run()
    above = excess([t.cpu() for t in first], x, mask, sinks, with_lse, softcap)
    require(f"values, {case}, {above}", all(ratio <= 1 for ratio in above.values()))
    again = (all(map(same_bytes, run(), first)) for _ in range(REPEATS))
    require(f"{REPEATS} repeats", all(again))


def rows_without_keys(dim: int, device: str) -> None:
    """NaN and Inf in the gradient of out of rows that see nothing reach no sink."""
    x, dense = cases.inputs(1, 2, 1, 40, 70, dim), torch.ones(40, 70, dtype=torch.bool)
    dense[3:9] = dense[38] = False
    mask, sinks = BlockMask.from_dense(dense.to(device)), drawn_sinks(2).to(device)
    dirty = x.dout.clone()
    dirty[:, 3:6], dirty[:, 7, :, 5], dirty[:, 38] = math.nan, math.inf, -math.inf
    leaves = [t.detach().to(device).requires_grad_() for t in (*x.leaves(), sinks)]
    out = ck.block_sparse_attention(*leaves[:3], mask, sinks=leaves[3])
    grads = [
        torch.autograd.grad(out, leaves[3], upstream.to(device), retain_graph=True)[0]
        for upstream in (x.dout, dirty)
    ]
    require(f"rows without keys, D = {dim}", bool(grads[0].isfinite().all()) and same_bytes(*grads))


@torch.no_grad()
def spans(dim: int, rows: int, device: str) -> None:
    """The last rows of two sequences, one behind padding."""
    g = torch.Generator().manual_seed(rows)
    sizes = (rows, 4, dim), (300, 2, dim), (300, 2, VALUE_DIMS[dim])
    drawn = (torch.randn(2, *size, generator=g) for size in sizes)
    q, k, v = (t.bfloat16().to(device) for t in drawn)
    padding = (torch.arange(300) >= torch.tensor([[0], [11]])).to(device)
    sinks = drawn_sinks(4).detach().to(device)
    out = []
    for where in ("cpu", device):
        options = {"packed": False, "device": where}
        table = api.kv_ranges(None, padding, 300 - rows, 0, (2, rows, 300), **options)
        out.append(api.sequence_attention(q, k, v, table, sinks=sinks))
    require(f"{rows} rows of spans, D = {dim}", same_bytes(*out))


def require(what: str, right: bool) -> None:
    """Prints a case, and fails if it is wrong."""
    print(what, "ok" if right else "WRONG", flush=True)
    assert right, what


if __name__ == "__main__":
    main(*sys.argv[1:])
