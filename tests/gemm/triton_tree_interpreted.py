"""The Triton order ``tree`` in Triton's interpreter: masks, pointers, order of leaves, in numpy.

Collected by tests/test_triton_interpreter.py only, as triton_interpreted.py is, and for its reasons
multiplied in fp32 and rounded outside the kernel.
"""

from __future__ import annotations

import os

import pytest
import torch

import cute_kernels.gemm.triton as package
from cute_kernels.gemm.triton import launch
from cute_kernels.schedulers.tiles import leaves
from tests.oracles import gemm as reference

from ..triton_copies import copy_of
from ..triton_in_numpy import same_on_every_machine  # noqa: F401
from . import triton_cases as cases
from . import triton_tree_cases as tree_cases

assert os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
PAIRS = (("mn", "k"), ("k", "mn"), ("padded", "offset"))


def engine(module, arch="gfx942") -> tree_cases.Tree:
    def plan(t):
        return module.plans.skinny(arch, module.plan_of(t.dtype))

    def gemm(a, b, bias=None):
        return module._launch_tree(a, b, bias, tree_cases.MANY, interpret=True)

    def skinny(x, w, bias=None, deterministic=True, programs=tree_cases.MANY):
        units = -(-programs // 2)
        return module._launch_skinny(x, w, bias, deterministic, plan(x), units, interpret=True)

    def leaf_sums(a, b, length):
        return module._launch_leaf_sums(a, b, length, plan(a), 132, interpret=True)

    return tree_cases.Tree(gemm, skinny, leaf_sums)


@DTYPES
@pytest.mark.parametrize("kind", tree_cases.BIASES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (17, 33, 130)])
def test_accuracy(dtype, kind, shape):
    """Every way within the bound of a chain, leaf by leaf."""
    m, n, k = shape
    a, b, _, _ = cases.problem(m, n, k, dtype, "plain", cancel=False)
    bias = tree_cases.bias_of(kind, m, n, dtype)
    exact = reference.gemm(a, b) + (0 if bias is None else bias.double())
    bound = reference.error_bound(a, b) * 16 / 5.25 * (1 + 2.0**-7) + 2.0**-25
    bound += exact.abs() * (cases.HALF_ULP[dtype] + 8 * 2.0**-24)
    tree = engine(launch)
    outs = [tree.skinny(a, b, bias, *way) for way in ((), (False,), (True, 1))]
    if kind in (None, "n"):
        outs.append(tree.gemm(a, b, None if bias is None else bias[0]))
    for out in outs:
        assert ((out.double() - exact).abs() <= bound).all()
    sums = tree.leaf_sums(a, b, leaves.length(k))
    assert cases.differing(tree_cases.added(sums, bias, dtype), outs[0]) == 0


@DTYPES
@pytest.mark.parametrize("check", [tree_cases.order_of_leaves, tree_cases.neighbours])
def test_order(check, dtype):
    check(engine(launch), dtype)


@pytest.mark.parametrize("check", [tree_cases.slices, tree_cases.fast])
def test_sums(check):
    check(engine(launch), BF16)


def test_one_tile_for_all_rows():
    """On an architecture whose instructions no test reads."""
    tree_cases.rows_alone(engine(launch, "sm_100"), BF16, (1, 33))


def test_layouts():
    tree_cases.layouts(engine(launch), BF16, PAIRS)


MUTANTS = {
    "leaf_into_the_next_one": (
        "size = tl.minimum(K - first, length)",
        "size = tl.minimum(K - first, length + 16)",
        tree_cases.order_of_leaves,
    ),
    "leaves_of_the_tree_descending": (
        "leaf, length, b_ptrs",
        "leaves - 1 - leaf, length, b_ptrs",
        tree_cases.order_of_leaves,
    ),
    "root_descending": (
        "tl.load(sum_ptrs + leaf * size,",
        "tl.load(sum_ptrs + (LEAVES - leaf) * size,",
        tree_cases.order_of_leaves,
    ),
    "slice_of_its_own_leaves": (
        "work = _work(m, n, length, cdiv(k, length), plan, compute_units)",
        "work = _work(m, n, leaves.length(k), leaves.count(k), plan, compute_units)",
        tree_cases.slices,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_killed(tmp_path, name):
    old, new, check = MUTANTS[name]
    mutant = copy_of(package, tmp_path, (old, new))
    with pytest.raises((AssertionError, RuntimeError)):
        check(engine(mutant), BF16)
