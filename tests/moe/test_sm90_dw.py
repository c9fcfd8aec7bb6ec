"""The SM90 kernel of experts' weight gradients in the simulator: bytes, schedules, mutants."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import ptxsim
from cute_kernels.gemm import launch as gemm_launch
from cute_kernels.moe import config, launch
from ptxsim import modes
from ptxsim.skips import requires_sim
from tests import contract
from tests.contract import same_bytes
from tests.kernels import edited
from tests.kernels.ring_defects import DEFECTS, LIMITS, SETTINGS
from tests.oracles import gemm as reference
from tests.oracles import moe as oracle

from ..gemm import simulated as gemm_simulated
from . import cases
from .simulated import grouped_dw_kernel, simulated

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = (
    "test_every_configuration test_bytes_of_linear test_pieces test_neighbours test_modes "
    "test_ctas test_bad_offsets_stay_inside test_empty_experts test_poison"
)
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("moe", often=EACH_COMMIT)]

BF16 = cases.BF16
DTYPES = {name: dtype for dtype, name in config.DTYPE_NAMES.items()}


def problem(load: str, n: int, k: int, dtype=BF16, accumulate: bool = True):
    """(dy, x, offsets, start or None)."""
    x, weight, offsets, _, dy = cases.operands(load, dtype, n, k)
    return dy, x, offsets, cases.drawn(*weight.shape, seed=9) if accumulate else None


def chain(dy, x, offsets, start) -> torch.Tensor:
    """Gradients by ``chain``, expert by expert."""
    out = [
        reference.chain(dy[rows].mT, x[rows].mT, None, None if start is None else start[expert])
        for expert, rows in oracle.experts(offsets)
    ]
    return torch.stack(out).to(dy.dtype if start is None else torch.float32)


def run(dy, x, offsets, start, **options) -> torch.Tensor:
    state = None if start is None else start.clone()
    with simulated(**options):
        got = launch.grouped_dw(dy, x, offsets, state)
    assert state is None or got is state
    return got


def every_configuration():
    for chosen in launch.dw_configs():
        often = chosen.dtype == "bf16"
        label = "-".join(map(str, vars(chosen).values()))
        yield pytest.param(chosen, id=label, marks=() if often else pytest.mark.nightly)


@pytest.mark.parametrize("chosen", list(every_configuration()))
def test_every_configuration(chosen):
    """Loads with every kind of tail, odd N and K, several tiles; empty experts."""
    shapes = [("uneven", 40, 56), ("few", 7, 3), ("tiles", 136, chosen.tile_n + 24)]
    for load, n, k in (*shapes, ("one expert", 72, 41)):
        operands = problem(load, n, k, DTYPES[chosen.dtype], chosen.accumulate)
        got = run(*operands, width=chosen.tile_n)
        assert same_bytes(got, chain(*operands)), (load, n, k)
        assert ptxsim.report()["fence_warnings"]["count"] == 0


@pytest.mark.parametrize("accumulate", [False, True])
def test_bytes_of_linear(accumulate):
    """Each expert's gradient has the bytes of gemm's kernel, with the truncating adder."""
    dy, x, offsets, start = problem("uneven", 72, 136, accumulate=accumulate)
    got = run(dy, x, offsets, start, width=128, wgmma_math="hopper")
    for expert, rows in oracle.experts(offsets):
        if rows.start < rows.stop:
            state = start[expert].clone() if accumulate else None
            with gemm_simulated.simulated(wgmma_math="hopper"):
                want = gemm_launch.gemm(dy[rows].mT, x[rows].mT, None, state)
            assert same_bytes(got[expert], want), expert


def test_empty_experts():
    """Exact zeros; a main_grad keeps every bit, -0 and NaN among them."""
    dy, x, offsets, start = problem("uneven", 40, 56)
    assert not contract.bits(run(dy, x, offsets, None)[1]).any()
    start[1, 0, :3] = torch.tensor([-0.0, float("nan"), float("inf")])
    assert same_bytes(run(dy, x, offsets, start)[1], start[1])


def test_pieces():
    with simulated(wgmma_math="hopper"):
        cases.pieces(launch, BF16)


def test_neighbours():
    """NaN and infinities in the rows of other experts reach no gradient of this one."""
    dy, x, offsets, start = problem("uneven", 40, 56)
    want = chain(dy, x, offsets, start)
    for expert, rows in oracle.experts(offsets):
        for value in (float("nan"), float("inf")):
            dirty_dy, dirty_x = torch.full_like(dy, value), torch.full_like(x, -value)
            dirty_dy[rows], dirty_x[rows] = dy[rows], x[rows]
            assert same_bytes(run(dirty_dy, dirty_x, offsets, start)[expert], want[expert])


def test_layouts():
    """Operands and main_grads that TMA cannot address are copied, and keep their bytes."""
    dy, x, offsets, start = problem("few", 41, 57)
    want = chain(dy, x, offsets, start)
    views = (x, x.mT.contiguous().mT, torch.cat([x, x], 1)[:, 1:58].copy_(x))
    for view in views:
        assert same_bytes(run(dy, view, offsets, start), want)
    wide = torch.zeros(len(start), 41, 64)[:, :, :57].copy_(start)
    for state in (wide, start.mT.contiguous().mT):
        with simulated():
            launch.grouped_dw(dy, x, offsets, state)
        assert same_bytes(state.contiguous(), want)


def test_modes():
    dy, x, offsets, start = problem("uneven", 136, 136)
    got = modes.run_modes(lambda: run(dy, x, offsets, start), modes.QUICK_MODES)
    assert same_bytes(got["default"], chain(dy, x, offsets, start))


@pytest.mark.parametrize("ctas", [1, 4, 7, 132])
def test_ctas(ctas):
    operands = problem("uneven", 200, 88)
    got = run(*operands, ctas=ctas, cta_order="random", seed=ctas)
    assert same_bytes(got, chain(*operands))


@pytest.mark.parametrize("bits", [0x7FC0, 0x7F7F])
def test_poison(bits):
    """Results are written everywhere, and no padding is touched."""
    fill = torch.tensor([bits], dtype=torch.int16).view(BF16)
    dy, x, offsets, _ = problem("uneven", 40, 52)
    memory = []

    def allocator(shape, dtype, device):
        def new():
            memory.append(torch.empty(shape, dtype=dtype).copy_(fill))
            return memory[-1]

        return new

    with mock.patch.object(launch, "allocator", allocator):
        got = run(dy, x, offsets, None)
    assert same_bytes(got, chain(dy, x, offsets, None))
    assert (contract.bits(memory[0][:, :, 52:]) == contract.bits(fill)).all()


def test_bad_offsets_stay_inside():
    dy, x, _, start = problem("few", 40, 56)
    for values in ([-5, 3, 1, 9, 2, 4, 2**31 - 1], [7, -(2**31), 8, 8, 8, 8, 100]):
        assert run(dy, x, torch.tensor(values, dtype=torch.int32), start).isfinite().all()


# ---- mutants -------------------------------------------------------------------------------------


def survives(kernel) -> bool:
    """Whether every run under every setting is right, without a warning or a race."""
    dy, x, offsets, start = problem("uneven", 136, 136)
    want = chain(dy, x, offsets, start)
    dy, x = dy.clone(), x.clone()
    for options in (*SETTINGS, {"check_races": 2, "warp_order": "random", "seed": 1}):
        try:
            got = run(dy, x, offsets, start, dw_kernel=kernel, **options, **LIMITS)
        except ptxsim.PtxsimError:
            return False
        report = ptxsim.report()
        if not same_bytes(got, want) or report["fence_warnings"]["count"] or report["races"]:
            return False
    return True


BARRIER = (
    "        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=CONSUMERS * mma.WARPGROUP)\n"
)
EDITS = {
    "tail_of_the_next_expert": (
        "        self.clear(cta.sA, read.index, tail, groups)\n"
        "        self.clear(cta.sB, read.index, tail, groups)\n",
        "",
    ),
    "no_barrier_behind_the_zeros": (BARRIER, ""),
    "no_fence_behind_the_zeros": (
        '        cute.arch.fence_proxy("async.shared", space="cta")\n' + BARRIER,
        BARRIER,
    ),
    "one_token_kept": ("cutlass.range(tail, groups", "cutlass.range(tail + 1, groups"),
    "one_token_lost": ("cutlass.range(tail, groups", "cutlass.range(tail - 1, groups"),
    "tail_dropped": ("if tail > 0:", "if tail > 16:"),
    "tokens_from_the_start": ("tile, tile.row0, tile.rows)", "tile, 0, tile.rows)"),
    "start_of_expert_0": ("(tile.expert,))", "(0,))"),
    "tile_of_the_neighbour": ("m * self.config.cluster_m + rank[0]", "m * self.config.cluster_m"),
    "stored_to_expert_0": ("tma.sliced(consumer.d, tile.expert)", "tma.sliced(consumer.d, 0)"),
}


def test_the_kernel_survives():
    assert survives(grouped_dw_kernel)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_of_the_ring_is_killed(monkeypatch, name):
    from cute_kernels.moe import kernel_grouped_dw_sm90

    with monkeypatch.context() as patch:
        DEFECTS[name](patch, kernel_grouped_dw_sm90)
        mutant = kernel_grouped_dw_sm90.build(
            config.GroupedDwConfig("bf16", True, 64), compile=ptxsim.compile
        )
    assert not survives(lambda *args: mutant)


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_killed(tmp_path, name):
    module = edited.changed(tmp_path, "moe.kernel_grouped_dw_sm90", *EDITS[name])
    mutant = module.build(config.GroupedDwConfig("bf16", True, 64), compile=ptxsim.compile)
    assert not survives(lambda *args: mutant)
