"""The exact sum against integers and fractions of Python, in any order and any number of parts."""

from __future__ import annotations

import decimal
import itertools
import math
import random
from fractions import Fraction

import pytest
import torch

from cute_kernels.logp import config, exact
from cute_kernels.logp.tensors import Rows
from tests.contract import same_bytes

BIN, BINS = config.BIN, config.BINS


def units(count: int, spread: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(M, s, Σ 2^(y - M) (y - M)) of one token's units, M within ``spread`` bins of 0."""
    generator = torch.Generator().manual_seed(seed)
    reach = max(1, spread * BIN // 2)
    exponent = torch.randint(-reach, reach + 1, (1, count), generator=generator)
    total = 0.7072 + torch.rand(1, count, generator=generator) * 21.9
    weighted = torch.randn(1, count, generator=generator) * 8
    return exponent, total, weighted


def state_by_integers(exponent, total, weighted) -> list[int]:
    """A state's top and sums, by the definition, in Python's integers."""
    members = [
        (m // BIN, m % BIN, Fraction(s), Fraction(w))
        for m, s, w in zip(*(t[0].tolist() for t in (exponent, total, weighted)), strict=True)
        if s > 0
    ]
    top = max((bin_ for bin_, *_ in members), default=config.EMPTY)
    sums, moved = [0] * BINS, [0] * BINS
    for bin_, place, s, w in members:
        if (below := top - bin_) < BINS:
            unit = 2 ** (config.FRACTION + place)
            sums[below] += round(s * unit)
            # fp64 first: a sum of two fp32 products, whose rounding to fp32 is an fma's.
            shifted = torch.tensor(float(s) * place + float(w), dtype=torch.float64).float().item()
            moved[below] += round(Fraction(shifted) * unit)
    return [top, *sums, *moved]


def rows(target: int = 0, scale: float = 1.0) -> Rows:
    return Rows(torch.tensor([target]), torch.tensor([scale]))


@pytest.mark.parametrize("spread", [0, 1, 2, 5, 40, 400])
@pytest.mark.parametrize("count", [1, 2, 17, 1000])
def test_a_state_is_the_sum_of_integers(count, spread):
    for seed in range(10):
        of = units(count, spread, seed)
        state = exact.of_units(*of)
        want = state_by_integers(*of)
        assert [*state[0, :5].tolist(), *state[0, 6:].tolist()] == want
        assert state[0, config.CHOSEN] == 0


@pytest.mark.parametrize("spread", [1, 3, 5, 40, 400])
def test_no_order_and_no_partition_shows(spread):
    """Units shuffled and dealt to any number of parts, which are merged in any order, in trees."""
    for seed in range(40):
        drawn = random.Random(seed)
        of = units(drawn.choice([5, 33, 200]), spread, seed)
        want = exact.of_units(*of)
        finished = exact.finish(want[None], rows())
        order = torch.randperm(of[0].shape[1], generator=torch.Generator().manual_seed(seed))
        shuffled = [t[:, order] for t in of]
        cuts = sorted(drawn.sample(range(1, len(order)), drawn.randint(1, min(8, len(order) - 1))))
        edges = [0, *cuts, len(order)]
        parts = [
            exact.of_units(*(t[:, a:b] for t in shuffled)) for a, b in itertools.pairwise(edges)
        ]
        while len(parts) > 1:
            drawn.shuffle(parts)
            size = drawn.randint(2, len(parts))
            parts = [exact.merge(torch.stack(parts[:size])), *parts[size:]]
        assert same_bytes(parts[0], want), seed
        for got, expected in zip(exact.finish(parts[0][None], rows()), finished, strict=True):
            assert same_bytes(got, expected)


@pytest.mark.parametrize("below", [64, 65, 79, 80, 1000, 10**6])
def test_a_unit_far_below_changes_nothing_in_any_order(below):
    """By 2^-64 always; by 2^-48 to 2^-64 as the bins lie, which is the values' own affair."""
    exponent, total, weighted = units(7, 0, 1)
    low = exponent[:, :1] - below, total[:, :1], weighted[:, :1]
    want = exact.of_units(exponent, total, weighted)
    for at in range(8):
        of = [
            torch.cat([t[:, :at], one, t[:, at:]], 1)
            for t, one in zip((exponent, total, weighted), low, strict=True)
        ]
        assert same_bytes(exact.of_units(*of), want)
    alone = exact.of_units(*low)
    for parts in ((want, alone), (alone, want)):
        assert same_bytes(exact.merge(torch.stack(parts)), want)


@pytest.mark.parametrize("below", range(45, 66))
def test_around_the_last_bin_every_order_does_the_same(below):
    """Whether it is kept depends on the bins of the two, not on who came first."""
    for place in range(BIN):
        exponent = torch.tensor([[place, place - below]])
        total = torch.tensor([[1.0, 1.5]])
        want = exact.of_units(exponent, total, total)
        low_first = exact.of_units(exponent.flip(1), total.flip(1), total.flip(1))
        ones = [exact.of_units(exponent[:, i : i + 1], *[total[:, i : i + 1]] * 2) for i in (0, 1)]
        assert same_bytes(low_first, want)
        assert same_bytes(exact.merge(torch.stack(ones)), want)
        assert same_bytes(exact.merge(torch.stack(ones[::-1])), want)
        kept = int(want[0, config.SUMS + 1 : config.CHOSEN].sum()) > 0
        if (place - below) // BIN != place // BIN:
            assert kept == ((place - below) // BIN > -BINS)
            assert kept or below > 48


def test_the_largest_vocabulary_does_not_overflow():
    """Every unit at the top place of its bin with 16 equal entries, and y - M of 1/2."""
    count = config.MAX_VOCAB // config.UNIT
    half = torch.tensor(0.5).exp2().item()
    for place in range(BIN):
        exponent = torch.full((1, count), place)
        total = torch.full((1, count), 16 * half)
        for weighted in (total * 0.5, torch.full((1, count), -16 * 0.5308)):
            state = exact.of_units(exponent, total, weighted)
            want = state_by_integers(exponent[:, :1], total[:, :1], weighted[:, :1])
            assert state[0, config.SUMS].item() == want[1] * count < 2**63
            assert state[0, config.WEIGHTED].item() == want[5] * count
            assert abs(want[5] * count) < 2**63
            lse2 = exact.finish(state[None], rows())[1]
            assert abs(lse2.item() - (place + 0.5 + math.log2(config.MAX_VOCAB))) < 1e-5
    # With twice as many it would.
    assert (
        state_by_integers(*(torch.full((1, 1), v) for v in (15, 16 * half, 8 * half)))[5]
        * (2 * count)
        >= 2**63
    )


def test_against_fractions():
    """log p and the entropy of units, against the sum of fractions and its decimal logarithm."""
    decimal.getcontext().prec = 60
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        y = torch.randn(6, 16, generator=generator).double() * (1 + seed)
        m = y.amax(1).round()
        values = (y - m[:, None]).exp2()
        total = values.sum(1).float()[None]
        weighted = (values * (y - m[:, None])).sum(1).float()[None]
        state = exact.of_units(m.long()[None], total, weighted)
        state[0, config.CHOSEN] = torch.tensor(float(y[2, 3])).view(torch.int32).item()
        logp, lse2, entropy = exact.finish(state[None], rows())
        top = int(m.max())
        whole = sum(
            Fraction(s) * Fraction(2) ** int(e)
            for s, e in zip(total[0].tolist(), m.tolist(), strict=True)
        )
        mantissa = whole / Fraction(2) ** top
        log2 = (
            decimal.Decimal(mantissa.numerator) / decimal.Decimal(mantissa.denominator)
        ).ln() / decimal.Decimal(2).ln()
        want = float(log2) + top
        assert abs(lse2.item() - want) <= 2.0**-24 * abs(want) + 2.0**-30
        chosen = torch.tensor(float(y[2, 3])).double().item()
        of_p = (chosen - want) * math.log(2)
        assert abs(logp.item() - min(0, of_p)) <= 2.0**-24 * abs(of_p) + 2.0**-30
        p = (y - want).exp2()
        h = float(-(p * (y - want)).sum() * math.log(2))
        assert abs(entropy.item() - h) <= 2.0**-20 * (1 + h)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinities(bad):
    """NaN or +inf in one unit's sum is NaN in the results, wherever the unit is."""
    exponent, total, weighted = units(5, 3, 2)
    for at in range(5):
        dirty = total.clone()
        dirty[0, at] = bad
        state = exact.of_units(exponent, dirty, weighted)
        if bad == -math.inf:
            assert state[0, 0] < config.LOST  # no sum of powers; not counted
            continue
        assert state[0, 0] == config.LOST
        for merged in (
            state,
            exact.merge(torch.stack([exact.of_units(exponent, total, weighted), state])),
        ):
            assert all(t.isnan().all() for t in exact.finish(merged[None], rows()))
            for got in exact.finish(merged[None], rows(config.MASKED))[::2]:
                assert got.item() == 0


def test_nothing_at_all():
    """Units without a sum are no units: a part of padding is neutral, a row of it is NaN."""
    exponent, total, weighted = units(5, 3, 2)
    empty = exact.of_units(exponent, torch.zeros_like(total), weighted)
    assert empty.tolist() == [[config.EMPTY, *[0] * 9]]
    want = exact.of_units(exponent, total, weighted)
    for parts in ((want, empty), (empty, want), (empty, want, empty)):
        assert same_bytes(exact.merge(torch.stack(parts)), want)
    assert all(t.isnan().all() for t in exact.finish(empty[None], rows()))
    assert exact.of_units(exponent[:0], total[:0], None).shape == (0, 6)


def test_targets_that_no_vocabulary_has():
    state = exact.of_units(*units(5, 3, 2))
    assert exact.finish(state[None], rows(config.OUTSIDE))[0].isnan().all()
    logp, _, entropy = exact.finish(state[None], rows(config.MASKED))
    assert same_bytes(logp, torch.zeros(1)) and same_bytes(entropy, torch.zeros(1))


def test_log2_to_the_last_bits():
    """Within 1e-15 relative (where log2 is not near 0: absolute), over all exponents in use."""
    decimal.getcontext().prec = 50
    ln2 = decimal.Decimal(2).ln()
    generator = torch.Generator().manual_seed(0)
    x = 1 + torch.rand(3000, generator=generator, dtype=torch.float64)
    x = torch.ldexp(x, torch.randint(0, 63, (3000,), generator=generator))
    edges = [1.0, 2.0, 0.5, 2.0**0.5, 0.5**0.5, 1 + 2.0**-52, 1 - 2.0**-53, 2.0**62, 1.5, 3.0]
    x = torch.cat([x, torch.tensor(edges, dtype=torch.float64)])
    near = x[-10:]
    far = torch.tensor([0.0, 1e300], dtype=torch.float64)
    x = torch.cat([x, torch.nextafter(near, far[:1]), torch.nextafter(near, far[1:])])
    got = exact._log2(x)
    for a, value in zip(got.tolist(), x.tolist(), strict=True):
        want = float(decimal.Decimal(value).ln() / ln2)
        assert abs(a - want) <= 1e-15 * max(abs(want), 1e-3), value
    powers = torch.ldexp(torch.ones(63, dtype=torch.float64), torch.arange(63))
    assert exact._log2(powers).tolist() == list(range(63))
    ascending = torch.arange(1, 4097, dtype=torch.float64) / 1024
    assert (exact._log2(ascending).diff() > 0).all()
