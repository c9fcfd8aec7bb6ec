"""Products with swapped operands: rows of a weight W along M of WGMMA, few tokens along N.

The accumulator has Y transposed.  It is stored in shared memory, a token's columns contiguous, and
read from there in quads of neighbouring columns, each of which one thread stores to Y.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from . import copy
from .mainloop import Mainloop

#: Neighbouring columns that one thread sums and stores.
QUAD = 4


@dataclass(frozen=True)
class SharedTiles:
    """Staged tiles in shared memory: [rows, k, stage] of W and X."""

    sW: cute.Tensor
    sX: cute.Tensor


@dataclass(frozen=True)
class TileBounds:
    """Rows and columns of Y that a tile computes and those that it stores.

    start_m, start_n: first row and column computed.
    first_m, first_n: first row and column stored; the tile before stores those ahead of them.
    """

    start_m: cutlass.Int32
    start_n: cutlass.Int32
    first_m: cutlass.Int32
    first_n: cutlass.Int32


class SwappedTile:
    """Output tile of a mainloop whose A is W: ``tile_n`` rows of W by ``tile_m`` tokens.

    pitch: fp32 elements of a token's columns in shared memory, padded against bank conflicts.
    sums_size: fp32 elements of a tile there.
    """

    def __init__(self, mainloop: Mainloop):
        self.mainloop = mainloop
        self.tile_n, self.tile_m = mainloop.tile[:2]
        self.pitch = self.tile_n + QUAD
        self.sums_size = self.tile_m * self.pitch

    def bounds(self, m: cutlass.Int32, n: cutlass.Int32, mY: cute.Tensor) -> TileBounds:
        """Bounds of the tile of Y that stores from row m and column n on.

        It starts early enough to end inside Y, if it can: zeros that TMA fills in cost more than
        data.  Rows and columns that it shares with the tile before are stored by that one.  Its
        first column is a multiple of QUAD.
        """
        rows, columns = mY.shape[0], mY.shape[1]
        start_m = cutlass.max(cutlass.min(m, rows - self.tile_m), 0)
        last_n = (columns - self.tile_n + QUAD - 1) // QUAD * QUAD
        start_n = cutlass.max(cutlass.min(n, last_n), 0)
        return TileBounds(start_m, start_n, m, n)

    def coordinates(self, tidx: cutlass.Int32) -> cute.Tensor:
        """tCcC: (row of W, token) in the tile of each value of a thread's accumulator."""
        thr_mma = self.mainloop.tiled_mma(self.mainloop.consumers).get_slice(tidx)
        return thr_mma.partition_C(cute.make_identity_tensor(self.mainloop.tile[:2]))

    @cute.jit
    def store_sums(self, acc: cute.Tensor, sums: cute.Pointer, tidx: cutlass.Int32):
        """sSums[row, token] = acc[row, token], rows contiguous."""
        tCcC = self.coordinates(tidx)
        sSums = cute.make_tensor(
            sums, cute.make_layout(self.mainloop.tile[:2], stride=(1, self.pitch))
        )
        # Nested loops: the DSL warns of long ones, and the warning would reach the user.
        for four in cutlass.range_constexpr(cute.size(acc) // QUAD):
            for i in cutlass.range_constexpr(QUAD * four, QUAD * four + QUAD):
                sSums[tCcC[i]] = acc[i]


@cute.jit
def store_quad(
    rTotal: cute.Tensor,
    mY: cute.Tensor,
    coord: cute.Coord,
    mBias: cute.Tensor | None,
    bias_row: cutlass.Int32,
):
    """Y[row, column + j] = round(rTotal[j] + bias[bias_row, column + j]), j < QUAD.

    A quad that ends beyond the last column ends in the padding of Y's own row.
    """
    row, column = coord
    if cutlass.const_expr(mBias is not None):
        for j in cutlass.range_constexpr(QUAD):
            # A column beyond N, in the padding of Y, reads the last one.
            c = cutlass.min(column + j, mY.shape[1] - 1)
            offset = cutlass.Int64(bias_row) * mBias.stride[0] + c
            gBias = cute.make_tensor(mBias.iterator + offset, cute.make_layout(1))
            rTotal[j] += gBias[0].to(cutlass.Float32)
    rY = cute.make_rmem_tensor(QUAD, mY.element_type)
    rY.store(rTotal.load().to(mY.element_type))
    copy.vector(mY, (row, column), QUAD).store(rY.load())
