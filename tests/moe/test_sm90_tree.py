"""The SM90 kernel of the order ``tree`` in the simulator: bytes of ck.linear's, mutants."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import ptxsim
from cute_kernels.gemm import launch as gemm_launch
from cute_kernels.gemm import tiles as gemm_tiles
from cute_kernels.moe import config, launch, tiles
from cute_kernels.schedulers.tiles import leaves
from ptxsim import modes
from ptxsim.skips import requires_sim
from tests import contract
from tests.contract import same_bytes
from tests.kernels import edited
from tests.kernels.ring_defects import DEFECTS as RING_DEFECTS
from tests.kernels.ring_defects import LIMITS, SETTINGS

from ..gemm import simulated as gemm_simulated
from . import cases, tree_cases
from .simulated import grouped_tree_kernel, simulated
from .sm90_cases import poisoned, problem

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = (
    "test_every_configuration test_rows_of_tree test_ranks test_modes test_ctas test_poison "
    "test_bad_offsets_stay_inside"
)
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("moe", often=EACH_COMMIT)]

BF16 = cases.BF16
DTYPES = {name: dtype for dtype, name in config.DTYPE_NAMES.items()}
HOPPER = {"wgmma_math": "hopper"}


def engine(**options) -> SimpleNamespace:
    """The launcher's functions in the simulator."""

    def inside(function):
        def run(*operands):
            with simulated(**options):
                return function(*operands)

        return run

    return SimpleNamespace(
        grouped_tree=inside(launch.grouped_tree),
        grouped_leaf_sums=inside(launch.grouped_leaf_sums),
    )


def gemm(**options) -> SimpleNamespace:
    """gemm's products on SM90 in the order ``tree``, in the simulator."""

    def tree(*operands):
        with gemm_simulated.simulated(tile=gemm_tiles.Dense(64), **options):
            return gemm_launch.gemm(*operands)

    def leaf_sums(a, b, length):
        with gemm_simulated.simulated(**options):
            return gemm_launch.leaf_sums(a, b, length)

    return SimpleNamespace(gemm=tree, leaf_sums=leaf_sums)


def both(x, weight, offsets, bias, length):
    """(leaves, the order ``tree``) in the simulator as it is set."""
    parts = launch.grouped_leaf_sums(x, weight, offsets, length)
    return parts, launch.grouped_tree(x, weight, offsets, bias)


def every_configuration():
    """By day bf16, the narrowest and the widest tile of each epilogue."""
    for chosen in launch.tree_configs():
        widths = tiles.tree_widths(chosen.epilogue)
        narrow = chosen.tile_n == min(widths) and (chosen.b_major, chosen.epilogue) != (
            "mn",
            "bias",
        )
        wide = chosen.tile_n == max(widths) and chosen.b_major == "k"
        often = chosen.dtype == "bf16" and (narrow or wide)
        label = "-".join(map(str, vars(chosen).values()))
        yield pytest.param(chosen, id=label, marks=() if often else pytest.mark.nightly)


@pytest.mark.parametrize("chosen", list(every_configuration()))
def test_every_configuration(chosen):
    """Loads with every kind of tail, K below a group, odd N, leaves shorter and longer than 64."""
    dtype = DTYPES[chosen.dtype]

    def run(x, weight, offsets, bias, length):
        used = bias if chosen.epilogue == "bias" else None
        with simulated(width=chosen.tile_n):
            if chosen.epilogue == "leaves":
                parts = launch.grouped_leaf_sums(x, weight, offsets, length)
                return parts, added(parts, offsets, bias, dtype)
            y = launch.grouped_tree(x, weight, offsets, used)
        if used is None:
            zero = engine(width=64).grouped_tree(x, weight, offsets, torch.zeros_like(bias))
            assert same_bytes(y, zero)
        parts = engine(width=64).grouped_leaf_sums(x, weight, offsets, length)
        return parts, y if used is not None else added(parts, offsets, bias, dtype)

    for load, n, k in (("uneven", 40, 56), ("few", 7, 3), ("tiles", chosen.tile_n + 24, 200),
                       ("empty ends", 72, 1100)):  # fmt: skip
        tree_cases.leaves_are_chains(run, load, n, k, dtype, chosen.b_major)
        assert ptxsim.report()["fence_warnings"]["count"] == 0


def added(parts, offsets, bias, dtype):
    """Leaves added by torch's adds, and the bias of each row's expert."""
    counts = offsets.diff().long()
    rows = bias.repeat_interleave(counts, 0).float()
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return (total + rows).to(dtype)


@pytest.mark.parametrize("load", ["uneven", "few"])
def test_rows_of_tree(load):
    """Rows have the bytes of gemm's kernels for its own tiles, with the truncating adder."""
    tree_cases.rows_of_tree(engine(width=128, **HOPPER), load, BF16, 136, 264, gemm=gemm(**HOPPER))


def test_ranks():
    tree_cases.leaves_of_ranks(engine(**HOPPER), BF16)


@pytest.mark.parametrize(
    "check", [tree_cases.neighbours, tree_cases.layouts], ids=lambda check: check.__name__
)
def test_products(check):
    check(engine(), BF16)


def test_permuted_rows():
    tree_cases.permuted(engine(**HOPPER).grouped_tree, BF16)


def test_modes():
    """Every timing gives the same bytes."""

    def run(x, weight, offsets, bias, length):
        def each():
            with simulated():
                return torch.cat(
                    [t.float().flatten() for t in both(x, weight, offsets, bias, length)]
                )

        found = modes.run_modes(each, modes.QUICK_MODES)["default"]
        count = leaves.count(x.shape[1]) * len(x) * weight.shape[1]
        parts = found[:count].view(-1, len(x), weight.shape[1])
        return parts, found[count:].view(parts.shape[1:]).to(BF16)

    tree_cases.leaves_are_chains(run, "uneven", 136, 328, BF16)


@pytest.mark.parametrize("ctas", [1, 2, 7, 132])
def test_ctas(ctas):
    def run(*operands):
        with simulated(ctas=ctas, cta_order="random", seed=ctas):
            return both(*operands)

    tree_cases.leaves_are_chains(run, "uneven", 200, 88, BF16)


@pytest.mark.parametrize("bits", [0x7FC0, 0x7F7F])
def test_poison(bits):
    """Results are written everywhere, and neither rows of no expert nor padding is touched."""
    fill = torch.tensor([bits], dtype=torch.int16).view(BF16)
    x, weight, offsets, bias = problem("uneven", 46, 56, bias=True)
    offsets = offsets - torch.tensor([0, 0, 0, 0, 0, 9], dtype=torch.int32)
    want = engine(width=128).grouped_tree(x, weight, offsets, bias)
    parts = engine(width=128).grouped_leaf_sums(x, weight, offsets, 16)
    last = int(offsets[-1])
    with poisoned(fill) as memory, simulated():
        got = launch.grouped_tree(x, weight, offsets, bias)
        sums = launch.grouped_leaf_sums(x, weight, offsets, 16)
    assert same_bytes(got[:last], want[:last]) and same_bytes(sums[:, :last], parts[:, :last])
    for t, columns in zip(memory, (46, 46), strict=True):
        untouched = contract.bits(fill.to(t.dtype))
        assert (contract.bits(t[..., last:, :]) == untouched).all()
        assert (contract.bits(t[..., (columns + 3) // 4 * 4 :]) == untouched).all()


def test_bad_offsets_stay_inside():
    """The simulator stops accesses outside of tensors."""
    tree_cases.inside(engine(), BF16)


def test_the_launchers_tile():
    """Whatever width the launcher chooses, bytes are the same."""

    def run(*operands):
        with simulated(width=None):
            return both(*operands)

    tree_cases.leaves_are_chains(run, "few", 264, 56, BF16)


def test_widths_do_not_read_the_order():
    """No epilogue is given a tile that spills (docs/certificate.md), and every one has tiles."""
    for epilogue in config.TREE_EPILOGUES:
        widths = {
            tiles.tree_width(rows, 8, columns, 132, epilogue)
            for rows in (1, 100, 5000)
            for columns in (64, 500, 4096)
        }
        assert widths <= set(tiles.tree_widths(epilogue)) and max(widths) == max(
            tiles.tree_widths(epilogue)
        )


def test_results_beyond_int32(tmp_path):
    """Row 2 of a result, and leaf 2, start beyond 2^31 elements of sparse memory."""
    rows, n, k, apart = 3, 72, 40, 2**30 + 8192
    x, weight = (cases.drawn(*s, seed=1, dtype=BF16) for s in ((rows, k), (rows, n, k)))
    operands = x, weight, cases.offsets_of([1] * rows)
    files = iter(("y", "leaves"))

    def allocator(shape, dtype, device):
        size = apart * (shape[0] - 1) + torch.Size(shape[1:]).numel()
        file = str(tmp_path / next(files))
        memory = torch.from_file(file, shared=True, size=size, dtype=dtype)
        inner = torch.empty(shape[1:]).stride()
        return lambda: memory.as_strided(shape, (apart, *inner))

    want = engine().grouped_tree(*operands, None), engine().grouped_leaf_sums(*operands, 16)
    with mock.patch.object(launch, "allocator", allocator), simulated():
        got = launch.grouped_tree(*operands, None), launch.grouped_leaf_sums(*operands, 16)
    assert all(same_bytes(*pair) for pair in zip(got, want, strict=True))


# ---- defects -------------------------------------------------------------------------------------


def survives(kernel) -> bool:
    """Whether every run under every setting is right, without a warning."""
    for load, n, k in (("uneven", 136, 1100), ("few", 40, 56)):
        for options in SETTINGS:

            def run(*operands, options=options):
                with simulated(tree_kernel=kernel, **options, **LIMITS):
                    return both(*operands)

            try:
                tree_cases.leaves_are_chains(run, load, n, k, BF16)
            except (ptxsim.PtxsimError, AssertionError):
                return False
            if ptxsim.report()["fence_warnings"]["count"]:
                return False
    return True


EDITS = {
    "leaves_descending": (
        "return leaf * args.length,",
        "return (cute.ceil_div(k, args.length) - 1 - leaf) * args.length,",
    ),
    "leaf_into_the_next_one": (
        "cutlass.min(args.length, k",
        "cutlass.min(cute.ceil_div(args.length, 64) * 64, k",
    ),
    "leaf_0_stored": ("tma.sliced(consumer.d, leaf)", "tma.sliced(consumer.d, 0)"),
    "pairs_of_leaf_0": ("cutlass.Int64(leaf) *", "cutlass.Int64(0) *"),
}


def a_leaf_goes_on(monkeypatch, module):
    monkeypatch.setattr(module.Frame, "chain", module.Frame.add_chain)


DEFECTS = {**RING_DEFECTS, "a_leaf_goes_on": a_leaf_goes_on}


def test_the_kernel_survives():
    assert survives(grouped_tree_kernel)


def mutant_of(module):
    """Builds a module's kernel for the arguments of `launch.grouped_tree_kernel`."""
    kernels = {}

    def kernel(dtype, b_major, epilogue, tile_n):
        if epilogue not in kernels:
            chosen = config.GroupedTreeConfig("bf16", b_major, epilogue, tile_n)
            kernels[epilogue] = module.build(chosen, compile=ptxsim.compile)
        return kernels[epilogue]

    return kernel


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_of_the_ring_is_killed(monkeypatch, name):
    from cute_kernels.moe import kernel_grouped_tree_sm90

    kernel = mutant_of(kernel_grouped_tree_sm90)
    with monkeypatch.context() as patch:
        DEFECTS[name](patch, kernel_grouped_tree_sm90)
        for epilogue in ("leaves", "bias"):
            kernel(BF16, "k", epilogue, 64)
    assert not survives(kernel)


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_killed(tmp_path, name):
    module = edited.changed(tmp_path, "moe.kernel_grouped_tree_sm90", *EDITS[name])
    assert not survives(mutant_of(module))
