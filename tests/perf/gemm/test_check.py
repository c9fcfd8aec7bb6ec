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


def test_the_bound_is_asked_of_those_who_promise_it():
    """cuBLAS's dW rounds to bf16 before it adds: allowed to a rival, not to us."""
    call, t = products.rounds_partial_sums("dw"), products.inputs("dw")
    assert check.check(call, "dw", t, promised=False).ok
    assert not check.check(call, "dw", t, promised=True).ok


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


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_sum_that_changes_between_calls_is_seen(product):
    verdict = check.bitwise(products.sum_changes(product), product, products.inputs(product))
    assert not verdict["repeat"]


@pytest.mark.parametrize("product", ["fwd", "dx"])
def test_bits_that_follow_the_batch_are_seen(product):
    t = products.inputs(product)
    verdict = check.bitwise(products.few_rows_split_k(product), product, t)
    assert verdict == {"repeat": True, "rows": False}


def test_bits_that_follow_the_micro_batches_are_seen():
    verdict = check.bitwise(products.adds_at_the_end("dw"), "dw", products.inputs("dw"))
    assert verdict == {"repeat": True, "splits": False}


def test_bytes_tell_zeros_apart():
    plus, minus = torch.zeros(3), -torch.zeros(3)
    assert torch.equal(plus, minus)
    assert not check.same_bytes(plus, minus)
    assert check.same_bytes(minus, minus.clone())
    assert not check.same_bytes(plus, plus[:2])
