"""The SM90 kernel for few rows in the simulator: values, rows, schedules, and mutants that fail.

In the order ``chain`` it must give the bytes of kernel_sm90, in ``tree`` those of its promotion
points: both are held to the same oracle, and here to each other.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import ptxsim
from cute_kernels.gemm import config, launch, tiles
from cute_kernels.gemm.tiles import Dense, Skinny
from ptxsim import modes
from ptxsim.skips import requires_sim
from tests import contract
from tests.contract import RowOp
from tests.gemm.simulated import WIDE, simulated
from tests.gemm.skinny_defects import DEFECTS
from tests.kernels.operands import cancelling, operand
from tests.kernels.ring_defects import LIMITS, SETTINGS
from tests.oracles import gemm as reference

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = (
    "test_every_configuration test_battery test_schedules "
    "test_the_output_is_written_everywhere_and_nowhere_else test_mutants_are_killed"
)
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("gemm", often=EACH_COMMIT)]

BF16 = torch.bfloat16
DTYPES = {name: dtype for dtype, name in config.DTYPE_NAMES.items()}
SEED = 5
ORACLE = {"chain": reference.chain, "tree": reference.tree}


def run(x, w, bias, tile, order, **options):
    """One product; bias [M, N] or None."""
    with simulated(tile=tile, **options):
        if order == config.UNORDERED:
            return launch.skinny(x, w, bias, False)
        how = launch._matrices(x, w, order)
        return launch._plan_skinny(x, w, bias, how, tile, order).run(x, w, bias)


def shapes(tile: Skinny):
    """One row of few columns; all of a tile; more of both than one has, and a tail of K."""
    tall, wide = tile.tile_n, tile.tile_m
    return [(1, tall - 24, 40), (wide, tall, 512), (tile.pair * wide + 5, tall + 9, 1000)]


def every_tile():
    """One configuration of each tile and order for every commit; the rest is nightly."""
    recorded = set()
    for kernel_config in launch.skinny_configs():
        tile = Skinny(*(getattr(kernel_config, name) for name in Skinny._fields))
        first = (tile, kernel_config.order) not in recorded
        first &= kernel_config.order != config.UNORDERED or tile.tile_m == 16
        if kernel_config.dtype == "bf16" and kernel_config.bias and kernel_config.w_major == "mn":
            recorded.add((tile, kernel_config.order))
            marks = ()
        else:
            marks = pytest.mark.nightly
        label = "-".join(map(str, vars(kernel_config).values()))
        yield pytest.param(
            kernel_config, tile, id=label, marks=marks if first else pytest.mark.nightly
        )


@pytest.mark.parametrize(("chosen", "tile"), list(every_tile()))
def test_every_configuration(chosen, tile):
    dtype = DTYPES[chosen.dtype]
    for m, n, k in shapes(tile):
        w = operand(n, k, dtype, chosen.w_major, seed=n + 1)
        x = operand(m, k, dtype, "k", seed=m)
        bias = torch.randn(m, n).to(dtype) if chosen.bias else None
        if chosen.order == config.UNORDERED:
            got = run(x, w, bias, tile, chosen.order)
            bound = (
                reference.error_bound(x, w) + 8 * 2.0**-24 * x.float().abs() @ w.mT.float().abs()
            )
            exact = reference.gemm(x, w, None) + (0 if bias is None else bias.double())
            # Of the 40 outputs of one row a single one may be misrounded, or two.
            contract.check_accuracy(got, exact, bound, 0.02 if m > 1 else 0.05)
            continue
        want = ORACLE[chosen.order](x, w, bias).to(dtype)
        got = run(x, w, bias, tile, chosen.order)
        assert contract.same_bytes(got, want), (m, n, k)
        assert ptxsim.report()["fence_warnings"]["count"] == 0


#: Tiles by number of rows, as a launcher may choose: both kernels, one CTA a tile or several.
BY_ROWS = {
    "chain": {8: Skinny(8, 64, 128, 1, 1), 64: Skinny(64, 64, 128, 2, 1), 300: WIDE},
    "tree": {8: Skinny(8, 64, 128, 1, 8), 64: Skinny(64, 64, 128, 1, 2), 300: Dense(192)},
}
N, K = 136, 1000


@pytest.mark.parametrize("order", ["chain", "tree"])
def test_a_rows_bytes_are_the_same_in_every_tile_of_both_kernels(order):
    x, weight = cancelling(300, N, K, BF16, SEED)
    bias = (1e-6 * torch.randn(N, generator=torch.Generator().manual_seed(2))).bfloat16()

    def product(rows, tile, order=order):
        with simulated(tile=tile, wgmma_math="hopper"):
            return launch.gemm(rows, weight, bias, None, order)

    want = product(x, BY_ROWS[order][300])
    other = product(x, tiles.Dense(192), "tree" if order == "chain" else "chain")
    assert not contract.same_bytes(want, other), "these operands do not show an order"
    for m, tile in ((1, 8), (8, 8), (13, 64), (64, 64), (103, 64), (300, 64), (16, 300)):
        got = product(x[:m], BY_ROWS[order][tile])
        assert contract.same_bytes(got, want[:m]), (m, tile)


@pytest.mark.parametrize("order", ["chain", "tree"])
def test_battery(order):
    """T1 to T5 and layouts at one tile: rows of other content, positions, padding, chunks."""
    weight = operand(72, 600, BF16, "k", seed=1)
    tile = BY_ROWS[order][64]

    def run(rows):
        with simulated(tile=tile, wgmma_math="hopper"):
            return launch.gemm(rows, weight, None, None, order)

    assert contract.check_rows(RowOp(f"skinny, {order}", run, 600, BF16), 70, SEED) > 40


@pytest.mark.parametrize(
    ("order", "tile"),
    [
        ("chain", Skinny(16, 64, 128, 2, 1)),
        ("chain", Skinny(128, 192, 64, 1, pair=2)),
        ("tree", Skinny(64, 64, 128, 1, pair=2)),
        ("tree", Skinny(16, 64, 128, 1, 1)),
        ("tree", Skinny(16, 64, 128, 1, 2)),
        ("tree", Skinny(64, 64, 128, 1, 8)),
    ],
    ids=str,
)
def test_schedules(order, tile):
    """Several tiles and more K blocks than stages, in every mode of the simulator."""
    x, w = cancelling(tile.tile_m + 3, tile.tile_n + 70, 2048, BF16, 7)
    bias = (1e-6 * torch.randn(x.shape[0], w.shape[0])).bfloat16()
    seven = modes.Mode("resident-7", {"resident_ctas": 7, "warp_order": "random", "seed": 7})
    chosen = (*modes.MODES, seven)
    want = modes.run_modes(lambda: run(x, w, bias, tile, order), chosen)["default"]
    assert contract.same_bytes(want, ORACLE[order](x, w, bias).bfloat16())


def test_the_unordered_kernel_is_unordered():
    """Its bytes follow the timing; those of the ordered one, on the same operands, do not."""
    tile = Skinny(16, 64, 128, 1, 8)
    x, w = cancelling(16, 256, 2048, BF16, 9)
    chosen = modes.QUICK_MODES
    results = modes.run_modes(
        lambda: run(x, w, None, tile, config.UNORDERED), chosen, same_bits=False
    )
    kinds = {contract.bits(y).numpy().tobytes() for y in results.values()}
    assert len(kinds) > 1
    modes.run_modes(lambda: run(x, w, None, tile, "tree"), chosen)


def test_an_unordered_sum_that_is_not_cleared_is_killed(monkeypatch):
    """Mutant: leaves are added to whatever shared memory held."""
    from cute_kernels.gemm import kernel_skinny_sm90

    tile = Skinny(16, 64, 128, 1, 8)
    x, w = operand(16, 512, BF16, "k", 1), operand(64, 512, BF16, "k", 2)
    kernel_config = launch.skinny_config(BF16, "k", False, tile, config.UNORDERED)
    with monkeypatch.context() as patch:
        patch.setattr(kernel_skinny_sm90.SkinnySm90, "clear_shared", lambda self, storage: None)
        broken = kernel_skinny_sm90.build(kernel_config, compile=ptxsim.compile)
    exact, bound = reference.gemm(x, w), reference.error_bound(x, w)
    contract.check_accuracy(run(x, w, None, tile, config.UNORDERED), exact, bound, 0.05)
    with pytest.raises((ptxsim.PtxsimError, AssertionError)):
        got = run(x, w, None, tile, config.UNORDERED, kernel=lambda *_: broken)
        contract.check_accuracy(got, exact, bound, 0.05)


@pytest.mark.parametrize("lanes", [1, 2])
def test_zeros_that_are_not_published_to_the_cluster_are_killed(monkeypatch, lanes):
    """Mutant: the zeros are stored before a relaxed arrival, and no fence lies between."""
    from cute_kernels.gemm import kernel_skinny_sm90

    tile = Skinny(16, 64, 128, 1, 8)
    x, w = operand(16, 512, BF16, "k", 1), operand(64, 512, BF16, "k", 2)
    kernel_config = launch.skinny_config(BF16, "k", False, tile, config.UNORDERED)
    arch = kernel_skinny_sm90.cute.arch
    with monkeypatch.context() as patch:
        patch.setattr(arch, "fence_acq_rel_cluster", lambda: None)
        broken = kernel_skinny_sm90.build(kernel_config, compile=ptxsim.compile)
    for kernel, clean in ((None, True), (lambda *_: broken, False)):
        run(x, w, None, tile, config.UNORDERED, kernel=kernel, check_races=lanes, **modes.RANDOM)
        assert (ptxsim.report()["races"] == 0) == clean


def test_the_output_is_written_everywhere_and_nowhere_else():
    """Poison in the rows' padding survives but for a quad's, and none is left inside."""
    for fill in ("nan", "0x7f"):
        out = []

        def allocator(shape, dtype, device, fill=fill, made=out):
            def new():
                made.append(modes.poisoned(shape, dtype, fill))
                return made[-1]

            return new

        x, w = cancelling(21, 77, 300, BF16, 3)
        with mock.patch.object(launch, "allocator", allocator):
            got = run(x, w, None, Skinny(16, 64, 128, 1, 1), "chain")
        assert contract.same_bytes(got, reference.chain(x, w).bfloat16())
        assert (contract.bits(out[0][:, 80:]) == contract.bits(out[0][:1, 80:])).all()
        assert out[0].shape[1] == 80


def test_signs_of_zero():
    """A leaf of -0 stays -0 among leaves of -0, and behind the last leaf nothing is added."""
    for k, tile in ((64, Skinny(8, 64, 128, 1, 8)), (2048, Skinny(8, 64, 128, 1, 2))):
        x = torch.full((3, k), -0.0).bfloat16()
        w = torch.full((64, k), 1.0).bfloat16()
        # What starts from +0 is +0; the simulator's fma keeps -0 otherwise.
        got = run(x, w, None, tile, "tree", wgmma_math="fma")
        dense = run_dense(x, w)
        assert contract.same_bytes(got, dense)


def run_dense(x, w):
    with simulated(tile=Dense(128), wgmma_math="fma"):
        return launch.gemm(x, w, None, None, "tree")


TILES = {
    "chain": Skinny(16, 64, 128, 1, 1),
    "tree": Skinny(16, 64, 128, 1, 1),
    "split": Skinny(16, 64, 128, 1, 8),
    "halves": Skinny(16, 64, 128, 1, 2),
    "two warpgroups": Skinny(128, 128, 64, 1, 1),
    "pair": Skinny(16, 64, 128, 1, pair=2),
}


def order_of(kind: str) -> str:
    return "chain" if kind in ("chain", "two warpgroups", "pair") else "tree"


def survives(kernel, kind: str) -> bool:
    """Whether runs under every setting have the oracle's bytes; `kernel` is a compiled function."""
    tile, order = TILES[kind], order_of(kind)
    for m, n, k in ((21, 150, 2200), (5, 60, 200)):
        x, w = cancelling(m, n, k, BF16, m)
        noise = torch.randn(m, n, generator=torch.Generator().manual_seed(k))
        bias = (1e-6 * noise).bfloat16()
        want = ORACLE[order](x, w, bias).bfloat16()
        for options in SETTINGS:
            try:
                got = run(x, w, bias, tile, order, kernel=lambda *_: kernel, **LIMITS, **options)
            except ptxsim.PtxsimError:
                return False
            if ptxsim.report()["fence_warnings"]["count"] or not contract.same_bytes(got, want):
                return False
    return True


def compiled(kind: str):
    from cute_kernels.gemm import kernel_skinny_sm90

    kernel_config = launch.skinny_config(BF16, "k", True, TILES[kind], order_of(kind))
    return kernel_skinny_sm90.build(kernel_config, compile=ptxsim.compile)


@pytest.mark.parametrize("kind", TILES)
def test_the_intact_kernel_survives(kind):
    assert survives(compiled(kind), kind)


@pytest.mark.parametrize(("defect", "kind"), DEFECTS, ids=lambda v: getattr(v, "__name__", v))
def test_mutants_are_killed(monkeypatch, defect, kind):
    from cute_kernels.gemm import kernel_skinny_sm90

    with monkeypatch.context() as patch:
        defect(patch, kernel_skinny_sm90)
        kernel = compiled(kind)
    assert not survives(kernel, kind)
