"""Parts of dweight, of dbias or of both, added to what they belong to, on SM90.

    into += parts[0] + parts[1] + ...  or  made = parts[0] + parts[1] + ..., rounded

Layout       parts fp32 [P, 8 ⌈D / 8⌉]; into fp32 [D], made [D] in its dtype; of a pair, two each.
Order        one chain, ascending, from ``into`` or from zero.
Work         a CTA for 32 columns, 128 bytes of a part: its threads copy 256 parts a round into
             shared memory, two rounds ahead, and lanes of one warp add them, one for each column.
             A dependent launch: CTAs come to SMs before the parts are complete, and wait there.
Code         little, and one text for both of a pair: each instruction is run for the first time,
             behind a kernel that has filled the L2, and so comes from memory.
Measured     docs/status.md.
"""

from collections.abc import Callable

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy
from ..dsl.ring import Slots
from .config import UNIT, SumConfig

WARP, THREADS = 32, 256
#: Columns of a CTA; those that a thread copies of a part.
COLUMNS, COPIED = 32, 4
#: Parts that all threads copy at once.
AT_ONCE = THREADS * COPIED // COLUMNS
#: Parts of a round; rounds under way: one is added while one comes to the memory's other half.
ROUND, ROUNDS = 256, 2
#: Parts that are read from shared memory before the first of them is added.
AHEAD = 16


class NormSumsSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: SumConfig):
        self.add, self.pair = config.into == "add", config.pair
        self.dtype = cutlass.Float32 if self.add else fake.DTYPES[config.into]
        self.slots = Slots((4 * COPIED,))

    @cute.jit
    def __call__(
        self,
        mParts: cute.Tensor,
        mInto: cute.Tensor,
        mOtherParts: cute.Tensor | None,
        mOtherInto: cute.Tensor | None,
        stream: cuda.CUstream,
    ):
        self.kernel(mParts, mInto, mOtherParts, mOtherInto).launch(
            grid=(cute.ceil_div(mInto.shape[0], COLUMNS), 1 + self.pair, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mParts: cute.Tensor,
        mInto: cute.Tensor,
        mOtherParts: cute.Tensor | None,
        mOtherInto: cute.Tensor | None,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, of_pair, _ = cute.arch.block_idx()
        layout = cute.make_ordered_layout((ROUNDS, ROUND, COLUMNS), order=(2, 1, 0))
        sParts = SmemAllocator().allocate_tensor(cutlass.Float32, layout, byte_alignment=16)
        if cutlass.const_expr(self.pair):
            mParts = either(of_pair == 0, mParts, mOtherParts, 16)
            mInto = either(of_pair == 0, mInto, mOtherInto, self.dtype.width // 8)
        parts, width = mParts.shape[0], mInto.shape[0]
        column = block * COLUMNS + tidx
        adder = (tidx < COLUMNS) & (column < width)
        total = cutlass.Float32(0.0)
        # The kernel that makes the parts may still run: its results are read after this only.
        cute.arch.griddepcontrol_wait()
        for early in cutlass.range(ROUNDS, unroll=1):
            self.fetch(mParts, sParts, early, early * ROUND)
        if cutlass.const_expr(self.add):
            if adder:
                total = mInto[column]
        half = cutlass.Int32(0)
        for first in cutlass.range(0, parts, ROUND, unroll=1):
            cute.arch.cp_async_wait_group(ROUNDS - 1)
            # Everybody's copies have come.
            cute.arch.sync_threads()
            if adder:
                count = cutlass.min(parts - first, ROUND)
                total = self.added(total, sParts[half, None, tidx], count)
            # They are added.
            cute.arch.sync_threads()
            self.fetch(mParts, sParts, half, first + ROUNDS * ROUND)
            half = half ^ 1
        if adder:
            mInto[column] = total.to(self.dtype)

    @cute.jit
    def fetch(
        self,
        mParts: cute.Tensor,
        sParts: cute.Tensor,
        half: cutlass.Int32,
        first: cutlass.Int32,
    ):
        """Copy a round of parts from ``first`` on, as one batch; none beyond the last part."""
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row, column = tidx * COPIED // COLUMNS, block * COLUMNS + tidx * COPIED % COLUMNS
        end = cutlass.min(first + ROUND, mParts.shape[0])
        end = end if column < mParts.shape[1] else first
        start = cute.recast_ptr(sParts[half, None, None].iterator, dtype=cutlass.Uint8)
        target = start + tidx // WARP * self.slots.size
        for part in cutlass.range(first + row, end, AT_ONCE, unroll=1):
            offset = cutlass.Int64(part) * mParts.stride[0] + column
            self.slots.fetch(target, 0, copy.aligned(mParts, offset, COPIED))
            target = target + THREADS // WARP * self.slots.size
        cute.arch.cp_async_commit_group()

    @cute.jit
    def added(
        self, total: cutlass.Float32, sColumn: cute.Tensor, count: cutlass.Int32
    ) -> cutlass.Float32:
        """total + sColumn[0] + sColumn[1] + ..., ``count`` parts, ascending."""
        whole = count // AHEAD * AHEAD
        for begin in cutlass.range(0, whole, AHEAD, unroll=1):
            rParts = cute.make_rmem_tensor(cute.make_layout(AHEAD), cutlass.Float32)
            for a in cutlass.range_constexpr(AHEAD):
                rParts[a] = sColumn[begin + a]
            for a in cutlass.range_constexpr(AHEAD):
                total = total + rParts[a]
        for i in cutlass.range(whole, count, unroll=1):
            total = total + sColumn[i]
        return total


@cute.jit
def either(
    first: cutlass.Boolean,
    one: cute.Tensor,
    other: cute.Tensor,
    align: cutlass.Constexpr[int],
) -> cute.Tensor:
    """Select ``one`` if ``first``, else ``other``: two tensors in global memory of one layout."""
    address = one.iterator.toint() if first else other.iterator.toint()
    space = cute.AddressSpace.gmem
    pointer = cute.make_ptr(one.element_type, address, space, assumed_align=align)
    return cute.make_tensor(pointer, one.layout)


def build(config: SumConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; needs no GPU."""
    into = "fp32" if config.into == "add" else config.into
    parts, width, columns = fake.size(), fake.size(), fake.size(UNIT)

    def one():
        return fake.compact(cutlass.Float32, (parts, columns), 16), fake.vector(into, width)

    return compile(
        NormSumsSm90(config),
        *one(),
        *(one() if config.pair else (None, None)),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
