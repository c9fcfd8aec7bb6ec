"""After the backward: dQ = round(dq scale), from the order of the accumulators to [B, Sq, Hq, D].

Layouts      dq fp32 [B, Hq, Mt, tile_m * D], a tile as in ``dq_layout``; dQ [B, Sq, Hq, D], rows of
             D contiguous.  A pack's lie as ``device/packed`` says, Mt counts the rows there.
Order        nothing is added: one product, one rounding.
Roles        one CTA per (tile of tile_m query rows, head, batch); a thread has the accumulators of
             the thread of the same number.
Limits       SM90a; bf16 and fp16; D a multiple of 16.
Measured     on an H200: docs/status.md, docs/notes/attention_sm90.md.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from ..compile import fake
from ..dsl import copy
from .config import PostConfig
from .device import packed
from .device.backward_tiles import BLOCK, dq_layout

WARPGROUP = 128
THREADS = 2 * WARPGROUP


class BackwardPostSm90:
    """One dtype, head dimension and tile height; ``__call__`` is what is compiled."""

    def __init__(self, config: PostConfig):
        assert config.tile_m in (64, 128) and config.head_dim % 16 == 0
        self.dtype, self.head_dim = fake.DTYPES[config.dtype], config.head_dim
        self.tile_m, self.packed = config.tile_m, config.packed

    @cute.jit
    def __call__(
        self,
        mAcc: cute.Tensor,
        mdQ: cute.Tensor,
        mPlace: cute.Tensor | None,
        scale: cutlass.Float32,
        stream,
    ):
        batches, heads, tiles, _ = mAcc.shape
        self.kernel(mAcc, mdQ, mPlace, scale).launch(
            grid=(tiles, heads, batches), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mAcc: cute.Tensor,
        mdQ: cute.Tensor,
        mPlace: cute.Tensor | None,
        scale: cutlass.Float32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        tile, head, batch = cute.arch.block_idx()
        warpgroup, thread = tidx // WARPGROUP, tidx % WARPGROUP
        # Warpgroups are stacked along the rows of 128, and side by side along D for 64 rows.
        row = tile * self.tile_m + thread // 32 * 16 + thread % 32 // 4
        column = thread % 4 * 2
        if cutlass.const_expr(self.tile_m == WARPGROUP):
            row += warpgroup * 64
        else:
            column += warpgroup * (self.head_dim // 2)
        fours = self.tile_m * self.head_dim // (4 * THREADS)
        gAcc = cute.make_tensor(mAcc[batch, head, tile, None].iterator, dq_layout(fours))
        own = gAcc[None, thread, None, warpgroup]
        if cutlass.const_expr(self.packed):
            shift, end = packed.place_of(mPlace, tile * self.tile_m // BLOCK)
            if tile * self.tile_m < end:
                self.round(own, mdQ, (batch, head, row, column), (shift, end), scale)
        else:
            self.round(own, mdQ, (batch, head, row, column), (0, mdQ.shape[1]), scale)

    @cute.jit
    def round(self, own, mdQ, at, place, scale):
        """A thread's accumulators of a tile; at: (batch, head, its first row and column)."""
        (batch, head, row, column), (shift, end) = at, place
        fours = self.tile_m * self.head_dim // (4 * THREADS)
        rAcc = cute.make_rmem_tensor(own.shape, cutlass.Float32)
        cute.autovec_copy(own, rAcc)
        for four in cutlass.range_constexpr(fours):
            # Two values of a row, then two of the row 8 below.
            for half in cutlass.range_constexpr(2):
                below = row + half * 8
                if below < end:
                    target = (batch, below - shift, head, column + 8 * four)
                    values = (rAcc[2 * half, four], rAcc[2 * half + 1, four])
                    self.store(mdQ, target, values, scale)

    @cute.jit
    def store(self, mdQ, place, values, scale):
        """Two adjacent elements, rounded: one 4-byte store."""
        target = copy.vector(mdQ, place, 2)
        rounded = cute.make_rmem_tensor(2, self.dtype)
        for i in cutlass.range_constexpr(2):
            rounded[i] = (values[i] * scale).to(self.dtype)
        cute.autovec_copy(rounded, target)


def build(config: PostConfig, compile=cute.compile):
    """Compiles one variant against fake tensors; no GPU needed."""
    batch, q_len, heads, tiles = (fake.size() for _ in range(4))
    wide = tuple(cute.sym_int64(divisibility=4) for _ in range(3))
    even = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
    shape = (batch, heads, tiles, config.tile_m * config.head_dim)
    return compile(
        BackwardPostSm90(config),
        make_fake_tensor(cutlass.Float32, shape, (*wide, 1), assumed_align=16),
        make_fake_tensor(
            fake.DTYPES[config.dtype],
            (batch, q_len, heads, config.head_dim),
            (*even, 1),
            assumed_align=16,
        ),
        packed.fake_table() if config.packed else None,
        cutlass.Float32(1.0),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
