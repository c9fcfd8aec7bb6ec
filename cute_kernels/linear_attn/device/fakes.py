"""Fake tensors of the kernels of linear attention."""

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_tensor

from ...compile import fake


def strided(dtype: str, shape: tuple[cutlass.Int32, ...]) -> cute.Tensor:
    """A tensor that TMA can address: last stride 1, others whole 16 bytes."""
    element = fake.DTYPES[dtype]
    whole = fake.TMA_ALIGN * 8 // element.width
    steps = (cute.sym_int64(divisibility=whole) for _ in shape[1:])
    return make_fake_tensor(element, shape, (*steps, 1), assumed_align=fake.TMA_ALIGN)


def states(shape: tuple[cutlass.Int32, ...], *there: bool) -> list[cute.Tensor | None]:
    """States of sequences, fp32, where they are there."""
    return [strided("fp32", shape) if each else None for each in there]
