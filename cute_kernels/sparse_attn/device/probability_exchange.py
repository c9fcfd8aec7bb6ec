"""P of long contexts: weights of a block, passed from the warp that makes them to the products.

A stage of a batch has four blocks of 128 keys, one by each of four warps.  Lane l of a warp has the
values that lane l of the accumulator's first warp has (``softmax``), and nobody else reads them:

    sP        int32 [stage, block, 8, 32 lanes, 4]: pairs of P in the order of WGMMA's operand,
              (2 n, 0), (2 n, 1), (2 n + 1, 0), (2 n + 1, 1) of (i, half); zeros where no rows are
    sFactor, sSum    fp32 [stage, block, half, 32 lanes]: exp2(c (m - m')); Σ P of a lane's columns
    sChanged  int32 [stage, block]: whether the factor of a row is not 1
    sMax      fp32 [half, 32 lanes]: the maximum behind the last block
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from .long_tiles import HALF
from .paged_tiles import WARP
from .values_state import Handover

#: Blocks of a batch, and stages of batches.
BATCH, STAGES = 4, 2
#: The block of zeros, of warps without rows.
ZEROS = STAGES * BATCH
#: int32s of P of a block; vectors of 16 bytes that a lane has of them.
BLOCK_WORDS, VECTORS = 1024, 8


@dataclass(frozen=True)
class ProbabilityExchange(Handover):
    """Shared memory of the handover, and its mbarriers by stage (``full``, ``empty``)."""

    pP: cute.Pointer
    sFactor: cute.Tensor
    sSum: cute.Tensor
    sChanged: cute.Tensor
    sMax: cute.Tensor

    def vector(self, slot: cutlass.Int32, number: int, lane: cutlass.Int32):
        """View of vector ``number`` of a lane's P of a block (slot: 4 stage + block).

        Vectors of slot ``ZEROS`` are zeros, of lane 0.
        """
        offset = slot * BLOCK_WORDS + (number * WARP + lane) * 4
        # Computed by hand: 16 bytes are one access.
        pointer = cute.make_ptr(
            cutlass.Int32, (self.pP + offset).toint(), cute.AddressSpace.smem, assumed_align=16
        )
        return cute.make_tensor(pointer, cute.make_layout(4))

    @cute.jit
    def fill_zeros(self, lane: cutlass.Int32):
        """Write the block of zeros; by a warp, before the CTA's barrier."""
        zeros = cute.make_rmem_tensor((4,), cutlass.Int32)
        zeros.fill(0)
        for number in cutlass.range_constexpr(VECTORS):
            if lane == 0:
                cute.autovec_copy(zeros, self.vector(cutlass.Int32(ZEROS), number, lane))

    @cute.jit
    def take(self, rP: cute.Tensor, slot: cutlass.Int32, lane: cutlass.Int32):
        """Load P of a block into WGMMA's operand ``rP``."""
        pairs = cute.recast_tensor(rP, cutlass.Int32)
        values = cute.make_rmem_tensor((4,), cutlass.Int32)
        for number in cutlass.range_constexpr(VECTORS):
            cute.autovec_copy(self.vector(slot, number, lane), values)
            for i in cutlass.range_constexpr(4):
                pairs[4 * number + i] = values[i]

    @cute.jit
    def give(self, rP: cute.Tensor, slot: cutlass.Int32, lane: cutlass.Int32):
        """Store pairs of P of a block, int32 [half, 16]."""
        values = cute.make_rmem_tensor((4,), cutlass.Int32)
        for number in cutlass.range_constexpr(VECTORS):
            for i in cutlass.range_constexpr(4):
                values[i] = rP[i % 2, 2 * number + i // 2]
            cute.autovec_copy(values, self.vector(slot, number, lane))

    @cute.jit
    def add(
        self,
        row_sum: cute.Tensor,
        factor: cute.Tensor,
        slot: cutlass.Int32,
        group: cutlass.Int32,
        lane: cutlass.Int32,
    ):
        """Load the factors of a block; l = l factor + Σ P of this lane's columns."""
        self.add_half(row_sum, factor, slot, 0, lane)
        if group > HALF:
            self.add_half(row_sum, factor, slot, 1, lane)

    def add_half(
        self,
        row_sum: cute.Tensor,
        factor: cute.Tensor,
        slot: cutlass.Int32,
        half: int,
        lane: cutlass.Int32,
    ):
        """One half of `add`."""
        factor[half] = self.sFactor[lane, half, slot]
        block_sum = self.sSum[lane, half, slot]
        row_sum[half] = cute.math.fma(row_sum[half], factor[half], block_sum)


@cute.jit
def exponentiate(
    scores: cute.Tensor, shift: cutlass.Float32, c: cutlass.Float32
) -> cutlass.Float32:
    """s = exp2(s c + shift) of a lane's scores of one row; returns Σ s, as ``softmax.block_sum``.

    scores: 2 i + side.
    """
    for index in cutlass.range_constexpr(cute.size(scores)):
        power = cute.math.fma(scores[index], c, shift)
        scores[index] = cute.math.exp2(power, fastmath=True)
    even, odd = scores[0], scores[1]
    for i in cutlass.range_constexpr(1, cute.size(scores) // 2):
        even = even + scores[2 * i]
        odd = odd + scores[2 * i + 1]
    return even + odd
