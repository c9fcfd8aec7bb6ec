"""Checks of the results of the Triton norm, whatever runs it; each takes a launcher module."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from unittest import mock

import pytest
import torch

from cute_kernels.norm.config import LAYER, part_rows
from cute_kernels.norm.triton import launch as triton_launch
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


def values(launch: ModuleType, case: Case, fma: triton_orders.Fma) -> None:
    """Check values within the bounds of float64, and the bytes of the written order."""
    inputs = cases.inputs_of(case)
    got = cases.run(launch, case, inputs)
    assert cases.check(got, case, inputs) > 0.01
    cases.same(got, triton_orders.run(case, inputs, fma))


def blocks_of(monkeypatch: pytest.MonkeyPatch, lanes: int, *launches: ModuleType) -> None:
    """Rows have at most so many lanes: what is wider is summed block after block."""
    for launch in {triton_launch, *launches}:
        whole = {"forward_whole": lanes, "backward_whole": lanes}
        small = replace(launch.TRITON, lanes=lanes, tile=lanes, **whole)
        monkeypatch.setattr(launch, "TRITON", small)


def short_parts(monkeypatch: pytest.MonkeyPatch, *launches: ModuleType) -> None:
    """Parts of two steps of a program, and of four at least: an interpreter is slow."""

    def two_steps(width: int) -> int:
        return max(4, 2 * triton_launch.part_lanes(width))

    own = (triton_launch, triton_orders, contracts, cases, sys.modules[__name__])
    for module in {*own, *launches}:
        monkeypatch.setattr(module, "part_rows", two_steps)


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
