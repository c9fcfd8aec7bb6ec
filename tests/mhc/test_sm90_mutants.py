"""Bugs put into the SM90 kernels of mhc on purpose; the check beside each notices."""

from __future__ import annotations

import pytest
import torch

import ptxsim
from ptxsim.modes import QUICK_MODES, RACES, run_modes
from ptxsim.skips import requires_sim
from tests.anchors import AnchorError
from tests.kernels.edited import kernels
from tests.mhc import launcher_cases as cases
from tests.mhc import simulated as system
from tests.mhc import sm90_orders as orders
from tests.mhc.launcher_cases import BF16, Shape, given
from tests.mhc.simulated import compiled, launchers, simulated
from tests.old_memory import old_memory

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_killed"
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("mhc", often=EACH_COMMIT)]

WIDE = Shape(37, 530, 4, "cn", BF16)
#: Streams that TMA does not take; several rounds of every ring, in two chunks of tokens.
OTHER, LONG = WIDE._replace(layout="nc", c=536), Shape(1043, 24, 2, "nc", BF16)


def value(name: str, shape: Shape = WIDE):
    """A check of launcher_cases."""

    def check(kernel):
        with simulated(kernel=kernel), old_memory():
            cases.CHECKS[name](launchers, given(shape))

    return check


def order(name: str):
    """A check of sm90_orders."""

    def check(kernel):
        with simulated(kernel=kernel), old_memory():
            orders.ORDERS[name](given(WIDE))

    return check


def timing(name: str, shape: Shape = WIDE):
    """Every timing of the simulator, with one size of the grid."""

    def check(kernel):
        orders.no_schedule_shows(name, given(shape), (1,), QUICK_MODES, kernel)

    return check


def in_modes(run, modes=RACES):
    """Accesses of shared memory that nothing orders, between lanes too, in one timing; or modes."""

    def check(kernel):
        def once():
            with simulated(1, kernel), old_memory():
                return run() or torch.zeros(1)

        run_modes(once, modes)

    return check


def races(name: str):
    return in_modes(lambda: orders.KERNELS[name](given(WIDE)))


def other_bytes(make, shape: Shape, kind: str, math: str = "hopper"):
    """Bytes of the projection's backward that needs no TMA."""
    return lambda kernel: orders.bytes_of_the_other(make(shape), kind, math, kernel)


def wgmma(shape: Shape, modes):
    return in_modes(lambda: orders.gradients(given(shape), "res and out"), modes)


wgmma_order = other_bytes(orders.cancelling, orders.TILES, "nothing")
wgmma_values = other_bytes(given, orders.TILES, "res and out")
wgmma_long = other_bytes(given, orders.TWO_CHUNKS, "add", "exact")
wgmma_timing = wgmma(orders.TWO_CHUNKS._replace(m=300), QUICK_MODES)
wgmma_races = wgmma(orders.TILES, RACES)
PROJECT, BACK = "kernel_project_sm90", "kernel_project_bwd_sm90"
COMBINE, RECOMPUTE = "kernel_combine_sm90", "kernel_recompute_sm90"
REDUCE, COEFFICIENTS = "kernel_reduce_sm90", "kernel_coefficients_sm90"
COEFFICIENTS_BACK, SUMS = "kernel_coefficients_bwd_sm90", "kernel_sums_sm90"
VECTOR, MIX, MATRIX = "device.vector", "device.mix", "device.matrix"
SYNC = "cute.arch.sync_threads()"
WGMMA, STAGED = "kernel_project_bwd_wgmma_sm90", "device.staged"
FENCE = 'cute.arch.fence_proxy("async.shared", space="cta")'

#: One bug of the kernel on WGMMA is out of the simulator's sight: it completes a WGMMA of all four
#: warps at once, so that dx may replace x there before the other warps' products have read it.  The
#: barrier is kept by the coefficients, which it orders too.
#: Name -> (source, its text, the bug in its place, who notices).
MUTANTS = {
    "one_stage_too_early": (BACK, "cp_async_wait_group(self.stages - 2)",
        "cp_async_wait_group(self.stages - 1)", timing("projected_back", OTHER)),
    "free_stage_is_one_in_use": (BACK, "free = stage + self.stages - 1",
        "free = stage + self.stages", timing("projected_back", OTHER)),
    "psi_used_before_it_is_there": (PROJECT,
        f"self.fill(sPsi, mPsi, chunk, tidx)\n            {SYNC}",
        "self.fill(sPsi, mPsi, chunk, tidx)", races("projected")),
    "psi_filled_while_it_is_used": (PROJECT,
        f"{SYNC}\n            self.fill(sPsi, mPsi, chunk, tidx)",
        "self.fill(sPsi, mPsi, chunk, tidx)", races("projected")),
    "sums_of_warps_not_awaited": (REDUCE, f"{SYNC}\n        if tidx < self.sums:",
        "if tidx < self.sums:", races("reduced")),
    "sums_of_warps_overwritten": (REDUCE,
        f"# The next token's sums are not written before these are read.\n        {SYNC}",
        "pass", races("reduced")),
    "h_not_awaited": (COEFFICIENTS,
        f"sH, block * TOKENS, size)\n            {SYNC}", "sH, block * TOKENS, size)",
        races("of_coefficients")),
    "parts_of_warps_not_awaited": (COEFFICIENTS_BACK, f"{SYNC}\n        if tidx < parts:",
        "if tidx < parts:", races("of_coefficients")),
    "second_term_dropped": (MATRIX, "rest.store(rest.load() - term.load().to(cutlass.Float32))",
        "rest.fill(0.0)", value("projection")),
    "second_chunk_begins_early": (PROJECT,
        "begin = chunk * self.chunk\n        extent", "begin = chunk * (self.chunk - 2)\n"
        "        extent", value("projection")),
    "last_token_dropped": (PROJECT, "if token < m:", "if token < m - 1:", value("projection")),
    "squares_of_two_lanes": (PROJECT, "reduce.over_threads(sums.squares[h], 4)",
        "reduce.over_threads(sums.squares[h], 2)", value("projection")),
    "collapsed_before_the_rounding": (COMBINE,
        "vector.collapsed(to_fp32(y), coefficients.pre)",
        "vector.collapsed(vector.expanded(to_fp32(rX), f, bias, post, res), coefficients.pre)",
        value("expanded")),
    "coefficients_of_the_next_site": (RECOMPUTE, "self.coefficients(site, row) for site in sites]",
        "self.coefficients(site, row) for site in [*sites[1:], sites[0]]]", value("recompute")),
    "not_rounded_between_sites": (RECOMPUTE,
        "vector.store(rX, site.mY, x_base, c, total)",
        "vector.store(rX, site.mY, x_base, c, total)\n            rX = y",
        value("recompute")),
    "res_transposed": (VECTOR, "x[self.position(i, e)], res[i * self.n + j], total",
        "x[self.position(i, e)], res[j * self.n + i], total", value("combine")),
    "layout_swapped": (VECTOR, 'return e * self.n + i if self.layout == "cn"',
        'return e * self.n + i if self.layout == "nc"', value("combine")),
    "tail_not_masked": (VECTOR,
        "                if c + self.channel(p) < total:\n"
        "                    rAccess.store(copy.aligned(mX, offset, self.width).load())",
        "                rAccess.store(copy.aligned(mX, offset, self.width).load())",
        value("expanded")),
    "bias_forgotten_in_dpost": (REDUCE, "f_plus_bias = f_plus_bias + bias[e]",
        "f_plus_bias = f[e]",
        value("reduce")),
    "res_transposed_in_dx": (VECTOR, "dy[self.position(j, e)], res[i * self.n + j]",
        "dy[self.position(j, e)], res[j * self.n + i]", value("reduce")),
    "dms_halved": (BACK, "cutlass.Float32(2.0) /", "cutlass.Float32(1.0) /",
        value("projection_backward", OTHER)),
    "chunk_of_tokens_begins_early": (BACK, "begin = chunk * TOKENS",
        "begin = chunk * (TOKENS - 16)", value("projection_backward", LONG)),
    "terms_of_psi_dropped_in_dx": (BACK, "for b in range(d + 1)]", "for b in range(1)]",
        value("projection_backward", OTHER)),
    "columns_before_rows": (COEFFICIENTS,
        "mix.normalise(y, divisors, n, mix.ROWS, eps)\n"
        "            mix.normalise(y, divisors, n, mix.COLUMNS, eps)",
        "mix.normalise(y, divisors, n, mix.COLUMNS, eps)\n"
        "            mix.normalise(y, divisors, n, mix.ROWS, eps)", value("coefficients")),
    "one_iteration_more": (COEFFICIENTS, "cutlass.range(iterations - 1, unroll=1)",
        "cutlass.range(iterations, unroll=1)", value("coefficients")),
    "eps_outside_the_root": (MIX, "cute.math.sqrt(ms + eps)",
        "(cute.math.sqrt(ms) + eps)", value("coefficients")),
    "gradient_of_the_epsilon_forgotten": (COEFFICIENTS_BACK,
        "gradient[i] = gradient[i] * (s[i] / (s[i] + eps))", "gradient[i] = gradient[i]",
        value("gates_backward")),
    "post_scale_forgotten_in_its_slope": (COEFFICIENTS_BACK, "slope = slope * scalars.post_scale",
        "slope = slope + 0.0", value("gates_backward")),
    "one_divisor_for_both_sides": (COEFFICIENTS_BACK,
        "mix.undo(y, [sDivisors[t, side, index, tidx]",
        "mix.undo(y, [sDivisors[t, 0, index, tidx]", value("gates_backward")),
    "warps_descending": (REDUCE, "total = reduce.over_lanes(sSums, tidx)",
        "total = cutlass.Float32(0.0)\n"
        "            for w in cutlass.range_constexpr(self.warps - 1, -1, -1):\n"
        "                total += sSums[w, tidx]", order("sums_of_reduce")),
    "chunks_of_channels_descending": (COEFFICIENTS,
        "copy.aligned(mSums, offset + s * step, 4)",
        "copy.aligned(mSums, offset + (chunks - s) * step, 4)", order("chunks_of_channels")),
    "parts_descending": (SUMS, "(begin + part) * size", "(begin + count - 1 - part) * size",
        order("chunks_of_tokens")),
    "chunks_of_tokens_descending": (SUMS,
        "copy.aligned(mParts, offset + s * step, 1)[0]\n                    total",
        "copy.aligned(mParts, offset + (chunks - 1 - s) * step, 1)[0]\n"
        "                    total", order("chunks_of_tokens")),
    "chunks_of_norm_weight_descending": (SUMS, "s = cutlass.min(begin + warp, chunks - 1)",
        "s = cutlass.max(chunks - 1 - begin - warp, 0)", order("chunks_of_norm_weight")),
    "chunks_of_norm_weight_not_awaited": (SUMS,
        f"{SYNC}\n            for w in cutlass.range(cutlass.min(WARPS, chunks - begin)",
        "for w in cutlass.range(cutlass.min(WARPS, chunks - begin)",
        in_modes(lambda: orders.ORDERS["chunks_of_norm_weight"](given(WIDE)))),
    "squares_descending": (PROJECT,
        "octet_sum = cute.math.fma(values[p], values[p], octet_sum)",
        "octet_sum = cute.math.fma(values[8 - p], values[8 - p], octet_sum)",
        order("squares")),
    "squares_in_one_chain": (PROJECT,
        "                octet_sum = values[o * OCTET] * values[o * OCTET]\n",
        "                octet_sum = cute.math.fma(values[o * OCTET], values[o * OCTET],"
        " sums.squares[h])\n                sums.squares[h] = cutlass.Float32(0.0)\n",
        order("squares")),
    "wgmma_terms_of_dx_in_another_order": (
        WGMMA, "PAIRS = ((1, 0), (0, 1), (0, 0))", "PAIRS = ((0, 0), (0, 1), (1, 0))", wgmma_order),
    "wgmma_second_term_of_psi_dropped": (
        WGMMA, "PAIRS = ((1, 0), (0, 1), (0, 0))", "PAIRS = ((1, 0), (0, 0))", wgmma_order),
    "wgmma_first_term_of_dh_first": (
        WGMMA, "terms = (buffer + 1, buffer)", "terms = (buffer, buffer + 1)", wgmma_order),
    "wgmma_elements_of_psi_exchanged": (
        WGMMA, "octet % 2 * 32 + p // 2 * 8 + octet // 2 * 2",
        "octet // 4 * 32 + p // 2 * 8 + octet % 4 * 2", wgmma_values),
    "wgmma_swizzle_forgotten": (
        STAGED, "offset = offset ^ (offset // 128 % (row_bytes // 16) * 16)",
        "offset = offset + 0", wgmma_values),
    "wgmma_chunk_begins_early": (
        WGMMA, "begin = chunk * TOKENS", "begin = chunk * (TOKENS - TILE)", wgmma_long),
    "wgmma_dh_of_the_tile_before": (
        WGMMA, "row + TILE, half", "row, half", wgmma_values),
    "wgmma_dms_of_the_tile_before": (
        WGMMA, "row + TILE + tidx // 2", "row + tidx // 2", wgmma_values),
    "wgmma_one_buffer_of_dh": (WGMMA, "buffer = i % 2 * TERMS", "buffer = i % 1 * TERMS",
        wgmma_values),
    "wgmma_dms_doubled": (
        WGMMA, "fma(x[p], factor, product[index])", "fma(x[p], factor + factor, product[index])",
        wgmma_values),
    "wgmma_tile_not_awaited": (
        WGMMA, "cute.arch.mbarrier_wait(copies.full + stage, phase)", "pass", wgmma_timing),
    "wgmma_phase_forgotten": (
        WGMMA, "count // self.config.stages % 2", "count // self.config.stages % 1", wgmma_timing),
    "wgmma_products_not_awaited": (WGMMA, "cute.nvgpu.warpgroup.wait_group(0)", "pass",
        wgmma_timing),
    "wgmma_stage_filled_while_it_is_stored": (
        WGMMA, "                cute.arch.cp_async_bulk_wait_group(0, read=True)\n"
        "                cute.arch.sync_warp()", "                pass", wgmma_timing),
    "wgmma_ends_before_its_stores": (
        WGMMA, "            count = count + tiles\n"
        "        cute.arch.cp_async_bulk_wait_group(0, read=True)",
        "            count = count + tiles", wgmma_timing),
    "wgmma_first_dh_used_before_it_is_there": (
        WGMMA, f"        {FENCE}\n        {SYNC}\n        for acc in", f"        {FENCE}\n"
        "        for acc in", wgmma_races),
    "wgmma_first_dh_not_fenced": (
        WGMMA, f"        {FENCE}\n        {SYNC}\n        for acc in", f"        {SYNC}\n"
        "        for acc in", wgmma_timing),
    "wgmma_coefficients_used_before_they_are_there": (
        WGMMA, f"        # All warps' products have read x, which dx replaces.\n        {SYNC}",
        "        pass", wgmma_races),
    "wgmma_dx_stored_before_it_is_there": (
        WGMMA, f"        {FENCE}\n        {SYNC}\n        if tidx == 0:", f"        {FENCE}\n"
        "        if tidx == 0:", wgmma_races),
    "wgmma_dx_not_fenced": (
        WGMMA, f"        {FENCE}\n        {SYNC}\n        if tidx == 0:", f"        {SYNC}\n"
        "        if tidx == 0:", wgmma_timing),
}  # fmt: skip


#: Those of every commit; the others take half a minute.
BY_DAY = (
    "eps_outside_the_root",
    "one_iteration_more",
    "parts_descending",
    "warps_descending",
    "psi_used_before_it_is_there",
    "psi_filled_while_it_is_used",
    "sums_of_warps_not_awaited",
    "sums_of_warps_overwritten",
    "h_not_awaited",
    "parts_of_warps_not_awaited",
    "wgmma_terms_of_dx_in_another_order",
    "wgmma_first_dh_used_before_it_is_there",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in MUTANTS],
)
def test_killed(tmp_path, name):
    *edit, check = MUTANTS[name]
    kernel = kernels(system, tmp_path, *edit)
    with pytest.raises((AssertionError, ptxsim.PtxsimError)):
        check(kernel)


RACES_BY_DAY = [*map(races, ("projected", "reduced", "of_coefficients")), wgmma_races]


@pytest.mark.parametrize("check", RACES_BY_DAY)
def test_the_intact_kernels_have_no_race(check):
    check(compiled)


@pytest.mark.nightly
def test_an_unedited_copy_lives(tmp_path):
    """A copy is what is run, and has what its original has."""
    for name in (PROJECT, VECTOR):
        kernel = kernels(system, tmp_path, name)
        value("projection")(kernel)
        with pytest.raises(AnchorError, match="expected 1 place"):
            kernels(system, tmp_path, name, "no such text", "")
        if name == PROJECT:
            assert kernel.cache_info().currsize > 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    "check",
    [
        *(value(name) for name in cases.CHECKS),
        *(value("projection_backward", shape) for shape in (OTHER, LONG)),
        *(order(name) for name in orders.ORDERS),
        *(timing(name) for name in orders.KERNELS),
        timing("projected_back", OTHER),
        *(wgmma_order, wgmma_values, wgmma_long, wgmma_timing),
    ],
)
def test_the_intact_kernels_live(check):
    check(compiled)
