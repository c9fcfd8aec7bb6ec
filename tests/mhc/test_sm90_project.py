"""The projection on TMA and WGMMA: bytes of the other kernel, timings and mutants."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from cute_kernels.mhc import launch
from cute_kernels.mhc.config import ProjectConfig, ProjectWgmmaConfig, project_wgmma_config
from cute_kernels.mhc.tensors import Mapping
from tests import ptxsim
from tests.contract import same_bytes
from tests.kernels.edited import kernels
from tests.mhc import simulated as system
from tests.mhc import sm90_cases as cases
from tests.mhc.simulated import compiled, simulated
from tests.mhc.triton_cases import BF16, Given, Shape, given
from tests.ptxsim.available import requires_sim
from tests.sim import MODES, QUICK_MODES, RACES, run_modes

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_bytes_of_the_other_kernel"
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("mhc", often=EACH_COMMIT)]

#: Two chunks with a tail in the last, a unit with a tail, more panels than stages.
SMALL = Shape(41, 530, 4, "cn", BF16)
#: Rows of f that TMA takes, more tokens than a group of y has, and a part of the last unit.
MADE = Shape(150, 40, 4, "cn", BF16)
#: More units than a group has; channels that end inside a step.
LONG = Shape(300, 24, 4, "nc", BF16)
SHAPES = (
    SMALL,
    SMALL._replace(c=536, layout="nc"),
    LONG,
    Shape(270, 36, 2, "cn", BF16),
    Shape(17, 1048, 2, "nc", BF16, norm_weight=False),
    SMALL._replace(precision="bf16x3", c=260),
    LONG._replace(precision="bf16x3", n=2, m=33, c=520),
)
MATHS = ("exact", "fma", "hopper")
#: Configurations of other sizes: one consumer warpgroup, one stage, single panels.
OTHERS = (
    {"warpgroups": 1, "x_stages": 1, "psi_stages": 1, "burst": 1},
    {"warpgroups": 2, "x_stages": 8, "psi_stages": 4, "burst": 4},
    {"warpgroups": 3, "x_stages": 2, "psi_stages": 6, "burst": 2},
)


def by_night(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


def sums(g: Given) -> tuple[torch.Tensor, ...]:
    """Sums of chunks and of squares."""
    return launch.project(g.x, g.mapping, g.streams)[:2]


def sums_of_y(g: Given) -> tuple[torch.Tensor, ...]:
    """Sums of y, which is made in the same pass, y, and its collapse."""
    plain = launch.project(g.x, g.mapping, g.streams, g.expand)
    return (*plain[:3], *launch.project(g.x, g.mapping, g.streams, g.expand, g.pre))


def with_kernel(cls: type, fields: dict | None = None, kernel=compiled):
    """Kernel that refuses configurations of another class, and has other ``fields``."""

    def chosen_kernel(config):
        assert isinstance(config, cls)
        return kernel(dataclasses.replace(config, **(fields or {})))

    return chosen_kernel


def other_sums(g: Given, math: str = "hopper", ctas: int = 5, results=sums) -> tuple:
    """Sums by the kernel that needs no TMA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "project_by_tma", lambda *fields: False)
        run = with_kernel(ProjectConfig)
        with simulated(ctas, run, wgmma_math=math), cases.poisoned():
            return results(g)


def bytes_of_the_other(
    g: Given,
    math: str = "hopper",
    fields: dict | None = None,
    ctas: int = 5,
    kernel=compiled,
    results=sums,
) -> None:
    """The kernel on TMA has the bytes of the one that needs none."""
    want = other_sums(g, math, results=results)
    run = with_kernel(ProjectWgmmaConfig, fields, kernel)
    with simulated(ctas, run, wgmma_math=math), cases.poisoned():
        got = results(g)
    assert all(map(same_bytes, got, want))


@pytest.mark.parametrize("shape", [SMALL, by_night(SHAPES[1])], ids=str)
def test_bytes_of_the_other_kernel(shape):
    """Addresses decide which of the two kernels runs, so that their bytes must agree."""
    bytes_of_the_other(given(shape))


@pytest.mark.nightly
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_of_the_other_kernel_in_every_arithmetic(shape):
    for math, ctas in itertools.product(MATHS, (1, 7)):
        bytes_of_the_other(given(shape), math, ctas=ctas)


@pytest.mark.nightly
@pytest.mark.parametrize("fields", OTHERS, ids=str)
@pytest.mark.parametrize("shape", [SMALL, LONG], ids=str)
def test_bytes_of_other_configurations(shape, fields):
    """Rings and groups of other sizes show in no bit."""
    bytes_of_the_other(given(shape), "hopper", fields, 3)


@pytest.mark.parametrize(
    "shape",
    [
        MADE,
        by_night(MADE._replace(c=528, m=41, bias=False)),
        by_night(MADE._replace(n=2, c=1048, m=37, norm_weight=False)),
        by_night(MADE._replace(precision="bf16x3", c=264, m=41)),
    ],
    ids=str,
)
def test_bytes_of_the_other_kernel_of_y(shape):
    bytes_of_the_other(given(shape), results=sums_of_y)


@pytest.mark.nightly
def test_bytes_of_the_other_kernel_of_y_in_every_arithmetic():
    for math, ctas in itertools.product(MATHS, (1, 7)):
        bytes_of_the_other(given(MADE), math, ctas=ctas, results=sums_of_y)


@pytest.mark.parametrize("shape", [LONG], ids=str)
def test_values(shape):
    run = with_kernel(ProjectWgmmaConfig)

    def kernel(config):
        return run(config) if isinstance(config, ProjectWgmmaConfig) else compiled(config)

    with simulated(3, kernel), cases.poisoned():
        cases.projection(given(shape))


def test_which_kernel_runs():
    """An operand that is not aligned sends the projection to the other kernel."""
    g = given(SMALL)
    phi = torch.empty(g.mapping.phi.numel() + 1)[1:].view_as(g.mapping.phi).copy_(g.mapping.phi)
    moved = g._replace(mapping=Mapping(phi, None, "bf16x2"))
    aligned = g._replace(mapping=Mapping(phi.clone(), None, "bf16x2"))
    with simulated(3, with_kernel(ProjectWgmmaConfig)):
        want = sums(aligned)
    with simulated(3, with_kernel(ProjectConfig)):
        assert all(map(same_bytes, sums(moved), want))


def schedules(g: Given, ctas, modes, kernel=compiled, results=sums) -> None:
    """Grids of any size, under every timing of the simulator, give the same bytes."""
    out = []
    for count in ctas:

        def run(count: int = count):
            with simulated(count, with_kernel(ProjectWgmmaConfig, None, kernel)), cases.poisoned():
                return results(g)

        out.append(run_modes(run, modes)["default"])
    for one, two in itertools.pairwise(out):
        assert all(map(same_bytes, one, two))


def test_no_schedule_shows():
    schedules(given(LONG), (1, 7), QUICK_MODES)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [SMALL, *SHAPES[1:4]], ids=str)
def test_no_schedule_of_any_kind_shows(shape):
    schedules(given(shape), (1, 2, 7, 132), MODES)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [MADE, MADE._replace(c=528, m=41)], ids=str)
def test_no_schedule_of_y_shows(shape):
    schedules(given(shape), (1, 2, 7, 132), MODES, results=sums_of_y)


@pytest.mark.nightly
@pytest.mark.parametrize("fields", OTHERS, ids=str)
def test_no_timing_of_other_configurations_shows(fields):
    g = given(SMALL)

    def run():
        with simulated(2, with_kernel(ProjectWgmmaConfig, fields)), cases.poisoned():
            return sums(g)

    run_modes(run, MODES)


# ---- mutants -------------------------------------------------------------------------------------

KERNEL = "kernel_project_wgmma_sm90"
STAGED, PANELS, PSI = "device.staged", "device.panels", "device.psi"
LOADS, MADE_Y = "device.project_loads", "device.expanded"


def small(kernel) -> None:
    """The bytes of the other kernel."""
    bytes_of_the_other(given(SMALL), kernel=kernel)


def long(kernel) -> None:
    """The bytes of the other kernel, of several groups in "nc"."""
    bytes_of_the_other(given(LONG), ctas=1, kernel=kernel)


def made(kernel) -> None:
    """The bytes of the other kernel, of y."""
    bytes_of_the_other(given(MADE), ctas=2, kernel=kernel, results=sums_of_y)


def timing_of_y(kernel) -> None:
    """Every timing of the simulator, of y."""
    schedules(given(MADE), (1,), QUICK_MODES, kernel, sums_of_y)


def timing(kernel) -> None:
    """Every timing of the simulator, of rings that are filled again."""
    schedules(given(SMALL), (2,), QUICK_MODES, kernel)


def races(kernel) -> None:
    """Accesses of shared memory that nothing orders."""
    schedules(given(SMALL._replace(m=20)), (1,), [QUICK_MODES[0], *RACES], kernel)


#: Name -> (source, its text, the bug in its place, who notices).
MUTANTS = {
    "terms_added_in_another_order": (
        KERNEL, "range_constexpr(self.terms - 1, -1, -1)", "range_constexpr(self.terms)",
        lambda kernel: bytes_of_the_other(
            given(SMALL._replace(precision="bf16x3", c=260)), kernel=kernel)),
    "elements_of_psi_exchanged": (
        PSI, "values[i // 2 * 8 + 2 * t + i % 2]", "values[i // 2 * 8 + t + i % 2 * 4]", small),
    "products_in_another_order": (
        KERNEL, "registers[k * 4 + 2 * pair + half]", "registers[(k ^ 1) * 4 + 2 * pair + half]",
        small),
    "squares_of_an_octet_backwards": (
        KERNEL, "for p in cutlass.range_constexpr(1, OCTET):",
        "for p in cutlass.range_constexpr(OCTET - 1, 0, -1):", small),
    "swizzle_forgotten": (
        STAGED, "offset = offset ^ (offset // 128 % (row_bytes // 16) * 16)",
        "offset = offset + 0", small),
    "weight_of_the_other_step": (
        PSI, "stage * PANEL + step * STEP + element", "stage * PANEL + element", small),
    "range_ends_early": (KERNEL, "(1 if block < extra else 0)", "0", small),
    "unit_skipped": (KERNEL, "position = position + size", "position = position + size + 1", long),
    "pair_of_streams_forgotten": (PANELS, "panel // pairs, panel % pairs", "panel // pairs, 0",
        long),
    "x_not_awaited": (
        KERNEL, "cute.arch.mbarrier_wait(shared.x_full + slot, phase)", "pass", timing),
    "psi_not_awaited": (
        KERNEL, "cute.arch.mbarrier_wait(shared.psi_full + psi_stage, psi_phase)", "pass", timing),
    "phi_not_awaited": (
        KERNEL, "cute.arch.mbarrier_wait(shared.phi_full + stage, phase)", "pass", timing),
    "x_filled_while_it_is_read": (
        LOADS, "cute.arch.mbarrier_wait(empty, 1 - phase)", "pass", timing),
    "phi_filled_while_it_is_read": (
        LOADS, "cute.arch.mbarrier_wait(shared.phi_empty + stage, 1 - phase)", "pass", timing),
    "psi_written_while_it_is_read": (
        KERNEL, "cute.arch.mbarrier_wait(shared.psi_empty + stage, 1 - phase)", "pass", timing),
    "psi_not_fenced": (
        KERNEL, 'cute.arch.fence_proxy("async.shared", space="cta")', "pass", timing),
    "products_not_awaited": (
        KERNEL, "        cute.nvgpu.warpgroup.wait_group(0)\n        last, _",
        "        last, _", timing),
    "operands_not_awaited": (
        KERNEL, "            cute.nvgpu.warpgroup.wait_group(0)\n            if panel > 0",
        "            if panel > 0", timing),
    "tokens_of_another_group_stored": (
        MADE_Y, "TokenCoefficients(token, token < end,", "TokenCoefficients(token, token < 150,",
        made),
    "collapsed_before_the_rounding": (
        MADE_Y, "unit.collapsed(vector, unit.to_fp32(y), token.pre)",
        "unit.collapsed(vector, x, token.pre)", made),
    "unit_of_f_of_another_warp": (
        LOADS, "part = w * per_tile + i", "part = w * per_tile + i // 2", made),
    "bytes_of_f_not_counted": (
        LOADS, "PANEL + (self.channels if self.config.expand else 0)",
        "PANEL + (0 if self.config.expand else 0)", timing_of_y),
    "f_released_before_it_is_read": (
        KERNEL, "            self.read(shared.sX, slot, warp, octets)\n",
        "            self.read(shared.sX, slot, warp, octets)\n"
        "            self.arrive(shared.x_empty + slot)\n", timing_of_y),
    "arrives_before_its_lanes": (KERNEL, "        cute.arch.sync_warp()\n", "", races),
}  # fmt: skip

#: Those of every commit.
BY_DAY = ("products_in_another_order", "psi_not_fenced")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in MUTANTS],
)
def test_killed(tmp_path, name):
    *edit, check = MUTANTS[name]
    kernel = kernels(system, tmp_path, *edit)
    with pytest.raises((AssertionError, ptxsim.PtxsimError)):
        check(kernel)


def test_the_intact_kernel_has_no_race():
    races(compiled)


@pytest.mark.nightly
@pytest.mark.parametrize("check", [small, long, timing, made, timing_of_y])
def test_the_intact_kernel_lives(check):
    check(compiled)


def test_every_configuration_is_catalogued():
    """Every configuration that a launch may choose is certified."""
    entries = {entry.kernel.identity for entry in launch.catalogue()}
    for n, layout, precision, weighted in itertools.product(
        (2, 4), ("cn", "nc"), ("bf16x2", "bf16x3"), (False, True)
    ):
        of_y = [(True, *flags) for flags in itertools.product((False, True), (False, True))]
        for flags in ((), *(of_y if layout == "cn" else ())):
            chosen = project_wgmma_config(n, layout, precision, weighted, *flags)
            assert launch.entry(chosen).identity in entries
