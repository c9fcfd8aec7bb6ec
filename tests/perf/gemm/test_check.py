"""The check before the timing: honest products pass, every mutant is caught by its own rule."""

from __future__ import annotations

import pytest
import torch

from perf.gemm import check
from perf.gemm.targets import PRODUCTS
from tests.perf.gemm import products


@pytest.mark.parametrize("product", PRODUCTS)
def test_an_honest_product_keeps_every_promise(product):
    t = products.inputs(product)
    out = check.check(products.honest(product), product, t, promised=True)
    assert out.ok, out
    assert out.beyond_bound == 0 and out.nan == 0
    assert all(check.bitwise(products.honest(product), product, t).values())


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    "mutant",
    [
        products.drops_the_last_k,
        products.leaves_a_column_unwritten,
        products.rounds_partial_sums,
    ],
)
def test_a_wrong_product_fails_the_check(product, mutant):
    out = check.check(mutant(product), product, products.inputs(product), promised=True)
    assert not out.ok, out
    # cuBLAS's dW rounds to bf16 before it adds: allowed to a rival, not to us.
    if mutant is products.rounds_partial_sums:
        assert check.check(mutant(product), product, products.inputs(product), promised=False).ok


def test_the_reference_is_float64_of_the_same_inputs():
    t = products.inputs("fwd")
    exact = (t["x"].double() @ t["w"].double().mT).bfloat16()
    assert check.check(lambda _: exact.clone(), "fwd", t, promised=True).misround == 0.0
    flipped = exact.clone()
    flipped.view(torch.int16)[3, 5] ^= 1
    out = check.check(lambda _: flipped, "fwd", t, promised=False)
    assert out.misround == pytest.approx(1 / flipped.numel())


def test_chunks_do_not_change_the_verdict(monkeypatch):
    t = products.inputs("fwd")
    whole = check.check(products.honest("fwd"), "fwd", t, promised=True)
    monkeypatch.setattr(check, "_CHUNK_BYTES", 8 * products.K * 7)
    cut = check.check(products.honest("fwd"), "fwd", t, promised=True)
    assert cut.rel_error == pytest.approx(whole.rel_error, rel=1e-12)
    assert (cut.misround, cut.beyond_bound) == (whole.misround, whole.beyond_bound)


def test_poison_is_told_from_memory_that_was_not_poisoned():
    kept = torch.zeros(4, 4)
    out, poisoned = check.poisoned_call(lambda t: kept, {"x": kept}, (4, 4), torch.float32)
    assert out is kept and not poisoned
    address = {}

    def same_place(t):
        return address["trap"]

    real = torch.full

    def watched(*args, **kwargs):
        address["trap"] = real(*args, **kwargs)
        return address["trap"]

    try:
        torch.full = watched
        out, poisoned = check.poisoned_call(same_place, {"x": kept}, (4, 4), torch.float32)
    finally:
        torch.full = real
    assert poisoned and out.isnan().all()


@pytest.mark.parametrize(
    ("mutant", "product", "broken"),
    [
        *((products.sum_changes, product, "repeat") for product in PRODUCTS),
        (products.few_rows_split_k, "fwd", "rows"),
        (products.few_rows_split_k, "dx", "rows"),
        (products.adds_at_the_end, "dw", "splits"),
    ],
)
def test_bits_that_change_are_seen(mutant, product, broken):
    verdict = check.bitwise(mutant(product), product, products.inputs(product))
    assert not verdict[broken] and (broken == "repeat" or verdict["repeat"])
