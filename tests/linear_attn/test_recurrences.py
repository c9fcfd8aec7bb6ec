"""Delta rules and scans on a CPU: bytes of parts, packs, batches and heads."""

from __future__ import annotations

import math

import pytest
import torch

import cute_kernels as ck
from cute_kernels.linear_attn import cpu_chunks
from tests import contract
from tests.contract import same_bytes

from . import delta_cases, ssd_cases
from .delta_cases import BF16
from .recurrences import (
    called,
    given,
    heads_are_alone,
    operands,
    parts,
    parts_are_whole,
    rows_of,
    run,
    same,
    sequences_are_alone,
    upstream,
)
from .ssd_cases import SELECTIVE_CASES

#: Empty sequences, those of one row, and those of several chunks.
DELTA = delta_cases.Case((5, 0, 66, 1, 130), behind=3)
PACKS = {
    "delta": DELTA,
    "kda": DELTA._replace(channels=True),
    "heads": ssd_cases.Case((5, 0, 130, 1, 260), behind=3),
    "channels": SELECTIVE_CASES["channels of a pack"],
}
SEQUENCES = {
    "delta": DELTA._replace(lengths=(150,), batch=1, behind=0),
    "kda": DELTA._replace(lengths=(150,), batch=1, behind=0, channels=True),
    "heads": ssd_cases.Case((290,), batch=1, heads=(1, 2), sizes=(8, 16)),
    "channels": SELECTIVE_CASES["channels"]._replace(lengths=(70,), batch=1),
}
#: Rows between the states at which parts may be cut: Mamba-1's anywhere, row by row too.
CUTS = [
    *((name, cuts) for name in ("delta", "kda") for cuts in ((64,), (128,), (64, 128))),
    *(("heads", cuts) for cuts in ((128,), (256,), (128, 256))),
    *(("channels", cuts) for cuts in ((1,), (32,), (33, 34, 50), tuple(range(60, 70)))),
]
packs = pytest.mark.parametrize("case", PACKS.values(), ids=PACKS)


@pytest.mark.parametrize(("name", "cuts"), CUTS, ids=str)
def test_parts_have_the_bytes_of_the_whole(name, cuts):
    """Both passes: the gradient of a state is the one that a part before it goes on from."""
    assert parts_are_whole(cuts, SEQUENCES[name])


@pytest.mark.parametrize("name", ["delta", "heads"])
def test_an_initial_state_starts_a_grid_of_chunks(name):
    """Cut elsewhere, the rounding of S is elsewhere: right, but other bytes."""
    whole, cut = parts((50,), SEQUENCES[name])
    assert same_bytes(whole.out[:50], cut.out[:50]) and not same_bytes(whole.final, cut.final)
    assert (whole.final - cut.final).abs().max() < 1e-5 * whole.final.abs().max()


@packs
def test_a_sequence_of_a_pack_has_its_bytes_alone(case):
    """Both passes, and main_grads of any split."""
    sequences_are_alone(case)


@pytest.mark.parametrize(
    "case",
    [
        *(SEQUENCES[name]._replace(batch=2) for name in ("delta", "kda", "channels")),
        ssd_cases.Case((140,), batch=2, skip=2),
    ],
    ids=["delta", "kda", "channels", "heads"],
)
def test_a_sequence_of_a_batch_has_its_bytes_alone(case):
    sequences_are_alone(case)


@packs
def test_an_empty_sequence_keeps_its_state(case):
    o, (_, d_final) = operands(case), upstream(case)
    results = run(case, o)
    assert same_bytes(results.final[1], o.initial[1])
    assert same_bytes(results.gradients["initial"][1], d_final[1])
    empty = case._replace(lengths=(0,), batch=2, behind=0)
    results, initial = run(empty, operands(empty)), operands(empty).initial
    assert same_bytes(results.final, initial) and results.out.shape == (0, *results.out.shape[1:])
    assert same_bytes(results.gradients["initial"], upstream(empty)[1])
    assert not any(results.gradients[name].any() for name in case.op.summed)
    leaves, others = given(empty, operands(empty)._replace(initial=None))
    zeros = called(empty, leaves, **others)[1]
    assert zeros.shape == initial.shape and not zeros.any()


@packs
def test_a_batch_beside_nan(case):
    """Another sequence, and what lies behind a pack, may be anything."""
    case = case._replace(lengths=(140,), batch=2, behind=0)
    o, slopes, names = operands(case), upstream(case), case.op.of_rows
    want = rows_of(run(case, o, slopes), slice(140), slice(1))
    for t in (*(getattr(o, n) for n in names), slopes[0]):
        t[140:] = torch.nan
    for t in (o.initial, slopes[1]):
        t[1:] = torch.nan
    assert same(rows_of(run(case, o, slopes), slice(140), slice(1)), want)
    pack = case._replace(batch=0, behind=140)
    beside, slopes = o._replace(initial=o.initial[:1]), (slopes[0], slopes[1][:1])
    got = run(pack, beside, slopes)
    assert same(rows_of(got, slice(140)), want)
    assert not any(t[140:].any() for t in (got.out, *(got.gradients[n] for n in names)))
    single = {n: getattr(o, n)[:140] for n in names}
    sums = run(case._replace(batch=1), beside._replace(**single), (slopes[0][:140], slopes[1]))
    assert all(same_bytes(got.gradients[n], sums.gradients[n]) for n in case.op.summed)


@pytest.mark.parametrize("case", [delta_cases.SHARED, *ssd_cases.SHARED], ids=str)
def test_heads_that_share_operands(case):
    heads_are_alone(case)


@pytest.mark.parametrize(
    "case",
    [
        delta_cases.Case((70,), batch=2, heads=(2, 6)),
        ssd_cases.Case((140,), batch=2, heads=(2, 6)),
        SEQUENCES["channels"]._replace(batch=2),
    ],
    ids=str,
)
def test_no_bit_follows_how_much_is_computed_at_once(monkeypatch, case):
    want = run(case, operands(case))
    monkeypatch.setattr(cpu_chunks, "AT_ONCE", 5 * case.op.chunk * math.prod(case.sizes))
    assert same(run(case, operands(case)), want)


def delta_rules(rows: torch.Tensor) -> torch.Tensor:
    """Rows of sequences of 3 rows of one head of 8 channels, one in each row given."""
    q, k, v = rows.view(-1, 3, 3, 1, 8).unbind(2)
    g, beta = -rows[:, :3, None].float().abs(), rows[:, 3:6, None]
    return ck.chunk_gated_delta_rule(q, k, v, g, beta)[0].reshape(len(rows), 24)


def scans_of_heads(rows: torch.Tensor) -> torch.Tensor:
    x, B, C = rows.view(-1, 3, 3, 1, 8).unbind(2)
    options = {"dt_softplus": True, "z": x}
    out = ck.mamba_chunk_scan_combined(x, rows[:, :3, None], -torch.ones(1), B, C, **options)
    return out.reshape(len(rows), 24)


def scans_of_channels(rows: torch.Tensor) -> torch.Tensor:
    u, B, C = rows.view(-1, 3, 3, 8).transpose(2, 3).unbind(1)
    A = -torch.arange(1, 65).view(8, 8) / 32.0
    return ck.selective_scan(u, u, A, B, C, delta_softplus=True, z=u).reshape(len(rows), 24)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("chunk_gated_delta_rule", delta_rules),
        ("mamba_chunk_scan_combined", scans_of_heads),
        ("selective_scan", scans_of_channels),
    ],
)
def test_the_battery_of_rows(name, call):
    """A sequence is a row: batches, neighbours, NaN among them, strides, repeated calls."""
    op = contract.RowOp(name, call, width=72, dtype=BF16)
    assert contract.check_rows(op, 70, seed=1) > 50
