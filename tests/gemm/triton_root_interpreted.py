"""The Triton kernel that adds leaves in Triton's interpreter, in fp32, where numpy is exact.

Collected by test_triton_add_leaves.py only, which starts the process that the interpreter needs.
"""

from __future__ import annotations

import os

import pytest

import cute_kernels.gemm.triton as package
from cute_kernels.gemm.triton import launch

from ..triton_copies import copy_of
from ..triton_in_numpy import same_on_every_machine  # noqa: F401
from ..triton_runner import device_guard  # noqa: F401
from . import triton_root_cases as cases

assert os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

CHECKS = (
    cases.bytes_of_torch,
    cases.in_place,
    cases.minus_zeros,
    cases.nothing_else_is_written,
)


@pytest.mark.parametrize("check", CHECKS)
def test_bytes(check):
    check(launch.add_leaves)


FIRST = "total = tl.load(sum_ptrs, mask=in_n, other=0.0)"
MUTANTS = {
    "descending": (
        [("tl.load(sum_ptrs, mask", "tl.load(sum_ptrs + (LEAVES - 1) * size, mask"),
         ("sum_ptrs + leaf * size", "sum_ptrs + (LEAVES - 1 - leaf) * size")],
        cases.bytes_of_torch,
    ),
    "second_descending": (
        [("second_ptr, offsets, second_l",
          "second_ptr, offsets + (SECOND - 1) * second_l, -second_l")],
        cases.bytes_of_torch,
    ),
    "third_descending": (
        [("third_ptr, offsets, third_l",
          "third_ptr, offsets + (THIRD - 1) * third_l, -third_l")],
        cases.bytes_of_torch,
    ),
    "third_before_second": (
        [("first, second, third = (*sums, None, None)[:3]",
          "first, second, third = sums if len(sums) == 3 else (*sums, None, None)[:3]\n"
          "    second, third = (third, second) if len(sums) == 3 else (second, third)")],
        cases.bytes_of_torch,
    ),
    "from_plus_zero": ([(FIRST, f"{FIRST} + 0.0")], cases.minus_zeros),
    "leaves_taken_as_dense": (
        [("strides = [0 if t is None else t.stride(0) for",
          "strides = [0 if t is None else m * n for")],
        cases.bytes_of_torch,
    ),
    "taken_as_aligned": (
        [("aligned = all(", "aligned = any(")],
        cases.bytes_of_torch,
    ),
    "tail_stored": (
        [("tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=in_n)",
          "tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=columns < N + 9)")],
        cases.nothing_else_is_written,
    ),
    "bias_before_the_leaves": (
        [(FIRST, f"{FIRST}\n    if bias_ptr is not None:\n        total += tl.load(bias_ptr "
          "+ row * bias_m + columns * bias_n, mask=in_n, other=0.0)"),
         ("        total += tl.load(bias_ptrs, mask=in_n, other=0.0).to(tl.float32)\n"
          "    tl.store(out_ptr + offsets", "        pass\n    tl.store(out_ptr + offsets")],
        cases.bytes_of_torch,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_killed(tmp_path, name):
    edits, check = MUTANTS[name]
    mutant = copy_of(package, tmp_path, *edits)
    with pytest.raises(AssertionError):
        check(mutant.add_leaves)


def test_an_unedited_copy_lives(tmp_path):
    for check in CHECKS:
        check(copy_of(package, tmp_path).add_leaves)
