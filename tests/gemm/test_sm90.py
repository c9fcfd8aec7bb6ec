"""The SM90 kernels in the simulator: values, rows, splits, schedules, for many rows and for few.

With ``wgmma_math="exact"`` each k16 group is one exact product rounded once, so kernels must give
the bytes of ``reference.chain`` and ``reference.tree``; with ``"hopper"`` (the truncating adder)
they must stay in the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

import ptxsim
from cute_kernels.gemm import config, launch, op
from cute_kernels.gemm.tiles import Dense, Skinny
from cute_kernels.schedulers.tiles import leaves
from ptxsim import modes
from ptxsim.skips import requires_sim
from tests import contract
from tests.contract import RowOp, SumOp
from tests.gemm.simulated import WIDE, gemm_kernel, simulated
from tests.gemm.sm90_defects import k_steps_swapped
from tests.kernels.operands import cancelling, operand
from tests.oracles import gemm as reference

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = (
    "test_every_configuration test_every_configuration_for_few_rows test_battery test_splits "
    "test_splits_of_negative_zero test_schedules test_column_sum "
    "test_the_output_is_written_everywhere"
)
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("gemm", often=EACH_COMMIT)]

BF16, SEED = torch.bfloat16, 3
DTYPES = {name: dtype for dtype, name in config.DTYPE_NAMES.items()}
CHAIN, TREE = config.ORDERS
ORACLE = {CHAIN: reference.chain, TREE: reference.tree}
HOPPER, FMA = {"wgmma_math": "hopper"}, {"wgmma_math": "fma"}
NARROW = Dense(128)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gemm(a, b, bias=None, start=None, order=CHAIN, **options) -> torch.Tensor:
    """`launch.gemm` in the simulator, onto a copy of ``start``."""
    with simulated(**options):
        return launch.gemm(a, b, bias, None if start is None else start.clone(), order)


def few(x, w, bias, tile: Skinny, order: str, **options) -> torch.Tensor:
    """The kernel for few rows in the simulator; bias [M, N] or None."""
    with simulated(tile=tile, **options):
        if order == config.UNORDERED:
            return launch.skinny(x, w, bias, False)
        how = launch._matrices(x, w, order)
        return launch._plan_skinny(x, w, bias, how, tile, order).run(x, w, bias)


# ---- values --------------------------------------------------------------------------------------

#: (M, N, K): one tile; every kind of tail; several tiles and k blocks; K below one group.
SHAPES = [(128, 256, 64), (200, 300, 200), (1, 7, 3), (130, 264, 80), (257, 520, 144), (64, 8, 16)]
#: Of those, what the narrower tile runs: the tails, and more K blocks than its ring has stages.
NARROW_SHAPES = [(200, 300, 200), (1, 7, 3), (130, 136, 456)]


def case(dtype, majors: tuple[str, str], epilogue: str, m: int, n: int, k: int) -> tuple:
    """a, b, bias and start."""
    a, b = operand(m, k, dtype, majors[0], seed=m), operand(n, k, dtype, majors[1], seed=n + 1)
    bias = drawn(n, seed=k).to(dtype) if epilogue == "bias" else None
    return a, b, bias, drawn(m, n, seed=k) if epilogue == "accumulate" else None


def every_configuration() -> Iterator:
    """Nightly: fp16, which differs in the type of its instructions, but for the widest tile; and of
    two widths and the tree all but one layout and epilogue."""
    for c in launch.configs():
        both_k = (c.a_major, c.b_major) == ("k", "k")
        often = c.dtype == "bf16"
        if c.tile_n in (256, 128) and c.order == CHAIN:
            often |= both_k and c.tile_n == WIDE.tile_n
        else:
            often &= both_k and c.epilogue == "bias"
        label = "-".join(map(str, vars(c).values()))
        yield pytest.param(c, id=label, marks=() if often else pytest.mark.nightly)


@pytest.mark.parametrize("chosen", list(every_configuration()))
def test_every_configuration(chosen):
    majors = chosen.a_major, chosen.b_major
    for m, n, k in SHAPES if chosen.tile_n == WIDE.tile_n else NARROW_SHAPES:
        a, b, bias, start = case(DTYPES[chosen.dtype], majors, chosen.epilogue, m, n, k)
        of = (bias, start) if chosen.order == CHAIN else (bias,)
        want = ORACLE[chosen.order](a, b, *of)
        got = gemm(a, b, bias, start, chosen.order, tile=Dense(chosen.tile_n))
        assert contract.same_bytes(got, want.to(got.dtype)), (m, n, k)
        assert ptxsim.report()["fence_warnings"]["count"] == 0


def every_configuration_for_few_rows() -> Iterator:
    """One configuration of each tile and order for every commit; the rest is nightly."""
    recorded = set()
    for c in launch.skinny_configs():
        tile = Skinny(*(getattr(c, name) for name in Skinny._fields))
        often = c.dtype == "bf16" and c.bias and c.w_major == "mn"
        often &= (tile, c.order) not in recorded
        often &= c.order != config.UNORDERED or tile.tile_m == 16
        if often:
            recorded.add((tile, c.order))
        label = "-".join(map(str, vars(c).values()))
        yield pytest.param(c, tile, id=label, marks=() if often else pytest.mark.nightly)


@pytest.mark.parametrize(("chosen", "tile"), list(every_configuration_for_few_rows()))
def test_every_configuration_for_few_rows(chosen, tile):
    """One row of few columns; all of a tile; more of both than one has, and a tail of K."""
    dtype, (wide, tall) = DTYPES[chosen.dtype], tile[:2]
    shapes = (1, tall - 24, 40), (wide, tall, 512), (tile.pair * wide + 5, tall + 9, 1000)
    for m, n, k in shapes:
        w = operand(n, k, dtype, chosen.w_major, seed=n + 1)
        x = operand(m, k, dtype, "k", seed=m)
        bias = drawn(m, n, seed=k).to(dtype) if chosen.bias else None
        got = few(x, w, bias, tile, chosen.order)
        if chosen.order == config.UNORDERED:
            sums = 8 * 2.0**-24 * x.float().abs() @ w.mT.float().abs()
            exact = reference.gemm(x, w) + (0 if bias is None else bias.double())
            # Of the 40 outputs of one row a single one may be misrounded, or two.
            share = 0.02 if m > 1 else 0.05
            contract.check_accuracy(got, exact, reference.error_bound(x, w) + sums, share)
            continue
        assert contract.same_bytes(got, ORACLE[chosen.order](x, w, bias).to(dtype)), (m, n, k)
        assert ptxsim.report()["fence_warnings"]["count"] == 0


@pytest.mark.parametrize("epilogue", ["plain", "bias", "accumulate"])
def test_against_float64_with_the_truncating_adder(epilogue):
    a, b, bias, start = case(BF16, ("k", "k"), epilogue, 130, 264, 1000)
    bound = reference.error_bound(a, b)
    if start is not None:
        bound = bound + 5.25 * 63 * 2.0**-23 * start.double().abs()
    exact = reference.gemm(a, b, bias, start)
    got = gemm(a, b, bias, start, **HOPPER)
    contract.check_accuracy(got, exact, bound, 1.0 if start is not None else 0.02)


@pytest.mark.parametrize("fill", ["nan", "0x7f"])
@pytest.mark.parametrize("tile", [WIDE, Skinny(16, 64, 128, 1, 1)], ids=str)
def test_the_output_is_written_everywhere(tile, fill):
    """Poison in the rows' padding survives but for a quad's, and none is left inside."""
    m, n, k = (200, 300, 72) if tile == WIDE else (21, 77, 300)
    x, w = cancelling(m, n, k, BF16, 3)
    out = []

    def allocator(shape, dtype, device):
        def new():
            out.append(modes.poisoned(shape, dtype, fill))
            return out[-1]

        return new

    with mock.patch.object(launch, "allocator", allocator):
        got = gemm(x, w) if tile == WIDE else few(x, w, None, tile, CHAIN)
    assert contract.same_bytes(got, reference.chain(x, w).bfloat16())
    columns = -(-n // 4) * 4
    untouched = contract.bits(modes.poisoned(out[0].shape, BF16, fill))
    assert (contract.bits(out[0])[:, columns:] == untouched[:, columns:]).all()


def test_negative_zero_survives_the_k_tail():
    """Groups wholly beyond K are skipped: a start of -0 and products of -0 stay -0.

    In the simulator's ``fma`` arithmetic, which keeps -0 + -0; what the card does is not run.
    """
    start = torch.full((16, 16), -0.0)
    for k in (16, 48, 80, 112):
        a, b = torch.full((16, k), -0.0).bfloat16(), torch.full((16, k), 1.0).bfloat16()
        assert contract.same_bytes(gemm(a, b, None, start, **FMA), start), k


def test_signs_of_zero():
    """A leaf of -0 stays -0 among leaves of -0, and behind the last leaf nothing is added."""
    for k, tile in ((64, Skinny(8, 64, 128, 1, 8)), (2048, Skinny(8, 64, 128, 1, 2))):
        x, w = torch.full((3, k), -0.0).bfloat16(), torch.full((64, k), 1.0).bfloat16()
        # What starts from +0 is +0; the simulator's fma keeps -0 otherwise.
        dense = gemm(x, w, order=TREE, tile=NARROW, **FMA)
        assert contract.same_bytes(few(x, w, None, tile, TREE, **FMA), dense)


def test_what_the_compiled_entry_refuses():
    """The second place of checks: TVM-FFI refuses dims, dtypes and strides that disagree."""
    kernel = gemm_kernel(BF16, "k", "k", "plain", WIDE)
    good, out = operand(16, 16, BF16, "k", 0), torch.empty(16, 16, dtype=BF16)
    kernel(good, good, out, None, 1)
    wrong = {
        "K differs": (good[:, :8], good, out),
        "M differs": (good[:8], good, out),
        "dtype": (good.half(), good, out),
        "out dtype": (good, good, out.float()),
        "rank": (good[None], good, out),
        "stride": (good.mT, good, out),
        "row stride": (torch.empty(16, 17, dtype=BF16)[:, :16], good, out),
        "alignment": (torch.empty(264, dtype=BF16)[1:257].view(16, 16), good, out),
    }
    for label, (a, b, d) in wrong.items():
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            kernel(a, b, d, None, 1)
            pytest.fail(label)


# ---- leaves --------------------------------------------------------------------------------------


@pytest.mark.parametrize("majors", [("k", "k"), ("mn", "mn"), ("k", "mn")], ids="-".join)
def test_leaves_are_chains(majors):
    """One leaf; whole leaves; odd N and a short last leaf; several tiles."""
    shapes = (3, 8, 16, 16), (70, 40, 128, 32), (130, 33, 100, 48), (200, 264, 96, 96)
    for m, n, k, length in shapes:
        a, b, *_ = case(BF16, majors, "plain", m, n, k)
        with simulated():
            got = launch.leaf_sums(a, b, length)
        spans = [slice(first, first + length) for first in range(0, k, length)]
        want = torch.stack([reference.chain(a[:, span], b[:, span]) for span in spans])
        assert got.is_contiguous() and contract.same_bytes(got, want), (m, n, k)


def test_ranks_give_the_tree():
    """With the truncating adder: the leaves of 2 and 4 ranks, in order, against the one kernel."""
    a, b, bias, _ = case(BF16, ("k", "k"), "bias", 70, 40, 256)
    want = gemm(a, b, bias, order=TREE, tile=Dense(64), **HOPPER)
    for degree in (2, 4):
        slices = zip(a.chunk(degree, 1), b.chunk(degree, 1), strict=True)
        with simulated(**HOPPER):
            parts = [launch.leaf_sums(*part, leaves.length(256)) for part in slices]
        assert contract.same_bytes(op.add_leaves(torch.cat(parts), bias, BF16), want), degree


# ---- rows ----------------------------------------------------------------------------------------

#: Tiles by number of rows, as a launcher may choose: both kernels, one CTA a tile or several.
BY_ROWS = {
    CHAIN: {8: Skinny(8, 64, 128, 1, 1), 64: Skinny(64, 64, 128, 2, 1), 300: WIDE},
    TREE: {8: Skinny(8, 64, 128, 1, 8), 64: Skinny(64, 64, 128, 1, 2), 300: Dense(192)},
}


@pytest.mark.parametrize("order", config.ORDERS)
def test_a_rows_bytes_are_the_same_in_every_tile_of_both_kernels(order):
    x, weight = cancelling(300, 136, 1000, BF16, SEED)
    bias = (1e-6 * drawn(136, seed=2)).bfloat16()

    def product(rows, tile, order=order):
        return gemm(rows, weight, bias, None, order, tile=tile, **HOPPER)

    want = product(x, BY_ROWS[order][300])
    other = product(x, Dense(192), TREE if order == CHAIN else CHAIN)
    assert not contract.same_bytes(want, other), "these operands do not show an order"
    for m, tile in ((1, 8), (8, 8), (13, 64), (64, 64), (103, 64), (300, 64), (16, 300)):
        assert contract.same_bytes(product(x[:m], BY_ROWS[order][tile]), want[:m]), (m, tile)


#: (K, weight's major, epilogue, order, tile).  fp32 outputs show an order change in 43% of them,
#: bf16 ones in 0.003%.
BATTERY = {
    "forward with bias": (88, "k", "bias", CHAIN, WIDE),
    "dx (weight column-major)": (88, "mn", "plain", CHAIN, WIDE),
    "fp32 partials": (88, "k", "accumulate", CHAIN, WIDE),
    "few rows, chain": (600, "k", "plain", CHAIN, BY_ROWS[CHAIN][64]),
    "few rows, tree": (600, "k", "plain", TREE, BY_ROWS[TREE][64]),
}


@pytest.mark.parametrize("name", BATTERY)
def test_battery(name):
    k, major, epilogue, order, tile = BATTERY[name]
    _, weight, bias, _ = case(BF16, ("k", major), epilogue, 1, 72, k)

    def run(rows):
        start = torch.zeros(len(rows), 72) if epilogue == "accumulate" else None
        return gemm(rows, weight, bias, start, order, tile=tile, **HOPPER)

    rows = 150 if tile == WIDE else 70
    assert contract.check_rows(RowOp(name, run, k, BF16), rows, SEED) > (60 if rows > 70 else 40)


def across_tiles(kernel=None) -> RowOp:
    """Product with fp32 outputs whose number of rows chooses the tile."""
    weight = operand(136, 88, BF16, "k", seed=1)  # a whole tile and a part of one

    def run(rows):
        tile = NARROW if len(rows) <= 256 else WIDE
        start = torch.zeros(len(rows), 136)
        return gemm(rows, weight, None, start, kernel=kernel, tile=tile, **HOPPER)

    return RowOp("linear across a change of tile", run, 88, BF16)


def test_a_tile_with_another_order_is_killed(monkeypatch):
    """The narrow tile's bytes of a row are the wide one's; not with two groups swapped."""
    from cute_kernels.gemm import kernel_sm90

    sizes = [1, 63, 128, 129, 255, 256, 257, 258, 300]
    assert contract.check_population(across_tiles(), 300, SEED, sizes) == len(sizes)
    with monkeypatch.context() as patch:
        k_steps_swapped(patch, kernel_sm90)
        chosen = launch.dense_config(BF16, "k", "k", "accumulate", NARROW)
        swapped = kernel_sm90.build(chosen, compile=ptxsim.compile)
    target = across_tiles(lambda *c: swapped if NARROW in c else gemm_kernel(*c))
    with pytest.raises(contract.ContractViolation, match="T1 population"):
        contract.check_population(target, 300, SEED, [256])
    assert contract.check_population(target, 300, SEED, [257]) == 1  # the wide tile is intact


# ---- cuts of a stream of tokens ------------------------------------------------------------------


def weight_gradient(dy, x, start, **options) -> SumOp:
    def run(start, pieces):
        state = start.clone()
        with simulated(**options):
            for piece in pieces:
                launch.gemm(dy[piece].mT, x[piece].mT, None, state)
        return state

    return SumOp("dW into main_grad", run, len(x), start)


def of_tokens(tokens: int, **options) -> SumOp:
    dy, x = operand(tokens, 24, BF16, "k", seed=4), operand(tokens, 40, BF16, "k", seed=5)
    return weight_gradient(dy, x, drawn(24, 40, seed=6), **options)


@pytest.mark.parametrize("tokens", [200, 145])
def test_splits(tokens):
    assert contract.check_splits(of_tokens(tokens, **HOPPER), SEED) == 7


def test_splits_of_negative_zero():
    """A whole stream of -0 products on a state of -0: no cut may turn one into +0."""
    dy, x = torch.full((208, 24), -0.0).bfloat16(), torch.ones(208, 40).bfloat16()
    target = weight_gradient(dy, x, torch.full((24, 40), -0.0), **FMA)
    assert contract.check_splits(target, SEED) == 7
    assert contract.same_bytes(target.run(target.start, [slice(0, 208)]), target.start)


def test_splits_under_schedules():
    """Every cut of the stream, in every mode: the state after all pieces is one shot's."""
    target = of_tokens(145)
    cuts = contract.splits(145, 16, SEED) | {"whole": [slice(0, 145)]}
    results = [
        modes.run_modes(lambda cut=cuts[label]: target.run(target.start, cut), modes.QUICK_MODES)
        for label in ("whole", "8 pieces", "ragged 0", "every block")
    ]
    for mode, whole in results[0].items():
        assert all(contract.same_bytes(result[mode], whole) for result in results), mode


# ---- schedules -----------------------------------------------------------------------------------

#: (order, tile, epilogue, shape): several tiles, and more K blocks than stages.
SCHEDULES = [
    *((CHAIN, WIDE, epilogue, (300, 520, 200)) for epilogue in ("plain", "bias", "accumulate")),
    (CHAIN, NARROW, "accumulate", (300, 264, 520)),
    *(
        (order, tile, "bias", (tile.tile_m + 3, tile.tile_n + 70, 2048))
        for order, tile in (
            (CHAIN, Skinny(16, 64, 128, 2, 1)),
            (CHAIN, Skinny(128, 192, 64, 1, pair=2)),
            (TREE, Skinny(64, 64, 128, 1, pair=2)),
            (TREE, Skinny(16, 64, 128, 1, 1)),
            (TREE, Skinny(16, 64, 128, 1, 2)),
            (TREE, Skinny(64, 64, 128, 1, 8)),
        )
    ),
]


@pytest.mark.parametrize(("order", "tile", "epilogue", "shape"), SCHEDULES, ids=str)
def test_schedules(order, tile, epilogue, shape):
    """schedule_invariant: every mode of the simulator, and every grid size."""
    m, n, k = shape
    a, b = cancelling(m, n, k, BF16, 7)
    bias = (1e-6 * drawn(n, seed=8)).bfloat16() if epilogue == "bias" else None
    start = drawn(m, n, seed=9) if epilogue == "accumulate" else None

    def run(**options):
        if isinstance(tile, Skinny):
            return few(a, b, bias.expand(m, n), tile, order, **options)
        return gemm(a, b, bias, start, order, tile=tile, **options)

    seven = modes.Mode("resident-7", {"resident_ctas": 7, "warp_order": "random", "seed": 7})
    got = modes.run_modes(run, (*modes.MODES, seven))["default"]
    of = (bias,) if order == TREE else (bias, start)
    assert contract.same_bytes(got, ORACLE[order](a, b, *of).to(got.dtype))
    for clusters in (1, 2, 66) if tile == WIDE else ():
        assert contract.same_bytes(run(clusters=clusters), got)


# ---- sums of rows --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("m", "n"), [(300, 130), (1, 2), (31, 64), (1025, 7), (64, 65)])
def test_column_sum(dtype, m, n):
    x = drawn(m, n, seed=m).to(DTYPES[dtype])
    lanes = torch.zeros(config.COLUMN_SUM.lanes, n)
    for row, values in enumerate(x.float()):
        lanes[row % config.COLUMN_SUM.lanes] += values
    total = torch.zeros(n)
    for lane in lanes:
        total = total + lane

    def run():
        with simulated():
            return launch.column_sum(x)

    quick = modes.QUICK_MODES if (m, n) == (300, 130) else modes.QUICK_MODES[:1]
    assert contract.same_bytes(modes.run_modes(run, quick)["default"], total.to(x.dtype))
    with simulated():
        for view in (x.mT.contiguous().mT, torch.cat([x, x], 1)[:, :n]):
            assert contract.same_bytes(launch.column_sum(view), total.to(x.dtype))


# ---- leaves added as they arrive -----------------------------------------------------------------

EIGHT = Skinny(16, 64, 128, 1, 8)


def test_the_unordered_kernel_is_unordered():
    """Its bytes follow the timing; those of the ordered one, on the same operands, do not."""
    x, w = cancelling(16, 256, 2048, BF16, 9)
    results = modes.run_modes(
        lambda: few(x, w, None, EIGHT, config.UNORDERED), modes.QUICK_MODES, same_bits=False
    )
    assert len({contract.bits(y).numpy().tobytes() for y in results.values()}) > 1
    modes.run_modes(lambda: few(x, w, None, EIGHT, TREE), modes.QUICK_MODES)


def unordered(monkeypatch, mutate):
    """Operands, and the unordered kernel compiled with a mutant."""
    from cute_kernels.gemm import kernel_skinny_sm90 as module

    chosen = launch.skinny_config(BF16, "k", False, EIGHT, config.UNORDERED)
    with monkeypatch.context() as patch:
        mutate(patch, module)
        broken = module.build(chosen, compile=ptxsim.compile)
    return operand(16, 512, BF16, "k", 1), operand(64, 512, BF16, "k", 2), lambda *_: broken


def test_an_unordered_sum_that_is_not_cleared_is_killed(monkeypatch):
    """Mutant: leaves are added to whatever shared memory held."""

    def uncleared(patch, module):
        patch.setattr(module.SkinnySm90, "clear_shared", lambda self, storage: None)

    x, w, broken = unordered(monkeypatch, uncleared)
    exact, bound = reference.gemm(x, w), reference.error_bound(x, w)
    contract.check_accuracy(few(x, w, None, EIGHT, config.UNORDERED), exact, bound, 0.05)
    with pytest.raises((ptxsim.PtxsimError, AssertionError)):
        got = few(x, w, None, EIGHT, config.UNORDERED, kernel=broken)
        contract.check_accuracy(got, exact, bound, 0.05)


@pytest.mark.parametrize("lanes", [1, 2])
def test_zeros_that_are_not_published_to_the_cluster_are_killed(monkeypatch, lanes):
    """Mutant: the zeros are stored before a relaxed arrival, and no fence lies between."""

    def unfenced(patch, module):
        patch.setattr(module.cute.arch, "fence_acq_rel_cluster", lambda: None)

    x, w, broken = unordered(monkeypatch, unfenced)
    for kernel, clean in ((None, True), (broken, False)):
        options = {"kernel": kernel, "check_races": lanes, **modes.RANDOM}
        few(x, w, None, EIGHT, config.UNORDERED, **options)
        assert (ptxsim.report()["races"] == 0) == clean
