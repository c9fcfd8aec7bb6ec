"""`python -m perf tune tiles`: what an SM takes for each tile of the SM90 kernels per element of K.

A tile's cost is the slope of its time between two K, so that launch and epilogue cancel:

    full    132 tiles, four of tokens by 33 of the weight, so that most of the weight's bytes come
            from L2: what the SM does
    half    64 tiles of the weight by one of tokens, cold: what is left of it where SMs idle

The table of `cute_kernels/gemm/tiles.py` is made of these records by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ..core import record, timing

KS = (4096, 14336)
ACROSS, TOKENS, ALONE = 33, 4, 64


def every_tile() -> dict[str, tuple[object, int, int]]:
    """Tiles by name: (tile, rows of the weight, rows of x); two CTAs an SM are one kind."""
    from cute_kernels.gemm import tiles
    from cute_kernels.gemm.config import Config

    out = {
        f"dense {tile.tile_n}": (tile, tile.tile_n, Config.tile_m)
        for tile in tiles.dense_tiles("chain")
    }
    for tile in tiles.skinny_tiles("chain"):
        if tile.ctas_per_sm == 1:
            name = f"skinny {tile.tile_n} x {tile.tile_m}{', pairs' * (tile.pair > 1)}"
            out[name] = tile, tile.tile_n, tile.tile_m
    return out


def product(tile: object) -> Callable:
    """Call of x [M, K] times w [N, K], both contiguous, through one tile."""
    from cute_kernels.gemm import launch

    skinny = isinstance(tile, launch.Skinny)
    plans = {}

    def call(t: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, w = t
        shape = (*x.shape, *w.shape)
        if shape not in plans:
            how = launch._matrices(x, w, "chain")
            plans[shape] = (
                launch._plan_skinny(x, w, None, how, tile, "chain")
                if skinny
                else launch._plan_dense(x, w, None, how, tile, "chain", None)
            )
        return plans[shape].run(x, w, None) if skinny else plans[shape].run(x, w, None, None)

    return call


def slope(call: Callable, m: int, n: int, rounds: int, l2_bytes: int) -> dict[str, float]:
    """The times at each K, and ns per element of K between them."""
    medians = []
    for k in KS:
        count = timing.set_count(2 * k * (m + n), l2_bytes, 1)
        sets = [
            tuple(torch.randn(size, k, device="cuda", dtype=torch.bfloat16) for size in (m, n))
            for _ in range(min(count, 16))
        ]
        rotated = timing.rotating({"": call}, sets)
        timing.warm_up(rotated, 2)
        medians.append(timing.interleave(rotated, rounds=rounds, backlog_us=2000)[""].median)
    per_k = (medians[1] - medians[0]) / (KS[1] - KS[0]) * 1e3
    return {"us": medians, "ns_per_k": per_k, "start_us": medians[0] - per_k * KS[0] / 1e3}


def measure(output: Path, rounds: int, commit: str | None) -> Iterator[str]:
    """Appends a record for each tile; yields its line."""
    common = record.environment(commit) | {"kind": "tune", "kernel": "gemm_tiles"}
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    for name, (tile, height, width) in every_tile().items():
        call = product(tile)
        body = common | {"tile": name, "system": name, "status": "ok", "k": list(KS)}
        body["full"] = slope(call, TOKENS * width, ACROSS * height, rounds, l2_bytes)
        pair = getattr(tile, "pair", 1)
        body["half"] = slope(call, pair * width, ALONE // pair * height, rounds, l2_bytes)
        record.append(output, body)
        costs = [f"{kind} {body[kind]['ns_per_k']:.2f}" for kind in ("full", "half")]
        yield f"{name:<24} ns per k: {', '.join(costs)}; start {body['full']['start_us']:.1f} us"
