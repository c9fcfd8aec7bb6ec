"""Parts of dweight or dbias, added to what they belong to, on SM90.

    into += parts[0] + parts[1] + ...  or  made = parts[0] + parts[1] + ..., rounded

Layout       parts fp32 [P, 8 ⌈D / 8⌉]; into fp32 [D], made [D] in its dtype.
Order        one chain, ascending, from ``into`` or from zero.
Work         a CTA for 32 columns: its warps load 128 parts while one adds those before.
Measured     docs/status.md.
"""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy
from .config import UNIT, SumConfig

WARP, WARPS = 32, 8
#: Parts that a warp loads at once.
AHEAD = 16


class NormSumsSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: SumConfig):
        self.add = config.into == "add"
        self.dtype = cutlass.Float32 if self.add else fake.DTYPES[config.into]

    @cute.jit
    def __call__(self, mParts: cute.Tensor, mInto: cute.Tensor, stream):
        self.kernel(mParts, mInto).launch(
            grid=(cute.ceil_div(mInto.shape[0], WARP), 1, 1),
            block=(WARP * WARPS, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mParts: cute.Tensor, mInto: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, lane = tidx // WARP, tidx % WARP
        parts, width = mParts.shape[0], mInto.shape[0]
        # A lane behind the last column reads the last one instead; nobody stores its sum.
        column = block * WARP + lane
        source = cutlass.min(column, width - 1)
        layout = cute.make_ordered_layout((2, WARPS * AHEAD, WARP), order=(2, 1, 0))
        sParts = SmemAllocator().allocate_tensor(cutlass.Float32, layout, byte_alignment=16)
        total = cutlass.Float32(0.0)
        if cutlass.const_expr(self.add):
            total = mInto[source]
        slot = cutlass.Int32(0)
        for first in cutlass.range(0, parts, WARPS * AHEAD, unroll=1):
            for a in cutlass.range_constexpr(AHEAD):
                part = first + warp * AHEAD + a
                if part < parts:
                    at = cutlass.Int64(part) * mParts.stride[0] + source
                    sParts[slot, warp * AHEAD + a, lane] = copy.aligned(mParts, at, 1)[0]
            cute.arch.sync_threads()
            # Warps other than the first load what comes next meanwhile, into the other slot.
            if warp == 0:
                count = cutlass.min(parts - first, WARPS * AHEAD)
                whole = count // AHEAD * AHEAD
                for begin in cutlass.range(0, whole, AHEAD, unroll=1):
                    # All of them are asked for before the first is added.
                    values = [sParts[slot, begin + a, lane] for a in range(AHEAD)]
                    for value in values:
                        total = total + value
                for i in cutlass.range(whole, count, unroll=1):
                    total = total + sParts[slot, i, lane]
            slot = slot ^ 1
        if (warp == 0) & (column < width):
            mInto[column] = total.to(self.dtype)


def build(config: SumConfig, compile=cute.compile):
    """Compiles one configuration against fake tensors; no GPU needed."""
    into = "fp32" if config.into == "add" else config.into
    return compile(
        NormSumsSm90(config),
        fake.compact(cutlass.Float32, (fake.size(), fake.size(UNIT)), 16),
        fake.vector(into, fake.size()),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
