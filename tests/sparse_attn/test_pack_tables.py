"""``kernel_varlen_tables_sm90`` in the simulator: its tables are those of `pack_tables`."""

from __future__ import annotations

import pytest
import torch

import ptxsim
from cute_kernels.sparse_attn import launch
from ptxsim import modes
from tests import certified
from tests.contract import same_bytes
from tests.sparse_attn import mutated, simulated
from tests.sparse_attn import pack_tables as known

#: What runs at every commit while the kernels are proved.
EACH_COMMIT = "test_edges test_bounds_of_a_padded_batch test_mutants_are_killed"
pytestmark = certified.marks("sparse_attn", EACH_COMMIT)

ANY = {"async_mode": "random", "warp_order": "random", "cta_order": "random", "seed": 5}
MODES = [
    *(m for m in modes.QUICK_MODES if m.name in ("default", "descending", "races")),
    *(modes.Mode(f"any-{n}", ANY | {"resident_ctas": n}) for n in (1, 2, 7)),
]
#: What no kernel has written.
JUNK = 0x7F7F7F7F


def placed(case: known.Case, tickets: bool = True, pack=None, **options):
    """(table, tickets, how many of them are in use) of the launcher."""
    q = torch.empty(1, case.tokens, case.kv_heads * case.group, 1)
    with simulated.simulated(pack=pack, **options):
        plan = launch.plan_varlen_tables(case.bounds, q, case.kv_heads * tickets, case.window)
        table, out = plan.run(case.bounds)
    if out is None:
        return table, None, 0
    used = int(out[-1, 0])
    assert (out[used:-1] == JUNK).all()
    return table, out[:used], used


def require(case: known.Case, **options) -> None:
    want = known.oracle(case)
    table, tickets, _ = placed(case, **options)
    assert same_bytes(table, torch.from_numpy(want.table)), case
    assert same_bytes(tickets, torch.from_numpy(want.tickets)), case
    alone, none, _ = placed(case, tickets=False, **options)
    assert none is None and same_bytes(alone, table)


def of(sizes: list[int], behind: int = 0, **facts) -> known.Case:
    offsets = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    case = known.Case(known.between(offsets), sum(sizes) + behind, (None, 0))
    return case._replace(**facts)


EDGES = {
    "none": known.Case(torch.zeros(0, 2, dtype=torch.int32), 300, (None, 0)),
    "none of one token": known.Case(torch.zeros(0, 2, dtype=torch.int32), 1, (None, 0)),
    "one": of([1]),
    "one of a block": of([128]),
    "all empty": of([0, 0, 0], 5),
    "ends of blocks": of([1, 127, 128, 129, 0, 255, 256, 257]),
    "tokens behind": of([70, 0, 61], 129),
    "empty ones around": of([0, 0, 300, 0, 0, 5, 0]),
    "one head less than a section": of([300, 140], 9, kv_heads=7, group=1),
    "groups": of([300, 140], 9, kv_heads=3, group=8),
    "a chunk": of([3] * 255, 4),
    "a chunk and the rest": of([3] * 256, 4),
    "a chunk and one": of([5] * 256 + [700]),
    "a long one behind a chunk": of([0] * 300 + [700, 1, 900], 300),
    "one over three chunks": known.Case(
        torch.tensor([[0, 900], *[[0, 0]] * 600, [100, 950]], dtype=torch.int32), 1000, (None, 0)
    ),
    "windows": of([513, 300], 1, window=(130, 260)),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(name):
    require(EDGES[name])


@pytest.mark.parametrize("name", ["ends of blocks", "a long one behind a chunk"])
def test_every_mode_writes_the_same(name):
    """With 16 slices to a chunk, and tickets that are few for them."""
    case = EDGES[name]
    for slices in (1, 3, 16):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "_SLICE", 1)
            patch.setattr(launch, "_MOST_SLICES", slices)
            want = known.oracle(case)
            run = lambda: placed(case)[:2]  # noqa: E731
            table, tickets = modes.run_modes(run, MODES)["default"]
        assert same_bytes(table, torch.from_numpy(want.table))
        assert same_bytes(tickets, torch.from_numpy(want.tickets))


NIGHT = [pytest.param(100 * i, 100, marks=pytest.mark.nightly) for i in range(1, 20)]


@pytest.mark.parametrize(("first", "count"), [(0, 100), *NIGHT])
def test_drawn_offsets(first, count):
    """int32 and int64, with strides; 2,000 by night."""
    for seed in range(first, first + count):
        require(known.drawn(seed))


@pytest.mark.parametrize(("first", "count"), [(0, 60), *NIGHT[:5]])
def test_wild_bounds_stay_inside(first, count):
    """As the oracle has them, which is inside."""
    for seed in range(first, first + count):
        case = known.wild(seed)
        want = known.oracle(case)
        for (shift, end, _, _), block in zip(
            want.table[:-1].tolist(), range(case.blocks), strict=True
        ):
            row = block * 128
            assert end == 0 or (row - shift >= 0 and end - shift <= case.tokens and end > row)
        require(case)


def test_thousands_of_sequences():
    g = torch.Generator().manual_seed(1)
    sizes = torch.randint(0, 40, (3_000,), generator=g).tolist()
    require(of(sizes, 77, kv_heads=5, group=2))


def test_bounds_of_a_padded_batch():
    """Sequences with tokens of none between them: those have no block."""
    bounds = torch.tensor([[3, 140], [140, 150], [260, 400]], dtype=torch.int32)
    out = known.oracle(known.Case(bounds, 420, (None, 0)))
    assert out.table[:, 0].tolist()[:6] == [-3, -3, 116, 124, 124, 240]
    require(known.Case(bounds, 420, (None, 0)))


# ---- mutants -------------------------------------------------------------------------------------

MUTANTS = {
    "bounds not cut": ("cutlass.max(cutlass.min(mBounds[item, 1], limit), 0)", "mBounds[item, 1]"),
    "sequences overlap": ("begin = cutlass.max(begin, cutlass.max(latest, last))", "begin = begin"),
    "the chunk before forgotten": ("latest = cutlass.max(latest, most)", "latest = most"),
    "blocks of another chunk": (
        "base, used = used, used + total",
        "base, used = base, used + total",
    ),
    "a block too few": ("(size + BLOCK - 1) // BLOCK", "(size + BLOCK - 2) // BLOCK"),
    "last of the neighbour": ("+ sequences.blocks[item] - 1", "+ sequences.blocks[item]"),
    "first of the neighbour": ("first = first if item < rest", "first = first - 1 if item < rest"),
    "tokens left attend": ("= count - 1 if chunk == chunks - 1", "= count if chunk == chunks - 1"),
    "one ticket too many": ("heads * used, 0, 0, 0)", "heads * used + 1, 0, 0, 0)"),
    "unordered": ("key == mine) & (other < tidx)", "key == mine) & (other > tidx)"),
    "shortest first": ("(key > mine)", "(key < mine)"),
    "columns ascending": ("block = last - column", "block = first + column"),
    "right off by one": ("block - rule.right)", "block - rule.right + 1)"),
    "left off by one": ("block + rule.left) + 1", "block + rule.left)"),
    "heads descending": ("number - column * width", "width - 1 - (number - column * width)"),
    "the last section wide": ("cutlass.min(heads - section * in_flight, in_flight)", "in_flight"),
    "unused blocks left": ("range(used + number, rows", "range(used + number + 1, rows"),
    "a block more in use": ("0, 0, used, -1)", "0, 0, used + 1, -1)"),
    "no barrier": ("    cute.arch.sync_threads()\n    total = cut", "    total = cut"),
}
CASES = [*EDGES.values(), *(known.wild(seed) for seed in range(6))]


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(tmp_path, name):
    where = "sparse_attn.kernel_varlen_tables_sm90"
    kernel = mutated.kernels(tmp_path, where, *MUTANTS[name])

    def survives(case: known.Case) -> bool:
        try:
            require(case, pack=kernel, warp_order="random", max_steps=2_000_000)
        except (AssertionError, ptxsim.PtxsimError):
            return False
        return True

    assert not all(map(survives, CASES))
