"""Packs by offsets on a card: python -m tests.sparse_attn.gpu_pack_tables [COUNT [DEVICE]]

The table and the tickets of ``COUNT`` drawn packs (10,000; ``0:2500``: a part of them) against the
oracle, every seventh of bounds that no pack has.  Then forward and backward with offsets on the
card, which may not wait for it, and the same in a CUDA graph: its replays with other offsets give
those packs' bytes, tokens behind the last sequence among them.  Prints "ok" at the end.
"""

from __future__ import annotations

import sys
import time

import torch

import cute_kernels as ck
from cute_kernels.sparse_attn import config, launch
from tests.contract import same_bytes
from tests.sparse_attn import pack_cases, pack_tables

#: Sequences of a graph's packs: as many, of other lengths; the last two leave tokens behind them.
TOKENS = 1500
PACKS = (
    (300, 0, 129, 571, 500),
    (1, 1496, 1, 1, 1),
    (0, 0, 0, 0, 1500),
    (128, 128, 256, 0, 700),
    (0, 0, 5, 0, 0),
)
WINDOWS = ((None, 0), (None, None), (200, 130))


def main(count: str = "10000", device: str = "cuda") -> None:
    pack_cases.DEVICE = device
    start = time.monotonic()
    for seed in pack_cases.share(count):
        table(seed, device)
    print(f"{count} packs, {time.monotonic() - start:.0f} s", flush=True)
    for dim in config.HEAD_DIMS:
        for window in WINDOWS:
            nothing_waits(dim, window)
            graph(dim, window)
            print(f"D = {dim}, window {window}: no wait; a graph", flush=True)
    print("ok")


def table(seed: int, device: str) -> None:
    """One pack's, with tickets and without."""
    case = (pack_tables.wild if seed % 7 == 6 else pack_tables.drawn)(seed, device)
    if not case.tokens:
        return
    want = pack_tables.oracle(case)
    q = torch.empty(1, case.tokens, case.kv_heads * case.group, 1, device=device)
    plan = launch.plan_varlen_tables(case.bounds, q, case.kv_heads, case.window)
    out, tickets = plan.run(case.bounds)
    alone, _ = launch.plan_varlen_tables(case.bounds, q).run(case.bounds)
    tickets = tickets.cpu()
    used = int(tickets[-1, 0])
    assert same_bytes(out.cpu(), torch.from_numpy(want.table)), case
    assert same_bytes(alone, out), case
    assert same_bytes(tickets[:used], torch.from_numpy(want.tickets)), case


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return pack_cases.offsets(list(lengths)).to(pack_cases.DEVICE)


def attended(tensors, cu_seqlens, window) -> list[torch.Tensor]:
    """(out, lse, dq, dk, dv)."""
    left, right = window
    options = {"window_size": window}
    if right == 0:
        options = {"window_size": (left, None), "causal": True}

    def run(q, k, v):
        return ck.block_sparse_attention_varlen(q, k, v, cu_seqlens, **options, return_lse=True)

    return pack_cases.differentiated(run, tensors)


def nothing_waits(dim: int, window: tuple) -> None:
    """Once all is compiled."""
    tensors = pack_cases.drawn(TOKENS, dim, heads=(4, 2), dim=dim)
    inputs = [offsets(lengths) for lengths in PACKS[:2]]
    want = attended(tensors, inputs[0], window)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attended(tensors, inputs[0], window)
        attended(tensors, inputs[1], window)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    require("again", out, want)


def graph(dim: int, window: tuple) -> None:
    """Check graphs of a pass and its backward; each replay against the sequences alone."""
    tensors = pack_cases.drawn(TOKENS, dim, heads=(4, 2), dim=dim)
    cu_seqlens = offsets(PACKS[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attended(tensors, cu_seqlens, window)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = attended(tensors, cu_seqlens, window)
    for lengths in PACKS:
        cu_seqlens.copy_(offsets(lengths))
        captured.replay()
        end = sum(lengths)
        sequence_tensors = [t[:, :end] if t.dim() == 2 else t[:end] for t in tensors]
        rule = (window[1] == 0, (window[0], None) if window[1] == 0 else window)
        rows = [t[:, :end] if i == 1 else t[:end] for i, t in enumerate(out)]
        require(f"{lengths}", rows, pack_cases.alone(sequence_tensors, list(lengths), *rule))
        for i, t in enumerate(out):
            rest = t[:, end:] if i == 1 else t[end:]
            assert same_bytes(rest, torch.full_like(rest, -torch.inf if i == 1 else 0.0)), lengths
    cu_seqlens.copy_(offsets(PACKS[0]))


def require(what: str, made: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    differing = pack_cases.differing(made, want)
    assert not differing, f"{what}: {differing}"


if __name__ == "__main__":
    main(*sys.argv[1:])
