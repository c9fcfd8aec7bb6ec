"""Checks of the results of the Triton norm, whatever runs it; each takes a launcher module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from unittest import mock

import pytest
import torch

from cute_kernels.norm.config import LAYER, part_rows
from cute_kernels.norm.triton import launch as triton_launch
from cute_kernels.norm.triton.plan import Sizes
from cute_kernels.runtime import dispatch
from cute_kernels.runtime.plan_cache import Plan

from .. import contract
from . import cases, contracts, triton_orders
from .cases import BF16, FP16, FP32, Case, Rule

LAYERS = Rule(LAYER, 1e-5)
#: Every optional tensor and dtype, more than one part of narrow rows, and rows of a part of one.
SMALL = (
    Case(7, 96, weight=FP32, residual=True),
    Case(5, 129, LAYERS, FP32, FP32, bias=True, residual=True),
    Case(9, 65, weight=None),
    Case(4, 264, LAYERS, FP16, FP32, bias=True),
    Case(3, 100, Rule(cases.RMS, 1e-6, 1.0), FP32, FP32),
)
PARTS = (Case(515, 64, residual=True), Case(70, 1030, LAYERS, bias=True))
#: Rows of blocks, where `blocks_of` 64 elements: three and four of them, and whole ones.
WIDE = (
    Case(5, 200, LAYERS, bias=True, residual=True),
    Case(66, 256, Rule(cases.RMS, 1e-6, 1.0), residual=True),
    Case(3, 177, LAYERS, FP32, FP32, bias=True),
)


def values(launch: ModuleType, case: Case) -> None:
    """Values within the bounds of float64, and the bytes of the written order."""
    inputs = cases.inputs_of(case)
    got = cases.run(launch, case, inputs)
    assert cases.check(got, case, inputs) > 0.01
    cases.same(got, triton_orders.run(case, inputs))


def bounds(launch: ModuleType, case: Case) -> None:
    """Values within the bounds of float64."""
    inputs = cases.inputs_of(case)
    cases.check(cases.run(launch, case, inputs), case, inputs)


def of_blocks(launch: ModuleType, check: Callable, *args: object) -> None:
    """A check of rows that have at most 64 lanes: what is wider is summed block after block."""
    with pytest.MonkeyPatch.context() as patch:
        for module in {triton_launch, launch}:
            whole = {"forward_whole": 64, "backward_whole": 64}
            patch.setattr(module, "TRITON", replace(module.TRITON, lanes=64, tile=64, **whole))
        check(launch, *args)


def of_short_parts(launch: ModuleType, check: Callable, *args: object) -> None:
    """A check of parts of two steps of a program, of four rows at least: interpreters are slow."""

    def two_steps(width: int) -> int:
        return max(4, 2 * triton_launch.part_lanes(width))

    own = (triton_launch, triton_orders, contracts, cases, sys.modules[__name__])
    with pytest.MonkeyPatch.context() as patch:
        for module in {*own, launch}:
            patch.setattr(module, "part_rows", two_steps)
        check(launch, *args)


#: Other tiles and warps: 1 and 16 of them.
SIZES = (Sizes(512, 64, 64, 2, 128, 1, 64, 5), Sizes(8192, 2, 2, 16, 256, 1, 128, 3))


def no_size_shows(launch: ModuleType, case: Case) -> None:
    """Warps among them: what a thread holds decides no order."""
    inputs = cases.inputs_of(case)
    want = cases.run(launch, case, inputs)
    for sizes in SIZES:
        with mock.patch.object(launch, "SIZES", sizes):
            cases.same(cases.run(launch, case, inputs), want)


def parts_are_added(launch: ModuleType) -> None:
    """One by one, ascending: a loop's bytes, -0 among them, into what has a stride too."""
    random = torch.Generator().manual_seed(6)
    for count, width in ((1, 7), (31, 70), (70, 130), (32, 1)):
        parts = torch.randn(count, width, generator=random)
        parts *= torch.randn(count, 1, generator=random).exp2()
        parts[:, 0] = -0.0
        start = torch.randn(width, generator=random)
        start[0] = -0.0
        want, zero = start.clone(), torch.zeros(width)
        for part in parts:
            want += part
            zero += part
        got = start.clone()
        assert launch.add_parts([parts], [got], [got]) == [None]
        assert contract.same_bytes(got, want)
        apart = torch.empty(width, 2)[:, 0].copy_(start)
        assert launch.add_parts([parts], [apart], [apart]) == [None]
        assert contract.same_bytes(apart, want)
        # Parts may have room behind their columns.
        room = torch.nn.functional.pad(parts, (0, 5), value=torch.nan)[:, :width]
        for dtype in (FP32, BF16, FP16):
            (out,) = launch.add_parts([room], [None], [torch.empty(width, dtype=dtype)])
            assert contract.same_bytes(out, zero.to(dtype))


def through_the_op(launch: ModuleType):
    """Run ``ck.rms_norm`` and ``ck.layer_norm`` on this launcher."""

    def plan(name, device, dtype, *operands):
        return Plan(getattr(launch, name.removeprefix("norm_")), fresh=False)

    return mock.patch.object(dispatch, "plan", plan)


def battery(launch: ModuleType, at: int, dtype: torch.dtype, m: int = 40) -> None:
    """Every transform of rows on one of `contracts.row_ops`."""
    with through_the_op(launch):
        assert contract.check_rows(contracts.row_ops(dtype=dtype)[at], m, seed=at) > 50


def no_cut_shows(launch: ModuleType, at: int, width: int, parts: int) -> None:
    """Micro-batches that are cut between parts, into main_grads."""
    tokens = parts * part_rows(width) + part_rows(width) // 2 + 1
    with through_the_op(launch):
        assert contract.check_splits(contracts.sum_ops(tokens, width)[at], seed=at) >= 4
