"""Cases of grouped products in the order ``tree``, and of the leaves that ranks exchange."""

from __future__ import annotations

import torch

from cute_kernels.gemm import op as gemm_op
from cute_kernels.schedulers.tiles import leaves
from tests.contract import same_bytes
from tests.oracles import gemm as reference
from tests.oracles import moe as oracle

from .cases import BAD_OFFSETS, FP32, LOADS, offsets_of, operands

#: (load, N, K): within a group; a short last leaf; whole leaves; leaves of more than a block of K.
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
        assert same_bytes(torch.cat(parts), whole), degree
    for expert, rows in oracle.experts(offsets):
        total = gemm_op.add_leaves(whole[:, rows].contiguous(), bias[expert], dtype)
        assert same_bytes(total, y[rows])


def leaves_are_chains(leaf_sums, load: str, n: int, k: int, dtype, major: str = "k") -> None:
    """With an exact adder, each leaf has the bytes of `reference.chain`; and their sum, `tree`'s.

    leaf_sums(x, weight, offsets, bias, length): (leaves, the order ``tree``).
    """
    x, weight, offsets, bias, _ = operands(load, dtype, n, k)
    weight = weight if major == "k" else weight.mT.contiguous().mT
    length = leaves.length(k)
    parts, y = leaf_sums(x, weight, offsets, bias, length)
    spans = [slice(first, first + length) for first in range(0, k, length)]
    for expert, rows in oracle.experts(offsets):
        if rows.start == rows.stop:
            continue
        chains = [reference.chain(x[rows][:, s], weight[expert][:, s]) for s in spans]
        want = torch.stack(chains)
        assert same_bytes(parts[:, rows], want), (expert, k)
        assert same_bytes(y[rows], gemm_op.add_leaves(want, bias[expert], dtype)), (expert, k)


def neighbours(engine, dtype: torch.dtype) -> None:
    """NaN in rows and weights of other experts, and behind the slice of K, reaches nothing."""
    x, weight, offsets, _, _ = operands("uneven", dtype, 40, 88)
    length = leaves.length(88)
    for expert, rows in oracle.experts(offsets):
        others = torch.ones(len(x), dtype=torch.bool)
        others[rows] = False
        dirty_x = torch.cat([x, torch.full_like(x, float("nan"))], 1)[:, : x.shape[1]]
        dirty_x[others] = float("nan")
        dirty_weight = torch.cat([weight, torch.full_like(weight, float("nan"))], 2)[:, :, :88]
        dirty_weight[[e for e in range(len(weight)) if e != expert]] = float("nan")
        dirty = dirty_x, dirty_weight, offsets
        want = engine.grouped_tree(x, weight, offsets, None)[rows]
        assert same_bytes(engine.grouped_tree(*dirty, None)[rows], want)
        want = engine.grouped_leaf_sums(x, weight, offsets, length)[:, rows]
        assert same_bytes(engine.grouped_leaf_sums(*dirty, length)[:, rows], want)


def layouts(engine, dtype: torch.dtype) -> None:
    """Strides and alignment of x and of the weight change no byte."""
    x, weight, offsets, bias, _ = operands("few", dtype, 24, 136)
    length = leaves.length(136)

    def both(x, weight, bias=bias):
        parts = engine.grouped_leaf_sums(x, weight, offsets, length)
        return parts, engine.grouped_tree(x, weight, offsets, bias)

    want = both(x, weight)
    wide = torch.cat([weight, weight], 2)[:, :, 1 : weight.shape[2] + 1].copy_(weight)
    views = [
        (x.mT.contiguous().mT, weight),
        (torch.cat([x, x], 1)[:, 1 : x.shape[1] + 1].copy_(x), weight),
        (x, weight.mT.contiguous().mT),
        (x, wide),
        (x, torch.cat([weight, weight], 1)[:, : weight.shape[1]]),
        (x, weight, bias.mT.contiguous().mT),
    ]
    for view in views:
        for got, expected in zip(both(*view), want, strict=True):
            assert same_bytes(got, expected)


def minus_zeros(engine) -> None:
    """A sum of leaves of -0 is -0: it does not begin at +0."""
    rows, weight = torch.full((2, 256), -0.0), torch.zeros(1, 16, 256)
    parts = engine.grouped_leaf_sums(rows, weight, offsets_of([2]), 32)
    y = engine.grouped_tree(rows, weight, offsets_of([2]), None)
    assert same_bytes(y, gemm_op.add_leaves(parts, None, FP32))


def inside(engine, dtype: torch.dtype) -> None:
    """With bad offsets nothing outside of tensors is read: NaN lies around them."""
    x, weight, _, _, _ = operands("few", dtype, 40, 56)
    around = torch.full((3 * len(x), x.shape[1]), float("nan"), dtype=dtype)
    inner = around[len(x) : 2 * len(x)].copy_(x)
    for values in BAD_OFFSETS:
        offsets = torch.tensor(values, dtype=torch.int32)
        engine.grouped_tree(inner, weight, offsets, None)
        engine.grouped_leaf_sums(inner, weight, offsets, 16)


def permuted(call, dtype: torch.dtype) -> None:
    """Rows of experts in any order of the batch, alone, and by any load, have the same bytes.

    call(x, weight, offsets, bias): the product.
    """
    counts = LOADS["uneven"]
    x, weight, offsets, bias, _ = operands("uneven", dtype, 40, 136)
    want = call(x, weight, offsets, bias)
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    generator = torch.Generator().manual_seed(3)
    for size in (1, 7, len(x)):
        chosen = torch.randperm(len(x), generator=generator)[:size]
        chosen = chosen[expert[chosen].sort(stable=True).indices]
        some = offsets_of(torch.bincount(expert[chosen], minlength=len(counts)).tolist())
        assert same_bytes(call(x[chosen], weight, some, bias), want[chosen]), size
    all_of_one = offsets_of([0, 0, len(x), 0, 0])
    got = call(x, weight, all_of_one, bias)
    rows = slice(int(offsets[2]), int(offsets[3]))
    assert same_bytes(got[rows], want[rows])


#: Checks of products, but for those that take others.
PRODUCTS = leaves_of_ranks, neighbours, layouts, inside
