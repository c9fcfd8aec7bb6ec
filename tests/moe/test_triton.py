"""The Triton kernels of moe: their sm_90 code in ptxsim, their source in the interpreter, mutants.

What an engine is, and what a row of a table: tests/triton_runner.py.
"""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

import torch

import cute_kernels.gemm.triton as gemm_package
from cute_kernels.moe.triton import launch as products
from tests.kernels.operands import far_apart
from tests.triton_runner import HOPPER, INTERPRETER, LATE, SM90, Runner, case, mutants

from . import cases
from .cases import BF16, FP16, FP32
from .triton_engine import PRODUCTS, ROUTES

pytestmark = pytest.mark.simulates("moe.triton")

DTYPES = (BF16, FP16, FP32)
LINEAR, TREE = cases.rows_of_linear, cases.rows_of_tree


def drawn(launch, check, count: int) -> None:
    """A check of so many drawn routings."""
    for seed in range(count):
        check(launch, seed)


#: A row of an expert has the bytes of gemm's.
_KERNELS = ("gemm_kernel", "column_sum_kernel", "leaves_kernel", "root_kernel")
GEMM = Runner(gemm_package, dict.fromkeys(_KERNELS, ("out_ptr",)))
AGAINST_GEMM = [
    *(case(SM90, LINEAR, "uneven", dtype, night=dtype != BF16, **HOPPER) for dtype in DTYPES),
    *(case(SM90, LINEAR, "uneven", dtype, night=True, **LATE) for dtype in DTYPES),
    case(SM90, LINEAR, "tiles", BF16, 136, 136, night=True, **HOPPER),
    case(INTERPRETER, LINEAR, "tiles", BF16, 136, 136),
    case(INTERPRETER, LINEAR, "tiles", BF16, 264, 144, night=True),
    *(
        case(SM90, TREE, "uneven", dtype, night=(dtype, late) != (BF16, False), **options)
        for dtype in DTYPES
        for late, options in enumerate((HOPPER, LATE))
    ),
    *(
        case(SM90, TREE, *shape, night=True, **HOPPER)
        for shape in ((load, BF16, n, k) for load, n, k in cases.SHAPES)
    ),
    case(SM90, TREE, "tiles", BF16, 264, 1100, night=True, **HOPPER),
    *(
        case(INTERPRETER, check, load, dtype, night=load != "empty ends")
        for check, load, dtype in itertools.product((LINEAR, TREE), cases.LOADS, (BF16, FP32))
    ),
]


@pytest.mark.simulates("moe.triton", "gemm.triton")
@pytest.mark.parametrize(("engine", "check", "options"), AGAINST_GEMM)
def test_rows_have_the_bytes_of_gemm(engine, check, options):
    with GEMM.running(engine, **options) as gemm, PRODUCTS.running(engine, **options) as launch:
        check(launch, gemm=gemm)


#: By day fewer programs than tiles, and more.
CAPS = [pytest.param(cap, marks=() if cap == 2 else pytest.mark.nightly) for cap in (1, 2, 7, 132)]


@pytest.mark.simulates("moe.triton", "gemm.triton")
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("check", [LINEAR, TREE])
def test_programs(monkeypatch, check, cap):
    monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", str(cap))
    with GEMM.running(INTERPRETER) as gemm, PRODUCTS.running(INTERPRETER) as launch:
        check(launch, "few", BF16, gemm=gemm)


def lanes_of_sm90(launch) -> None:
    """Lane l adds rows l, l + 32, ...; then lanes, ascending: the order of both GPU backends."""
    _, _, offsets, _, dy = cases.operands("uneven", BF16)
    got = launch.grouped_column_sum(dy, offsets)
    for expert, first, end in zip(itertools.count(), offsets, offsets[1:], strict=False):
        lanes, total = torch.zeros(32, dy.shape[1]), torch.zeros(dy.shape[1])
        for i, row in enumerate(dy[first:end].float()):
            lanes[i % 32] += row
        for lane in lanes:
            total += lane
        assert cases.same_bytes(got[expert], total.to(BF16))


def rows_in_any_order(launch) -> None:
    cases.permuted(launch.grouped_tree, BF16)


def far_rows(launch) -> None:
    """Row 2 starts at element 2³¹: operands and results reach it."""
    x, weight, _, _, dy = (t[:3] for t in cases.operands("few", BF16))
    offsets, length = cases.offsets_of([1, 1, 1]), 16
    for run in (
        lambda x, dy: launch.grouped_gemm(x, weight, offsets, None),
        lambda x, dy: launch.grouped_tree(x, weight, offsets, None),
        lambda x, dy: launch.grouped_leaf_sums(x, weight, offsets, length),
        lambda x, dy: launch.grouped_dw(dy, x, offsets, None),
        lambda x, dy: launch.grouped_column_sum(dy, offsets),
    ):
        assert cases.same_bytes(run(far_apart(x), far_apart(dy)), run(x, dy))


def far_slots(launch) -> None:
    """As `far_rows`, of rows that are moved."""
    x = cases.operands("few", BF16)[0][:3]
    offsets, weights = cases.offsets_of([1, 1, 1]), torch.rand(3, 1)
    order, positions = torch.tensor([[2, 0, 1], [1, 2, 0]], dtype=torch.int32)
    slots = positions[:, None]
    for run in (
        lambda x: launch.gather(x, offsets, order, slots),
        lambda x: launch.combine(x, None, offsets, positions[None]),
        lambda x: torch.cat(launch.combine_backward(x, x, weights, offsets, order, slots), 1),
    ):
        assert cases.same_bytes(run(far_apart(x)), run(x))


#: Of checks in the simulator.
BY_DAY = cases.pieces, cases.inside, cases.leaves_of_ranks
ALONE = [
    *(
        case(SM90, check, dtype, night=dtype != BF16 or check not in BY_DAY, **HOPPER)
        for check, dtype in itertools.product((*cases.PRODUCTS, cases.inside), DTYPES)
    ),
    *(
        case(INTERPRETER, check, dtype, night=dtype != BF16)
        for check, dtype in itertools.product((*cases.PRODUCTS, cases.inside), (BF16, FP32))
    ),
    case(SM90, lanes_of_sm90, **LATE),
    case(SM90, rows_in_any_order, night=True, **HOPPER),
    case(INTERPRETER, rows_in_any_order),
    *(case(engine, cases.minus_zeros) for engine in (SM90, INTERPRETER)),
    case(SM90, far_rows),
]


@pytest.mark.parametrize(("engine", "check", "options"), ALONE)
def test_products(engine, check, options):
    with PRODUCTS.running(engine, **options) as launch:
        check(launch)


def positions_outside(launch) -> None:
    """Rows and gradients of positions that are no rows reach nothing."""
    x, order = torch.ones(2, 32), torch.arange(4, dtype=torch.int32)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    positions = torch.tensor([[0, 2**31 - 1], [-5, 3]], dtype=torch.int32)
    launch.gather(x, offsets, order, positions)
    rows, weights = torch.ones(4, 32), torch.ones(2, 2)
    _, got = launch.combine_backward(x, rows, weights, offsets, order, positions)
    assert got.tolist() == [[32, 0], [0, 32]]


ROUTED = [
    *(
        case(engine, check, **options)
        for engine, options in ((SM90, LATE), (INTERPRETER, {}))
        for check in cases.SINGLE
    ),
    *(case(SM90, drawn, check, 5, **LATE) for check in cases.DRAWN),
    *(case(SM90, drawn, check, 60, night=True, **LATE) for check in cases.DRAWN),
    *(case(INTERPRETER, drawn, check, 6, night=True) for check in cases.DRAWN),
    # Blocks of slots; with 700 experts several groups of slots a block.
    case(SM90, cases.many_slots, 1500, 5, **LATE),
    case(SM90, cases.many_slots, 2100, 700, night=True, **LATE),
    case(INTERPRETER, cases.many_slots, 1100, 1000),
    case(SM90, positions_outside),
    case(SM90, far_slots),
]


@pytest.mark.parametrize(("engine", "check", "options"), ROUTED)
def test_routing(engine, check, options):
    with ROUTES.running(engine, **options) as launch:
        check(launch)


def test_one_binary_for_every_number_of_rows():
    """Neither tokens nor loads select another binary."""
    found = set()
    for load in ("few", "empty ends", "tiles"):
        x, weight, _, _, dy = cases.operands(load, BF16, 40, 264)
        weight = weight[:1].expand(4, -1, -1).contiguous()
        counts = (cases.LOADS[load] + [0] * 4)[:4]
        offsets, rows = cases.offsets_of(counts), sum(counts)
        for call in (
            lambda: products.grouped_gemm(x[:rows], weight, offsets, None),  # noqa: B023
            lambda: products.grouped_dw(dy[:rows], x[:rows], offsets, None),  # noqa: B023
            lambda: products.grouped_tree(x[:rows], weight, offsets, None),  # noqa: B023
            lambda: products.grouped_leaf_sums(x[:rows], weight, offsets, 48),  # noqa: B023
        ):
            found |= {kernel.hash for kernel in PRODUCTS.compiled("sm_90", call)}
    assert len(found) == 4


# ---- mutants -------------------------------------------------------------------------------------

#: Of products, against gemm's.
MUTANTS = {
    "leaf_into_the_next_one": (
        *(INTERPRETER, TREE, "few", BF16),
        ("size = tl.minimum(K - first, length)", "size = tl.minimum(K - first, length + 16)"),
    ),
    "leaves_descending": (
        *(INTERPRETER, TREE, "few", FP32),
        ("leaf, length, b_ptrs", "leaves - 1 - leaf, length, b_ptrs"),
    ),
    "tree_of_the_next_expert": (
        *(INTERPRETER, TREE, "uneven", BF16),
        ("in_m = (rows < count)[None, :]", "in_m = (rows < T - row0)[None, :]"),
    ),
    "tail_of_the_next_expert": (
        *(INTERPRETER, LINEAR, "uneven", BF16),
        ("in_m = (rows < count)[:, None]", "in_m = (rows < T - row0)[:, None]"),
    ),
    "tail_of_tokens_multiplied": (
        *(INTERPRETER, LINEAR, "uneven", BF16),
        ("in_m, in_n, count, acc", "in_m, in_n, T - row0, acc"),
    ),
    "k_descending": (
        *(INTERPRETER, LINEAR, "few", FP32, 40, 200),
        ("for step in tl.range(0, steps):", "for step in tl.range(steps - 1, -1, -1):"),
    ),
    "block_k_of_main_grad": (
        *(INTERPRETER, LINEAR, "uneven", BF16),
        ("plan.accumulate_k if accumulate else plan.block_k", "plan.block_k"),
    ),
    "main_grad_from_zero": (
        *(INTERPRETER, LINEAR, "uneven", BF16),
        (
            "acc = tl.load(out_ptrs, mask=stored, other=0.0)",
            "acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)",
        ),
    ),
    "no_tile_of_a_tail": (
        *(INTERPRETER, LINEAR, "tiles", BF16),
        (
            "heights = rows_of_each // BLOCK_M + (rows_of_each % BLOCK_M > 0).to(tl.int32)",
            "heights = rows_of_each // BLOCK_M",
        ),
    ),
    "bias_of_expert_0": (
        *(INTERPRETER, LINEAR, "few", BF16),
        (
            "tl.cast(expert, tl.int64) * bias_e\n            bias_ptrs += columns.",
            "tl.cast(expert, tl.int64) * 0\n            bias_ptrs += columns.",
        ),
    ),
    "tree_bias_of_expert_0": (
        *(INTERPRETER, TREE, "few", BF16),
        (
            "bias_ptrs = bias_ptr + tl.cast(expert, tl.int64) * bias_e\n                bias_ptrs",
            "bias_ptrs = bias_ptr + tl.cast(expert, tl.int64) * 0\n                bias_ptrs",
        ),
    ),
    "lanes_descending": (
        *(INTERPRETER, LINEAR, "uneven", FP32),
        ("for lane in tl.range(0, LANES):", "for lane in tl.range(LANES - 1, -1, -1):"),
    ),
}


@pytest.mark.parametrize(("engine", "check", "edits"), mutants(MUTANTS))
def test_killed(monkeypatch, engine, check, edits):
    # By two programs, one after the other: tiles of the first do not hide what the second spoils.
    monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", "2")
    with GEMM.running(engine) as gemm:
        PRODUCTS.kill(engine, lambda launch: check(launch, gemm=gemm), *edits)


#: Offsets of 32 bits leave the tensor, or wrap inside it.
MUTANTS_ALONE = {
    "leaves_of_the_slice": (
        *(INTERPRETER, cases.leaves_of_ranks, FP32),
        (
            "    count, shape = plans.cdiv(",
            "    length = leaves.length(a.shape[1])\n    count, shape = plans.cdiv(",
        ),
    ),
    "narrow_offsets": (
        *(SM90, far_rows),
        (
            "row_offsets = (tl.cast(row0, tl.int64) + rows)[:, None]",
            "row_offsets = (row0 + rows)[:, None]",
        ),
    ),
    "narrow_offsets_of_the_tree": (
        *(SM90, far_rows),
        (
            "row_offsets = (tl.cast(row0, tl.int64) + rows)[None, :]",
            "row_offsets = (row0 + rows)[None, :]",
        ),
    ),
}


@pytest.mark.parametrize(("engine", "check", "edits"), mutants(MUTANTS_ALONE))
def test_killed_alone(engine, check, edits):
    PRODUCTS.kill(engine, check, *edits)


MANY = INTERPRETER, cases.many_slots, 1100, 1000
SORTED, COMBINED, ABSENT = (
    (INTERPRETER, drawn, check, 30)
    for check in (cases.sorted_slots, cases.combined, cases.without_an_expert)
)

ROUTING_MUTANTS = {
    "tie_by_highest": (
        *(INTERPRETER, cases.ties),
        (
            "expert = tl.min(tl.min(tl.where(equal, index, _MOST), axis=1), axis=0)",
            "expert = tl.max(tl.max(tl.where(equal, index, -1), axis=1), axis=0)",
        ),
    ),
    "zeros_apart": (*(INTERPRETER, cases.ties), ("bits = (value + 0.0).to", "bits = value.to")),
    "order_by_load": (
        *SORTED,
        (
            "starts = tl.cumsum(totals, 0) - totals",
            "starts = tl.sum(totals, axis=0) - tl.cumsum(totals, 0)",
        ),
    ),
    "unstable": (*SORTED, ("(here[None, :] < here[:, None])", "(here[None, :] > here[:, None])")),
    "counts_of_this_block_too": (*MANY, ("tl.where(other < block,", "tl.where(other <= block,")),
    "groups_of_a_block_apart": (*MANY, ("run += tl.sum(chosen.to(tl.int32), axis=0)", "run += 0")),
    "slots_without_an_expert_by_block": (
        *MANY,
        ("none = placed + (block * SPAN).to(tl.int32) - tl.sum(run, axis=0)", "none = placed"),
    ),
    "rows_of_the_first_slots": (
        *COMBINED,
        ("slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)", "slot = tl.arange(0, SLOTS)"),
    ),
    "rows_of_the_next_token": (
        *COMBINED,
        (
            "row = tl.load(positions_ptr + token * K + slot, mask=",
            "row = tl.load(positions_ptr + (token * K + slot + 1) % rows, mask=",
        ),
    ),
    "rows_of_no_expert_added": (
        *ABSENT,
        ("has_expert = last < placed\n", "has_expert = first + i < K\n"),
    ),
    "no_expert_as_a_term": (
        *ABSENT,
        (
            "total = tl.where(experts[i], added, total)",
            "total = tl.where(first + i < K, added, total)",
        ),
    ),
    "weight_gradient_of_no_expert": (
        *ABSENT,
        (
            "total = tl.where(has_expert, over_columns(lanes, SLOTS, LANES), 0.0)",
            "total = over_columns(lanes, SLOTS, LANES)",
        ),
    ),
    "row_gradient_of_no_expert": (
        *ABSENT,
        ("d_row = tl.where(has_expert[:, None], dy * weight, 0.0)", "d_row = dy * weight"),
    ),
    "row_of_no_expert": (
        *ABSENT,
        ("kept = tl.where(row < placed, value, tl.zeros_like(value))", "kept = value"),
    ),
    "gradient_of_no_weight": (
        *ABSENT,
        ("last % K_ROOM, mask=last // K_ROOM < E, other=0.0)", "last % K_ROOM)"),
    ),
    "combine_by_arrival": (
        *COMBINED,
        (
            "last = tl.min(tl.where(position > last, position, _MOST), axis=0)",
            "last = tl.max(tl.where(slot == first + i, position, -1), axis=0)",
        ),
    ),
    "combine_from_zero": (
        *(INTERPRETER, cases.zeros_keep_their_sign),
        ("added = tl.where(first + i == 0, term, total + term)", "added = total + term"),
    ),
    "weights_by_slot": (
        *(INTERPRETER, drawn, cases.weights, 30),
        (
            "last = tl.min(tl.where(keys > last, keys, _MOST), axis=0)\n"
            "            term = _score(scores_ptr, token, last // K_ROOM, E, scores_t, scores_e)\n"
            "            total",
            "last = tl.max(tl.where(slot == rank, keys, -1), axis=0)\n"
            "            term = _score(scores_ptr, token, last // K_ROOM, E, scores_t, scores_e)\n"
            "            total",
        ),
    ),
    "two_best_without_a_bias": (
        *(INTERPRETER, drawn, cases.choices, 30),
        ("if bias_ptr is not None and SIZE_ROOM > 1:", "if SIZE_ROOM > 1:"),
    ),
}


@pytest.mark.parametrize(("engine", "check", "edits"), mutants(ROUTING_MUTANTS))
def test_routing_killed(engine, check, edits):
    ROUTES.kill(engine, check, *edits)
