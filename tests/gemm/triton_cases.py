"""Properties of the Triton gemm, stated once for the simulator and for the interpreter.

Each check takes the launcher and raises AssertionError.  Bytes are compared wherever bits are
promised: of the order ``chain``, of ``tree`` in every way to it, and of sums of leaves and rows.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from unittest import mock

import torch

from cute_kernels.gemm import config, op
from cute_kernels.schedulers.tiles import leaves
from tests.kernels.operands import far_apart
from tests.oracles import gemm as reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CHAIN, TREE = config.ORDERS
HALF_ULP = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}
EPILOGUES = ("plain", "bias", "accumulate")
BIASES = (None, "n", "rows", "spread")
LAYOUTS = ("k", "mn", "padded", "offset")
#: Programs of a launch: leaves of a few tiles each to its own, some to one, all to one.
MANY, FEW, ONE = 132, 7, 1


def differing(x: torch.Tensor, y: torch.Tensor) -> int:
    """How many bytes of two tensors of one shape and dtype differ."""
    assert x.shape == y.shape and x.dtype == y.dtype, (x.shape, x.dtype, y.shape, y.dtype)
    return int((x.contiguous().view(torch.uint8) != y.contiguous().view(torch.uint8)).sum())


def random(*shape: int, dtype: torch.dtype, seed: int, bits: int | None = None) -> torch.Tensor:
    """Normal values over ten binades, so that the order of a sum shows; ``bits`` of mantissa."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator)
    values *= torch.exp2(torch.randint(-5, 6, shape, generator=generator).float())
    if bits is not None:
        mantissa, exponent = torch.frexp(values)
        values = torch.ldexp(torch.round(mantissa * 2**bits) / 2**bits, exponent)
    return values.to(dtype)


def laid_out(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The values of a 2-D tensor in another memory layout; what is between them is NaN."""
    rows, columns = t.shape
    if layout == "k":
        return t.clone(memory_format=torch.contiguous_format)
    if layout == "mn":
        return t.mT.clone(memory_format=torch.contiguous_format).mT
    if layout == "padded":
        view = t.new_full((rows + 2, columns + 13), torch.nan)[1:-1, 5 : 5 + columns]
    else:
        # An odd address, rows packed at an odd stride: no vector load is aligned.
        stride = columns + 1 - columns % 2
        storage = t.new_full((1 + rows * stride,), torch.nan)
        view = storage[1:].as_strided((rows, columns), (stride, 1))
    return view.copy_(t)


def operands(
    m: int, n: int, k: int, dtype: torch.dtype, seed: int = 0, cancel: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """a, b; the products of fp32 operands are exact in fp64.

    With ``cancel`` the first product is 2²⁴ times larger than others and cancelled by the "last"
    one, so that the rounding errors between them, which hang on the order, reach bf16's last bit;
    or by the "middle" one, so that the first leaves are rounded coarsely and the last ones finely.
    """
    bits = 12 if dtype == FP32 else None
    a = random(m, k, dtype=dtype, seed=seed, bits=bits)
    b = random(n, k, dtype=dtype, seed=seed + 1, bits=bits)
    # In the middle of one group of 16 the reference's float64 would round.
    if cancel and k > (1 if cancel == "last" else 31):
        taken_back = k - 1 if cancel == "last" else k // 2
        a, b = a / 16, b / 16
        a[:, 0] *= 2**12
        b[:, 0] *= 2**12
        a[:, taken_back], b[:, taken_back] = -a[:, 0], b[:, 0]
    return a, b


def operands_of(order: str, m: int, n: int, k: int, dtype: torch.dtype, seed: int = 0) -> tuple:
    """Operands whose products show the order."""
    return operands(m, n, k, dtype, seed, "last" if order == CHAIN else "middle")


def bias_of(kind: str | None, m: int, n: int, dtype: torch.dtype) -> torch.Tensor | None:
    """[M, N], as the op hands it on: one row for all, a row each, or with NaN in between."""
    if kind is None:
        return None
    if kind == "n":
        return random(n, dtype=dtype, seed=7).expand(m, n)
    bias = random(m, n, dtype=dtype, seed=8)
    if kind == "rows":
        return bias
    return torch.stack((bias, torch.full_like(bias, torch.nan)), 2)[:, :, 0]


@contextlib.contextmanager
def programs(count: int) -> Iterator[None]:
    """While it lasts, a grid has at most so many programs."""
    with mock.patch.dict(os.environ, CUTE_KERNELS_MAX_CTAS=str(count)):
        yield


def skinny(launch, x, w, bias=None, deterministic: bool = True, count: int = MANY):
    """`launch.skinny`; a unit is meant to hold two programs of such a launch."""
    with programs(-(-count // 2)):
        return launch.skinny(x, w, bias, deterministic)


def ways(launch: ModuleType, order: str, *counts: int) -> list[Callable[..., torch.Tensor]]:
    """Ways to a product of an order, ``way(a, b, bias [N] or None)``; `skinny` by many programs,
    and by ``counts``."""

    def gemm(a, b, bias=None):
        return launch.gemm(a, b, bias, None, order)

    def few(count):
        def way(a, b, bias=None):
            rows = None if bias is None else bias.expand(len(a), len(b))
            return skinny(launch, a, b, rows, True, count)

        return way

    return [gemm] if order == CHAIN else [gemm, *map(few, (MANY, *counts))]


def leaf_chains(a: torch.Tensor, b: torch.Tensor, length: int | None = None) -> torch.Tensor:
    """[leaves, M, N]: groups of 16 in one rounding; of fp32, one fma at a time."""
    length = length or leaves.length(a.shape[1])
    parts = zip(a.split(length, 1), b.split(length, 1), strict=True)
    return torch.stack([chain(x, y) for x, y in parts])


def added(sums: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The leaves in ascending order, the bias, one rounding."""
    total = sums[0]
    for leaf in sums[1:]:
        total = total + leaf
    return (total if bias is None else total + bias.float()).to(dtype)


def chain(a, b, bias=None, accumulator=None) -> torch.Tensor:
    """The order ``chain``; of fp32 one fma per k, ascending."""
    if a.dtype != FP32:
        return reference.chain(a, b, bias, accumulator)
    total = torch.zeros(a.shape[0], b.shape[0]) if accumulator is None else accumulator.clone()
    for k in range(a.shape[1]):
        # float64 holds these products and sums before the rounding.
        total = (total.double() + a[:, k, None].double() * b[None, :, k].double()).float()
    return total if bias is None else total + bias


def tree(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The order ``tree``, rounded."""
    if a.dtype == FP32:
        return added(leaf_chains(a, b), bias, FP32)
    return reference.tree(a, b, bias).to(a.dtype)


# ---- values --------------------------------------------------------------------------------------


def chain_bits(launch, m: int, n: int, k: int, dtype: torch.dtype, epilogue: str) -> None:
    """The bits of the documented order: groups of 16 in one rounding, or one fma at a time."""
    a, b = operands(m, n, k, dtype, cancel="last")
    bias = random(n, dtype=dtype, seed=2) if epilogue == "bias" else None
    start = random(m, n, dtype=FP32, seed=3) if epilogue == "accumulate" else None
    want = chain(a, b, bias, start)
    got = launch.gemm(a, b, bias, start)
    assert differing(got, want.to(got.dtype)) == 0


def tree_bits(launch, m: int, n: int, k: int, dtype: torch.dtype, kind: str | None) -> None:
    """Every way to the order tree has the bytes of the documented one."""
    a, b = operands(m, n, k, dtype, cancel="middle")
    bias = bias_of(kind, m, n, dtype)
    want = tree(a, b, bias)
    if kind in (None, "n"):
        of_n = None if bias is None else bias[0]
        assert differing(launch.gemm(a, b, of_n, None, TREE), want) == 0, "gemm"
    for count in (MANY, FEW, ONE):
        assert differing(skinny(launch, a, b, bias, True, count), want) == 0, count
    assert differing(launch.leaf_sums(a, b, leaves.length(k)), leaf_chains(a, b)) == 0, "leaf_sums"


def accuracy(launch, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """|y - exact| <= half an ulp of y + T (1 + 2⁻⁷), T as reference.error_bound; both orders."""
    a, b = operands(m, n, k, dtype)
    bias, start = random(n, dtype=dtype, seed=2), random(m, n, dtype=FP32, seed=3)
    # numpy rounds each product of the interpreter, a GPU each group of 16.
    bound = reference.error_bound(a, b) * 16 / 5.25
    bound = bound + 16 * -(-k // config.K_GROUP) * 2.0**-23 * start.double().abs()
    for epilogue, order in (*((e, CHAIN) for e in EPILOGUES), ("plain", TREE), ("bias", TREE)):
        addend = bias if epilogue == "bias" else None
        state = start.clone() if epilogue == "accumulate" else None
        exact = reference.gemm(a, b, addend, None if state is None else start)
        got = launch.gemm(a, b, addend, state, order)
        half_ulp = exact.abs() * (HALF_ULP[got.dtype] + 8 * 2.0**-24) + 2.0**-25
        close = (got.double() - exact).abs() <= half_ulp + bound * (1 + 2.0**-7)
        assert close.all(), (epilogue, order)


def blocks_in_order(launch, dtype: torch.dtype, order: str) -> None:
    """One product that is not zero per block of 64 k of a leaf, so the sum over a block is exact in
    any order: the bits are those of the ascending chain of blocks, and of leaves."""
    m, n, k = 13, 17, 1030
    length = k if order == CHAIN else leaves.length(k)
    generator = torch.Generator().manual_seed(5)
    a, b = operands(m, n, k, dtype, 11, "" if order == CHAIN else "middle")
    is_summed = torch.zeros(k, dtype=torch.bool)
    for start in range(0, k, length):
        for first in range(start, min(start + length, k), 64):
            end = min(first + 64, start + length, k)
            drawn = int(torch.randint(first, end, (1,), generator=generator))
            large = [index for index in (0, k // 2) if first <= index < end]
            is_summed[large[0] if large and order == TREE else drawn] = True
    a = torch.where(is_summed, a, torch.zeros((), dtype=dtype))
    want = (reference.chain if order == CHAIN else reference.tree)(a, b).to(dtype)
    for way in ways(launch, order, ONE):
        assert differing(way(a, b), want) == 0
    if order == CHAIN:
        state = random(m, n, dtype=FP32, seed=14)
        want = reference.chain(a, b, None, state)
        assert differing(launch.gemm(a, b, None, state), want) == 0


def signs(launch) -> None:
    """Leaves that underflow to -0 add up to -0, in every way; a leaf of products of -0 is +0."""
    m, n, k = 5, 21, 1024  # leaves of two whole blocks: no zeros are filled in
    a = torch.full((m, k), 2.0**-90, dtype=BF16)
    a *= 1 + torch.arange(k).remainder(7).bfloat16() / 8
    b = -a[:1].expand(n, k).clone()
    minus_zero = torch.full((m, n), -0.0, dtype=BF16)
    assert differing(reference.tree(a, b).bfloat16(), minus_zero) == 0
    for way in ways(launch, TREE, ONE):
        assert differing(way(a, b), minus_zero) == 0
    for count in (MANY, ONE):
        assert differing(skinny(launch, a, b, None, False, count), minus_zero) == 0, count
    assert bool(launch.leaf_sums(a, b, 128).signbit().all())
    zeros = torch.full_like(a, -0.0)
    assert differing(skinny(launch, zeros, -b), torch.zeros_like(minus_zero)) == 0


def fast(launch, dtype: torch.dtype) -> None:
    """Where every sum is exact the unordered bytes are those of the tree; else they are near."""
    m, n, k = 33, 70, 520
    generator = torch.Generator().manual_seed(3)
    a = torch.randint(-3, 4, (m, k), generator=generator).to(dtype)
    b = torch.randint(-2, 4, (n, k), generator=generator).to(dtype)
    for kind in BIASES:
        bias = bias_of(kind, m, n, dtype)
        want = (a.double() @ b.double().mT).float()
        want = (want if bias is None else want + bias.float()).to(dtype)
        assert differing(skinny(launch, a, b, bias, False), want) == 0, kind
    a, b = operands(m, n, k, dtype)
    exact = reference.gemm(a, b)
    bound = 4 * reference.error_bound(a, b) + exact.abs() * 2.0**-8
    assert ((skinny(launch, a, b, None, False).double() - exact).abs() <= bound).all()
    # One program has nothing to add out of order.
    alone = [skinny(launch, a, b, None, deterministic, ONE) for deterministic in (True, False)]
    assert differing(*alone) == 0


# ---- invariance ----------------------------------------------------------------------------------


def rows_alone(launch, dtype: torch.dtype, order: str, counts: tuple[int, ...] = (1, 33)) -> None:
    """A row has the same bits in any number of rows, moved, among others, and in every way."""
    m, (n, k) = 150, (40, 200) if order == CHAIN else (70, 520)
    a, b = operands_of(order, m, n, k, dtype, seed=21)
    bias = random(n, dtype=dtype, seed=23)
    gemm, *_ = every = ways(launch, order)
    whole = gemm(a, b, bias)
    assert differing(gemm(a.roll(61, 0), b, bias).roll(-61, 0), whole) == 0
    for way, count in itertools.product(every, counts):
        for first in {0, m - count}:
            rows = slice(first, first + count)
            assert differing(way(a[rows], b, bias), whole[rows]) == 0, (count, first)


def bias_rows_alone(launch, dtype: torch.dtype, counts: tuple[int, ...] = (1, 33)) -> None:
    """So has a row with a bias of its own."""
    a, b = operands(128, 70, 520, dtype, 21, "middle")
    bias = bias_of("rows", 128, 70, dtype)
    whole = skinny(launch, a, b, bias)
    for count in counts:
        for rows in (slice(0, count), slice(128 - count, 128)):
            assert differing(skinny(launch, a[rows], b, bias[rows]), whole[rows]) == 0, count


def pieces(launch, dtype: torch.dtype, layout: str = "mn") -> None:
    """Tokens cut at any multiple of 16 leave the accumulator with the bits of one shot."""
    n, k, tokens = 24, 20, 215
    dy, x = operands(n, k, tokens, dtype, 31, "last")
    start = random(n, k, dtype=FP32, seed=34)
    start[:4] = -0.0  # zeros of both signs are among the bytes
    dy[:2] = -0.0
    dy, x = laid_out(dy, layout), laid_out(x, layout)
    once = launch.gemm(dy, x, None, start.clone())
    for cuts in ((16,), (112,), (16, 32, 48), (64, 80, 208), tuple(range(16, 215, 16))):
        total = start.clone()
        for first, end in zip((0, *cuts), (*cuts, tokens), strict=True):
            launch.gemm(dy[:, first:end], x[:, first:end], None, total)
        assert differing(total, once) == 0, cuts


def grids(launch, dtype: torch.dtype) -> None:
    """One, three and 132 programs leave the same bytes; 11 tile rows do not fill two groups."""
    a, b = operands(1300, 150, 24, dtype, 41, "last")
    bias, outs = random(150, dtype=dtype, seed=43), []
    for count in (1, 3, 132):
        with programs(count):
            outs.append(launch.gemm(a, b, bias, None))
    assert not outs[0].isnan().any()
    assert differing(outs[0], outs[1]) == 0 and differing(outs[0], outs[2]) == 0
    rows = slice(1270, 1300)
    assert differing(launch.gemm(a[rows], b, bias, None), outs[0][rows]) == 0


def layouts(launch, dtype: torch.dtype, order: str, pairs: tuple[tuple[str, str], ...]) -> None:
    """Strides, alignment and expanded rows, of operands and of the bias, do not change a byte."""
    m, n, k = (48, 32, 96) if order == CHAIN else (24, 32, 288)
    a, b = operands_of(order, m, n, k, dtype, seed=51)
    bias, start = random(n, dtype=dtype, seed=53), random(m, n, dtype=FP32, seed=54)
    spread = torch.stack((bias, torch.full_like(bias, torch.nan)), 1)[:, 0]
    row = a[3:4].expand(m, k)
    for way in ways(launch, order):
        want = way(a, b, bias)
        for x, y in pairs:
            assert differing(way(laid_out(a, x), laid_out(b, y), bias), want) == 0, (x, y)
        assert differing(way(row, b, bias), way(row.contiguous(), b, bias)) == 0
        assert differing(way(a, b, spread), want) == 0
    if order == CHAIN:
        want = launch.gemm(a, b, None, start.clone())
        for x, y in pairs:
            total = laid_out(start, y)
            returned = launch.gemm(laid_out(a, x), laid_out(b, y), None, total)
            assert returned.data_ptr() == total.data_ptr()
            assert differing(total, want) == 0, (x, y)
        return
    bias = bias_of("rows", m, n, dtype)
    want = skinny(launch, a, b, bias)
    for x, _ in pairs:
        assert differing(skinny(launch, a, b, laid_out(bias, x)), want) == 0, x


def neighbours(launch, dtype: torch.dtype, order: str) -> None:
    """NaN and Inf stay in their own row and column; memory around the operands is not read into
    the result, and memory around the accumulator is not written."""
    m, n, k = (133, 21, 35) if order == CHAIN else (33, 21, 285)
    a, b = operands_of(order, m, n, k, dtype, seed=61)
    dirty_a, dirty_b = a.clone(), b.clone()
    dirty_a[5, 3], dirty_a[30, k - 1], dirty_b[7, k // 6] = torch.nan, torch.inf, -torch.inf
    unchanged = torch.ones(m, n, dtype=torch.bool)
    unchanged[[5, 30]], unchanged[:, 7] = False, False
    for way in ways(launch, order):
        clean = way(a, b)
        assert differing(way(laid_out(a, "padded"), laid_out(b, "padded")), clean) == 0
        dirty = way(dirty_a, dirty_b)
        assert differing(dirty[unchanged], clean[unchanged]) == 0
        assert bool(dirty[5].isnan().all()) and not bool(dirty[30].isfinite().any())
    if order == CHAIN:
        start = random(m, n, dtype=FP32, seed=64)
        around = torch.full((m + 4, n + 4), 7.5)
        around[2:-2, 2:-2] = start
        launch.gemm(laid_out(a, "padded"), laid_out(b, "padded"), None, around[2:-2, 2:-2])
        assert differing(around[2:-2, 2:-2], launch.gemm(a, b, None, start)) == 0
        around[2:-2, 2:-2] = 7.5
        assert bool((around == 7.5).all()), "wrote outside the accumulator"


def slices(launch, dtype: torch.dtype) -> None:
    """Leaves of a slice of K are those of the whole, in 2, 4 and 8 slices and for more rows."""
    n, k = 21, 1030
    a, b = operands(140, n, k, dtype, 91, "middle")
    length = leaves.length(k)
    few, whole = launch.leaf_sums(a[:5], b, length), launch.leaf_sums(a, b, length)
    assert differing(whole[:, :5], few) == 0
    assert differing(added(whole, None, dtype), launch.gemm(a, b, None, None, TREE)) == 0
    for ranks in (2, 4, 8):
        step = -(-leaves.count(k) // ranks) * length
        parts = [
            launch.leaf_sums(x, y, length)
            for x, y in zip(a[:5].split(step, 1), b.split(step, 1), strict=True)
        ]
        # A slice with leaves of its own has another number of them.
        assert sum(map(len, parts)) == len(few) and differing(torch.cat(parts), few) == 0, ranks


def far_offsets(launch) -> None:
    """Row 2 starts at element 2³¹, leaf 1 at as many: operands, accumulator, sums reach it."""
    a, b = operands(3, 3, 20, BF16, 81)
    start = random(3, 3, dtype=FP32, seed=84)
    far_a, far_b, far_start = map(far_apart, (a, b, start))
    assert differing(launch.gemm(far_a, far_b, None, None), chain(a, b).bfloat16()) == 0
    into = launch.gemm(far_a, far_b, None, far_start)
    assert differing(into, chain(a, b, None, start)) == 0
    assert differing(launch.column_sum(far_a), a.float().cumsum(0)[-1].bfloat16()) == 0
    for x in (far_a, far_apart(a, (1, 2**27))):
        assert differing(skinny(launch, x, b), tree(a, b)) == 0


# ---- sums of rows and of leaves ------------------------------------------------------------------


#: (M, N) of sums of rows: one element, fewer rows than lanes, ragged tails, multiples of 16.
ROWS = ((1, 1), (7, 70), (83, 130), (64, 64))


def column_sums(launch, dtype: torch.dtype, shapes=ROWS) -> None:
    """The bits of: each lane every so manieth row in order; then the lanes in order."""
    for m, n in shapes:
        rows = random(m, n, dtype=dtype, seed=71 + m)
        lanes = torch.zeros(config.COLUMN_SUM.lanes, n)
        for i, row in enumerate(rows):
            lanes[i % config.COLUMN_SUM.lanes] += row.float()
        total = torch.zeros(n)
        for lane in lanes:
            total += lane
        for layout in LAYOUTS:
            got = launch.column_sum(laid_out(rows, layout))
            assert differing(got, total.to(dtype)) == 0, (m, n, layout)
    row = random(1, 70, dtype=dtype, seed=72).expand(9, 70)
    assert differing(launch.column_sum(row), launch.column_sum(row.contiguous())) == 0


#: Leaves of each tensor: one leaf, one tensor, and what ranks hold of eight.
SPLITS = ((1,), (8,), (1, 1), (1, 4), (6, 2), (2, 2, 4), (4, 2, 2), (1, 1, 6))
#: (M, N): one element, ragged tails of a program, several programs, multiples of 16.
LEAF_SHAPES = ((1, 1), (3, 33), (2, 300), (5, 256), (1, 1040))


def leaves_of(count: int, m: int, n: int) -> torch.Tensor:
    """[count, M, N] of many magnitudes, with sums of -0, of subnormals, Inf, Inf - Inf and NaN."""
    generator = torch.Generator().manual_seed(1000 * count + n)
    parts = torch.randn(count, m * n, generator=generator)
    parts *= torch.exp2(torch.randint(-12, 13, parts.shape, generator=generator).float())
    parts[:, 0::11], parts[:, 1::11] = -0.0, parts[:, 1::11] * 1e-41
    parts[-1, 2::11] = torch.inf
    parts[0, 3::11], parts[0, 2::22] = torch.nan, -torch.inf
    return parts.view(count, m, n)


def leaf_bias(n: int) -> torch.Tensor:
    """A bias with elements of +0 and -0, by every third element of a longer tensor."""
    bias = torch.randn(n, 3, generator=torch.Generator().manual_seed(n))[:, 0]
    bias[::11] = -0.0
    return bias


def cut(parts: torch.Tensor, split: tuple[int, ...]) -> list[torch.Tensor]:
    """The leaves in tensors of their own; the second one's are rows in the middle of others."""
    sums = [part.clone() for part in parts.split(split)]
    if len(sums) > 1:
        count, m, n = sums[1].shape
        longer = torch.full((count, m + 5, n), torch.nan)
        longer[:, 2 : 2 + m] = sums[1]
        sums[1] = longer[:, 2 : 2 + m]
    return sums


def same_sums(got: torch.Tensor, want: torch.Tensor) -> None:
    """Every byte agrees; of NaN, that it is one: its payload is the device's."""
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    assert differing(got[~nan], want[~nan]) == 0


def leaves_as_torch(launch, dtype: torch.dtype, splits=SPLITS, shapes=LEAF_SHAPES) -> None:
    """`launch.add_leaves` has the bytes of torch's adds: splits at a ragged size, and shapes."""
    sizes = [*((split, 3, 97) for split in splits), *(((2, 2, 4), *s) for s in shapes)]
    for split, m, n in sizes:
        sums = cut(leaves_of(sum(split), m, n), split)
        for bias in (leaf_bias(n).to(dtype), None):
            want = op.add_leaves_into(torch.empty(m, n, dtype=dtype), sums, bias)
            got = launch.add_leaves(torch.full((m, n), torch.nan, dtype=dtype), sums, bias)
            same_sums(got, want)


def leaves_in_place(launch) -> None:
    """A running sum and leaves -> a running sum, in the memory of the first; no other changes."""
    for split in ((1,), (1, 2), (4,)):
        sums = cut(leaves_of(sum(split), 3, 97), split)
        want = op.add_leaves_into(torch.empty(3, 97), sums, None)
        rest = [part.clone() for part in (sums[0][1:], *sums[1:])]
        same_sums(launch.add_leaves(sums[0][0], sums, None), want)
        for part, before in zip((sums[0][1:], *sums[1:]), rest, strict=True):
            assert differing(part, before) == 0
    for bias in (None, leaf_bias(97)):
        whole = torch.full((9, 97), 7.0)
        launch.add_leaves(whole[3:6], [leaves_of(8, 3, 97)], bias)
        assert (whole[:3] == 7).all() and (whole[6:] == 7).all()


def leaves_of_minus_zeros(launch) -> None:
    """Sums of -0 keep their sign, whatever tensor the leaves are in."""
    for split in SPLITS:
        sums = [torch.full((count, 2, 40), -0.0) for count in split]
        out = launch.add_leaves(torch.full((2, 40), torch.nan), sums, None)
        assert torch.signbit(out).all() and not out.any()


def far_leaves(launch) -> None:
    """Leaves 2³⁰ elements apart: from the third on, beyond 32 bits."""
    far = far_apart(leaves_of(3, 2, 40), (2**30, 40, 1))
    want = op.add_leaves(far.clone(), None, FP32)
    same_sums(launch.add_leaves(torch.empty(2, 40), [far], None), want)
