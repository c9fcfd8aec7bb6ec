"""Stores of dK and dV of a block, through TMA or, where a sequence ends in it, row by row."""

import cutlass
from cutlass import cute

from ...dsl import mma
from . import varlen
from .backward_state import Outputs, SharedStorage, VarlenGrads
from .backward_tiles import WARPGROUPS, BackwardTiles

CONSUMER_THREADS = WARPGROUPS * mma.WARPGROUP


class Stores:
    """Stores of one configuration of the kernel."""

    def __init__(self, tiles: BackwardTiles):
        self.tiles = tiles

    def store_rows(
        self,
        varlen_grads: VarlenGrads,
        shared: SharedStorage,
        coord: varlen.RowCoord,
        inside: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Store the first rows of dK and dV, of a block that a sequence ends in."""
        for buffer, target in ((shared.sdS, varlen_grads.mdK), (shared.sV, varlen_grads.mdV)):
            tile, shape = buffer.data_ptr(), self.tiles.k_shape
            varlen.store_rows(tile, shape, target, coord, inside, thread, CONSUMER_THREADS)

    def copy_out(
        self,
        outputs: Outputs,
        sdK: cute.Tensor,
        sdV: cute.Tensor,
        kv_head: cutlass.Int32,
        batch: cutlass.Int32,
        block: cutlass.Int32,
        rows: varlen.RowRange | None,
    ):
        """Store dK and dV of a block through TMA; by one thread."""
        for matrix, buffer in ((outputs.dk, sdK), (outputs.dv, sdV)):
            tXsX, tXgX = self.tiles.boxes(matrix, buffer, kv_head, batch, rows)
            cute.copy(matrix.atom, tXsX[None, 0], tXgX[None, block])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
