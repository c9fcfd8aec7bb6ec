"""Bugs put into the SM90 kernels of mhc on purpose; the check beside each notices."""

from __future__ import annotations

import pytest
import torch

import ptxsim
from ptxsim.modes import QUICK_MODES, RACES, run_modes
from ptxsim.skips import requires_sim
from tests.anchors import AnchorError
from tests.kernels.edited import kernels
from tests.mhc import simulated as system
from tests.mhc import sm90_cases as cases
from tests.mhc import sm90_orders as orders
from tests.mhc.simulated import compiled, simulated
from tests.mhc.triton_cases import BF16, Shape, given
from tests.old_memory import old_memory

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_killed"
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("mhc", often=EACH_COMMIT)]

WIDE = Shape(37, 530, 4, "cn", BF16)
#: Streams that TMA does not take; several rounds of every ring, in two chunks of tokens.
OTHER, LONG = WIDE._replace(layout="nc", c=536), Shape(1043, 24, 2, "nc", BF16)


def value(name: str, shape: Shape = WIDE):
    """A check of sm90_cases."""

    def check(kernel):
        with simulated(kernel=kernel), old_memory():
            cases.CHECKS[name](given(shape))

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


def races(name: str):
    """Accesses of shared memory that nothing orders, between lanes too, in one timing."""

    def check(kernel):
        def run():
            with simulated(1, kernel), old_memory():
                return orders.KERNELS[name](given(WIDE))

        run_modes(run, RACES)

    return check


def races_of_order(name: str):
    """Accesses that nothing orders in a check of sm90_orders."""

    def check(kernel):
        def run():
            with simulated(1, kernel):
                orders.ORDERS[name](given(WIDE))
            return torch.zeros(1)

        run_modes(run, RACES)

    return check


PROJECT, BACK = "kernel_project_sm90", "kernel_project_bwd_sm90"
COMBINE, RECOMPUTE = "kernel_combine_sm90", "kernel_recompute_sm90"
REDUCE, COEFFICIENTS = "kernel_reduce_sm90", "kernel_coefficients_sm90"
COEFFICIENTS_BACK, SUMS = "kernel_coefficients_bwd_sm90", "kernel_sums_sm90"
VECTOR, MIX, MATRIX = "device.vector", "device.mix", "device.matrix"
SYNC = "cute.arch.sync_threads()"

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
        races_of_order("chunks_of_norm_weight")),
    "squares_descending": (PROJECT,
        "octet_sum = cute.math.fma(values[p], values[p], octet_sum)",
        "octet_sum = cute.math.fma(values[8 - p], values[8 - p], octet_sum)",
        order("squares")),
    "squares_in_one_chain": (PROJECT,
        "                octet_sum = values[o * OCTET] * values[o * OCTET]\n",
        "                octet_sum = cute.math.fma(values[o * OCTET], values[o * OCTET],"
        " sums.squares[h])\n                sums.squares[h] = cutlass.Float32(0.0)\n",
        order("squares")),
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


@pytest.mark.parametrize("name", ["projected", "reduced", "of_coefficients"])
def test_the_intact_kernels_have_no_race(name):
    races(name)(compiled)


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
    ],
)
def test_the_intact_kernels_live(check):
    check(compiled)
