"""The choice of a tile: what is fastest by the measured costs, for any number of rows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from cute_kernels.gemm import config, launch, tiles
from cute_kernels.gemm.tiles import Dense, Skinny

TILES = Path(__file__).parents[2] / "perf" / "results" / "tiles.jsonl"

#: (rows, N, K) -> what an H200 takes, as measured (docs/notes/gemm_sm90.md): each is a reason for a
#: part of the model.
KNOWN = {
    (1, 4096, 4096, "chain"): Skinny(8, 64, 256, 1),  # 64 tiles: a whole SM for each
    (1, 12288, 4096, "chain"): Skinny(8, 64, 128, 2),  # 192: two on some SMs
    (13, 4096, 14336, "tree"): Skinny(16, 64, 128, 1, split=2),  # idle SMs take half of the leaves
    (13, 256, 4096, "tree"): Skinny(16, 64, 128, 1, split=8),
    (103, 4096, 14336, "chain"): Skinny(64, 64, 128, 1, pair=2),  # the weight is read once for both
    (128, 12288, 4096, "chain"): Skinny(128, 128, 64, 1),  # the tokens' bytes begin to count
    (160, 12288, 4096, "chain"): Skinny(160, 128, 64, 1),  # all rows in one tile
    (256, 4096, 4096, "chain"): Skinny(128, 64, 64, 1, pair=2),
    (384, 12288, 4096, "chain"): Skinny(192, 192, 64, 1),  # 128 tiles: one wave
    (2048, 2112, 7168, "chain"): Skinny(176, 192, 64, 1),  # 132 tiles: one wave
    (512, 4096, 4096, "chain"): Dense(128),
    (4096, 4096, 4096, "chain"): Dense(256),
    (4096, 12288, 4096, "chain"): Dense(256),
    (4096, 12288, 4096, "tree"): Dense(192),
}


@pytest.mark.parametrize(("product", "tile"), KNOWN.items(), ids=str)
def test_the_tile_of_known_products(product, tile):
    assert tiles.choose(*product, 132) == tile


def drawn(count: int):
    """Products with numbers of SMs, from one row on a small GPU to many on a large one."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        scale = [
            int(2 ** (most * torch.rand(1, generator=generator).item())) for most in (14, 17, 14, 8)
        ]
        yield from ((*scale[:3], order, scale[3]) for order in config.ORDERS)


def test_what_is_chosen_is_in_the_catalogue():
    dense = {(c.order, Dense(c.tile_n)) for c in launch.configs()}
    skinny = {
        (c.order, Skinny(c.tile_m, c.tile_n, c.tile_k, c.ctas_per_sm, c.split, c.pair))
        for c in launch.skinny_configs()
    }
    chosen = set()
    for rows, n, k, order, units in drawn(500):
        product = rows, n, k, order, units
        chosen.add((order, tiles.choose(*product)))
        assert (order, tiles.dense(*product)) in dense
        assert (order, tiles.skinny(*product)) in skinny
    assert chosen <= dense | skinny
    assert len(chosen) > 20


def test_clusters_fit_the_device():
    """A tile is split only where every part of it finds an SM at once."""
    split = 0
    for rows, n, k, order, units in drawn(500):
        tile = tiles.skinny(rows, n, k, order, units)
        across = len(range(0, rows, tile.tile_m)) * len(range(0, n, tile.tile_n))
        if tile.split > 1:
            assert order == "tree" and across * tile.split <= units
            split += 1
    assert split > 5


def test_the_memory_of_choices_is_bounded():
    for choice in (tiles.choose, tiles.dense, tiles.skinny):
        assert choice.cache_info().maxsize is not None


def test_only_the_tile_of_the_kernel_follows_m(monkeypatch):
    """What the launcher asks for, at many numbers of rows: one order, several tiles."""
    requested = set()
    monkeypatch.setattr(launch, "max_clusters", lambda device: 66)
    monkeypatch.setattr(launch, "most_ctas", lambda device: 132)
    monkeypatch.setattr(launch, "bind", lambda *args: lambda *args: None)
    for name in ("gemm_kernel", "skinny_kernel"):
        monkeypatch.setattr(launch, name, lambda *chosen, name=name: requested.add((name, *chosen)))
    weight = torch.empty(4096, 16, dtype=torch.bfloat16)
    for m, order in itertools.product((*range(1, 200), *range(255, 2100, 64), 4096), config.ORDERS):
        launch.gemm(torch.empty(m, 16, dtype=torch.bfloat16), weight, None, None, order)
    kinds = {(name, *rest[:-2], rest[-1]) for name, *rest in requested}
    assert kinds == {
        *(("gemm_kernel", torch.bfloat16, "k", "k", "plain", o) for o in config.ORDERS),
        *(("skinny_kernel", torch.bfloat16, "k", False, o) for o in config.ORDERS),
    }
    assert len(requested) > 8


def test_the_costs_are_the_measured_ones():
    """Each is the latest record's of its tile, to two digits; no tile is without one."""
    measured = {
        record["tile"]: (round(record["half"]["ns_per_k"], 2), round(record["full"]["ns_per_k"], 2))
        for record in map(json.loads, TILES.read_text().splitlines())
    }
    for width, cost in tiles.DENSE_COST.items():
        assert cost == measured[f"dense {width}"][1]
    for (tall, wide, pair), costs in tiles.SKINNY_COST.items():
        assert costs == measured[f"skinny {tall} x {wide}{', pairs' * (pair > 1)}"]
