"""Scores of few queries with long contexts over a key buffer for SM90: the first of two kernels.

Formula, scratch, order, work, masks and roles are those of ``kernel_paged_scores_sm90``, and so are
the bits.  What differs:

Layouts      K [N, S, Hkv, D] and one query of each sequence, Q [N, Hq, D].  Keys: one range for
             all, or ranges, int32 [N, 1, 4] (``device/key_buffer``).
Loads        128 rows of the buffer at once, from any row on; TMA gives zeros for rows outside.  No
             table is read.
Limits       SM90a only; the rest as there.
Measured     docs/notes/attention_sm90.md.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda

from ..compile import fake
from .config import BufferScoresConfig
from .device import kv_ranges, paged_fakes
from .device.key_buffer import KeyBuffer
from .kernel_paged_scores_sm90 import PagedScoresSm90, Scratch


class BufferScoresSm90(PagedScoresSm90):
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: BufferScoresConfig):
        super().__init__(config)
        assert self.boxes == 1

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mScores: cute.Tensor,
        mMaxima: cute.Tensor,
        mSpans: cute.Tensor | None,
        first: cutlass.Int32,
        end: cutlass.Int32,
        inner: cutlass.Float32,
        ctas: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        buffer = KeyBuffer(mSpans, first, end, mK.shape[0], mK.shape[1])
        self.launch(mQ, mK, Scratch(mScores, mMaxima), buffer, inner, ctas, stream)


def build(config: BufferScoresConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; no GPU needed."""
    count, heads, rows, kv_heads = (fake.size() for _ in range(4))
    ranges = fake.compact(cutlass.Int32, (count, 1, len(kv_ranges.FIELDS)), fake.TMA_ALIGN)
    return compile(
        BufferScoresSm90(config),
        paged_fakes.token_rows(config.dtype, count, heads, config.head_dim),
        fake.activations(config.dtype, count, rows, kv_heads, config.head_dim),
        *paged_fakes.scratch(),
        ranges if config.kv_ranges else None,
        cutlass.Int32(0),
        cutlass.Int32(0),
        cutlass.Float32(0.0),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
