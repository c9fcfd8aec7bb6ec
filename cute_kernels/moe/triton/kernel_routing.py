"""Routing in Triton, for ROCm and CUDA: choice, weights, the stable sort, combination.

    select            the experts of the k largest scores + bias; ties: the lowest index
    weights           scale s / (Σ s + ε) of the chosen, experts ascending; and its gradient
    slot_weights      s / Σ s of the chosen, slots by halves, rounded: routers of transformers
    count, place      the slots (token, choice) in the order of their experts, stable: a counting
                      sort whose sums are of integers; few slots need place alone
    gather, combine   rows of slots from rows of tokens, and back: Σ weight · row
    combine_backward  weight · dy, and Σ row · dy of each row

Work.  A program of place adds the counts of all blocks of slots by itself, so that no third launch
makes a prefix sum.  Moves go by token: a row of x or of dy is read once and each of its k rows is
written from registers.  ALIGN is a factor of D that makes loads and stores of 16 bytes: with a D of
which nothing is known each element has a load of its own.

Order.  Sums over a token's slots ascend by expert, each product and each sum rounded to fp32.  The
gradient of a weight has LANES lanes, of which each adds every LANES-th column, ascending; then half
onto half.  Integers are compared in the order of the fp32 numbers that they stand for, so a NaN is
the largest and both zeros are one.

Indices that are no experts have no weight, and their slots come after those of all experts.  Their
rows are not read: rows and gradients of them are zeros, and sums leave them out.  No atomics.  The
interpreter and ptxsim compare bytes with a written order.
"""

import triton
import triton.language as tl

from ...runtime.triton_sums import over_columns

_LEAST = tl.constexpr(-(2**31))
_MOST = tl.constexpr(2**31 - 1)


# ---- choice --------------------------------------------------------------------------------------


@triton.jit
def _ordered(value):
    """Integers in the order of fp32 numbers."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(value == value, key, _MOST)


@triton.jit
def _number(key):
    """The fp32 number of an integer of `_ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["GROUPS", "SIZE", "K", "KEPT"])
def select_kernel(
    scores_ptr,
    bias_ptr,
    out_ptr,
    GROUPS,
    SIZE,
    K,
    KEPT,
    scores_t,
    scores_e,
    bias_e,
    GROUPS_ROOM: tl.constexpr,
    SIZE_ROOM: tl.constexpr,
):
    """The K experts of token program_id, in KEPT of GROUPS groups of SIZE experts.

    GROUPS_ROOM, SIZE_ROOM: powers of two, not below GROUPS and SIZE.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_ROOM)
    place = tl.arange(0, SIZE_ROOM)[None, :]
    index = group[:, None] * SIZE + place
    exists = (group < GROUPS)[:, None] & (place < SIZE)
    offsets = index.to(tl.int64)
    value = tl.load(scores_ptr + token * scores_t + offsets * scores_e, mask=exists, other=0.0)
    if bias_ptr is not None:
        value += tl.load(bias_ptr + offsets * bias_e, mask=exists, other=0.0).to(tl.float32)
    key = tl.where(exists, _ordered(value), _LEAST)
    left = exists.to(tl.int32)

    if GROUPS_ROOM > 1:
        best = tl.max(key, axis=1)
        if bias_ptr is not None and SIZE_ROOM > 1:
            # The sum of the two best: the first of the equal ones is taken out.
            spots = tl.where((key == best[:, None]) & exists, place, _MOST)
            rest = tl.where(place == tl.min(spots, axis=1)[:, None], _LEAST, key)
            best = _ordered(_number(best) + _number(tl.max(rest, axis=1)))
        open_groups = (group < GROUPS).to(tl.int32)
        kept = tl.full((GROUPS_ROOM,), 0, tl.int32)
        for _ in tl.range(0, KEPT):
            largest = tl.max(tl.where(open_groups > 0, best, _LEAST), axis=0)
            equal = (open_groups > 0) & (best == largest)
            chosen_group = tl.min(tl.where(equal, group, _MOST), axis=0)
            kept = tl.where(group == chosen_group, 1, kept)
            open_groups = tl.where(group == chosen_group, 0, open_groups)
        left = left * kept[:, None]

    for slot in tl.range(0, K):
        largest = tl.max(tl.max(tl.where(left > 0, key, _LEAST), axis=1), axis=0)
        equal = (left > 0) & (key == largest)
        expert = tl.min(tl.min(tl.where(equal, index, _MOST), axis=1), axis=0)
        tl.store(out_ptr + token * K + slot, expert)
        left = tl.where(index == expert, 0, left)


# ---- weights -------------------------------------------------------------------------------------


@triton.jit
def _slot_keys(indices_ptr, token, E, K, K_ROOM: tl.constexpr):
    """Integers that sort a token's slots by expert, then by slot; of no expert: as expert E."""
    slot = tl.arange(0, K_ROOM)
    expert = tl.load(indices_ptr + token * K + slot.to(tl.int64), mask=slot < K, other=0)
    expert = tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)
    return tl.where(slot < K, expert * K_ROOM + slot, _MOST)


@triton.jit
def _score(scores_ptr, token, expert, E, scores_t, scores_e):
    """A token's score of an expert; 0 of no expert."""
    offsets = token * scores_t + expert.to(tl.int64) * scores_e
    return tl.load(scores_ptr + offsets, mask=expert < E, other=0.0)


@triton.jit(do_not_specialize=["E", "K"])
def weights_kernel(
    scores_ptr,
    indices_ptr,
    out_ptr,
    E,
    K,
    scores_t,
    scores_e,
    scale,
    NORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    K_ROOM: tl.constexpr,
):
    """weights[j] = scale s[j] / (Σ s + ε), or scale s[j], of token program_id."""
    token = tl.program_id(0).to(tl.int64)
    keys = _slot_keys(indices_ptr, token, E, K, K_ROOM)
    slot = tl.arange(0, K_ROOM)
    weight = _score(scores_ptr, token, keys // K_ROOM, E, scores_t, scores_e)
    if NORMALIZE:
        last = -1
        total = 0.0
        for rank in tl.range(0, K):
            last = tl.min(tl.where(keys > last, keys, _MOST), axis=0)
            term = _score(scores_ptr, token, last // K_ROOM, E, scores_t, scores_e)
            total = tl.where(rank == 0, term, total + term)
        weight = tl.div_rn(weight, tl.full((K_ROOM,), 0.0, tl.float32) + (total + EPSILON))
    tl.store(out_ptr + token * K + slot.to(tl.int64), weight * scale, mask=slot < K)


@triton.jit(do_not_specialize=["E", "K"])
def slot_weights_kernel(
    scores_ptr,
    indices_ptr,
    out_ptr,
    E,
    K,
    scores_t,
    scores_e,
    NORMALIZE: tl.constexpr,
    K_ROOM: tl.constexpr,
):
    """weights[j] = s[j] / Σ s, or s[j], of token program_id, in the dtype of the result.

    Σ adds half of the slots onto half, of the power of two that holds them.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, K_ROOM)
    keys = _slot_keys(indices_ptr, token, E, K, K_ROOM)
    expert = tl.where(slot < K, keys // K_ROOM, E)
    weight = _score(scores_ptr, token, expert, E, scores_t, scores_e)
    if NORMALIZE:
        total = over_columns(tl.reshape(weight, [1, K_ROOM]), 1, K_ROOM)
        weight = tl.div_rn(weight, tl.broadcast_to(total, [K_ROOM]))
    rounded = weight.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * K + slot.to(tl.int64), rounded, mask=slot < K)


@triton.jit(do_not_specialize=["E", "K"])
def weights_backward_kernel(
    grad_ptr,
    scores_ptr,
    indices_ptr,
    out_ptr,
    E,
    K,
    scores_t,
    scores_e,
    scale,
    NORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    K_ROOM: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """ds[e] of token program_id: scale (g - Σ g s / (Σ s + ε)) / (Σ s + ε), slots ascending."""
    token = tl.program_id(0).to(tl.int64)
    keys = _slot_keys(indices_ptr, token, E, K, K_ROOM)
    total = 0.0
    mean = 0.0
    if NORMALIZE:
        last = -1
        for rank in tl.range(0, K):
            last = tl.min(tl.where(keys > last, keys, _MOST), axis=0)
            term = _score(scores_ptr, token, last // K_ROOM, E, scores_t, scores_e)
            # The weight of no expert is 0, whatever gradient comes in.
            grad = tl.load(grad_ptr + token * K + last % K_ROOM, mask=last // K_ROOM < E, other=0.0)
            total = tl.where(rank == 0, term, total + term)
            mean = tl.where(rank == 0, grad * term, mean + grad * term)
        total = total + EPSILON
        mean = tl.div_rn(mean, total)
    expert = tl.arange(0, EXPERTS)
    slots = tl.arange(0, K_ROOM)
    out = tl.full((EXPERTS,), 0.0, tl.float32)
    for slot in tl.range(0, K):
        grad = tl.load(grad_ptr + token * K + slot)
        if NORMALIZE:
            grad = tl.div_rn(grad - mean, total)
        mine = tl.max(tl.where(slots == slot, keys, -1), axis=0) // K_ROOM
        out = tl.where(expert == mine, out + grad * scale, out)
    tl.store(out_ptr + token * E + expert.to(tl.int64), out, mask=expert < E)


# ---- the stable sort -----------------------------------------------------------------------------


@triton.jit
def _keys(indices_ptr, slot, end, E):
    """The expert of each slot before ``end``; -1 of one that has none."""
    index = tl.load(indices_ptr + slot, mask=slot < end, other=-1)
    return tl.where((index >= 0) & (index < E), index, -1).to(tl.int32)


@triton.jit
def _count(indices_ptr, first, end, E, SLOTS: tl.constexpr, BINS: tl.constexpr):
    """Slots of each expert among slots ``first`` to ``end``."""
    bins = tl.arange(0, BINS)[None, :]
    counts = tl.full((SLOTS, BINS), 0, tl.int32)
    for start in tl.range(first, end, SLOTS):
        key = _keys(indices_ptr, start + tl.arange(0, SLOTS), end, E)
        counts += (key[:, None] == bins).to(tl.int32)
    return tl.sum(counts, axis=0)


@triton.jit(do_not_specialize=["S", "E", "SPAN"])
def count_kernel(indices_ptr, counts_ptr, S, E, SPAN, SLOTS: tl.constexpr, BINS: tl.constexpr):
    """counts[block, e] = slots of expert e among the SPAN slots of block program_id.

    SLOTS: slots that are compared with all experts at once.
    """
    block = tl.program_id(0).to(tl.int64)
    end = tl.minimum((block + 1) * SPAN, S)
    counts = _count(indices_ptr, block * SPAN, end, E, SLOTS, BINS)
    tl.store(counts_ptr + block * BINS + tl.arange(0, BINS).to(tl.int64), counts)


@triton.jit(do_not_specialize=["S", "E", "SPAN", "BLOCKS"])
def place_kernel(
    indices_ptr,
    counts_ptr,
    offsets_ptr,
    order_ptr,
    positions_ptr,
    S,
    E,
    SPAN,
    BLOCKS,
    SLOTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """positions[slot] = the row of each slot of block program_id, order, its inverse, and offsets.

    counts_ptr: None where one block has all slots; then it counts them itself.  ROWS: blocks whose
    counts are added at once.
    """
    block = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, BINS)
    if counts_ptr is None:
        totals = _count(indices_ptr, block * SPAN, S, E, SLOTS, BINS)
        run = tl.full((BINS,), 0, tl.int32)
    else:
        all_counts = tl.full((ROWS, BINS), 0, tl.int32)
        earlier = tl.full((ROWS, BINS), 0, tl.int32)
        for first in tl.range(0, BLOCKS, ROWS):
            other = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            ptrs = counts_ptr + other * BINS + bins.to(tl.int64)[None, :]
            counts = tl.load(ptrs, mask=(other < BLOCKS) & (bins < BINS)[None, :], other=0)
            all_counts += counts
            earlier += tl.where(other < block, counts, 0)
        totals = tl.sum(all_counts, axis=0)
        run = tl.sum(earlier, axis=0)
    starts = tl.cumsum(totals, 0) - totals
    placed = tl.sum(totals, axis=0)
    if block == 0:
        tl.store(offsets_ptr + bins.to(tl.int64), starts, mask=bins < E)
        tl.store(offsets_ptr + E, placed)
    # The next row of each expert, and of slots without one, which come after all experts.
    none = placed + (block * SPAN).to(tl.int32) - tl.sum(run, axis=0)
    run += starts
    end = tl.minimum((block + 1) * SPAN, S)
    here = tl.arange(0, SLOTS)
    for first in tl.range(block * SPAN, end, SLOTS):
        slot = first + here
        key = _keys(indices_ptr, slot, end, E)
        other = _keys(indices_ptr, slot, end, E)
        same = (key[:, None] == other[None, :]) & (here[None, :] < here[:, None])
        rank = tl.sum(same.to(tl.int32), axis=1)
        chosen = key[:, None] == bins[None, :]
        row = tl.sum(tl.where(chosen, run[None, :], 0), axis=1)
        row = tl.where(key < 0, none, row) + rank
        tl.store(positions_ptr + slot, row, mask=slot < end)
        tl.store(order_ptr + row.to(tl.int64), slot.to(tl.int32), mask=slot < end)
        run += tl.sum(chosen.to(tl.int32), axis=0)
        none += tl.sum(((key < 0) & (slot < end)).to(tl.int32), axis=0)


# ---- rows ----------------------------------------------------------------------------------------


@triton.jit
def _placed(offsets_ptr, E, K):
    """Rows that have an expert; at most K of each program."""
    return tl.minimum(tl.load(offsets_ptr + E).to(tl.int64), tl.num_programs(0).to(tl.int64) * K)


@triton.jit(do_not_specialize=["E", "K", "D"])
def gather_kernel(
    x_ptr,
    offsets_ptr,
    positions_ptr,
    out_ptr,
    E,
    K,
    D,
    x_t,
    x_d,
    ALIGN: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """out[positions[t, j]] = x[t] for all K choices j, COLUMNS columns: x is read once.

    0 for a slot without an expert.  A position outside of out is not written.  UNROLL: positions
    that are loaded at once.
    """
    D = D // ALIGN * ALIGN
    placed = _placed(offsets_ptr, E, K)
    rows = tl.num_programs(0).to(tl.int64) * K
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.load(x_ptr + token * x_t + column * x_d, mask=column < D)
    for first in tl.range(0, K, UNROLL):
        places = ()
        for i in tl.static_range(UNROLL):
            slot = first + i
            row = tl.load(positions_ptr + token * K + slot, mask=slot < K, other=-1)
            places = places + (row.to(tl.int64),)
        for i in tl.static_range(UNROLL):
            row = places[i]
            inside = (row >= 0) & (row < rows)
            kept = tl.where(row < placed, value, tl.zeros_like(value))
            tl.store(out_ptr + row * D + column, kept, mask=(column < D) & inside)


@triton.jit(do_not_specialize=["E", "K", "D"])
def combine_kernel(
    rows_ptr,
    weights_ptr,
    offsets_ptr,
    positions_ptr,
    out_ptr,
    E,
    K,
    D,
    rows_s,
    rows_d,
    ALIGN: tl.constexpr,
    K_ROOM: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """out[t] = Σ_j weights[t, j] rows[positions[t, j]], positions ascending, COLUMNS columns.

    The sum leaves slots without an expert out; +0 if no slot has one.  UNROLL: rows of a token that
    are loaded before the first of them is added.
    """
    D = D // ALIGN * ALIGN
    placed = _placed(offsets_ptr, E, K)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.arange(0, K_ROOM)
    position = tl.load(positions_ptr + token * K + slot.to(tl.int64), mask=slot < K, other=_MOST)
    total = tl.full((COLUMNS,), 0.0, tl.float32)
    last = -1
    for first in tl.range(0, K, UNROLL):
        # A rank beyond K has no position: it counts as one without an expert, and loads nothing.
        terms, factors, experts = (), (), ()
        for i in tl.static_range(UNROLL):
            last = tl.min(tl.where(position > last, position, _MOST), axis=0)
            has_expert = last < placed
            experts = experts + (has_expert,)
            inside = (column < D) & has_expert
            ptrs = rows_ptr + last.to(tl.int64) * rows_s + column * rows_d
            terms = terms + (tl.load(ptrs, mask=inside, other=0.0),)
            if weights_ptr is not None:
                mine = tl.min(tl.where(position == last, slot, _MOST), axis=0)
                ptr = weights_ptr + token * K + mine
                factors = factors + (tl.load(ptr, mask=has_expert, other=0.0),)
        for i in tl.static_range(UNROLL):
            term = terms[i].to(tl.float32)
            if weights_ptr is not None:
                term *= factors[i].to(tl.float32)
            # The first term as it is: a sum from +0 would lose the sign of -0.
            added = tl.where(first + i == 0, term, total + term)
            total = tl.where(experts[i], added, total)
    tl.store(out_ptr + token * D + column, total.to(out_ptr.dtype.element_ty), mask=column < D)


@triton.jit(do_not_specialize=["E", "K", "D"])
def combine_backward_kernel(
    dy_ptr,
    rows_ptr,
    weights_ptr,
    offsets_ptr,
    positions_ptr,
    d_rows_ptr,
    d_weights_ptr,
    E,
    K,
    D,
    dy_t,
    dy_d,
    rows_s,
    rows_d,
    ALIGN: tl.constexpr,
    SLOTS: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """d_rows[row] = weight dy[token], and d_weights[slot] = Σ rows[row] dy[token] in lanes.

    Both are 0 for a slot without an expert.  SLOTS slots of a token: those from SLOTS times
    program_id(1) on.
    """
    D = D // ALIGN * ALIGN
    placed = _placed(offsets_ptr, E, K)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    slots = token * K + slot.to(tl.int64)
    row = tl.load(positions_ptr + slots, mask=slot < K, other=-1).to(tl.int64)
    exists = ((row >= 0) & (row < tl.num_programs(0).to(tl.int64) * K))[:, None]
    has_expert = (row >= 0) & (row < placed)
    weight = tl.load(weights_ptr + slots, mask=has_expert, other=0.0).to(tl.float32)[:, None]
    row = row[:, None]
    lane = tl.arange(0, LANES)
    lanes = tl.full((SLOTS, LANES), 0.0, tl.float32)
    for first in tl.range(0, D, LANES, loop_unroll_factor=UNROLL):
        column = first + lane.to(tl.int64)
        inside = (column < D)[None, :]
        dy = tl.load(dy_ptr + token * dy_t + column * dy_d, mask=column < D, other=0.0)
        dy = dy.to(tl.float32)[None, :]
        ptrs = rows_ptr + row * rows_s + column[None, :] * rows_d
        term = tl.load(ptrs, mask=inside & has_expert[:, None], other=0.0)
        lanes += term.to(tl.float32) * dy
        d_row = tl.where(has_expert[:, None], dy * weight, 0.0)
        d_row = d_row.to(d_rows_ptr.dtype.element_ty)
        tl.store(d_rows_ptr + row * D + column[None, :], d_row, mask=inside & exists)
    # 0 times an infinite dy is no 0.
    total = tl.where(has_expert, over_columns(lanes, SLOTS, LANES), 0.0)
    tl.store(d_weights_ptr + slots, total, mask=slot < K)
