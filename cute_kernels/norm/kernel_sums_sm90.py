"""Parts of dweight, of dbias or of both, added to what they belong to, on SM90.

    into += parts[0] + parts[1] + ...  or  made = parts[0] + parts[1] + ..., rounded

Layout       parts fp32 [P, 8 ⌈D / 8⌉]; into fp32 [D], made [D] in its dtype; of a pair, two each.
Order        one chain, ascending, from ``into`` or from zero.
Work         a CTA for 16 columns, 64 bytes of a part, so that narrow rows have some for many SMs:
             its threads copy 64 parts a stage into a ring of shared memory, and lanes of one warp
             add them, one for each column.  A dependent launch: CTAs come to SMs before the parts
             are complete, and wait there.
Measured     docs/status.md.
"""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy
from ..dsl.ring import Slots
from .config import UNIT, SumConfig

WARP, WARPS = 32, 8
#: Columns of a CTA; those that a thread copies of a part.
COLUMNS, COPIED = 16, 4
#: Parts that a warp copies at once, and a stage's.
OF_WARP = WARP * COPIED // COLUMNS
OF_STAGE = OF_WARP * WARPS
#: All but one are under way while one is added.
STAGES = 3
#: Parts that are read from shared memory before those read earlier are added.
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
        stream,
    ):
        self.kernel(mParts, mInto, mOtherParts, mOtherInto).launch(
            grid=(cute.ceil_div(mInto.shape[0], COLUMNS), 1 + self.pair, 1),
            block=(WARP * WARPS, 1, 1),
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
        _, of_pair, _ = cute.arch.block_idx()
        layout = cute.make_ordered_layout((STAGES, OF_STAGE, COLUMNS), order=(2, 1, 0))
        sParts = SmemAllocator().allocate_tensor(cutlass.Float32, layout, byte_alignment=16)
        # The kernel that makes the parts may still run: none of its results is read before this.
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(self.pair):
            if of_pair == 0:
                self.sum(mParts, mInto, sParts)
            else:
                self.sum(mOtherParts, mOtherInto, sParts)
        else:
            self.sum(mParts, mInto, sParts)

    @cute.jit
    def sum(self, mParts: cute.Tensor, mInto: cute.Tensor, sParts: cute.Tensor):
        """A CTA's columns of one sum."""
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.make_warp_uniform(tidx // WARP), tidx % WARP
        parts, width = mParts.shape[0], mInto.shape[0]
        # A lane behind the last column has the last one instead, and stores nothing.
        column = block * COLUMNS + lane
        total = cutlass.Float32(0.0)
        if cutlass.const_expr(self.add):
            total = mInto[cutlass.min(column, width - 1)]
        for stage in cutlass.range_constexpr(STAGES - 1):
            self.fetch(mParts, sParts, stage, stage * OF_STAGE, (block, warp, lane))
        stage = cutlass.Int32(0)
        for first in cutlass.range(0, parts, OF_STAGE, unroll=1):
            cute.arch.cp_async_wait_group(STAGES - 2)
            # Everybody's copies have come, and the stage before this one is added.
            cute.arch.sync_threads()
            free = STAGES - 1 if stage == 0 else stage - 1
            next_one = first + (STAGES - 1) * OF_STAGE
            self.fetch(mParts, sParts, free, next_one, (block, warp, lane))
            if warp == 0:
                count = cutlass.min(parts - first, OF_STAGE)
                total = self.added(total, sParts[stage, None, lane % COLUMNS], count)
            stage = 0 if stage == STAGES - 1 else stage + 1
        if (warp == 0) & (lane < COLUMNS) & (column < width):
            mInto[column] = total.to(self.dtype)

    @cute.jit
    def fetch(self, mParts: cute.Tensor, sParts: cute.Tensor, stage, first, thread: tuple):
        """A stage of parts from ``first`` on, one batch of copies; zeros for what is not there."""
        block, warp, lane = thread
        part = first + warp * OF_WARP + lane * COPIED // COLUMNS
        column = block * COLUMNS + lane * COPIED % COLUMNS
        there = (part < mParts.shape[0]) & (column < mParts.shape[1])
        at = cutlass.Int64(part) * mParts.stride[0] + column if there else cutlass.Int64(0)
        rows = cute.recast_ptr(sParts[stage, None, None].iterator, dtype=cutlass.Uint8)
        target = rows + warp * self.slots.size
        self.slots.fetch(target, 0, copy.aligned(mParts, at, COPIED), there)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def added(self, total, sColumn: cute.Tensor, count):
        """The sum and ``count`` parts of a column, ascending."""
        whole = count // AHEAD * AHEAD
        now = self.read(sColumn, 0)
        for begin in cutlass.range(0, whole, AHEAD, unroll=1):
            following = self.read(sColumn, cutlass.min(begin + AHEAD, OF_STAGE - AHEAD))
            for a in cutlass.range_constexpr(AHEAD):
                total = total + now[a]
            now.store(following.load())
        for i in cutlass.range(whole, count, unroll=1):
            total = total + sColumn[i]
        return total

    @cute.jit
    def read(self, sColumn: cute.Tensor, begin) -> cute.Tensor:
        """Some parts of a column, in registers."""
        values = cute.make_rmem_tensor(cute.make_layout(AHEAD), cutlass.Float32)
        for a in cutlass.range_constexpr(AHEAD):
            values[a] = sColumn[begin + a]
        return values


def build(config: SumConfig, compile=cute.compile):
    """Compiles one configuration against fake tensors; no GPU needed."""
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
