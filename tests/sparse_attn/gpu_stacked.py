"""Masks by query head under GQA on a card: python -m tests.sparse_attn.gpu_stacked [DEVICE]

Values and gradients against float64, repeats, and equal masks against one for all heads.  Prints
"ok" at the end.
"""

from __future__ import annotations

import dataclasses
import sys

import torch

from cute_kernels.schedulers import BlockMask
from tests.contract import same_bytes
from tests.sparse_attn import cases
from tests.sparse_attn.sink_cases import drawn_sinks, excess
from tests.sparse_attn.stacked_cases import HEADS, KV_HEADS, MASKS, S, attended, dense

REPEATS = 20


def main(device: str = "cuda") -> None:
    for name in MASKS:
        for dim, dtype, softcap in (
            (64, torch.bfloat16, 0.0),
            (96, torch.float16, 3.0),
            (128, torch.bfloat16, 0.0),
        ):
            values(name, dim, dtype, softcap, device)
    # Of a CPU a head's sum comes first where heads have masks of their own.
    for dim in (64, 128) if device != "cpu" else ():
        for length in (S, 2100):
            alike(dim, length, device)
    print("ok")


def moved(x: cases.Inputs, device: str) -> cases.Inputs:
    """Copy on the device, with leaves of its own."""
    leaves = {n: getattr(x, n).detach().to(device).requires_grad_() for n in "qkv"}
    return dataclasses.replace(x, **leaves, dout=x.dout.to(device), dlse=x.dlse.to(device))


def values(name: str, dim: int, dtype: torch.dtype, softcap: float, device: str) -> None:
    x = cases.inputs(2, HEADS, KV_HEADS, S, S, dim, dtype, seed=dim)
    mask, sinks = MASKS[name](), drawn_sinks(HEADS)
    there = moved(x, device), mask.to(device), sinks.detach().to(device).requires_grad_()
    first = attended(*there, softcap=softcap)
    above = excess([t.cpu() for t in first], x, mask, sinks, True, softcap)
    require(f"values, {name}, D = {dim}, {above}", all(ratio <= 1 for ratio in above.values()))
    again = (all(map(same_bytes, attended(*there, softcap=softcap), first)) for _ in range(REPEATS))
    require(f"{REPEATS} repeats", all(again))


def alike(dim: int, length: int, device: str) -> None:
    """The same mask for each head, and one for all: tickets from the left have one order."""
    x = moved(cases.inputs(1, HEADS, KV_HEADS, length, length, dim, seed=1), device)
    one = dense(1)[:, 3:] if length == S else drawn_blocks(length)
    own = BlockMask.from_dense(one.expand(1, HEADS, length, length)).to(device)
    made = (
        attended(x, mask, schedule="left_to_right")
        for mask in (BlockMask.from_dense(one).to(device), own)
    )
    require(f"equal masks, D = {dim}, {length} rows", all(map(same_bytes, *made)))


def drawn_blocks(length: int) -> torch.Tensor:
    """Half of the blocks of a causal mask."""
    blocks = -(-length // 128)
    is_allowed = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(8)) < 0.5
    whole = is_allowed.repeat_interleave(128, 0).repeat_interleave(128, 1)[:length, :length]
    return (whole & torch.ones(length, length, dtype=torch.bool).tril())[None, None]


def require(what: str, right: bool) -> None:
    """Prints a case, and fails if it is wrong."""
    print(what, "ok" if right else "WRONG", flush=True)
    assert right, what


if __name__ == "__main__":
    main(*sys.argv[1:])
