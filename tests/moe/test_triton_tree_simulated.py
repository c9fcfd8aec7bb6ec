"""The sm_90 code of Triton's grouped products in the order ``tree``, in ptxsim."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import cute_kernels.moe.triton as package
from cute_kernels.gemm.triton import launch as gemm_launch
from cute_kernels.moe.triton import launch
from ptxsim.skips import requires_core

from .. import triton_harness as harness
from ..triton_copies import copy_of
from . import cases, tree_cases
from .triton_harness import DTYPES, HOPPER, LATE, described, far, simulated

pytestmark = [pytest.mark.sim, requires_core]

GEMM = {"leaves_kernel": ("out_ptr",)}


def gemm(**options) -> SimpleNamespace:
    """gemm's Triton products in the order ``tree`` in the simulator."""

    def run(call):
        with described(), harness.on_the_cpu(), harness.simulated(gemm_launch, GEMM, options):
            return call()

    return SimpleNamespace(
        gemm=lambda a, b, bias: run(lambda: gemm_launch.gemm(a, b, bias, None, "tree")),
        leaf_sums=lambda a, b, length: run(lambda: gemm_launch.leaf_sums(a, b, length)),
    )


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    "options", [pytest.param(HOPPER, id="hopper"), pytest.param(LATE, id="late", marks=NIGHTLY)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_tree(dtype, options):
    with simulated(**options):
        tree_cases.rows_of_tree(launch, gemm(**options), "uneven", dtype)


@NIGHTLY
@pytest.mark.parametrize(("load", "n", "k"), [*tree_cases.SHAPES, ("tiles", 264, 1100)])
def test_shapes(load, n, k):
    with simulated(**HOPPER):
        tree_cases.rows_of_tree(launch, gemm(**HOPPER), load, cases.BF16, n, k)


@pytest.mark.parametrize("cap", ["1", "7"])
def test_programs(monkeypatch, cap):
    monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", cap)
    with simulated(**HOPPER):
        tree_cases.rows_of_tree(launch, gemm(**HOPPER), "few", cases.BF16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "check",
    [
        tree_cases.leaves_of_ranks,
        pytest.param(tree_cases.neighbours, marks=NIGHTLY),
        pytest.param(tree_cases.layouts, marks=NIGHTLY),
        tree_cases.inside,
    ],
    ids=lambda check: check.__name__,
)
def test_products(check, dtype):
    with simulated(**HOPPER):
        check(launch, dtype)


def test_permuted_rows():
    with simulated(**HOPPER):
        tree_cases.permuted(launch.grouped_tree, cases.BF16)


def test_minus_zeros():
    with simulated():
        tree_cases.minus_zeros(launch)


def test_one_binary_for_every_number_of_rows():
    with simulated() as kernels:
        for load in ("few", "empty ends", "tiles"):
            x, weight, _, _, _ = cases.operands(load, cases.BF16, 40, 264)
            weight = weight[:1].expand(4, -1, -1).contiguous()
            counts = (cases.LOADS[load] + [0] * 4)[:4]
            offsets, rows = cases.offsets_of(counts), sum(counts)
            launch.grouped_tree(x[:rows], weight, offsets, None)
            launch.grouped_leaf_sums(x[:rows], weight, offsets, 48)
        assert len({kernel.hash for kernel in kernels}) == 2


def products(module, x) -> list:
    """Both results for three experts with a row each."""
    weight = cases.operands("few", cases.BF16)[1][:3]
    offsets = cases.offsets_of([1, 1, 1])
    sums = module.grouped_leaf_sums(x, weight, offsets, 16)
    return [module.grouped_tree(x, weight, offsets, None), sums]


def test_offsets_beyond_int32(tmp_path):
    """Row 2 starts at element 2³¹."""
    x = cases.operands("few", cases.BF16)[0][:3]
    far_x = far(x, tmp_path / "x")
    with simulated():
        pairs = zip(products(launch, far_x), products(launch, x), strict=True)
        assert all(map(_same, pairs))


def _same(pair) -> bool:
    return cases.same_bytes(*pair)


def test_narrow_offsets_are_killed(tmp_path):
    old = "row_offsets = (tl.cast(row0, tl.int64) + rows)[None, :]"
    mutant = copy_of(package, tmp_path, (old, "row_offsets = (row0 + rows)[None, :]"))
    x = cases.operands("few", cases.BF16)[0][:3]
    far_x = far(x, tmp_path / "x")
    with simulated(mutant), pytest.raises((AssertionError, harness.WildAccess)):
        assert all(map(_same, zip(products(mutant, far_x), products(mutant, x), strict=True)))
