"""Fake operands with which the kernels over paged caches are compiled; host code."""

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_tensor

from ...compile import fake


def token_rows(
    dtype: str, tokens: cutlass.Int32, heads: cutlass.Int32, columns: int
) -> cute.Tensor:
    """[T, H, columns], contiguous columns, other strides multiples of 16 bytes: Q or O."""
    element = fake.DTYPES[dtype]
    step = fake.TMA_ALIGN * 8 // element.width
    strides = *(cute.sym_int64(divisibility=step) for _ in range(2)), 1
    shape = tokens, heads, columns
    return make_fake_tensor(element, shape, strides, assumed_align=fake.TMA_ALIGN)


def lists() -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
    """Return the block table [N, pages of a sequence], the lengths [N] and the starts [N + 1]."""
    sequences = fake.size()
    return (
        _rows(cutlass.Int32, sequences, fake.size()),
        _rows(cutlass.Int32, sequences),
        _rows(cutlass.Int32, fake.size()),
    )


def scratch() -> tuple[cute.Tensor, cute.Tensor]:
    """Return scores and maxima of all units (``long_tiles``)."""
    units, blocks, group = (fake.size() for _ in range(3))
    return (
        fake.compact(cutlass.Float32, (units, blocks, fake.size(1024)), fake.TMA_ALIGN),
        fake.compact(cutlass.Float32, (units, group, blocks)),
    )


def lse(heads: cutlass.Int32, tokens: cutlass.Int32) -> cute.Tensor:
    """LSE [H, T], contiguous along the tokens."""
    return _rows(cutlass.Float32, heads, tokens)


def _rows(element: type[cutlass.Numeric], *shape: cutlass.Int32) -> cute.Tensor:
    strides = *(cute.sym_int64() for _ in shape[1:]), 1
    return make_fake_tensor(element, shape, strides, assumed_align=4)
