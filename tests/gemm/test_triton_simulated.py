"""The compiled sm_90 code of the Triton gemm, run on a CPU by ptxsim: its bits, not its speed."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.gemm.triton import launch
from ptxsim.skips import requires_core
from tests.gemm.triton_engine import BF16, FP16, FP32, engine, far_offsets

from . import triton_cases as cases
from .triton_harness import simulated

pytestmark = [pytest.mark.sim, requires_core]

DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
SHAPES = ((1, 1, 1), (127, 129, 65), (130, 7, 200))
HOPPER, LATE = {"wgmma_math": 2}, {"async_mode": 1, "wgmma_mode": 1, "warp_order": 1, "seed": 9}


@pytest.mark.parametrize(
    ("dtype", "epilogue"),
    [
        # By day each dtype and each epilogue.
        pytest.param(d, e, marks=() if i == j else pytest.mark.nightly)
        for i, d in enumerate((BF16, FP16, FP32))
        for j, e in enumerate(("plain", "bias", "accumulate"))
    ],
    ids=str,
)
def test_bits_are_those_of_the_documented_chain(monkeypatch, dtype, epilogue):
    with simulated(launch):
        for m, n, k in SHAPES:
            cases.chain_bits(engine(monkeypatch), m, n, k, dtype, epilogue)


@pytest.mark.parametrize("options", [HOPPER, LATE], ids=["hopper", "late"])
@pytest.mark.parametrize(
    "check",
    [cases.rows_alone, cases.pieces, cases.neighbours],
    ids=lambda check: check.__name__,
)
def test_invariance(monkeypatch, check, options):
    with simulated(launch, **options):
        check(engine(monkeypatch), BF16)


@DTYPES
def test_programs_do_not_show(monkeypatch, dtype):
    with simulated(launch):
        cases.programs(engine(monkeypatch), dtype)


@pytest.mark.parametrize("check", [cases.rows_alone, cases.neighbours, cases.pieces])
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=["fp16", "fp32"])
@pytest.mark.nightly
def test_invariance_of_other_dtypes(monkeypatch, check, dtype):
    with simulated(launch):
        check(engine(monkeypatch), dtype)


def test_layouts_do_not_show(monkeypatch):
    pairs = (("mn", "k"), ("k", "mn"), ("padded", "offset"))
    with simulated(launch, **HOPPER):
        cases.layouts(engine(monkeypatch), BF16, pairs)


@pytest.mark.nightly
@DTYPES
def test_every_pair_of_layouts(monkeypatch, dtype):
    pairs = tuple((a, b) for a in cases.LAYOUTS for b in cases.LAYOUTS)
    with simulated(launch):
        cases.layouts(engine(monkeypatch), dtype, pairs)


def test_cuts_of_a_row_major_stream(monkeypatch):
    with simulated(launch, **HOPPER):
        cases.pieces(engine(monkeypatch), BF16, layout="k")


@pytest.mark.parametrize(
    "dtype", [BF16, *(pytest.param(d, marks=pytest.mark.nightly) for d in (FP16, FP32))], ids=str
)
def test_column_sum(dtype):
    with simulated(launch):
        cases.column_sums(launch.column_sum, dtype)


def test_one_binary_for_every_number_of_rows(monkeypatch):
    """Neither M of a forward product nor the tokens of a dW select another binary."""
    gemm = engine(monkeypatch)
    b = cases.random(32, 48, dtype=BF16, seed=1)
    with simulated(launch) as kernels:
        for m in (1, 2, 7, 16, 33, 128):
            gemm(cases.random(m, 48, dtype=BF16, seed=m), b)
        assert len({kernel.hash for kernel in kernels}) == 1
        kernels.clear()
        for tokens in (1, 15, 16, 17, 64):
            dy = cases.random(tokens, 32, dtype=BF16, seed=tokens)
            x = cases.random(tokens, 48, dtype=BF16, seed=tokens)
            gemm(dy.mT, x.mT, None, torch.zeros(32, 48))
        assert len({kernel.hash for kernel in kernels}) == 1


def test_offsets_beyond_int32(monkeypatch, tmp_path):
    """Row 2 starts at element 2³¹: operands, accumulator and column sums reach it."""
    with simulated(launch):
        far_offsets(engine(monkeypatch), launch.column_sum, tmp_path)


@pytest.mark.parametrize("cap", ["0", "1", "3", "500"])
def test_grid(monkeypatch, cap):
    """One program per tile, at most one per SM, at most the cap."""
    monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", cap)
    with simulated(launch):
        limit = min(int(cap) or 132, 132)
        assert launch.most_ctas(torch.device("cuda:0")) == limit
