"""The projection's backward on TMA and WGMMA: bytes of the other kernel, timings and mutants."""

from __future__ import annotations

import itertools

import pytest
import torch

import ptxsim
from cute_kernels.mhc import launch
from cute_kernels.mhc.config import (
    ProjectBackwardConfig,
    ProjectBackwardWgmmaConfig,
    wgmma_configs,
)
from ptxsim.modes import MODES, QUICK_MODES, RACES, run_modes
from ptxsim.skips import requires_sim
from tests.contract import same_bytes
from tests.kernels.edited import kernels
from tests.mhc import simulated as system
from tests.mhc import sm90_cases as cases
from tests.mhc import sm90_orders as orders
from tests.mhc.simulated import compiled, launchers, simulated
from tests.mhc.triton_cases import BF16, Given, Shape, given
from tests.old_memory import old_memory

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_bytes_of_the_other_kernel"
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("mhc", often=EACH_COMMIT)]

#: Two tiles of tokens with a tail in one group, and a tail in the last panel.
TILES = Shape(83, 40, 4, "cn", BF16)
#: Two chunks of tokens, more tiles than stages, and whole groups beyond the last token.
LONG = Shape(1060, 24, 2, "cn", BF16)
MATHS = ("exact", "fma", "hopper")


def by_night(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


def gradients(g: Given, kind: str) -> tuple:
    """dx and the parts of dpsi."""
    upstream = cases.upstream_of(g, kind)
    of = (g.x, g.h, g.ms, g.mapping, g.streams, upstream, (True, True))
    dx, parts = launchers.project_backward(*of)
    return dx, parts.values


def cancelling(shape: Shape) -> Given:
    """Operands whose first terms nearly cancel in dH psi, so that the order of the sum shows.

    dx is rounded to bf16: of other operands, it shows in one of 2^15 elements.
    """
    g = given(shape)
    h, phi = g.h.clone(), g.mapping.phi.clone()
    h[:, 1::2] = -h[:, ::2]
    phi[1::2] = phi[::2] * (1 + 2.0**-9 * torch.rand(phi[::2].shape))
    return g._replace(h=h, ms=torch.zeros_like(g.ms), mapping=g.mapping._replace(phi=phi))


def with_kernel(cls: type, chosen: object = None):
    """Kernel that refuses configurations of the projection's backward of another class."""

    def kernel(config):
        assert isinstance(config, cls)
        return compiled(chosen or config)

    return kernel


def other_bytes(g: Given, kind: str, math: str = "hopper") -> tuple:
    """Gradients by the kernel that needs no TMA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "by_tma", lambda *fields: False)
        with simulated(5, with_kernel(ProjectBackwardConfig), wgmma_math=math), old_memory():
            return gradients(g, kind)


def bytes_of_the_other(g: Given, kind: str, math: str = "hopper", kernel=None) -> None:
    """Every configuration for this problem has the bytes of the kernel that needs no TMA."""
    want = other_bytes(g, kind, math)
    upstream = cases.upstream_of(g, kind)
    mode = "" if upstream.dy is None else "add" if upstream.res is None else "res"
    for chosen in wgmma_configs(g.shape.n, mode, upstream.d_out is not None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "project_backward_wgmma_config", lambda *of, one=chosen: one)
            run = kernel or with_kernel(ProjectBackwardWgmmaConfig)
            with simulated(5, run, wgmma_math=math), old_memory():
                got = gradients(g, kind)
        assert all(map(same_bytes, got, want)), chosen


@pytest.mark.parametrize(
    ("kind", "make"), [("res and out", given), by_night("nothing", cancelling)]
)
def test_bytes_of_the_other_kernel(kind, make):
    """Dtypes and layouts that TMA does not take have the other kernel: one contract, one order."""
    bytes_of_the_other(make(TILES), kind)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [TILES, TILES._replace(n=2, c=44), LONG], ids=str)
@pytest.mark.parametrize("kind", cases.KINDS)
def test_bytes_of_the_other_kernel_of_every_kind(kind, shape):
    for math in MATHS:
        bytes_of_the_other(given(shape), kind, math)


@pytest.mark.parametrize("shape", [TILES, by_night(LONG)], ids=str)
def test_values(shape):
    with simulated(), old_memory():
        cases.projection_backward(given(shape), cases.KINDS[:2])


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [TILES, LONG], ids=str)
def test_values_of_every_kind(shape):
    with simulated(), old_memory():
        cases.projection_backward(given(shape), cases.KINDS)


def test_no_schedule_shows():
    orders.no_schedule_shows("projected_back", given(TILES), (1, 7))


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [TILES, LONG], ids=str)
def test_no_schedule_of_any_kind_shows(shape):
    orders.no_schedule_shows("projected_back", given(shape), modes=MODES)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "fields"), [("nothing", ("", False)), ("res and out", ("res", True))]
)
def test_no_timing_shows_in_any_configuration(monkeypatch, kind, fields):
    g = given(LONG._replace(n=4, m=300))
    for chosen in wgmma_configs(4, *fields):
        monkeypatch.setattr(launch, "project_backward_wgmma_config", lambda *of, one=chosen: one)

        def run():
            with simulated(2, with_kernel(ProjectBackwardWgmmaConfig)), old_memory():
                return gradients(g, kind)

        run_modes(run, MODES)


def test_the_choice_fills_rounds():
    """The configurations that an H200 was fastest with: (slab, stages, CTAs an SM)."""
    best = {
        (2048, 4096): ((128, 3, 2), (128, 2, 2)),
        (4096, 2560): ((64, 2, 5), (64, 2, 3)),
        (8192, 5120): ((64, 2, 5), (128, 2, 2)),
        (8192, 7168): ((128, 2, 3), (128, 2, 2)),
        (32768, 4096): ((128, 2, 3), (128, 2, 2)),
    }
    for (m, c), expected in best.items():
        for fields, want in zip((("", False), ("res", True)), expected, strict=True):
            one = launch.project_backward_wgmma_config(4, *fields, m // 1024, 4 * c, 132)
            assert (one.slab, one.stages, one.blocks) == want, (m, c, fields)


# ---- mutants -------------------------------------------------------------------------------------

KERNEL, STAGED = "kernel_project_bwd_wgmma_sm90", "device.staged"
FENCE = 'cute.arch.fence_proxy("async.shared", space="cta")'
SYNC = "cute.arch.sync_threads()"


def order(kernel) -> None:
    """The bytes of the other kernel where the order of dx's sum shows."""
    bytes_of_the_other(cancelling(TILES), "nothing", "hopper", kernel)


def values(kernel) -> None:
    """The bytes of the other kernel, of all terms of dx."""
    bytes_of_the_other(given(TILES), "res and out", "hopper", kernel)


def long(kernel) -> None:
    """The bytes of the other kernel, of two chunks of tokens."""
    bytes_of_the_other(given(LONG), "add", "exact", kernel)


def timing(kernel) -> None:
    """Every timing of the simulator, of a ring that is filled again."""

    def run():
        with simulated(1, kernel), old_memory():
            return gradients(given(LONG._replace(m=300)), "res and out")

    run_modes(run, QUICK_MODES)


def races(kernel) -> None:
    """Accesses of shared memory that nothing orders."""

    def run():
        with simulated(1, kernel), old_memory():
            return gradients(given(TILES), "res and out")

    run_modes(run, RACES)


#: One bug is out of the simulator's sight: it completes a WGMMA of all four warps at once, so that
#: dx may replace x there before the other warps' products have read it.  The barrier is kept by the
#: coefficients, which it orders too.
#: Name -> (source, its text, the bug in its place, who notices).
MUTANTS = {
    "terms_of_dx_in_another_order": (
        KERNEL, "PAIRS = ((1, 0), (0, 1), (0, 0))", "PAIRS = ((0, 0), (0, 1), (1, 0))", order),
    "second_term_of_psi_dropped": (
        KERNEL, "PAIRS = ((1, 0), (0, 1), (0, 0))", "PAIRS = ((1, 0), (0, 0))", order),
    "first_term_of_dh_first": (
        KERNEL, "terms = (buffer + 1, buffer)", "terms = (buffer, buffer + 1)", order),
    "elements_of_psi_exchanged": (
        KERNEL, "octet % 2 * 32 + p // 2 * 8 + octet // 2 * 2",
        "octet // 4 * 32 + p // 2 * 8 + octet % 4 * 2", values),
    "swizzle_forgotten": (
        STAGED, "offset = offset ^ (offset // 128 % (row_bytes // 16) * 16)",
        "offset = offset + 0", values),
    "chunk_begins_early": (
        KERNEL, "begin = chunk * TOKENS", "begin = chunk * (TOKENS - TILE)", long),
    "dh_of_the_tile_before": (
        KERNEL, "row + TILE, half", "row, half", values),
    "dms_of_the_tile_before": (
        KERNEL, "row + TILE + tidx // 2", "row + tidx // 2", values),
    "one_buffer_of_dh": (KERNEL, "buffer = i % 2 * TERMS", "buffer = i % 1 * TERMS", values),
    "dms_doubled": (
        KERNEL, "fma(x[p], factor, product[index])", "fma(x[p], factor + factor, product[index])",
        values),
    "tile_not_awaited": (
        KERNEL, "cute.arch.mbarrier_wait(copies.full + stage, phase)", "pass", timing),
    "phase_forgotten": (
        KERNEL, "count // self.config.stages % 2", "count // self.config.stages % 1", timing),
    "products_not_awaited": (KERNEL, "cute.nvgpu.warpgroup.wait_group(0)", "pass", timing),
    "stage_filled_while_it_is_stored": (
        KERNEL, "                cute.arch.cp_async_bulk_wait_group(0, read=True)\n"
        "                cute.arch.sync_warp()", "                pass", timing),
    "ends_before_its_stores": (
        KERNEL, "            count = count + tiles\n"
        "        cute.arch.cp_async_bulk_wait_group(0, read=True)",
        "            count = count + tiles", timing),
    "first_dh_used_before_it_is_there": (
        KERNEL, f"        {FENCE}\n        {SYNC}\n        for acc in", f"        {FENCE}\n"
        "        for acc in", races),
    "first_dh_not_fenced": (
        KERNEL, f"        {FENCE}\n        {SYNC}\n        for acc in", f"        {SYNC}\n"
        "        for acc in", timing),
    "coefficients_used_before_they_are_there": (
        KERNEL, f"        # All warps' products have read x, which dx replaces.\n        {SYNC}",
        "        pass", races),
    "dx_stored_before_it_is_there": (
        KERNEL, f"        {FENCE}\n        {SYNC}\n        if tidx == 0:", f"        {FENCE}\n"
        "        if tidx == 0:", races),
    "dx_not_fenced": (
        KERNEL, f"        {FENCE}\n        {SYNC}\n        if tidx == 0:", f"        {SYNC}\n"
        "        if tidx == 0:", timing),
}  # fmt: skip

#: Those of every commit.
BY_DAY = ("terms_of_dx_in_another_order", "first_dh_used_before_it_is_there")


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
@pytest.mark.parametrize("check", [order, values, long, timing])
def test_the_intact_kernel_lives(check):
    check(compiled)


def test_every_configuration_is_catalogued():
    """Every configuration that a launch may choose, of every upstream, is certified."""
    entries = {entry.kernel.identity for entry in launch.catalogue()}
    for n, dy, d_out in itertools.product((2, 4), ("", "add", "res"), (False, True)):
        for chosen in wgmma_configs(n, dy, d_out):
            assert launch.entry(chosen).identity in entries
