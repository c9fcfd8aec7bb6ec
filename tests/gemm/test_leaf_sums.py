"""Leaves that are not added: of a slice of K, with the bits that ``order="tree"`` adds."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import BackendUnavailable, UnsupportedTransformError
from cute_kernels.gemm import cpu, op
from cute_kernels.schedulers.tiles import leaves
from tests import contract
from tests.oracles import gemm as reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def drawn(m: int, n: int, k: int, dtype: torch.dtype, seed: int = 0):
    """Operands of many magnitudes, and a bias."""
    generator = torch.Generator().manual_seed(seed + m + n + k)
    a, b, bias = (torch.randn(*s, generator=generator) for s in ((m, k), (n, k), (n,)))
    return (a * 2.0 ** torch.arange(k).remainder(5)).to(dtype), b.to(dtype), bias.to(dtype)


def of_ranks(a, b, degree: int) -> torch.Tensor:
    """The leaves of all ranks, each from its own slices, one after the other."""
    length = leaves.length(a.shape[1])
    parts = zip(a.chunk(degree, 1), b.chunk(degree, 1), strict=True)
    return torch.cat([op.leaf_sums(x.clone(), w.clone(), length) for x, w in parts])


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("k", [5, 16, 100, 128, 320, 1000, 1024])
def test_their_ordered_sum_is_the_tree(dtype, k):
    """For K with a short last leaf, with fewer than eight, and within one group."""
    for m, n in ((1, 48), (3, 33), (70, 130), (300, 64)):
        a, b, bias = drawn(m, n, k, dtype)
        parts = op.leaf_sums(a, b, leaves.length(k))
        assert parts.shape == (leaves.count(k), m, n) and parts.dtype == FP32
        for addend in (None, bias):
            want = ck.linear(a, b, addend, order="tree")
            assert contract.same_bytes(op.add_leaves(parts, addend, dtype), want), (m, n)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("k", [128, 512, 1152])
def test_ranks_have_the_leaves_of_the_whole(degree, k):
    a, b, _ = drawn(70, 40, k, BF16)
    assert contract.same_bytes(of_ranks(a, b, degree), op.leaf_sums(a, b, leaves.length(k)))


def test_each_is_a_chain_within_its_bound():
    a, b, _ = drawn(20, 24, 512, BF16)
    for leaf, first in zip(op.leaf_sums(a, b, 64), range(0, 512, 64), strict=True):
        span = slice(first, first + 64)
        exact = reference.gemm(a[:, span], b[:, span])
        bound = reference.error_bound(a[:, span], b[:, span])
        assert ((leaf.double() - exact).abs() <= bound + leaf.abs() * 2.0**-24).all()


def test_layouts_do_not_show():
    a, b, _ = drawn(9, 24, 256, BF16)
    want = op.leaf_sums(a, b, 32)
    for one, two in ((a.mT.contiguous().mT, b), (a, b.mT.contiguous().mT)):
        assert contract.same_bytes(op.leaf_sums(one, two, 32), want)


def test_a_sum_of_minus_zeros_keeps_the_sign():
    """A sum that started from +0 would lose it."""
    parts = torch.full((8, 2, 16), -0.0)
    total = op.add_leaves(parts, None, BF16)
    assert torch.signbit(total).all() and not total.any()


def test_products_that_underflow_have_the_sign_that_the_tree_gives_them():
    """-0, or +0 where the BLAS starts its sums from it."""
    a, b = torch.full((2, 256), 1e-30).bfloat16(), torch.full((16, 256), -1e-30).bfloat16()
    parts = op.leaf_sums(a, b, 32)
    assert not parts.any()
    total = op.add_leaves(parts, None, BF16)
    assert contract.same_bytes(total, ck.linear(a, b, order="tree"))


def test_subnormal_sums_are_not_flushed():
    parts = torch.full((2, 1, 3), 2.0**-140)
    torch.set_flush_denormal(True)
    try:
        total = op.add_leaves(parts, None, FP32)
    finally:
        torch.set_flush_denormal(False)
    assert (total == 2.0**-139).all()


@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 32), (4, 0, 32), (4, 4, 0)])
def test_empty(m, n, k):
    assert op.leaf_sums(torch.empty(m, k), torch.empty(n, k), 16).shape == (-(-k // 16), m, n)


def test_the_sum_of_one_leaf_is_another_tensor():
    parts = torch.randn(1, 5, 6)
    assert op.add_leaves(parts, None, FP32).data_ptr() != parts.data_ptr()


def test_a_gradient_is_refused():
    a = torch.ones(2, 32, requires_grad=True)
    with pytest.raises(UnsupportedTransformError, match="no gradient"):
        op.leaf_sums(a, torch.ones(2, 32), 16)


def test_column_sums_do_not_follow_the_width():
    """A rank has some of the columns: their sums have the bits of the whole's, at any width."""
    rows = torch.randn(300, 200, generator=torch.Generator().manual_seed(2))
    whole = cpu.column_sum(rows)
    for first in (0, 1, 48, 100):
        for width in (1, 7, 16, 32, 100):
            part = cpu.column_sum(rows[:, first : first + width])
            assert contract.same_bytes(part, whole[first : first + width]), (first, width)


# ---- columns of the CPU backend -----------------------------------------------------------------


def chunks_differ(n: int, k: int, degree: int) -> bool:
    """Whether a product has other bytes by ``degree`` calls with some of the columns each."""
    a, b, _ = drawn(70, n, k, FP32)
    whole = op.linear(a, b, None, None, "chain")
    parts = [op.linear(a, b_chunk, None, None, "chain") for b_chunk in b.chunk(degree)]
    return not contract.same_bytes(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("k", [16, 1024, 1376])
def test_columns_do_not_know_how_many_there_are(k):
    """MKL's own products of 128 columns or fewer have another order from K = 896 on."""
    for n, degree in ((256, 8), (384, 4), (512, 4), (768, 2), (2048, 8)):
        assert not chunks_differ(n, k, degree), (n, degree)


@pytest.mark.nightly
@pytest.mark.parametrize("k", [896, 2048, 4096, 14336])
def test_columns_of_long_sums(k):
    for n in (256, 272, 384, 512, 1024, 2048, 4096):
        for degree in (2, 4, 8):
            assert not chunks_differ(n, k, degree), (n, degree)


@pytest.fixture
def blas(monkeypatch):
    """Sets what stands for the BLAS; what was proved of the true one is forgotten."""
    true = cpu.mm
    proofs = (
        cpu._columns_are_same,
        cpu._prove_column_position,
        cpu._prove_row_position,
        cpu._wide_is_same,
    )

    def use(changed):
        def mm(a, b, out=None, *, add=False):
            result = changed(true, a, b)
            return result if out is None else out.copy_(result)

        for proof in proofs:
            proof.cache_clear()
        monkeypatch.setattr(cpu, "mm", mm)

    yield use
    for proof in proofs:
        proof.cache_clear()


def order_by_width(true, a, b):
    """Another order for narrow products, and for wide ones."""
    return true(a, b) if b.shape[1] == 256 else true(a.flip(1), b.flip(0))


def last_column_apart(true, a, b):
    out = true(a, b)
    out[:, -1] = true(a.flip(1), b.flip(0))[:, -1]
    return out


def test_a_blas_whose_bits_follow_the_width_is_given_one_width(blas, monkeypatch):
    blas(order_by_width)
    assert not any(chunks_differ(n, 100, degree) for n, degree in ((512, 2), (600, 4), (64, 2)))
    blas(order_by_width)
    monkeypatch.setattr(cpu, "_columns_are_same", lambda *_: True)  # mutant: it is not asked
    assert chunks_differ(512, 100, 2)


def test_a_blas_whose_bits_follow_the_column_is_refused(blas):
    blas(last_column_apart)
    a, b, _ = drawn(3, 24, 128, FP32)
    with pytest.raises(BackendUnavailable, match="tp_invariant"):
        op.leaf_sums(a, b, 16)


# ---- who adds leaves -----------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """Calls of the launcher, as the sizes and strides of what it takes."""
    calls = []

    def add_leaves(out, sums, bias):
        calls.append([(tuple(part.shape), part.stride()) for part in sums])
        return out

    monkeypatch.setattr(op, "_triton_launcher", lambda: SimpleNamespace(add_leaves=add_leaves))
    return calls


def test_a_gpu_adds_in_one_launch(launched, monkeypatch):
    monkeypatch.setattr(op, "_adds_by_triton", lambda device: True)  # for tensors of a CPU
    parts, out = torch.empty(8, 6, 32), torch.empty(3, 32, dtype=BF16)
    # The middle rows of each leaf, as a rank's own leaves lie, are taken as they are.
    op.add_leaves_into(out, (parts[:2, :3], parts[2:2, :3], parts[2:, 1:4]), None)
    # Leaves that are not contiguous are copied.
    op.add_leaves_into(out, (parts[:, ::2],), None)
    first, second = launched
    assert first == [((2, 3, 32), (192, 32, 1)), ((6, 3, 32), (192, 32, 1))]
    assert second == [((8, 3, 32), (96, 32, 1))]
    op.add_leaves(parts, None, BF16)
    assert launched[2:] == [[((8, 6, 32), (192, 32, 1))]]
    op.add_leaves_into(out[:0], (parts[:, :0],), None)
    assert len(launched) == 3


def test_who_adds_by_triton(launched):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert op._adds_by_triton(gpu) and not op._adds_by_triton(cpu)
    with mock.patch.object(importlib.util, "find_spec", lambda name: None):
        op._triton_installed.cache_clear()
        try:
            assert not op._adds_by_triton(gpu)
        finally:
            op._triton_installed.cache_clear()
    op.add_leaves_into(torch.empty(3, 32), (torch.zeros(8, 3, 32),), None)
    assert launched == []
