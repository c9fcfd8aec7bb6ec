"""The truncation model: by hand, against the simulator bit for bit, and its mutants."""

from __future__ import annotations

import pytest
import torch

from perf.probes import inputs, truncation


def one_step(products: list[tuple[float, float]], acc: float = 0.0) -> float:
    """One group with these (a, b) pairs, zeros elsewhere."""
    a, b = torch.zeros(1, 16), torch.zeros(1, 16)
    for k, (x, y) in enumerate(products):
        a[0, k], b[0, k] = x, y
    start = torch.tensor([[acc]])
    return truncation.chain(a.bfloat16(), b.bfloat16(), start).item()


@pytest.mark.parametrize(
    ("products", "acc", "want"),
    [
        ([(1.0, 1.0)], 0.0, 1.0),
        ([(1.5, 1.5), (2.0, -1.0)], 1.0, 1.25),
        # 25 fractional bits below the largest exponent survive the alignment, a 26th does not:
        ([(1.0, 1.0), (2.0**-25, 1.0), (-1.0, 1.0)], 0.0, 2.0**-25),
        ([(1.0, 1.0), (2.0**-26, 1.0), (-1.0, 1.0)], 0.0, 0.0),
        # truncated toward zero on both sides, before the sum:
        ([(1.0, 1.0), (-(2.0**-26), 1.0)], 0.0, 1.0),
        # the fp32 result is truncated, not rounded: 1 + 3 * 2^-25 stays 1
        ([(1.0, 1.0), (3.0 * 2.0**-25, 1.0)], 0.0, 1.0),
        ([(1.0, 1.0), (7.0 * 2.0**-25, 1.0)], 0.0, 1.0 + 2.0**-23),
        ([(-1.0, 1.0), (-7.0 * 2.0**-25, 1.0)], 0.0, -1.0 - 2.0**-23),
        # a product's exponent is the sum of its operands', so 1.5 * 1.5 counts as 2^0:
        ([(1.5, 1.5), (2.0**-25, 1.0), (-1.5, 1.5)], 0.0, 2.0**-25),
        # the accumulator takes part in the alignment
        ([(2.0**-30, 1.0), (2.0**-30, 1.0)], 1.0, 1.0),
        ([(2.0**-25, 1.0), (-1.0, 1.0)], 1.0, 2.0**-25),
    ],
)
def test_a_group_by_hand(products, acc, want):
    assert one_step(products, acc) == want


def test_zero_groups_and_signs_of_zero():
    assert one_step([], 0.375) == 0.375
    a, b, c = (torch.full(shape, -0.0) for shape in ((1, 16), (1, 16), (1, 1)))
    for sign, want in ((1.0, -(2**31)), (-1.0, 0)):  # -0 * 1 and 0 * 1, onto -0
        sums = truncation.chain((sign * a).bfloat16(), (b + 1).bfloat16(), c)
        assert sums.view(torch.int32).item() == want


def test_rounding_toward_zero_stays_finite_and_keeps_subnormals():
    values = [1e39, -1e39, 1 + 2.0**-24, -(1 + 2.0**-24), 1.9 * 2.0**-149, 2.0**-150]
    got = truncation.toward_zero(torch.tensor(values, dtype=torch.float64))
    largest = torch.finfo(torch.float32).max
    assert got.tolist() == [largest, -largest, 1.0, -1.0, 2.0**-149, 0.0]


def test_leaves_are_rounded_to_nearest_and_chunks_change_nothing():
    a, b, c = inputs.make("normal", 40, 24, 128, device="cpu")
    want = c.clone()
    for k in (0, 64):
        want = want + truncation.chain(a[:, k : k + 64], b[:, k : k + 64])
    got = truncation.chain(a, b, c, promote_every=4)
    assert (got.view(torch.int32) == want.view(torch.int32)).all()
    cut = truncation.chain(a, b, c, promote_every=4, rows=7)
    assert (got.view(torch.int32) == cut.view(torch.int32)).all()


def test_a_k_tail_is_refused():
    a, b, _ = inputs.make("normal", 4, 4, 32, device="cpu")
    with pytest.raises(ValueError, match="multiple of 16, got 24"):
        truncation.chain(a[:, :24], b[:, :24])


@pytest.mark.parametrize("kind", sorted(inputs.ORDINARY | inputs.EXTREME))
def test_every_kind_of_operands_is_what_it_says(kind):
    a, b, c = inputs.make(kind, 64, 48, 96, device="cpu")
    assert (a.shape, b.shape, c.shape) == ((64, 96), (48, 96), (64, 48))
    assert (a.dtype, b.dtype, c.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert all(t.float().isfinite().all() for t in (a, b, c))
    again = inputs.make(kind, 64, 48, 96, device="cpu")
    other = inputs.make(kind, 64, 48, 96, device="cpu", seed=1)
    assert torch.equal(a, again[0]) and not torch.equal(a, other[0])
    if kind == "zeros":
        assert (a.view(torch.int16) == -32768).any() and (c.view(torch.int32) == -(2**31)).any()
    if kind == "subnormal":
        tiny = truncation.chain(a, b, c).abs()
        assert ((tiny > 0) & (tiny < torch.finfo(torch.float32).tiny)).any()
    if kind == "overflow":
        assert (truncation.chain(a, b, c).abs() == torch.finfo(torch.float32).max).any()
