"""The option table of the norms on every backend: each combination is near one float64 oracle."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

from cute_kernels.norm import cpu, launch
from cute_kernels.norm.config import LAYER, RMS
from cute_kernels.norm.tensors import Rule
from ptxsim.skips import requires_core

from ..contract import same_bytes
from . import cases
from .cases import BF16, FP32, Case
from .simulated import simulated

TABLE = [
    Case(5, 64, Rule(kind, 1e-5, offset), BF16, weight, bias, residual)
    for kind, offset, weight, bias, residual in itertools.product(
        (RMS, LAYER), (0.0, 1.0), (None, BF16, FP32), (False, True), (False, True)
    )
    if not (bias and (kind == RMS or weight is None)) and not (offset and kind == LAYER)
]


def backend_cpu():
    return cpu, contextlib.nullcontext()


def backend_sm90():
    return launch, simulated()


def backend_triton():
    pytest.importorskip("triton")
    from cute_kernels.norm.triton import launch as triton_launch

    from .triton_harness import simulated as triton_simulated

    return triton_launch, triton_simulated()


BACKENDS = [
    backend_cpu,
    pytest.param(backend_sm90, marks=[pytest.mark.sim, requires_core]),
    pytest.param(backend_triton, marks=[pytest.mark.sim, requires_core]),
]


#: Every value of each option (a missing weight meets one in bf16); the rest is for the night.
OFTEN = [
    Case(5, 64, Rule(kind, 1e-5, offset), BF16, weight, bias, residual)
    for kind, offset, weight, bias, residual in (
        (RMS, 1.0, None, False, False),
        (RMS, 0.0, FP32, False, True),
        (LAYER, 0.0, BF16, True, False),
        (LAYER, 0.0, FP32, False, True),
    )
]
REST = [case for case in TABLE if case not in OFTEN]


def test_the_table_is_whole():
    assert len(TABLE) == len(set(TABLE)) == len(OFTEN) + len(REST) == 22


@pytest.mark.parametrize("table", [OFTEN, pytest.param(REST, marks=pytest.mark.nightly)], ids=len)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_option(backend, table):
    functions, inside = backend()
    with inside:
        for case in table:
            x = cases.inputs_of(case)
            results = cases.run(functions, case, x)
            cases.check(results, case, x)
            if case.weight is None:
                # A missing weight is a weight of ones, offset included.
                ones = x._replace(scale=x.scale._replace(weight=torch.ones(case.width, dtype=BF16)))
                want = cases.run(functions, case, ones)
                assert same_bytes(results.y, want.y) and same_bytes(results.dx, want.dx)
