"""Attention of few queries with long contexts over a key buffer for SM90: the second kernel.

Formula, scratch, order, overlap, masks and roles are those of ``kernel_paged_values_sm90``, and so
are the bits.  What differs:

Layouts      V [N, S, Hkv, Dv] and one query of each sequence: O [N, Hq, Dv], LSE [N, Hq].  Keys as
             in ``kernel_buffer_scores_sm90``.
Loads        128 rows of the buffer at once, from any row on.  Rows outside are zeros by TMA, the
             nearest row by ``cp.async``; no query sees them, so that they are set to zero.
Limits       SM90a only; the rest as there.
Measured     docs/notes/attention_sm90.md.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda

from ..compile import fake
from .config import BufferValuesConfig
from .device import kv_ranges, paged_fakes
from .device.key_buffer import KeyBuffer
from .device.values_state import BufferResults, Rows
from .kernel_paged_values_sm90 import PagedValuesSm90


class BufferValuesSm90(PagedValuesSm90):
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    results = BufferResults

    @cute.jit
    def __call__(
        self,
        mV: cute.Tensor,
        mScores: cute.Tensor,
        mMaxima: cute.Tensor,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        mSpans: cute.Tensor | None,
        mSinks: cute.Tensor,
        first: cutlass.Int32,
        end: cutlass.Int32,
        c: cutlass.Float32,
        stream: cuda.CUstream,
    ):
        buffer = KeyBuffer(mSpans, first, end, mV.shape[0], mV.shape[1])
        self.launch(mV, mScores, mMaxima, Rows(mO, mLse, mSinks), buffer, c, stream)


def build(config: BufferValuesConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; no GPU needed."""
    count, heads, rows, kv_heads = (fake.size() for _ in range(4))
    ranges = fake.compact(cutlass.Int32, (count, 1, len(kv_ranges.FIELDS)), fake.TMA_ALIGN)
    return compile(
        BufferValuesSm90(config),
        fake.activations(config.dtype, count, rows, kv_heads, config.value_dim),
        *paged_fakes.scratch(),
        paged_fakes.token_rows(config.dtype, count, heads, config.value_dim),
        fake.compact(cutlass.Float32, (count, heads)),
        ranges if config.kv_ranges else None,
        fake.compact(cutlass.Float32, (heads,)),
        cutlass.Int32(0),
        cutlass.Int32(0),
        cutlass.Float32(1.0),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
