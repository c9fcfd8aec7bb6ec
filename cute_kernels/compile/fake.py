"""Fake tensors to compile against: shapes and strides as symbols, shared where they must agree.

The compiled entry checks dims, dtypes, static strides, divisibility and alignment of the real
tensors (TVM-FFI, in compiled code), so a launcher need not.  Strides are 64-bit: offsets in a
tensor of more than 2^31 elements must not wrap.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

#: What TMA needs of a pointer and, in bytes, of every stride but the contiguous one.
TMA_ALIGN = 16

DTYPES = {
    "bf16": cutlass.BFloat16,
    "fp16": cutlass.Float16,
    "fp32": cutlass.Float32,
}


def size(divisibility: int = 1):
    """A symbolic extent; use the same object wherever two extents must agree."""
    return cute.sym_int(divisibility=divisibility)


def matrix(dtype: str, rows, columns, major: str):
    """A [rows, columns] matrix that TMA can address; ``major``: ``"k"`` (row-major) or ``"mn"``."""
    element = DTYPES[dtype]
    leading = cute.sym_int64(divisibility=TMA_ALIGN * 8 // element.width)
    stride = (leading, 1) if major == "k" else (1, leading)
    return make_fake_tensor(element, (rows, columns), stride, assumed_align=TMA_ALIGN)


def vector(dtype: str, length):
    """A contiguous vector, aligned to its elements only."""
    element = DTYPES[dtype]
    return make_fake_tensor(element, (length,), (1,), assumed_align=element.width // 8)


def rows(dtype: str, count, columns):
    """A [count, columns] matrix, aligned to its elements only; the row stride may be 0."""
    element = DTYPES[dtype]
    return make_fake_tensor(
        element, (count, columns), (cute.sym_int64(), 1), assumed_align=element.width // 8
    )


def activations(dtype: str, batch, length, heads, head_dim: int):
    """[B, S, H, D] with D contiguous and every other stride a multiple of 16 bytes."""
    step = TMA_ALIGN * 8 // DTYPES[dtype].width
    strides = tuple(cute.sym_int64(divisibility=step) for _ in range(3))
    shape = (batch, length, heads, head_dim)
    return make_fake_tensor(DTYPES[dtype], shape, (*strides, 1), assumed_align=TMA_ALIGN)


def compact(element, shape: tuple, align: int = 4):
    """A row-major tensor without gaps."""
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(element, shape, stride_order=order, assumed_align=align)


def stream():
    """The current stream of the tensors' device, read at every call."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)


#: How every SM90 kernel is compiled: for this architecture, whatever GPU (or none) is here.
SM90_OPTIONS = "--enable-tvm-ffi --gpu-arch sm_90a"
