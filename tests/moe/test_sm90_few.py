"""The SM90 kernel of experts with few rows in the simulator: bytes, schedules, poison, choice."""

from __future__ import annotations

import itertools

import pytest
import torch

import ptxsim
from cute_kernels.gemm import launch as gemm_launch
from cute_kernels.moe import config, launch, tiles
from ptxsim import modes
from ptxsim.skips import requires_sim
from tests import contract
from tests.contract import same_bytes
from tests.oracles import moe as oracle

from ..gemm import simulated as gemm_simulated
from . import cases
from .simulated import CHOICE, grouped_few_kernel, simulated
from .sm90_cases import by_content, chain, far_apart, neighbours, poisoned, problem

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = (
    "test_every_configuration test_bytes_of_other_kernels test_battery test_modes test_ctas "
    "test_loads test_poison test_bad_offsets_stay_inside test_many_experts"
)
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("moe", often=EACH_COMMIT)]

BF16 = cases.BF16
DTYPES = {name: dtype for dtype, name in config.DTYPE_NAMES.items()}
NARROW, *_, WIDE = tiles.FEW
#: Rows of each expert, beside those of `cases.LOADS`.
LOADS = {
    "zipf": [23, 0, 11, 7, 0, 5, 4, 3, 3, 2, 0, 1, 1, 1],
    "one row each": [1] * 11,
    "one expert has all": [0, 0, 0, 70, 0],
    "last expert has all": [0, 0, 19],
    "no rows before the last": [0] * 40 + [1],
    "full tiles": [8, 16, 32, 64, 128],
}


def drawn(counts: list[int], n: int, k: int) -> tuple:
    """(x, weight, offsets, bias) of a load."""
    shapes = (sum(counts), k), (len(counts), n, k), (len(counts), n)
    x, weight, bias = (cases.drawn(*s, seed=i, dtype=BF16) for i, s in enumerate(shapes))
    return x, weight, cases.offsets_of(counts), bias


def run(operands: tuple, tile: tiles.Few | str = NARROW, **options) -> torch.Tensor:
    with simulated(few=tile, **options):
        return launch.grouped_gemm(*operands)


def every_configuration():
    """By day bf16, and of each tile two layouts and epilogues."""
    for chosen in launch.few_configs():
        often = chosen.dtype == "bf16" and chosen.bias == (chosen.w_major == "k")
        label = "-".join(map(str, vars(chosen).values()))
        yield pytest.param(chosen, id=label, marks=() if often else pytest.mark.nightly)


@pytest.mark.parametrize("chosen", list(every_configuration()))
def test_every_configuration(chosen):
    """Loads with every kind of tail, K below a group, odd N, several tiles and K blocks."""
    tile = tiles.Few(chosen.tile_m, chosen.tile_n, chosen.tile_k)
    shapes = [("uneven", 40, 56), ("few", 7, 3), ("tiles", chosen.tile_n + 24, 200)]
    for load, n, k in (*shapes, ("empty ends", 72, 600)):
        operands = problem(load, n, k, DTYPES[chosen.dtype], chosen.w_major, chosen.bias)
        got = run(operands, tile)
        assert same_bytes(got, chain(*operands)), (load, n, k)
        assert ptxsim.report()["fence_warnings"]["count"] == 0


@pytest.mark.parametrize("tile", tiles.FEW, ids=str)
def test_bytes_of_other_kernels(tile):
    """Rows have the bytes of the kernel of many rows, and of gemm's, with the truncating adder."""
    x, weight, offsets, bias = problem("uneven", 136, 88, bias=True)
    got = run((x, weight, offsets, bias), tile, wgmma_math="hopper")
    with simulated(width=128, wgmma_math="hopper"):
        assert same_bytes(got, launch.grouped_gemm(x, weight, offsets, bias))
    for expert, rows in oracle.experts(offsets):
        if rows.start < rows.stop:
            with gemm_simulated.simulated(wgmma_math="hopper"):
                want = gemm_launch.gemm(x[rows], weight[expert], bias[expert], None)
            assert same_bytes(got[rows], want), expert


@pytest.mark.parametrize("tile", [NARROW, WIDE], ids=str)
def test_battery(tile):
    weight = cases.drawn(4, 72, 88, seed=1, dtype=BF16)
    op = by_content(weight, few=tile, wgmma_math="hopper")
    assert contract.check_rows(op, 70, 3) > 50


@pytest.mark.parametrize("load", LOADS)
def test_loads(load):
    """Experts without rows, with one, with more than a tile; bytes and every timing of CTAs."""
    operands = drawn(LOADS[load], 100, 72)
    want = chain(*operands)
    for tile, options in itertools.product((NARROW, WIDE), (modes.ANY_CTA, {"ctas": 132})):
        assert same_bytes(run(operands, tile, **options), want), tile


@pytest.mark.parametrize("experts", [1, 31, 129, 1024])
def test_many_experts(experts):
    """The scan of offsets: a unit is found whatever experts lie before it."""
    counts = [0] * experts
    for expert in {0, experts // 3, experts // 2 + 1, experts - 1}:
        counts[min(expert, experts - 1)] = 1 + expert % 9
    x, weight, offsets, bias = drawn(counts, 8, 16)
    got = run((x, weight, offsets, bias), ctas=2)
    assert same_bytes(got, chain(x, weight, offsets, bias))


@pytest.mark.parametrize("major", ["k", "mn"])
def test_neighbours(major):
    neighbours(lambda *operands: run(operands), major)


@pytest.mark.parametrize("tile", [NARROW, WIDE], ids=str)
def test_modes(tile):
    """Every timing gives the same bytes."""
    operands = problem("few", 136, 328, bias=True)
    results = modes.run_modes(lambda: run(operands, tile, ctas=4), modes.QUICK_MODES)
    assert same_bytes(results["default"], chain(*operands))


@pytest.mark.nightly
@pytest.mark.parametrize("tile", tiles.FEW, ids=str)
def test_all_modes(tile):
    """Every mode and seed, with more units than CTAs and more K blocks than stages."""
    operands = drawn(LOADS["zipf"], 200, 1800)
    seven = modes.Mode("resident-7", {"resident_ctas": 7, "warp_order": "random", "seed": 7})
    chosen = (*modes.MODES, seven)
    want = modes.run_modes(lambda: run(operands, tile, ctas=19), chosen)["default"]
    assert same_bytes(want, chain(*operands))


@pytest.mark.parametrize("ctas", [1, 2, 7, 132])
def test_ctas(ctas):
    operands = problem("uneven", 200, 88)
    for tile in (NARROW, WIDE):
        got = run(operands, tile, ctas=ctas, cta_order="random", seed=ctas)
        assert same_bytes(got, chain(*operands))


@pytest.mark.parametrize("tile", [NARROW, WIDE], ids=str)
@pytest.mark.parametrize("bits", [0x7FC0, 0x7F7F])
def test_poison(bits, tile):
    """Results are written everywhere; rows of no expert are not touched, nor padding of others."""
    fill = torch.tensor([bits], dtype=torch.int16).view(BF16)
    for n, end in ((44, 44), (77, 80)):  # a quad's columns are stored whole
        x, weight, offsets, _ = problem("uneven", n, 56)
        offsets = offsets - torch.tensor([0, 0, 0, 0, 0, 9], dtype=torch.int32)
        with poisoned(fill) as memory:
            got = run((x, weight, offsets, None), tile)
        last = int(offsets[-1])
        assert same_bytes(got[:last], chain(x[:last], weight, offsets))
        untouched = contract.bits(fill)
        assert (contract.bits(memory[0][last:]) == untouched).all()
        assert (contract.bits(memory[0][:, end:]) == untouched).all()


def test_bad_offsets_stay_inside():
    """The simulator stops accesses outside of tensors."""
    x, weight, _, _ = problem("few", 40, 56)
    for values in ([-5, 3, 1, 9, 2, 4, 2**31 - 1], [7, -(2**31), 8, 8, 8, 8, 100]):
        run((x, weight, torch.tensor(values, dtype=torch.int32), None))


def test_rows_before_the_first_expert():
    """Rows of no expert may lie in front: a tile starts at its expert's first row."""
    x, weight, offsets, _ = drawn([0, 5, 9], 40, 56)
    offsets = offsets + torch.tensor([3, 3, 0, 0], dtype=torch.int32)
    got = run((x, weight, offsets, None))
    want = chain(x[3:], weight, offsets - 3)
    assert same_bytes(got[3:], want)


def test_more_than_2_to_the_31_elements():
    """Experts, rows of y and biases lie far apart; the memory between them is never touched."""
    assert far_apart(grouped_few_kernel)


# ---- the choice of the kernel --------------------------------------------------------------------


def test_the_launchers_choice():
    """Few rows an expert take narrow tiles, many another kernel; T and E alone decide."""
    assert tiles.few(8, 128) == NARROW
    assert tiles.few(16 * 8, 128) == NARROW
    assert tiles.few(128 * 8, 128).tile_m == 32
    assert tiles.few(256, 8) == WIDE
    assert tiles.few(4096 * 8, 256) is None
    for experts in (1, 8, 60, 128, 256):
        chosen = [tiles.few(rows, experts) for rows in range(1, 33 * experts, experts)]
        widths = [float("inf") if tile is None else tile.tile_m for tile in chosen]
        assert widths == sorted(widths)


def test_the_choice_shows_in_no_bit():
    """Around each change of tile and kernel a row keeps its bytes."""
    x, weight, _, bias = drawn([40, 40], 72, 88)
    everything = chain(x, weight, cases.offsets_of([40, 40]), bias)
    seen = set()
    for rows in (1, 3, 5, 17, 33, 70, 80):
        first = (rows + 1) // 2
        offsets = cases.offsets_of([first, rows - first])
        take = [*range(first), *range(40, 40 + rows - first)]
        seen.add(tiles.few(rows, 2))
        with simulated(few=CHOICE, width=None, wgmma_math="exact"):
            got = launch.grouped_gemm(x[take], weight, offsets, bias)
        assert same_bytes(got, everything[take]), rows
    assert len(seen) > 3


def test_a_product_takes_the_kernel_that_the_table_says(monkeypatch):
    """32 rows an expert on average are few, more are many."""
    calls = []
    for name in ("grouped_few_kernel", "grouped_kernel"):
        monkeypatch.setattr(launch, name, lambda *chosen, name=name: calls.append(name) or print)
    monkeypatch.setattr(launch, "most_ctas", lambda device: 3)
    for rows in (64, 66):
        x, weight = torch.empty(rows, 16, dtype=BF16), torch.empty(2, 16, 16, dtype=BF16)
        launch.plan_grouped_gemm(x, weight, cases.offsets_of([rows, 0]), None)
    assert calls == ["grouped_few_kernel", "grouped_kernel"]
