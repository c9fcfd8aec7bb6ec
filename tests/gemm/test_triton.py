"""The Triton gemm: its sm_90 code in ptxsim and its source in the interpreter, and their mutants.

What an engine is, and what a row of a table: tests/triton_runner.py.
"""

from __future__ import annotations

import itertools
from unittest import mock

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.gemm.triton import launch
from cute_kernels.schedulers.tiles import leaves
from ptxsim.skips import requires_core
from tests.triton_runner import HOPPER, INTERPRETER, LATE, SM90, case, mutants

from . import triton_cases as cases
from .triton_cases import BF16, CHAIN, FP16, FP32, TREE
from .triton_engine import RUNNER

pytestmark = pytest.mark.simulates("gemm.triton")

DTYPES, ORDERS = (BF16, FP16, FP32), (CHAIN, TREE)
SHAPES = ((1, 1, 1), (127, 129, 65), (130, 7, 200))
COUNTS = (1, 2, 13, 16, 17, 32, 33, 64, 65, 103, 127)
PAIRS = (("mn", "k"), ("padded", "offset"))
EVERY_PAIR = tuple(itertools.product(cases.LAYOUTS, repeat=2))

CHECKS = [
    # Bits: by day each dtype and each epilogue.
    *(
        case(SM90, cases.chain_bits, *shape, dtype, epilogue, night=i != j)
        for i, dtype in enumerate(DTYPES)
        for j, epilogue in enumerate(cases.EPILOGUES)
        for shape in SHAPES
    ),
    case(SM90, cases.tree_bits, 1, 1, 1, BF16, "n"),
    case(SM90, cases.tree_bits, 13, 144, 1440, BF16, "rows"),
    case(SM90, cases.tree_bits, 33, 70, 520, FP16, None, night=True),
    case(SM90, cases.tree_bits, 16, 31, 1030, FP32, "n", night=True),
    case(SM90, cases.tree_bits, 103, 128, 2888, BF16, "n", night=True),
    *(
        case(SM90, cases.tree_bits, *shape, dtype, bias, night=True)
        for shape in ((1, 16, 15), (127, 129, 65), (65, 33, 129), (128, 7, 2047))
        for dtype, bias in itertools.product(DTYPES, cases.BIASES)
    ),
    *(case(INTERPRETER, cases.accuracy, 17, 33, 130, dtype) for dtype in DTYPES),
    *(case(INTERPRETER, cases.accuracy, 130, 7, 200, dtype, night=True) for dtype in DTYPES),
    *(
        case(INTERPRETER, cases.blocks_in_order, dtype, order, night=dtype == FP16)
        for dtype, order in itertools.product(DTYPES, ORDERS)
    ),
    case(SM90, cases.signs),
    *(case(SM90, cases.fast, dtype, night=dtype != BF16, **HOPPER) for dtype in DTYPES),
    # Rows and columns.
    case(SM90, cases.rows_alone, BF16, CHAIN, **HOPPER),
    case(SM90, cases.rows_alone, BF16, CHAIN, night=True, **LATE),
    case(SM90, cases.rows_alone, BF16, TREE, (1, 13, 33, 103), **HOPPER),
    case(SM90, cases.rows_alone, BF16, TREE, COUNTS, night=True, **LATE),
    case(SM90, cases.bias_rows_alone, BF16, COUNTS, night=True, **HOPPER),
    *(
        case(SM90, cases.rows_alone, dtype, TREE, tuple(range(1, 129)), night=True, **HOPPER)
        for dtype in DTYPES
    ),
    *(
        case(INTERPRETER, cases.rows_alone, dtype, order, night=order == TREE)
        for dtype, order in itertools.product(DTYPES, ORDERS)
    ),
    case(INTERPRETER, cases.bias_rows_alone, BF16, night=True),
    case(SM90, cases.neighbours, BF16, CHAIN, **LATE),
    *(
        case(SM90, cases.neighbours, dtype, order, night=(dtype, order) != (BF16, TREE), **HOPPER)
        for dtype, order in itertools.product(DTYPES, ORDERS)
    ),
    *(
        case(INTERPRETER, cases.neighbours, dtype, order, night=dtype != FP16)
        for dtype, order in itertools.product(DTYPES, ORDERS)
    ),
    # Cuts of K and of tokens.
    case(SM90, cases.pieces, BF16, **LATE),
    case(SM90, cases.pieces, BF16, "k", **HOPPER),
    *(case(SM90, cases.pieces, dtype, night=True, **HOPPER) for dtype in DTYPES),
    *(case(INTERPRETER, cases.pieces, dtype, night=dtype == BF16) for dtype in DTYPES),
    *(case(SM90, cases.slices, dtype, night=dtype != BF16, **HOPPER) for dtype in DTYPES),
    # Grids, layouts, offsets.
    *(case(SM90, cases.grids, dtype, night=dtype != BF16) for dtype in DTYPES),
    *(case(INTERPRETER, cases.grids, dtype, night=True) for dtype in DTYPES),
    case(SM90, cases.layouts, BF16, CHAIN, PAIRS, **HOPPER),
    case(SM90, cases.layouts, BF16, TREE, PAIRS[:1], **HOPPER),
    case(INTERPRETER, cases.layouts, FP32, TREE, PAIRS),
    *(
        case(engine, cases.layouts, dtype, order, EVERY_PAIR, night=True)
        for engine, dtype, order in itertools.product((SM90, INTERPRETER), DTYPES, ORDERS)
    ),
    case(SM90, cases.far_offsets),
    case(SM90, cases.far_leaves),
    # Sums of rows, and of leaves.
    case(SM90, cases.column_sums, BF16, cases.ROWS[2:3]),
    *(case(SM90, cases.column_sums, dtype, night=True) for dtype in DTYPES),
    *(case(INTERPRETER, cases.column_sums, dtype, night=dtype == FP16) for dtype in DTYPES),
    case(SM90, cases.leaves_as_torch, BF16, cases.SPLITS[::3], ()),
    *(case(SM90, cases.leaves_as_torch, dtype, night=True) for dtype in DTYPES),
    *(
        case(engine, check)
        for engine in (SM90, INTERPRETER)
        for check in (cases.leaves_in_place, cases.leaves_of_minus_zeros)
    ),
    case(INTERPRETER, cases.leaves_as_torch, FP32),
]


@pytest.mark.parametrize(("engine", "check", "options"), CHECKS)
def test_values(engine, check, options):
    with RUNNER.running(engine, **options) as module:
        check(module)


#: vLLM #35183's lists.
VLLM_K, VLLM_N = (2880, 2888, 3072, 3080), (128, 144, 256, 272, 640, 656)
VLLM_ROWS = (13, 16, 32, 64, 103, 128)


@pytest.mark.nightly
@pytest.mark.sim
@requires_core
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("k", "n"), list(itertools.product(VLLM_K, VLLM_N)))
def test_vllm_shapes(k, n, dtype):
    """Its rows, biases and padded rows: the bytes of the reference, and of gemm."""
    a, b = cases.operands(128, n, k, dtype, cancel="middle")
    plain = cases.tree(a, b)
    with RUNNER.running(SM90) as module:
        assert cases.differing(module.gemm(a, b, None, None, TREE), plain) == 0
        for i, rows in enumerate(VLLM_ROWS):
            bias = cases.bias_of(cases.BIASES[i % 4], rows, n, dtype)
            want = plain[:rows] if bias is None else cases.tree(a[:rows], b, bias)
            x = cases.laid_out(a[:rows], ("k", "padded")[i % 2])
            assert cases.differing(cases.skinny(module, x, b, bias), want) == 0, rows


@pytest.mark.sim
@requires_core
def test_arrival_shows_in_the_fast_variant_only():
    """The control: dispatched backwards, unordered leaves have other bytes."""
    a, b = cases.operands(13, 70, 520, BF16, cancel="middle")
    outs = []
    for order in (0, 2):
        with RUNNER.running(SM90, cta_order=order, resident_ctas=1) as module:
            outs.append([cases.skinny(module, a, b, None, ordered) for ordered in (True, False)])
    assert cases.differing(outs[0][0], outs[1][0]) == 0
    assert cases.differing(outs[0][1], outs[1][1]) > 0


@pytest.mark.parametrize("deterministic", [True, False])
def test_workspace_bound(monkeypatch, deterministic):
    """One byte less than the sums need, and one program adds them all, with the same bytes."""
    m, n, k = 13, 70, 520
    a, b = cases.operands(m, n, k, BF16, cancel="middle")
    need = 4 * m * n * (leaves.count(k) if deterministic else 1)
    outs, roots = [], []
    with RUNNER.running(INTERPRETER) as module:
        root = module._launch_root
        monkeypatch.setattr(module, "_launch_root", lambda *of: (roots.append(1), root(*of)))
        for bound in (need, need - 1):
            monkeypatch.setattr(module.plans, "WORKSPACE", bound)
            outs.append(cases.skinny(module, a, b, None, deterministic))
            assert len(roots) == 1
        assert cases.differing(outs[1], module.gemm(a, b, None, None, TREE)) == 0
    assert not deterministic or cases.differing(*outs) == 0


def test_workspace_of_a_large_vocabulary():
    """2³³ bytes of sums, beyond int32, are not asked for: meta tensors have none."""
    x, w = torch.empty(128, 4096, device="meta"), torch.empty(2**21, 4096, device="meta")
    skinny_plan = launch.plans.skinny("gfx942", launch.TRITON)
    with mock.patch.object(launch, "_launch_leaves") as launched:
        launch._launch_skinny(x, w, None, True, skinny_plan, 2**20)
    (call,) = launched.call_args_list
    assert call.args[4] == "tree" and call.args[5].share == 8


@pytest.mark.parametrize("cap", ["0", "1", "3", "500"])
def test_grid(monkeypatch, cap):
    """One program per tile, at most one per SM, at most the cap."""
    monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", cap)
    with RUNNER.running(INTERPRETER) as module:
        assert module.most_ctas(torch.device("cuda:0")) == min(int(cap) or 132, 132)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_data_can_show_an_order(dtype, order):
    """Rounded, more than a tenth of the outputs tell ascending from descending K, or leaves."""
    if order == TREE:
        sums = cases.leaf_chains(*cases.operands(13, 70, 520, dtype, cancel="middle"))
        up, down = (cases.added(of, None, dtype) for of in (sums, sums.flip(0)))
    else:
        a, b = cases.operands(130, 7, 200, dtype, cancel="last")
        a, b = (torch.cat((t, t.new_zeros(len(t), 8)), 1) for t in (a, b))
        back = torch.arange(208).view(13, 16).flip(0).reshape(-1)
        up, down = cases.chain(a, b).to(dtype), cases.chain(a[:, back], b[:, back]).to(dtype)
    assert (up != down).float().mean() > 0.1


# ---- mutants -------------------------------------------------------------------------------------

K_LOOP = "for step in tl.range(0, steps):\n"
BY_M = (
    "rows = tl.sum(in_m.to(tl.int32))\n    for up in tl.range(0, steps):\n"
    "        step = up if rows > 32 else steps - 1 - up\n"
)
SIZES = "    (m, k), n = a.shape, b.shape[0]\n    plan = plan_of(a.dtype)\n"
SPLIT_BY_M = SIZES + (
    "    if m < 32 and k > 64 and accumulator is None:\n"
    "        left = _launch(a[:, :64], b[:, :64], bias, None, programs)\n"
    "        return left + _launch(a[:, 64:], b[:, 64:], None, None, programs)\n"
)
START = "            acc = tl.load(out_ptrs, mask=in_m & in_n, other=0.0)\n"
FROM_ZERO = "            acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)\n"
BIAS = "\n        if bias_ptr is not None:\n"
ADD_LATE = "\n        if ACCUMULATE:\n            acc += before" + BIAS
STORE = "tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_m & in_n)"
LOAD_A = "a = tl.load(a_ptrs + step * a_step, mask=in_m & in_k[None, :], other=0.0)"
LOAD_B = "b = tl.load(b_ptrs + step * b_step, mask=in_k[:, None] & in_n, other=0.0)"
WHOLE_A = LOAD_A.replace("in_m & in_k[None, :]", "in_m")
ADD_BIAS = "acc += bias.to(tl.float32)[None, :]"
ROUND_FIRST = "acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32) + bias.to(tl.float32)[None, :]"
LANE = "for lane in tl.range(0, LANES):"
PARTIAL = "partial += tl.load(ptrs + step * stride, mask=in_m & in_n, other=0.0).to(tl.float32)"

SUM = "total = tl.where(leaf == first_leaf, acc, total + acc)"
STORE_LEAF = "tl.store(out_ptrs + tl.cast(leaf, tl.int64) * M * N, acc, mask=in_n & in_m)"
ROUNDED = "acc.to(tl.bfloat16).to(tl.float32)"
WORK = "work = _work(m, n, leaves.length(k), leaves.count(k), plan, compute_units)"
SLICE = "work = _work(m, n, length, cdiv(k, length), plan, compute_units)"
FULL = "torch.full((1, m, n), -0.0,"
ROOT = "total += tl.load(sum_ptrs + leaf * size, mask=in_n, other=0.0)"
FIRST = "total = tl.load(sum_ptrs, mask=in_n, other=0.0)"
STRIDED = "in_n, in_m, K, zero,"
ADD_ROOT_BIAS = "        total += tl.load(bias_ptrs, mask=in_n, other=0.0).to(tl.float32)\n"
ROOT_BIAS = "        bias_ptrs = bias_ptr + row * bias_m + columns * bias_n\n"
ROUND_TOTAL = "        total = total.to(out_ptr.dtype.element_ty).to(tl.float32)\n"
IN_ROWS = "row_offsets = rows.to(tl.int64)[:, None]"

CHAIN_BITS = SM90, cases.chain_bits, 130, 7, 200, BF16
TREE_BITS = SM90, cases.tree_bits, 13, 70, 520, BF16
BLOCKS, TREE_BLOCKS = ((INTERPRETER, cases.blocks_in_order, BF16, order) for order in ORDERS)
ACCURACY = INTERPRETER, cases.accuracy, 17, 33, 130, FP32
ROWS = INTERPRETER, cases.rows_alone, FP32, CHAIN
NEIGHBOURS = INTERPRETER, cases.neighbours, FP32, CHAIN
STORED = SM90, cases.neighbours, BF16, CHAIN
PIECES = INTERPRETER, cases.pieces, BF16
COLUMNS = INTERPRETER, cases.column_sums
LEAVES = INTERPRETER, cases.leaves_as_torch, FP32

MUTANTS = {
    # The chain.
    "k_descending": (*CHAIN_BITS, "plain", (K_LOOP, "for step in tl.range(steps - 1, -1, -1):\n")),
    "blocks_descending": (*BLOCKS, (K_LOOP, "for step in tl.range(steps - 1, -1, -1):\n")),
    "k_order_by_m": (*ROWS, (K_LOOP, BY_M)),
    "split_k_by_m": (*ROWS, (SIZES, SPLIT_BY_M)),
    "block_k_by_m": (
        *ROWS,
        (
            "dot_options(plan, accumulate, interpret)",
            "dot_options(plan, accumulate or m < 32, interpret)",
        ),
    ),
    "last_k_group_dropped": (*ACCURACY, ("steps = (K - 1) // BLOCK_K + 1", "steps = K // BLOCK_K")),
    "k_tail_multiplied": (
        *NEIGHBOURS,
        (LOAD_A, WHOLE_A + "\n        a = a * in_k[None, :].to(a.dtype)"),
    ),
    "k_tail_of_one_operand_unmasked": (*NEIGHBOURS, (LOAD_A, WHOLE_A)),
    "n_tail_unmasked": (*CHAIN_BITS, "plain", (LOAD_B, LOAD_B.replace(" & in_n", ""))),
    "m_tail_stored": (*STORED, (STORE, STORE.replace("in_m & in_n", "in_n"))),
    "n_tail_stored": (*STORED, (STORE, STORE.replace("in_m & in_n", "in_m"))),
    "bias_after_the_rounding": (*CHAIN_BITS, "bias", (ADD_BIAS, ROUND_FIRST)),
    "bias_added_twice_rounded_once": (
        *ACCURACY,
        (ADD_BIAS, ADD_BIAS + "\n            " + ADD_BIAS),
    ),
    "accumulator_added_at_the_end": (
        *PIECES,
        (START, START.replace("acc =", "before =") + FROM_ZERO),
        (BIAS, ADD_LATE),
    ),
    "accumulator_ignored": (*ACCURACY, (START, FROM_ZERO)),
    "wide_dot_in_the_accumulate_path": (
        *PIECES,
        ("plan.accumulate_k if accumulate else plan.block_k", "plan.block_k"),
    ),
    "stride_of_the_grid_fixed": (
        *(INTERPRETER, cases.grids, BF16),
        ("tiles_n, tl.num_programs(0)):", "tiles_n, 132):"),
    ),
    "raster_ignores_the_last_group": (
        *(INTERPRETER, cases.grids, BF16),
        ("height = tl.minimum(tiles_m - first_m, GROUP_M)", "height = GROUP_M"),
    ),
    "alignment_taken_on_trust": (
        *(*CHAIN_BITS, "plain"),
        ("return 16 if size % 16 == 0 and 1 in strides else 1", "return 16"),
    ),
    "guard_dropped": (
        *ACCURACY,
        ("with torch.cuda.device(a.device):\n        if order", "if True:\n        if order"),
    ),
    "offsets_of_32_bits": (
        *(SM90, cases.far_offsets),
        (IN_ROWS, IN_ROWS.replace(".to(tl.int64)", "")),
    ),
    "lanes_of_32_bits": (
        *(SM90, cases.far_offsets),
        ("tl.arange(0, LANES).to(tl.int64)", "tl.arange(0, LANES)"),
    ),
    # Sums of rows.
    "lanes_descending": (*COLUMNS, FP32, (LANE, "for lane in tl.range(LANES - 1, -1, -1):")),
    "lanes_as_a_tree": (
        *(SM90, cases.column_sums, FP32),
        (
            "total += tl.sum(tl.where((lanes == lane)[:, None], partial, 0.0), axis=0)",
            "total = tl.sum(partial, axis=0)",
        ),
    ),
    "row_tail_unmasked": (*COLUMNS, FP32, (PARTIAL, PARTIAL.replace("in_m & in_n", "in_n"))),
    "partial_sums_rounded": (
        *(*COLUMNS, BF16),
        (PARTIAL, PARTIAL + "\n        partial = partial.to(ptrs.dtype.element_ty).to(tl.float32)"),
    ),
    # The tree.
    "leaves_by_m": (
        *(INTERPRETER, cases.rows_alone, BF16, TREE, (13, 33)),
        (WORK, f"cut = k if m > 16 else 2 * k\n    {WORK}".replace("length(k)", "length(cut)")),
        (
            "if work.share == work.leaves or",
            "work = work._replace(leaves=-(-k // work.length))\n"
            "    count = min(count, work.leaves)\n    if work.share == work.leaves or",
        ),
    ),
    "small_tiles_take_k_backwards": (
        *TREE_BLOCKS,
        (
            K_LOOP,
            "for up in tl.range(0, steps):\n"
            "        step = up if acc.shape[1] > 16 else steps - 1 - up\n",
        ),
    ),
    "leaves_rounded": (*TREE_BITS, "rows", (STORE_LEAF, STORE_LEAF.replace("acc,", f"{ROUNDED},"))),
    "leaves_rounded_in_registers": (*TREE_BLOCKS, (SUM, SUM.replace("acc)", f"{ROUNDED})"))),
    "root_descending": (*TREE_BLOCKS, (ROOT, ROOT.replace("leaf *", "(LEAVES - leaf) *"))),
    "root_pairwise": (
        *TREE_BLOCKS,
        (
            ROOT,
            "total += tl.load(sum_ptrs + leaf * size, mask=in_n, other=0.0) if leaf % 2 == 0 "
            "else 0.0\n    odd = tl.load(sum_ptrs + size, mask=in_n, other=0.0)\n"
            "    for leaf in tl.static_range(3, LEAVES, 2):\n"
            "        odd += tl.load(sum_ptrs + leaf * size, mask=in_n, other=0.0)\n"
            "    total += odd",
        ),
    ),
    "tree_descending": (
        *TREE_BLOCKS,
        ("leaf, length, b_ptrs", "leaves - 1 - leaf, length, b_ptrs"),
    ),
    "leaf_into_the_next_one": (
        *TREE_BLOCKS,
        ("size = tl.minimum(K - first, length)", "size = tl.minimum(K - first, length + 16)"),
    ),
    "one_chain": (
        *TREE_BLOCKS,
        (STRIDED, STRIDED.replace("zero", "tl.where(leaf == first_leaf, zero, total)")),
        (SUM, "total = acc"),
    ),
    "tree_from_plus_zero": (INTERPRETER, cases.signs, (SUM, "total = total + acc")),
    "root_from_plus_zero": (INTERPRETER, cases.signs, (FIRST, FIRST.replace("= tl", "= 0.0 + tl"))),
    "atomics_from_plus_zero": (INTERPRETER, cases.signs, (FULL, FULL.replace("-0.0", "0.0"))),
    "unzeroed_workspace": (INTERPRETER, cases.fast, BF16, (FULL, "torch.empty(1, m, n,")),
    "last_leaf_dropped": (
        *TREE_BLOCKS,
        (
            "tl.range(first_leaf, tl.minimum(first_leaf + share, leaves))",
            "tl.range(first_leaf, tl.minimum(first_leaf + share, leaves - 1))",
        ),
    ),
    "bias_dropped_after_atomics": (
        *(INTERPRETER, cases.fast, BF16),
        (
            "_launch_root((sums,), bias, out, plan)",
            "_launch_root((sums,), bias if deterministic else None, out, plan)",
        ),
    ),
    "bias_of_the_first_row": (INTERPRETER, cases.fast, BF16, ("row * bias_m", "0 * bias_m")),
    "root_bias_after_the_rounding": (
        *(*TREE_BITS, "rows"),
        (ADD_ROOT_BIAS, ROUND_TOTAL + ADD_ROOT_BIAS),
    ),
    "row_tail_of_leaves_stored": (
        *(SM90, cases.tree_bits, 13, 64, 520, BF16, "rows"),
        (STORE_LEAF, STORE_LEAF.replace("in_n & in_m", "in_n")),
    ),
    "column_tail_of_leaves_stored": (
        *(SM90, cases.tree_bits, 16, 70, 520, BF16, "rows"),
        (STORE_LEAF, STORE_LEAF.replace("in_n & in_m", "in_m")),
    ),
    "slices_with_leaves_of_their_own": (INTERPRETER, cases.slices, BF16, (SLICE, WORK)),
    "rows_taken_as_aligned": (
        *(SM90, cases.tree_bits, 13, 21, 130, BF16, "rows"),
        ("return 8 if t.stride(1) == 1 and t.stride(0) % 8 == 0 else 1", "return 8"),
    ),
    "k_taken_as_aligned": (
        *(SM90, cases.tree_bits, 13, 21, 130, BF16, "rows"),
        ("return 8 if k % 16 == 8 and 1 in strides else", "return 8 if k % 2 == 0 else"),
    ),
    "guard_of_skinny_dropped": (*TREE_BLOCKS, ("with torch.cuda.device(x.device):", "if True:")),
    # Sums of leaves.
    "leaves_descending": (
        *LEAVES,
        ("tl.load(sum_ptrs, mask", "tl.load(sum_ptrs + (LEAVES - 1) * size, mask"),
        ("sum_ptrs + leaf * size", "sum_ptrs + (LEAVES - 1 - leaf) * size"),
    ),
    "second_descending": (
        *LEAVES,
        (
            "second_ptr, offsets, second_l",
            "second_ptr, offsets + (SECOND - 1) * second_l, -second_l",
        ),
    ),
    "third_descending": (
        *LEAVES,
        ("third_ptr, offsets, third_l", "third_ptr, offsets + (THIRD - 1) * third_l, -third_l"),
    ),
    "third_before_second": (
        *LEAVES,
        (
            "first, second, third = (*sums, None, None)[:3]",
            "first, second, third = sums if len(sums) == 3 else (*sums, None, None)[:3]\n"
            "    second, third = (third, second) if len(sums) == 3 else (second, third)",
        ),
    ),
    "from_plus_zero": (INTERPRETER, cases.leaves_of_minus_zeros, (FIRST, f"{FIRST} + 0.0")),
    "leaves_taken_as_dense": (
        *LEAVES,
        (
            "strides = [0 if t is None else t.stride(0) for",
            "strides = [0 if t is None else m * n for",
        ),
    ),
    "taken_as_aligned": (*LEAVES, ("aligned = all(", "aligned = any(")),
    "tail_stored": (
        *(SM90, cases.leaves_in_place),
        (
            "tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=in_n)",
            "tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=columns < N + 9)",
        ),
    ),
    "bias_before_the_leaves": (
        *LEAVES,
        (
            FIRST,
            f"{FIRST}\n    if bias_ptr is not None:\n        total += tl.load(bias_ptr "
            "+ row * bias_m + columns * bias_n, mask=in_n, other=0.0)",
        ),
        (
            f"{ADD_ROOT_BIAS}    tl.store(out_ptr + offsets",
            "        pass\n    tl.store(out_ptr + offsets",
        ),
    ),
    "rounded_twice": (SM90, cases.leaves_as_torch, BF16, (ROOT_BIAS, ROUND_TOTAL + ROOT_BIAS)),
    # LLVM may widen sums of 32 bits, but not these of 31.
    "leaves_of_31_bits": (
        *(SM90, cases.far_leaves),
        ("sum_ptrs + leaf * size", "sum_ptrs + (leaf * size & 0x7FFFFFFF)"),
    ),
}


@pytest.mark.parametrize(("engine", "check", "edits"), mutants(MUTANTS))
def test_killed(engine, check, edits):
    RUNNER.kill(engine, check, *edits)
