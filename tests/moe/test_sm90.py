"""The SM90 kernels of grouped products in the simulator: bytes of ck.linear's, schedules, poison.

One for many rows an expert and one for few, of the weights' gradients, of the order ``tree`` and
its leaves.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import ptxsim
from cute_kernels.moe import config, launch, tiles
from ptxsim import modes
from ptxsim.skips import requires_sim
from tests import contract
from tests.contract import same_bytes

from . import cases
from .simulated import CHOICE, simulated
from .sm90_cases import (
    BF16,
    DTYPES,
    NARROW,
    PRODUCTS,
    WIDE,
    by_content,
    chain,
    configurations,
    engine,
    far_apart,
    gemm,
    poisoned,
)

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = (
    "test_every_configuration test_battery test_products test_modes test_ctas test_loads "
    "test_poison test_bad_offsets_stay_inside test_empty_experts test_many_experts"
)
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("moe", often=EACH_COMMIT)]

HOPPER = {"wgmma_math": "hopper"}


def each(first: str):
    """A parameter for each product; ``first`` runs at every commit."""
    names = sorted(PRODUCTS, key=lambda name: name != first)
    return pytest.mark.parametrize("name", names)


def every_configuration():
    for name, chosen, options, of, often in configurations():
        label = "-".join(map(str, (name, *vars(chosen).values())))
        marks = () if often and chosen.dtype == "bf16" else pytest.mark.nightly
        yield pytest.param(name, chosen, options, of, id=label, marks=marks)


@pytest.mark.parametrize(("name", "chosen", "options", "of"), list(every_configuration()))
def test_every_configuration(name, chosen, options, of):
    """Loads with every kind of tail, K below a group, odd N, several tiles and K blocks."""
    product, wide = PRODUCTS[name], chosen.tile_n + 24
    last = {"dw": ("one expert", 72, 41), "tree": ("empty ends", 72, 1100)}
    several = ("tiles", 136, wide) if name == "dw" else ("tiles", wide, 200)
    shapes = [("uneven", 40, 56), ("few", 7, 3), several, last.get(name, ("empty ends", 72, 600))]
    for load, n, k in shapes:
        operands = product.operands(load, n, k, DTYPES[chosen.dtype], **of)
        assert same_bytes(product.run(operands, **options), product.want(*operands)), (load, n, k)
        assert ptxsim.report()["fence_warnings"]["count"] == 0


@pytest.mark.parametrize("tile", [None, *tiles.FEW], ids=str)
def test_bytes_of_gemm(tile):
    """y, dx, dW and main_grad are those of gemm's kernel for its own tile, as Hopper adds."""
    ours = engine(width=128, few=tile, **HOPPER)
    cases.rows_of_linear(ours, "uneven", BF16, 136, 88, gemm=gemm(**HOPPER))


@pytest.mark.parametrize("load", ["uneven", "few"])
def test_bytes_of_gemms_tree(load):
    ours = engine(width=128, **HOPPER)
    cases.rows_of_tree(ours, load, BF16, 136, 264, gemm=gemm(**HOPPER))


@pytest.mark.parametrize("tile", [None, NARROW, WIDE], ids=str)
def test_battery(tile):
    weight = cases.drawn(4, 72, 88, seed=1, dtype=BF16)
    assert contract.check_rows(by_content(weight, few=tile, **HOPPER), 70, 3) > 50


CHECKS = [
    (cases.leaves_of_ranks, None, HOPPER),
    (cases.pieces, None, HOPPER),
    (cases.layouts, None, {}),
    *((cases.neighbours, tile, {}) for tile in (None, NARROW)),
]


@pytest.mark.parametrize(("check", "tile", "options"), CHECKS)
def test_products(check, tile, options):
    check(engine(few=tile, **options), BF16)


def test_permuted_rows():
    cases.permuted(engine(**HOPPER).grouped_tree, BF16)


@each("tree")
def test_modes(name):
    """Every timing gives the same bytes."""
    product = PRODUCTS[name]
    operands = product.operands("few" if "few" in name else "uneven", 136, 328)
    results = modes.run_modes(lambda: product.run(operands, ctas=4), modes.QUICK_MODES)
    assert same_bytes(results["default"], product.want(*operands))


@pytest.mark.parametrize("ctas", [1, 4, 7, 132])
@each("dw")
def test_ctas(name, ctas):
    product = PRODUCTS[name]
    operands = product.operands("uneven", 200, 88)
    got = product.run(operands, ctas=ctas, cta_order="random", seed=ctas)
    assert same_bytes(got, product.want(*operands))


@each("leaves")
@pytest.mark.parametrize("bits", [0x7FC0, 0x7F7F])
def test_poison(bits, name):
    """Results are written everywhere; rows of no expert are not touched, nor padding of others."""
    fill, product = torch.tensor([bits], dtype=torch.int16).view(BF16), PRODUCTS[name]
    for n, k in ((44, 56), (77, 52)):
        operands = product.operands("uneven", n, k, more=False)
        last = len(operands[0])
        if name != "dw":
            last = int(operands[2][-1]) - 9
            offsets = operands[2] - torch.tensor([0, 0, 0, 0, 0, 9], dtype=torch.int32)
            operands = (*operands[:2], offsets, None)
        with poisoned(fill) as memory:
            got = product.run(operands)
        # A quad's columns are stored whole.
        columns = -(-(k if name == "dw" else n) // 4) * 4
        untouched = contract.bits(fill.to(memory[0].dtype))
        assert (contract.bits(memory[0][..., columns:]) == untouched).all()
        if name == "dw":
            assert same_bytes(got, product.want(*operands))
            continue
        want = product.want(operands[0][:last], *operands[1:])
        assert same_bytes(got[..., :last, :], want)
        assert (contract.bits(memory[0][..., last:, :]) == untouched).all()


@pytest.mark.parametrize("tile", [None, NARROW], ids=str)
def test_bad_offsets_stay_inside(tile):
    """The simulator stops accesses outside of tensors."""
    cases.inside(engine(few=tile), BF16)


def test_empty_experts():
    """Exact zeros; a main_grad keeps every bit, -0 and NaN among them."""
    product = PRODUCTS["dw"]
    dy, x, offsets, start = product.operands("uneven", 40, 56)
    assert not contract.bits(product.run((dy, x, offsets, None))[1]).any()
    start[1, 0, :3] = torch.tensor([-0.0, float("nan"), float("inf")])
    assert same_bytes(product.run((dy, x, offsets, start))[1], start[1])


@pytest.mark.parametrize("name", ["few", "tree", "leaves"])
def test_more_than_2_to_the_31_elements(name):
    """Experts, rows of y, leaves and biases lie far apart."""
    assert far_apart(name)


# ---- few rows an expert --------------------------------------------------------------------------

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
    return PRODUCTS["few"].run(operands, few=tile, **options)


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
    operands = drawn(counts, 8, 16)
    assert same_bytes(run(operands, ctas=2), chain(*operands))


@pytest.mark.nightly
@pytest.mark.parametrize("tile", tiles.FEW, ids=str)
def test_all_modes(tile):
    """Every mode and seed, with more units than CTAs and more K blocks than stages."""
    operands = drawn(LOADS["zipf"], 200, 1800)
    seven = modes.Mode("resident-7", {"resident_ctas": 7, "warp_order": "random", "seed": 7})
    chosen = (*modes.MODES, seven)
    want = modes.run_modes(lambda: run(operands, tile, ctas=19), chosen)["default"]
    assert same_bytes(want, chain(*operands))


def test_rows_before_the_first_expert():
    """Rows of no expert may lie in front: a tile starts at its expert's first row."""
    x, weight, offsets, _ = drawn([0, 5, 9], 40, 56)
    offsets = offsets + torch.tensor([3, 3, 0, 0], dtype=torch.int32)
    got = run((x, weight, offsets, None))
    assert same_bytes(got[3:], chain(x[3:], weight, offsets - 3))


# ---- the choice of kernels and tiles -------------------------------------------------------------


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


@pytest.mark.parametrize("name", ["many", "tree", "leaves"])
def test_the_launchers_tile(name):
    """Whatever width the launcher chooses, bytes are the same."""
    operands = PRODUCTS[name].operands("few", 264, 56)
    got = PRODUCTS[name].run(operands, width=None)
    assert same_bytes(got, PRODUCTS[name].want(*operands))


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
        got = run((x[take], weight, offsets, bias), CHOICE, width=None, wgmma_math="exact")
        assert same_bytes(got, everything[take]), rows
    assert len(seen) > 3


def test_a_product_takes_the_kernel_that_the_table_says():
    """32 rows an expert on average are few, more are many."""
    calls = []
    kernels = {
        name: lambda *chosen, name=name: calls.append(name) or print
        for name in ("grouped_few", "grouped")
    }
    with simulated(few=CHOICE, kernels=kernels):
        for rows in (64, 66):
            x, weight = torch.empty(rows, 16, dtype=BF16), torch.empty(2, 16, 16, dtype=BF16)
            launch.plan_grouped_gemm(x, weight, cases.offsets_of([rows, 0]), None)
    assert calls == ["grouped_few", "grouped"]


def test_widths_do_not_read_the_order():
    """No epilogue is given a tile that spills (docs/certificate.md), and every one has tiles."""
    for epilogue in config.TREE_EPILOGUES:
        widths = {
            tiles.tree_width(rows, 8, columns, 132, epilogue)
            for rows in (1, 100, 5000)
            for columns in (64, 500, 4096)
        }
        most = tiles.tree_widths(epilogue)
        assert widths <= set(most) and max(widths) == max(most)
