"""The SM90 kernel over paged caches in the simulator: rows have the dense forward's bytes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import ptxsim
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks.rules import Band
from cute_kernels.sparse_attn import config, launch, masks
from cute_kernels.sparse_attn.paged import launch as paged
from ptxsim import modes
from tests import certified, contract
from tests.sparse_attn import mutated, simulated
from tests.sparse_attn.paged_cases import Batch, draw, drawn, other_layouts, wrong_rows

#: What runs at every commit while the kernels are proved.
pytestmark = certified.marks("sparse_attn", "test_rows test_mutants")

HEADS = (4, 2, 64)
MIXED = [(1, 131), (40, 40), (3, 260), (0, 77), (1, 1), (20, 150), (1, 385)]
FEW = MIXED[:4] + MIXED[5:]


def run(batch: Batch):
    """(out, lse) of the launcher in the simulator."""
    with simulated.simulated():
        return paged.paged_attention(*batch.operands())


def require_rows(batch: Batch, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Every row is its row in the dense forward of its sequence; other tokens are empty."""
    with simulated.simulated():
        assert wrong_rows(batch, out, lse, launch.forward) == []


CASES = [
    *(([(1, 200), (5, 130)], (4, 2, width), 16, {"seed": width}) for width in config.HEAD_DIMS),
    *((MIXED, HEADS, page, {"seed": page, "padding": 70}) for page in (16, 128, 256)),
    (FEW, (1, 1, 64), 32, {"window": (100, 0)}),
    (FEW, (3, 1, 64), 32, {"window": (70, 0), "softcap": 20.0}),
    (FEW, (16, 1, 64), 32, {"with_sinks": True, "dtype": "fp16"}),
    (FEW, (7, 1, 64), 32, {"window": (40, None), "with_sinks": True}),
    (FEW, (2, 1, 64), 32, {"window": (None, None)}),
    # More tiles than a sequence has: each packed row of 64 belongs to at most one of those behind.
    ([(n, n + 5) for n in (33, 1, 64, 65, 31, 128, 2, 0, 97)], (2, 1, 64), 16, {"seed": 8}),
]


@pytest.mark.parametrize(("lengths", "heads", "page", "options"), CASES)
def test_rows(lengths, heads, page, options):
    batch = drawn(lengths, heads, page, **options)
    require_rows(batch, *run(batch))


def test_speculative_rows():
    """A few rows of a sequence are as many sequences of one row."""
    batch = drawn([(5, 130), (3, 64), (1, 20), (2, 2)], HEADS, 64, seed=6, window=(70, 0))
    assert all(map(contract.same_bytes, run(batch), run(batch.by_row())))


def test_modes():
    """Every mode of the simulator: late and early data, random warps, any order and residency."""
    batch = drawn(MIXED, HEADS, 64, seed=3, padding=3)
    results = modes.run_modes(lambda: run(batch))
    require_rows(batch, *results["default"])


def test_other_layouts():
    batch = drawn(MIXED[:3], HEADS, 16, seed=4)
    want = run(batch)
    for other in other_layouts(batch):
        assert all(map(contract.same_bytes, run(other), want))


_BOX = "box = block * (BLOCK // config.keys_per_load)"
MUTANTS = {
    "a page of another sequence": (
        *("(tile.sequence, box >>", "(tile.sequence * 0, box >>"),
        *("(tile.sequence, box), 1", "(tile.sequence * 0, box), 1"),
    ),
    "values not cleaned": ("if thread < first or thread >= end:", "if thread < 0:"),
    "a key before the window": ("p + tile.lo, 0) for", "p + tile.lo, 0) - 1 for"),
    "blocks descending": (
        _BOX,
        _BOX.replace("block *", "(tile.first_block + tile.end_block - 1 - block) *"),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(monkeypatch, tmp_path, name):
    batch = drawn([(1, 256), (2, 300)], HEADS, 16, seed=9, window=(150, 0))
    want = run(batch)
    require_rows(batch, *want)
    kernel = mutated.kernels(tmp_path, "sparse_attn.device.paged_tiles", *MUTANTS[name])
    monkeypatch.setattr(simulated, "kernel", kernel)
    try:
        got = run(batch)
    except ptxsim.PtxsimError:
        return
    assert not all(map(contract.same_bytes, got, want))


# 500 of them before an issue is resolved; a row sees nothing of its batch.
@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_drawn(seed):
    batch = drawn(**draw(seed, most=520))
    require_rows(batch, *run(batch))


@pytest.mark.parametrize("with_sinks", [False, True])
def test_one_query_over_a_key_buffer_reads_keys_once(with_sinks):
    """Query heads of a KV head are rows of one tile, with the bytes of a head alone."""
    batch = drawn([(1, 300)], (6, 2, 64), 128, seed=6, with_sinks=with_sinks)
    keys, values = batch.keys[0][None], batch.values[0][None]
    mask = masks.lower(BlockMask.from_rule(Band(None, 299), 1, 300))
    assert mask.form == "none"
    with simulated.simulated(), mock.patch.object(launch, "grid", wraps=launch.grid) as calls:
        out, lse = launch.forward(batch.q[None], keys, values, mask, batch.scale, 0.0, batch.sinks)
    assert calls.call_args.args[1:3] == (3, 2)
    with simulated.simulated():
        for head in range(6):
            kv = slice(head // 3, head // 3 + 1)
            alone = batch.q[None, :, head : head + 1], keys[:, :, kv], values[:, :, kv]
            sink = None if batch.sinks is None else batch.sinks[head : head + 1]
            want = launch.forward(*alone, mask, batch.scale, 0.0, sink)
            assert contract.same_bytes(out[:, :, head], want[0][:, :, 0])
            assert contract.same_bytes(lse[:, head], want[1][:, 0])
