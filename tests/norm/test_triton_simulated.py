"""The sm_90 code of the Triton norm, run in ptxsim: values, rows, parts, sizes and addresses.

An fma rounds once here, so the bytes are those of the orders that `triton_orders` writes down.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from cute_kernels.norm.triton import launch
from cute_kernels.norm.triton.plan import Sizes
from ptxsim.skips import requires_core
from tests import on_gpu

from . import cases, triton_orders
from . import triton_checks as checks
from .cases import BF16, FP32, Case
from .triton_checks import LAYERS
from .triton_harness import copy_of, poisoned, simulated  # noqa: F401
from .triton_orders import rounds_once

pytestmark = pytest.mark.simulates("norm.triton")

SIM = [pytest.mark.sim, requires_core]
CARD = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
simulated_test = lambda test: pytest.mark.sim(requires_core(test))  # noqa: E731
#: Rows of several warps, of a whole program, and of blocks.
LARGE = (Case(3, 4104, LAYERS, bias=True), Case(2, 9000, residual=True))
NIGHT = (Case(2, 16500, LAYERS, bias=True, residual=True), *cases.kinds(), *cases.widths())


@pytest.fixture(params=[pytest.param("sim", marks=SIM), pytest.param("cuda", marks=CARD)])
def there(request):
    """(The launchers, in the simulator or on a GPU; names of kernels that were launched)."""
    if request.param == "cuda":
        yield on_gpu.launcher(launch), None
        return
    with simulated() as kernels:
        yield launch, kernels


def by_night(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


BY_DAY = (checks.SMALL[1], LARGE[0])
REST = [*(c for c in (*checks.SMALL, *checks.PARTS, *LARGE) if c not in BY_DAY), *NIGHT]
BLOCKS = {"forward_kernel", "dx_kernel", "parts_kernel", "add_parts_kernel"}


@pytest.mark.parametrize("case", [*BY_DAY, *map(by_night, REST)], ids=str)
def test_values(there, case):
    module, kernels = there
    checks.values(module, case, rounds_once)
    fused = case.width <= launch.TRITON.backward_whole
    names = {kernel.name for kernel in kernels or ()}
    assert kernels is None or ("backward_kernel" in names) == fused


@pytest.mark.parametrize("case", [checks.WIDE[0], *map(by_night, checks.WIDE[1:])], ids=str)
def test_values_of_blocks(there, monkeypatch, case):
    checks.blocks_of(monkeypatch, 64)
    module, kernels = there
    checks.values(module, case, rounds_once)
    assert kernels is None or {kernel.name for kernel in kernels} == BLOCKS


@pytest.mark.nightly
def test_parts_are_added(there):
    checks.parts_are_added(there[0])


FEW = Case(11, 96, LAYERS, FP32, FP32, bias=True, residual=True)


@pytest.mark.parametrize("case", [FEW, by_night(Case(9, 4104)), by_night(checks.PARTS[1])], ids=str)
def test_few_rows_show_in_none(there, case):
    cases.few_rows(there[0], case)


@pytest.mark.nightly
@pytest.mark.parametrize("at", range(6))
@simulated_test
def test_no_row_shows(at):
    with simulated():
        checks.battery(launch, at, BF16 if at % 2 else FP32, 9)


@pytest.mark.parametrize("case", [checks.PARTS[1], by_night(checks.PARTS[0])], ids=str)
@simulated_test
def test_a_part_is_the_same_anywhere(case):
    with simulated():
        cases.a_part_is_the_same_anywhere(launch, case)


@pytest.mark.parametrize(("at", "width"), [(1, 1030), by_night(0, 104), by_night(1, 104)])
@simulated_test
def test_no_cut_shows(at, width):
    with simulated():
        checks.no_cut_shows(launch, at, width, 2)


#: Other tiles and warps: 1 and 16 of them.
OTHERS = (Sizes(512, 64, 64, 2, 128, 1, 64, 5), Sizes(8192, 2, 2, 16, 256, 1, 128, 3))


@pytest.mark.parametrize(
    "case",
    [Case(9, 520, LAYERS, FP32, FP32, bias=True, residual=True), by_night(checks.PARTS[0])],
    ids=str,
)
@simulated_test
def test_no_size_shows(tmp_path, case):
    """Warps among them: what a thread holds decides no order."""
    warps, out = set(), []
    for sizes in (launch.SIZES, *OTHERS):
        other = copy_of(tmp_path)
        other.SIZES = sizes
        with simulated(other) as kernels:
            out.append(cases.run(other, case, cases.inputs_of(case)))
        warps |= {kernel.metadata.num_warps for kernel in kernels}
    assert len(warps) > 3
    for one in out[1:]:
        cases.same(one, out[0])


@pytest.mark.nightly
@pytest.mark.parametrize("case", checks.WIDE, ids=str)
@simulated_test
def test_no_size_of_blocks_shows(tmp_path, monkeypatch, case):
    copies = [copy_of(tmp_path) for _ in OTHERS]
    checks.blocks_of(monkeypatch, 64, *copies)
    inputs = cases.inputs_of(case)
    with simulated():
        want = cases.run(launch, case, inputs)
    for other, sizes in zip(copies, OTHERS, strict=True):
        other.SIZES = sizes
        with simulated(other):
            cases.same(cases.run(other, case, inputs), want)


@pytest.mark.parametrize(
    "case",
    [Case(9, 96, residual=True), by_night(Case(5, 520, LAYERS, FP32, BF16, bias=True))],
    ids=str,
)
@simulated_test
def test_no_address_shows(case):
    """Other loads are compiled for what is not aligned; the bytes are the same."""
    with simulated() as kernels:
        cases.no_address_shows(launch, case)
    assert len({k.hash for k in kernels if k.name == "backward_kernel"}) >= 2


@simulated_test
def test_fused_sums_are_killed(tmp_path):
    """What a compiler fuses on its own has other bytes than the written order."""
    case = Case(9, 520, LAYERS, FP32, FP32, bias=True, residual=True)
    inputs = cases.inputs_of(case)
    want = triton_orders.run(case, inputs, rounds_once)
    with simulated():
        cases.same(cases.run(launch, case, inputs), want)
    mutant = copy_of(tmp_path, ('"enable_fp_fusion": TRITON.fp_fusion', '"enable_fp_fusion": True'))
    with simulated(mutant):
        got = cases.run(mutant, case, inputs)
    with pytest.raises(AssertionError):
        cases.same(got, want)
