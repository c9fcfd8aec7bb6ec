"""The compiled sm_90 code of the Triton order ``tree``, run on a CPU by ptxsim: its bits."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.gemm.triton import launch
from cute_kernels.schedulers.tiles import leaves
from ptxsim.skips import requires_core

from . import triton_cases as cases
from . import triton_tree_cases as tree_cases
from .triton_engine import BF16, FP16, FP32, tree_engine
from .triton_harness import simulated

pytestmark = [pytest.mark.sim, requires_core]

DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
HOPPER, LATE = {"wgmma_math": 2}, {"async_mode": 1, "wgmma_mode": 1, "warp_order": 1, "seed": 9}
COUNTS = (1, 2, 13, 16, 17, 32, 33, 64, 65, 103, 127)
#: vLLM #35183's lists.
VLLM_K, VLLM_N = (2880, 2888, 3072, 3080), (128, 144, 256, 272, 640, 656)
VLLM_ROWS = (13, 16, 32, 64, 103, 128)


@pytest.mark.parametrize(
    ("shape", "dtype", "bias"),
    [
        ((1, 1, 1), BF16, "n"),
        ((13, 144, 2880), BF16, "rows"),
        ((33, 70, 520), FP16, None),
        pytest.param((16, 31, 1030), FP32, "n", marks=pytest.mark.nightly),
        pytest.param((103, 128, 2888), BF16, "n", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_bits_are_those_of_the_documented_tree(monkeypatch, shape, dtype, bias):
    with simulated(launch):
        tree_cases.tree_bits(tree_engine(monkeypatch), *shape, dtype, bias)


@pytest.mark.nightly
@DTYPES
@pytest.mark.parametrize("bias", tree_cases.BIASES)
@pytest.mark.parametrize("shape", [(1, 16, 15), (127, 129, 65), (65, 33, 129), (128, 7, 2047)])
def test_every_bias_and_dtype(monkeypatch, shape, dtype, bias):
    with simulated(launch):
        tree_cases.tree_bits(tree_engine(monkeypatch), *shape, dtype, bias)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("k", "n"), list(itertools.product(VLLM_K, VLLM_N)))
def test_vllm_shapes(monkeypatch, k, n, dtype):
    """Its rows, biases and padded rows: the bytes of the reference, and of gemm."""
    tree = tree_engine(monkeypatch)
    a, b = tree_cases.operands(128, n, k, dtype)
    plain = tree_cases.want(a, b, None)
    with simulated(launch):
        assert cases.differing(tree.gemm(a, b), plain) == 0
        for i, rows in enumerate(VLLM_ROWS):
            bias = tree_cases.bias_of(tree_cases.BIASES[i % 4], rows, n, dtype)
            right = plain[:rows] if bias is None else tree_cases.want(a[:rows], b, bias)
            x = cases.laid_out(a[:rows], ("k", "padded")[i % 2])
            assert cases.differing(tree.skinny(x, b, bias), right) == 0, rows


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(HOPPER, id="hopper"),
        pytest.param(LATE, id="late", marks=pytest.mark.nightly),
    ],
)
def test_rows_alone(monkeypatch, options):
    with simulated(launch, **options):
        tree_cases.rows_alone(tree_engine(monkeypatch), BF16, COUNTS)


@pytest.mark.nightly
@DTYPES
def test_every_number_of_rows(monkeypatch, dtype):
    with simulated(launch, **HOPPER):
        tree_cases.rows_alone(tree_engine(monkeypatch), dtype, tuple(range(1, 129)))


@pytest.mark.parametrize("check", [tree_cases.neighbours, tree_cases.slices, tree_cases.fast])
@pytest.mark.parametrize(
    "dtype",
    [
        BF16,
        pytest.param(FP16, marks=pytest.mark.nightly),
        pytest.param(FP32, marks=pytest.mark.nightly),
    ],
    ids=["bf16", "fp16", "fp32"],
)
def test_invariance(monkeypatch, check, dtype):
    with simulated(launch, **HOPPER):
        check(tree_engine(monkeypatch), dtype)


def test_layouts_do_not_show(monkeypatch):
    pairs = (("k", "mn"), ("padded", "offset"))
    with simulated(launch, **HOPPER):
        tree_cases.layouts(tree_engine(monkeypatch), BF16, pairs)


@pytest.mark.nightly
@DTYPES
def test_every_pair_of_layouts(monkeypatch, dtype):
    with simulated(launch):
        pairs = tuple(itertools.product(cases.LAYOUTS, repeat=2))
        tree_cases.layouts(tree_engine(monkeypatch), dtype, pairs)


def test_a_sum_of_minus_zeros_keeps_its_sign(monkeypatch):
    with simulated(launch):
        tree_cases.signs(tree_engine(monkeypatch))


def test_arrival_shows_in_the_fast_variant_only(monkeypatch):
    """The control: dispatched backwards, unordered leaves have other bytes."""
    a, b = tree_cases.operands(13, 70, 520, BF16)
    tree, outs = tree_engine(monkeypatch), []
    for order in (0, 2):
        with simulated(launch, cta_order=order, resident_ctas=1):
            outs.append([tree.skinny(a, b, None, ordered) for ordered in (True, False)])
    assert cases.differing(outs[0][0], outs[1][0]) == 0
    assert cases.differing(outs[0][1], outs[1][1]) > 0


def test_one_binary_for_the_rows_of_a_tile(monkeypatch):
    tree = tree_engine(monkeypatch)
    b = cases.random(32, 272, dtype=BF16, seed=1)
    with simulated(launch) as kernels:
        for m in (1, 2, 7, 16):
            tree.skinny(cases.random(m, 272, dtype=BF16, seed=m), b)
        assert [kernel.name for kernel in kernels] == ["leaves_kernel", "root_kernel"] * 4
        assert len({kernel.hash for kernel in kernels}) == 2
        kernels.clear()
        for m in (1, 2, 16, 150):
            tree.gemm(cases.random(m, 272, dtype=BF16, seed=m), b)
        assert len({kernel.hash for kernel in kernels}) == len(kernels) / 4 == 1


@pytest.mark.parametrize("deterministic", [True, False])
def test_workspace_bound(monkeypatch, deterministic):
    """One byte less than the sums need, and one program adds them all, with the same bytes."""
    m, n, k = 13, 70, 520
    a, b = tree_cases.operands(m, n, k, BF16)
    tree = tree_engine(monkeypatch)
    need = 4 * m * n * (leaves.count(k) if deterministic else 1)
    with simulated(launch) as kernels:
        outs = []
        for bound in (need, need - 1):
            monkeypatch.setattr(launch.plans, "WORKSPACE", bound)
            kernels.clear()
            outs.append(tree.skinny(a, b, None, deterministic))
            assert len(kernels) == 1 + (bound == need)
    assert cases.differing(outs[1], tree_cases.want(a, b, None)) == 0
    assert not deterministic or cases.differing(*outs) == 0


def test_workspace_of_a_large_vocabulary():
    """2³³ bytes of sums, beyond int32, are not asked for: meta tensors have none."""
    x, w = torch.empty(128, 4096, device="meta"), torch.empty(2**21, 4096, device="meta")
    skinny_plan = launch.plans.skinny("gfx942", launch.TRITON)
    with mock.patch.object(launch, "_launch_leaves") as launched:
        launch._launch_skinny(x, w, None, True, skinny_plan, 2**20)
    (call,) = launched.call_args_list
    assert call.args[4] == "tree" and call.args[5].share == 8


def test_far_operands(monkeypatch, tmp_path):
    """Leaf 1 starts at element 2³¹ of K, row 2 at as many: offsets of 64 bits."""
    tree = tree_engine(monkeypatch)
    a, b = tree_cases.operands(3, 3, 20, BF16, seed=81)
    with simulated(launch):
        near = tree.skinny(a, b)
        for name, strides in (("rows", (2**30, 1)), ("k", (1, 2**27))):
            size = sum(s * (n - 1) for s, n in zip(strides, a.shape, strict=True)) + 1
            file = str(tmp_path / name)
            storage = torch.from_file(file, shared=True, size=size, dtype=BF16)
            far = storage.as_strided(a.shape, strides).copy_(a)
            assert cases.differing(tree.skinny(far, b), near) == 0
