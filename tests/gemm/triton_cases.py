"""Properties of the Triton gemm, stated once for the simulator and for the interpreter.

Each check takes ``gemm(a, b, bias=None, accumulator=None, programs=132)`` or
``column_sum(rows)`` and raises AssertionError.  Bytes are compared wherever bits are promised.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cute_kernels.gemm import config
from tests.oracles import gemm as reference

Gemm = Callable[..., torch.Tensor]
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
LAYOUTS = ("k", "mn", "padded", "offset")


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


def problem(
    m: int, n: int, k: int, dtype: torch.dtype, epilogue: str, seed: int = 0, cancel: bool = True
) -> tuple:
    """Operands a, b, bias, accumulator; the products of fp32 operands are exact in fp64.

    With ``cancel`` the first and the last product are 2²⁴ times larger than others and cancel, so
    that the rounding errors between them, which hang on the order, reach bf16's last bit.
    """
    bits = 12 if dtype == torch.float32 else None
    a = random(m, k, dtype=dtype, seed=seed, bits=bits)
    b = random(n, k, dtype=dtype, seed=seed + 1, bits=bits)
    if cancel and k > 1:
        a, b = a / 16, b / 16
        a[:, 0] *= 2**12
        b[:, 0] *= 2**12
        a[:, -1], b[:, -1] = -a[:, 0], b[:, 0]
    bias = random(n, dtype=dtype, seed=seed + 2) if epilogue == "bias" else None
    accumulator = None
    if epilogue == "accumulate":
        accumulator = random(m, n, dtype=torch.float32, seed=seed + 3)
    return a, b, bias, accumulator


def chain_bits(gemm: Gemm, m: int, n: int, k: int, dtype: torch.dtype, epilogue: str) -> None:
    """The bits of the documented order: groups of 16 in one rounding, or one fma at a time."""
    a, b, bias, accumulator = problem(m, n, k, dtype, epilogue)
    chain = reference.chain if dtype != torch.float32 else _fma_chain
    want = chain(a, b, bias, accumulator)
    got = gemm(a, b, bias, accumulator)
    assert differing(got, want.to(got.dtype)) == 0


def accuracy(gemm: Gemm, m: int, n: int, k: int, dtype: torch.dtype, epilogue: str) -> None:
    """|y - exact| <= half an ulp of y + T (1 + 2⁻⁷), T as reference.error_bound."""
    a, b, bias, accumulator = problem(m, n, k, dtype, epilogue, cancel=False)
    exact = reference.gemm(a, b, bias, accumulator)
    start = torch.zeros(()) if accumulator is None else accumulator.clone()
    got = gemm(a, b, bias, accumulator)
    steps = -(-k // config.K_GROUP)
    bound = reference.error_bound(a, b) + 5.25 * steps * 2.0**-23 * start.double().abs()
    if dtype == torch.float32:
        bound *= 16 / 5.25  # one rounding per product, not per group
    half_ulp = exact.abs() * HALF_ULP[got.dtype] + 2.0**-25
    assert ((got.double() - exact).abs() <= half_ulp + bound * (1 + 2.0**-7)).all()


def order_of_blocks(gemm: Gemm, dtype: torch.dtype) -> None:
    """One product that is not zero per 64 k, so the sum over a block is exact in any order: the
    bits are those of the ascending chain of blocks."""
    m, n, k = 20, 17, 64 * 9
    generator = torch.Generator().manual_seed(5)
    a, b, _, _ = problem(m, n, k, dtype, "plain", seed=11, cancel=False)
    is_summed = torch.zeros(k)
    is_summed[torch.arange(0, k, 64) + torch.randint(0, 64, (9,), generator=generator)] = 1
    a = torch.where(is_summed.bool(), a, torch.zeros((), dtype=dtype))
    accumulator = random(m, n, dtype=torch.float32, seed=14)
    want = reference.chain(a, b, None, accumulator)
    assert differing(gemm(a, b, None, accumulator.clone()), want) == 0
    assert differing(gemm(a, b), reference.chain(a, b).to(dtype)) == 0


def rows_alone(gemm: Gemm, dtype: torch.dtype) -> None:
    """A row has the same bits alone, in 150 rows, moved, and among other neighbours."""
    m, n, k = 150, 40, 200
    a, b, bias, _ = problem(m, n, k, dtype, "bias", seed=21)
    whole = gemm(a, b, bias)
    moved = gemm(a.roll(61, 0), b, bias)
    assert differing(moved.roll(-61, 0), whole) == 0
    for row in (0, 1, 63, 127, 128, 149):
        assert differing(gemm(a[row : row + 1], b, bias)[0], whole[row]) == 0
    assert differing(gemm(a[100:137], b, bias), whole[100:137]) == 0


def pieces(gemm: Gemm, dtype: torch.dtype, layout: str = "mn") -> None:
    """Tokens cut at any multiple of 16 leave the accumulator with the bits of one shot."""
    n, k, tokens = 24, 20, 215
    dy, x, _, start = problem(n, k, tokens, dtype, "accumulate", seed=31)
    start[:4] = -0.0  # zeros of both signs are among the bytes
    dy[:2] = -0.0
    dy, x = laid_out(dy, layout), laid_out(x, layout)
    once = gemm(dy, x, None, start.clone())
    for cuts in ((16,), (112,), (16, 32, 48), (64, 80, 208), tuple(range(16, 215, 16))):
        total = start.clone()
        for first, end in zip((0, *cuts), (*cuts, tokens), strict=True):
            gemm(dy[:, first:end], x[:, first:end], None, total)
        assert differing(total, once) == 0, cuts


def programs(gemm: Gemm, dtype: torch.dtype) -> None:
    """One, three and 132 programs leave the same bytes; 11 tile rows do not fill two groups."""
    a, b, bias, _ = problem(1300, 150, 24, dtype, "bias", seed=41)
    outs = [gemm(a, b, bias, programs=count) for count in (1, 3, 132)]
    assert not outs[0].isnan().any()
    assert differing(outs[0], outs[1]) == 0 and differing(outs[0], outs[2]) == 0
    rows = slice(1270, 1300)
    assert differing(gemm(a[rows], b, bias), outs[0][rows]) == 0


def layouts(gemm: Gemm, dtype: torch.dtype, pairs: tuple[tuple[str, str], ...]) -> None:
    """Strides, alignment and expanded rows do not change a byte."""
    m, n, k = 48, 32, 96
    a, b, bias, _ = problem(m, n, k, dtype, "bias", seed=51)
    start = random(m, n, dtype=torch.float32, seed=54)
    plain, added = gemm(a, b, bias), gemm(a, b, None, start.clone())
    for a_layout, b_layout in pairs:
        x, y = laid_out(a, a_layout), laid_out(b, b_layout)
        assert differing(gemm(x, y, bias), plain) == 0, (a_layout, b_layout)
        total = laid_out(start, b_layout)
        returned = gemm(x, y, None, total)
        assert returned.data_ptr() == total.data_ptr()
        assert differing(total, added) == 0, (a_layout, b_layout)
    row = a[3:4].expand(m, k)
    assert differing(gemm(row, b, bias), gemm(row.contiguous(), b, bias)) == 0
    spread = torch.stack((bias, torch.full_like(bias, torch.nan)), 1)[:, 0]
    assert differing(gemm(a, b, spread), plain) == 0


def neighbours(gemm: Gemm, dtype: torch.dtype) -> None:
    """NaN and Inf stay in their own row and column; memory around the operands is not read into
    the result, and memory around the accumulator is not written."""
    m, n, k = 133, 21, 35
    a, b, _, start = problem(m, n, k, dtype, "accumulate", seed=61)
    clean, added = gemm(a, b), gemm(a, b, None, start.clone())
    x, y = laid_out(a, "padded"), laid_out(b, "padded")
    assert differing(gemm(x, y), clean) == 0
    around = torch.full((m + 4, n + 4), 7.5)
    around[2:-2, 2:-2] = start
    gemm(x, y, None, around[2:-2, 2:-2])
    assert differing(around[2:-2, 2:-2], added) == 0
    around[2:-2, 2:-2] = 7.5
    assert bool((around == 7.5).all()), "wrote outside the accumulator"
    a, b = a.clone(), b.clone()
    a[5, 3], a[130, 34], b[7, 0] = torch.nan, torch.inf, -torch.inf
    dirty = gemm(a, b)
    unchanged = torch.ones(m, n, dtype=torch.bool)
    unchanged[[5, 130]], unchanged[:, 7] = False, False
    assert differing(dirty[unchanged], clean[unchanged]) == 0
    assert bool(dirty[5].isnan().all()) and not bool(dirty[130].isfinite().any())


def column_sums(column_sum: Callable, dtype: torch.dtype) -> None:
    """The bits of: eight lanes, each every eighth row in order; then the lanes in order."""
    for m, n in ((1, 1), (7, 70), (83, 130), (64, 64)):
        rows = random(m, n, dtype=dtype, seed=71 + m)
        lanes = torch.zeros(config.COLUMN_SUM.lanes, n)
        for i, row in enumerate(rows):
            lanes[i % config.COLUMN_SUM.lanes] += row.float()
        total = torch.zeros(n)
        for lane in lanes:
            total += lane
        for layout in LAYOUTS:
            got = column_sum(laid_out(rows, layout))
            assert differing(got, total.to(dtype)) == 0, (m, n, layout)
    row = random(1, 70, dtype=dtype, seed=72).expand(9, 70)
    assert differing(column_sum(row), column_sum(row.contiguous())) == 0


def _fma_chain(a, b, bias, accumulator) -> torch.Tensor:
    """One fp32 fma per k, ascending; float64 holds these products and sums before the rounding."""
    total = torch.zeros(a.shape[0], b.shape[0]) if accumulator is None else accumulator.clone()
    for k in range(a.shape[1]):
        total = (total.double() + a[:, k, None].double() * b[None, :, k].double()).float()
    return total if bias is None else total + bias
