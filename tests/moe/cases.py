"""Checks of any backend of moe: an engine has the functions of cute_kernels/moe/cpu.py."""

from __future__ import annotations

import itertools

import torch

from cute_kernels.gemm import op as gemm_op
from cute_kernels.schedulers.tiles import leaves
from tests.contract import bits, same_bytes
from tests.oracles import moe as oracle

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT32 = torch.int32


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(*shape: int, seed: int, dtype: torch.dtype = FP32, device: str = "cpu") -> torch.Tensor:
    """Normal numbers whose rows have magnitudes of their own."""

    def normal(*size: int, seed: int) -> torch.Tensor:
        g = torch.Generator(device).manual_seed(seed)
        return torch.randn(size, generator=g, device=device)

    values = normal(*shape, seed=seed)
    scale = normal(*shape[:-1], 1, seed=seed + 1).exp2()
    return (values * scale).to(dtype)


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=INT32)


# ---- routings ------------------------------------------------------------------------------------

KINDS = ("uniform", "skewed", "one expert", "empty experts", "all experts", "duplicates")


def routing(seed: int, most_tokens: int = 40) -> tuple[torch.Tensor, int]:
    """(indices [T, k], number of experts), of a kind that the seed chooses."""
    g = generator(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=g))

    kind = KINDS[seed % len(KINDS)]
    tokens, experts = number(1, most_tokens), number(1, 20)
    k = experts if kind == "all experts" else number(1, min(experts, 8))
    if kind == "duplicates":
        return torch.randint(0, experts, (tokens, k), generator=g, dtype=INT32), experts
    load = torch.rand(tokens, experts, generator=g)
    if kind == "skewed":
        load = load * (torch.arange(experts) + 1.0).reciprocal()
    if kind == "one expert":
        load[:, number(0, experts - 1)] += 10
        k = 1
    if kind == "empty experts":
        load[:, : experts // 2] = -1.0
        k = min(k, experts - experts // 2)
    return load.topk(k).indices.to(INT32), experts


def sorted_slots(engine, seed: int) -> None:
    """The sort is Python's stable one, byte for byte."""
    sorts(engine, *routing(seed))


def sorts(engine, indices: torch.Tensor, experts: int) -> None:
    """The sort of these slots is Python's."""
    for dtype in (INT32, torch.int64):
        got = engine.sort(indices.to(dtype), experts)
        for t, want in zip(got, oracle.permutation(indices, experts), strict=True):
            assert same_bytes(t, want)


def many_slots(engine, tokens: int, experts: int) -> None:
    """The sort of more slots than one block has, some of which have no expert: those come last."""
    indices = torch.randint(-1, experts + 1, (tokens, 2), generator=generator(1), dtype=INT32)
    absent = (indices < 0) | (indices >= experts)
    offsets, *places = oracle.permutation(indices.masked_fill(absent, experts), experts + 1)
    for t, want in zip(engine.sort(indices, experts), (offsets[:-1], *places), strict=True):
        assert same_bytes(t, want)


def choices(engine, seed: int) -> None:
    """Chosen experts are those of sorted Python numbers, of scores with ties and both zeros."""
    g = generator(seed)
    groups = (1, 1, 2, 3, 4)[seed % 5]
    experts = groups * int(torch.randint(2, 8, (1,), generator=g))
    scores = torch.randint(-3, 4, (9, experts), generator=g) / 4
    scores = torch.where(torch.rand(scores.shape, generator=g) < 0.5, scores * -0.0, scores)
    bias = None if seed % 2 else torch.randint(-2, 3, (experts,), generator=g).to(BF16) / 4
    kept = int(torch.randint(1, groups + 1, (1,), generator=g))
    k = int(torch.randint(1, kept * (experts // groups) + 1, (1,), generator=g))
    got = engine.select(scores, bias, k, groups, kept)
    assert got.tolist() == oracle.choice(scores, bias, k, groups, kept)


def ties(engine) -> None:
    """Of equal scores the lowest index is chosen."""
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0, 1.0], [0.0, -0.0, 0.0, -0.0, -1.0]])
    assert engine.select(scores, None, 3, 1, 1).tolist() == [[1, 2, 3], [0, 1, 2]]
    # Of equal groups the first ones: a sort that is not stable moves more than 16.
    for bias in (None, torch.zeros(64)):
        assert engine.select(torch.zeros(1, 64), bias, 4, 32, 2).tolist() == [[0, 1, 2, 3]]


def not_numbers(engine) -> None:
    """NaN is chosen first, and infinities are numbers."""
    inf, nan = float("inf"), float("nan")
    scores = torch.tensor([[1.0, nan, inf, -nan, -inf], [-inf, -inf, -inf, 1.0, -inf]])
    assert engine.select(scores, None, 3, 1, 1).tolist() == [[1, 3, 2], [3, 0, 1]]


def weights(engine, seed: int) -> None:
    """Weights have the bytes of the written order, and their gradient is float64's."""
    indices, experts = routing(seed)
    scores = torch.rand(len(indices), experts, generator=generator(seed)) + 0.01
    upstream = drawn(*indices.shape, seed=seed)
    for normalize, scale in ((True, 1.0), (True, 2.5), (False, 0.3)):
        scale = torch.tensor(scale).item()
        got = engine.weights(scores, indices, normalize, scale)
        assert same_bytes(got, oracle.weights(scores, indices, normalize, scale))
        exact = scores.double().requires_grad_()
        oracle_weights = _differentiable(exact, indices, normalize) * scale
        (want,) = torch.autograd.grad(oracle_weights, exact, upstream.double())
        d_scores = engine.weights_backward(upstream, scores, indices, normalize, scale)
        size = want.abs().amax() + upstream.abs().amax() * 100
        assert (d_scores - want).abs().max() <= 64 * 2.0**-24 * size


def slot_weights(engine, seed: int) -> None:
    """Weights of transformers' routers have the bytes of the written order."""
    indices, experts = routing(seed)
    scores = torch.rand(len(indices), experts, generator=generator(seed)) + 0.01
    for normalize in (True, False):
        for dtype in (FP32, BF16, FP16):
            got = engine.slot_weights(scores, indices, normalize, dtype)
            want = scores.gather(1, indices.long())
            if normalize:
                want = want / _by_halves(list(want.unbind(1)))[:, None]
            assert same_bytes(got, want.to(dtype))


def _by_halves(columns: list[torch.Tensor]) -> torch.Tensor:
    """Each half onto half, of the power of two that holds them."""
    if len(columns) == 1:
        return columns[0]
    room = 1 << (len(columns) - 1).bit_length()
    columns = columns + [torch.zeros_like(columns[0])] * (room - len(columns))
    pairs = zip(columns[: room // 2], columns[room // 2 :], strict=True)
    return _by_halves([a + b for a, b in pairs])


def _differentiable(scores, indices, normalize):
    chosen = scores.gather(1, indices.long())
    return chosen / chosen.sum(1, keepdim=True) if normalize else chosen


def combined(engine, seed: int, dtype: torch.dtype = FP32) -> None:
    """Results and gradients of combine have the bytes of the written order."""
    indices, experts = routing(seed, most_tokens=12)
    permutation = oracle.permutation(indices, experts)
    offsets, order, positions = permutation
    width = (1, 7, 48, 300, 1040)[seed % 5]
    rows, upstream = (drawn(n, width, seed=seed + i, dtype=dtype)
                      for i, n in enumerate((indices.numel(), len(indices))))  # fmt: skip
    by = drawn(*indices.shape, seed=seed + 2, dtype=(FP32, dtype)[seed % 2])
    for weight in (by, None):
        got = engine.combine(rows, weight, offsets, positions)
        fp32 = None if weight is None else weight.float()
        assert same_bytes(got, oracle.combine(rows.float(), fp32, positions).to(dtype))
    d_rows, d_weights = engine.combine_backward(upstream, rows, by, *permutation)
    token = order.long() // indices.shape[1]
    factor = by.float().flatten()[order.long()]
    assert same_bytes(d_rows, (upstream.float()[token] * factor[:, None]).to(dtype))
    lanes = torch.zeros(len(rows), 256)
    for column, term in enumerate((rows.float() * upstream.float()[token]).unbind(1)):
        lanes[:, column % 256] += term
    want = torch.empty(by.numel())
    want[order.long()] = _by_halves(list(lanes.unbind(1)))
    assert same_bytes(d_weights.flatten(), want)
    assert same_bytes(engine.gather(upstream, *permutation), upstream[token])


def without_an_expert(engine, seed: int, dtype: torch.dtype = FP32) -> None:
    """A slot of no expert counts as if the token did not have it, whatever lies in its row.

    A token of such slots alone gives +0.  NaN lies in their rows and weights, infinity in their
    tokens' gradients.
    """
    indices, experts = routing(seed, most_tokens=5)
    g = generator(seed)
    absent = torch.rand(indices.shape, generator=g) < (0.4, 0.9)[seed % 2]
    absent[0] = True
    strays = torch.tensor([-1, experts, -(2**31), 2**31 - 1], dtype=INT32)
    drawn_strays = strays[torch.randint(0, 4, indices.shape, generator=g)]
    indices = torch.where(absent, drawn_strays, indices)
    permutation = offsets, _, positions = engine.sort(indices, experts)
    as_last = torch.where(absent, experts, indices)
    want = oracle.permutation(as_last, experts + 1)
    for t, expected in zip(permutation, (want[0][:-1], *want[1:]), strict=True):
        assert same_bytes(t, expected)

    placed, width = int(offsets[-1]), (1, 7, 48, 300)[seed % 4]
    rows, upstream = (drawn(n, width, seed=seed + i, dtype=dtype)
                      for i, n in enumerate((indices.numel(), len(indices))))  # fmt: skip
    by = drawn(*indices.shape, seed=seed + 2)
    rows[:, 0] = -0.0
    rows[placed:], by[absent] = torch.nan, torch.nan
    upstream[0] = torch.inf
    got = (
        engine.combine(rows, by, offsets, positions),
        engine.combine(rows, None, offsets, positions),
    )
    d_rows, d_weights = engine.combine_backward(upstream, rows, by, *permutation)
    scores = torch.rand(len(indices), experts, generator=g) + 0.01
    weights = engine.weights(scores, indices, True, 1.0)
    d_scores = engine.weights_backward(by, scores, indices, True, 1.0)
    gathered = engine.gather(upstream, *permutation)
    for t in (gathered[placed:], d_rows[placed:], d_weights[absent], weights[absent]):
        assert not bits(t).any()
    for token, gone in enumerate(absent):
        if gone.all():
            for t in (*(y[token] for y in got), d_scores[token]):
                assert not bits(t).any()
            continue
        # The same token with its other slots alone.
        kept, one = indices[token : token + 1, ~gone], slice(token, token + 1)
        alone = oracle.permutation(kept, experts)
        slots = positions[token].long()[~gone]
        own = torch.empty(len(slots), width, dtype=dtype)
        own[alone[2][0].long()] = rows[slots]
        w = by[one, ~gone]
        for y, weight in zip(got, (w, None), strict=True):
            assert same_bytes(y[one], engine.combine(own, weight, alone[0], alone[2]))
        d_own, d_w = engine.combine_backward(upstream[one], own, w, *alone)
        assert same_bytes(d_rows[slots], d_own[alone[2][0].long()])
        assert same_bytes(d_weights[one, ~gone], d_w)
        assert same_bytes(gathered[slots], upstream[one].expand(len(slots), width))
        assert same_bytes(weights[one, ~gone], engine.weights(scores[one], kept, True, 1.0))
        want = engine.weights_backward(w, scores[one], kept, True, 1.0)
        assert same_bytes(d_scores[one], want)


def zeros_keep_their_sign(engine) -> None:
    """A sum of -0 is -0: it does not begin at +0."""
    rows, offsets = torch.full((2, 8), -0.0), offsets_of([2])
    positions = torch.tensor([[1, 0]], dtype=INT32)
    got = engine.combine(rows, torch.ones(1, 2), offsets, positions)
    assert (bits(got) == bits(rows[:1])).all()


# ---- grouped products ----------------------------------------------------------------------------

#: Rows of each expert.
LOADS = {
    "uneven": [17, 0, 73, 1, 59],
    "one expert": [0, 150, 0],
    "tiles": [128, 129, 127, 64],
    "empty ends": [0, 0, 40, 0],
    "few": [1, 1, 2, 0, 1, 3],
}


def operands(load: str, dtype: torch.dtype, n: int = 40, k: int = 56, seed: int = 0) -> tuple:
    """(x [T, K], weight [E, N, K], offsets, bias [E, N], dy [T, N])."""
    counts = LOADS[load]
    tokens, experts = sum(counts), len(counts)
    x, dy = (drawn(tokens, width, seed=seed + i, dtype=dtype) for i, width in enumerate((k, n)))
    weight, bias = (
        drawn(experts, *shape, seed=seed + 5 + i, dtype=dtype)
        for i, shape in enumerate(((n, k), (n,)))
    )
    return x, weight, offsets_of(counts), bias, dy


def rows_of_linear(
    engine, load: str, dtype: torch.dtype, n: int = 40, k: int = 56, *, gemm
) -> None:
    """y, dx, dW and dbias of each expert have the bytes of gemm's.

    ``gemm``: gemm's functions on the same backend, ``gemm.gemm`` and ``gemm.column_sum``.
    """
    x, weight, offsets, bias, dy = operands(load, dtype, n, k)
    start = drawn(*weight.shape, seed=9)
    state = start.clone()
    got = {
        "y": engine.grouped_gemm(x, weight, offsets, None),
        "with bias": engine.grouped_gemm(x, weight, offsets, bias),
        "dx": engine.grouped_gemm(dy, weight.mT, offsets, None),
        "dw": engine.grouped_dw(dy, x, offsets, None),
        "main_grad": engine.grouped_dw(dy, x, offsets, state),
        "dbias": engine.grouped_column_sum(dy, offsets),
    }
    assert same_bytes(got["main_grad"], state)
    for expert, rows in oracle.experts(offsets):
        if rows.start == rows.stop:
            for name in ("dw", "dbias"):
                assert not bits(got[name][expert]).any(), f"{name} of an expert without rows"
            assert same_bytes(state[expert], start[expert])
            continue
        factors = dy[rows].mT, x[rows].mT
        want = {
            "y": gemm.gemm(x[rows], weight[expert], None, None),
            "with bias": gemm.gemm(x[rows], weight[expert], bias[expert], None),
            "dx": gemm.gemm(dy[rows], weight[expert].mT, None, None),
            "dw": gemm.gemm(*factors, None, None),
            "main_grad": gemm.gemm(*factors, None, start[expert].clone()),
            "dbias": gemm.column_sum(dy[rows]),
        }
        for name, value in want.items():
            at = rows if name in ("y", "with bias", "dx") else expert
            assert same_bytes(got[name][at], value), f"{name} of expert {expert}"


#: Of the order ``tree``, (load, N, K): within a group; a short last leaf; whole leaves; leaves of
#: more than a block of K.
SHAPES = [("uneven", 40, 5), ("few", 41, 57), ("one expert", 24, 128), ("empty ends", 33, 600)]


def rows_of_tree(engine, load: str, dtype: torch.dtype, n: int = 40, k: int = 200, *, gemm) -> None:
    """Rows of y and dx of each expert have the bytes of gemm's tree, and leaves those of its own.

    ``gemm``: gemm's functions on the same backend, ``gemm.gemm`` and ``gemm.leaf_sums``.
    """
    x, weight, offsets, bias, dy = operands(load, dtype, n, k)
    length = leaves.length(k)
    got = {
        "y": engine.grouped_tree(x, weight, offsets, None),
        "with bias": engine.grouped_tree(x, weight, offsets, bias),
        "dx": engine.grouped_tree(dy, weight.mT, offsets, None),
    }
    parts = engine.grouped_leaf_sums(x, weight, offsets, length)
    assert parts.shape == (leaves.count(k), len(x), n) and parts.dtype == FP32
    for expert, rows in oracle.experts(offsets):
        if rows.start == rows.stop:
            continue
        want = {
            "y": gemm.gemm(x[rows], weight[expert], None, None, "tree"),
            "with bias": gemm.gemm(x[rows], weight[expert], bias[expert], None, "tree"),
            "dx": gemm.gemm(dy[rows], weight[expert].mT, None, None, "tree"),
        }
        for name, value in want.items():
            assert same_bytes(got[name][rows], value), f"{name} of expert {expert}"
        of_gemm = gemm.leaf_sums(x[rows], weight[expert], length)
        assert same_bytes(parts[:, rows], of_gemm), f"leaves of expert {expert}"


def leaves_of_ranks(engine, dtype: torch.dtype) -> None:
    """Ranks that have slices of K have the leaves of the whole: 2, 4 and 8 of them."""
    x, weight, offsets, bias, _ = operands("uneven", dtype, 24, 256)
    length = leaves.length(256)
    whole = engine.grouped_leaf_sums(x, weight, offsets, length)
    y = engine.grouped_tree(x, weight, offsets, bias)
    for degree in (2, 4, 8):
        parts = [
            engine.grouped_leaf_sums(a, b, offsets, length)
            for a, b in zip(x.chunk(degree, 1), weight.chunk(degree, 2), strict=True)
        ]
        assert sum(map(len, parts)) == len(whole) and same_bytes(torch.cat(parts), whole), degree
    for expert, rows in oracle.experts(offsets):
        total = gemm_op.add_leaves(whole[:, rows].contiguous(), bias[expert], dtype)
        assert same_bytes(total, y[rows])


def minus_zeros(engine) -> None:
    """A sum of leaves of -0 is -0: it does not begin at +0."""
    rows, weight = torch.full((2, 256), -0.0), torch.zeros(1, 16, 256)
    parts = engine.grouped_leaf_sums(rows, weight, offsets_of([2]), 32)
    y = engine.grouped_tree(rows, weight, offsets_of([2]), None)
    assert same_bytes(y, gemm_op.add_leaves(parts, None, FP32))


def permuted(call, dtype: torch.dtype) -> None:
    """Rows of experts in any order of the batch, alone, and by any load, have the same bytes.

    call(x, weight, offsets, bias): the product.
    """
    counts = LOADS["uneven"]
    x, weight, offsets, bias, _ = operands("uneven", dtype, 40, 136)
    want = call(x, weight, offsets, bias)
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    g = generator(3)
    for size in (1, 7, len(x)):
        chosen = torch.randperm(len(x), generator=g)[:size]
        chosen = chosen[expert[chosen].sort(stable=True).indices]
        some = offsets_of(torch.bincount(expert[chosen], minlength=len(counts)).tolist())
        assert same_bytes(call(x[chosen], weight, some, bias), want[chosen]), size
    got = call(x, weight, offsets_of([0, 0, len(x), 0, 0]), bias)
    rows = slice(int(offsets[2]), int(offsets[3]))
    assert same_bytes(got[rows], want[rows])


def pieces(engine, dtype: torch.dtype) -> None:
    """Cuts of each expert's rows at multiples of 16 leave the bits of one shot in main_grad."""
    counts, n, k = [48, 0, 33, 70], 24, 40
    x, dy = (drawn(sum(counts), width, seed=i, dtype=dtype) for i, width in enumerate((k, n)))
    offsets = offsets_of(counts)
    whole = engine.grouped_dw(dy, x, offsets, torch.zeros(4, n, k))
    for cuts in ([[16], [], [32], [16, 64]], [[32, 32], [0], [16, 16], [48, 64]]):
        state = torch.zeros(4, n, k)
        edges = [
            [0, *(cut + [count] * 2)[:2], count] for cut, count in zip(cuts, counts, strict=True)
        ]
        for piece in range(3):
            spans = [
                slice(int(first) + e[piece], int(first) + max(e[piece], e[piece + 1]))
                for first, e in zip(offsets, edges, strict=False)
            ]
            rows = torch.cat([torch.arange(s.start, s.stop) for s in spans])
            some = offsets_of([s.stop - s.start for s in spans])
            engine.grouped_dw(dy[rows], x[rows], some, state)
        assert same_bytes(state, whole)


def forwards(engine, x, weight, offsets, bias=None) -> list[torch.Tensor]:
    """Rows in both orders, and leaves as rows."""
    sums = engine.grouped_leaf_sums(x, weight, offsets, leaves.length(x.shape[1]))
    rows = [f(x, weight, offsets, bias) for f in (engine.grouped_gemm, engine.grouped_tree)]
    return [*rows, *sums]


def neighbours(engine, dtype: torch.dtype) -> None:
    """NaN in rows and weights of other experts, and behind the last k, reaches nothing of this."""
    x, weight, offsets, _, dy = operands("uneven", dtype, 40, 88)
    nan = [torch.full_like(t, torch.nan) for t in (x, weight)]
    want, want_dw = forwards(engine, x, weight, offsets), engine.grouped_dw(dy, x, offsets, None)
    want_dx = engine.grouped_gemm(dy, weight.mT, offsets, None)
    for expert, rows in oracle.experts(offsets):
        dirty_x = torch.cat([nan[0], nan[0]], 1)[:, : x.shape[1]]
        dirty_weight = torch.cat([nan[1], nan[1]], 2)[:, :, : x.shape[1]]
        dirty_dy = torch.full_like(dy, torch.nan)
        dirty_x[rows], dirty_dy[rows], dirty_weight[expert] = x[rows], dy[rows], weight[expert]
        got = forwards(engine, dirty_x, dirty_weight, offsets)
        assert all(same_bytes(g[rows], w[rows]) for g, w in zip(got, want, strict=True))
        dx = engine.grouped_gemm(dirty_dy, dirty_weight.mT, offsets, None)
        assert same_bytes(dx[rows], want_dx[rows])
        dw = engine.grouped_dw(dirty_dy, dirty_x, offsets, None)
        assert same_bytes(dw[expert], want_dw[expert])


def layouts(engine, dtype: torch.dtype) -> None:
    """Strides and alignment of operands and of main_grad change no byte."""
    x, weight, offsets, bias, dy = operands("few", dtype, 24, 137)
    k = x.shape[1]
    want = forwards(engine, x, weight, offsets, bias)
    for view in (
        (x.mT.contiguous().mT, weight, bias),
        (torch.cat([x, x], 1)[:, 1 : k + 1].copy_(x), weight, bias),
        (x, weight.mT.contiguous().mT, bias),
        (x, torch.cat([weight, weight], 2)[:, :, 1 : k + 1].copy_(weight), bias),
        (x, weight.transpose(0, 1).contiguous().transpose(0, 1), bias.mT.contiguous().mT),
    ):
        got = forwards(engine, *view[:2], offsets, view[2])
        assert all(map(same_bytes, got, want))
    start = drawn(*weight.shape, seed=9)
    want_dw = engine.grouped_dw(dy, x, offsets, start.clone())
    wide = torch.zeros(*start.shape[:2], k + 7)[:, :, :k].copy_(start)
    for view, state in (
        (torch.cat([x, x], 1)[:, :k], start.clone()),
        (x.mT.contiguous().mT, start.mT.contiguous().mT),
        (torch.cat([x, x], 1)[:, 1 : k + 1].copy_(x), wide),
    ):
        engine.grouped_dw(dy, view, offsets, state)
        assert same_bytes(state.contiguous(), want_dw)


#: Offsets that are none.
BAD_OFFSETS = ([-5, 3, 1, 9, 2, 4, 2**31 - 1], [7, -(2**31), 8, 8, 8, 8, 100])


def inside(engine, dtype: torch.dtype) -> None:
    """With bad offsets nothing outside of tensors is read or written: NaN lies around them."""
    x, weight, _, _, dy = operands("few", dtype)
    inner = []
    for t in (x, dy):
        around = torch.full((3 * len(t), t.shape[1]), torch.nan, dtype=dtype)
        inner.append(around[len(t) : 2 * len(t)].copy_(t))
    for values in BAD_OFFSETS:
        offsets = torch.tensor(values, dtype=INT32)
        holder = torch.full((len(weight) + 2, *weight.shape[1:]), 7.0)
        state = holder[1:-1].zero_()
        engine.grouped_dw(inner[1], inner[0], offsets, state)
        forwards(engine, inner[0], weight, offsets)
        assert state.isfinite().all() and (holder[[0, -1]] == 7).all()
        assert engine.grouped_column_sum(inner[1], offsets).isfinite().all()


#: Checks of products, of one draw, and of many, but for those with operands.
PRODUCTS = pieces, neighbours, layouts, leaves_of_ranks
SINGLE = ties, not_numbers, zeros_keep_their_sign
DRAWN = sorted_slots, choices, weights, slot_weights, combined, without_an_expert
