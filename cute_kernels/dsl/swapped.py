"""Frame of a product kernel for few rows: rows of a weight W along M of WGMMA, tokens along N.

The operands are swapped, so that one token does not pay for 64; no bit shows it (docs/numerics.md).
The accumulator has Y transposed.  It is stored in shared memory, a token's columns contiguous, and
read from there in quads of neighbouring columns, each of which one thread stores to Y.

Roles        warpgroups of 64 rows of W each multiply; one more warp, the last, loads.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute

from . import copy, mma, tma
from .product import Arguments, Cta, Frame

#: Neighbouring columns that one thread sums and stores.
QUAD = 4
#: Shared memory of an SM; what each CTA needs of it for barriers, alignment and the system.
SM_BYTES, CTA_BYTES = 233472, 4096
#: Named barrier of the consumer warpgroups.
CONSUMER_BARRIER = 1


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


class SwappedFrame(Frame):
    """Base of product kernels for few rows: tiles of ``tile_m`` rows of W by ``tile_n`` tokens.

    Args:
        dtype: element type of W and X.
        w_major: contiguous dimension of W; that of X is K.
        tile: (rows of W, tokens, k).
        used: bytes of shared memory that the kernel takes besides the ring.
        ctas_per_sm: CTAs that share an SM's memory.
        pair: CTAs of a cluster that share W.
        tree: whether leaves of K are added.

    pitch: fp32 elements of a token's columns in shared memory, padded against bank conflicts.
    sums_size: fp32 elements of a tile there.
    """

    #: Tiles start early enough to end inside, if they can: `bounds`.
    clips = (False, False)

    def __init__(
        self,
        dtype: type[cutlass.Numeric],
        w_major: str,
        tile: tuple[int, int, int],
        used: int = 0,
        ctas_per_sm: int = 1,
        pair: int = 1,
        tree: bool = False,
    ):
        consumers, self.ctas_per_sm = tile[0] // 64, ctas_per_sm
        space = SM_BYTES // ctas_per_sm - CTA_BYTES - used
        options = {"tree": tree, "consumers": consumers, "space": space}
        super().__init__(dtype, None, (w_major, "k"), tile, (1, pair), **options)
        self.threads = consumers * mma.WARPGROUP
        self.producer_warp, self.first_consumer = self.threads // 32, 0
        self.pitch = self.tile_m + QUAD
        self.sums_size = self.tile_n * self.pitch

    def launch(
        self,
        mW: cute.Tensor,
        mX: cute.Tensor,
        args: Arguments,
        stream: cuda.CUstream,
        **shape: cute.Shape,
    ) -> None:
        """Launch the kernel on W [N, K] and X [M, K]; shape: its grid, and its cluster."""
        w, x = self.product.sources(mW, mX)
        self.storage = self.make_storage()
        self.kernel(w, x, None, args).launch(
            block=(self.threads + 32, 1, 1),
            min_blocks_per_mp=self.ctas_per_sm,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=100,
            stream=stream,
            **shape,
        )

    def problem_shape(self, cta: Cta) -> cute.Shape:
        """(N, M, K): rows of W and of X, and elements of their sums, of X."""
        n, m = cute.size(cta.a.tensor, mode=[0]), cute.size(cta.b.tensor, mode=[0])
        return n, m, cute.size(cta.b.tensor, mode=[1])

    @cute.jit
    def run_roles(self, cta: Cta, w: tma.Source, x: tma.Source, d: None, args: Arguments):
        """Split the warps of the CTA."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == self.producer_warp:
            self.produce(cta, w, x, args)
        else:
            self.consume(cta, d, args)

    def bounds(self, m: cutlass.Int32, n: cutlass.Int32, mY: cute.Tensor) -> TileBounds:
        """Bounds of the tile of Y that stores from row m and column n on.

        It starts early enough to end inside Y, if it can: zeros that TMA fills in cost more than
        data.  Rows and columns that it shares with the tile before are stored by that one.  Its
        first column is a multiple of QUAD.
        """
        rows, columns = mY.shape[0], mY.shape[1]
        start_m = cutlass.max(cutlass.min(m, rows - self.tile_n), 0)
        last_n = (columns - self.tile_m + QUAD - 1) // QUAD * QUAD
        start_n = cutlass.max(cutlass.min(n, last_n), 0)
        return TileBounds(start_m, start_n, m, n)

    def tile_coordinates(self, tidx: cutlass.Int32) -> cute.Tensor:
        """tCcC: (row of W, token) in the whole tile of each value of a thread's accumulator."""
        thr_mma = self.product.tiled_mma(self.product.consumers).get_slice(tidx)
        return thr_mma.partition_C(cute.make_identity_tensor((self.tile_m, self.tile_n)))

    @cute.jit
    def store_sums(self, tCrC: cute.Tensor, sums: cute.Pointer, tidx: cutlass.Int32):
        """sSums[row, token] = tCrC[row, token], rows contiguous."""
        tCcC = self.tile_coordinates(tidx)
        layout = cute.make_layout((self.tile_m, self.tile_n), stride=(1, self.pitch))
        sSums = cute.make_tensor(sums, layout)
        # Nested loops: the DSL warns of long ones, and the warning would reach the user.
        for four in cutlass.range_constexpr(cute.size(tCrC) // QUAD):
            for i in cutlass.range_constexpr(QUAD * four, QUAD * four + QUAD):
                sSums[tCcC[i]] = tCrC[i]

    def sync_consumers(self):
        """Named barrier of the consumer warpgroups."""
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=self.threads)


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
