"""Y[t, n] = round(Σ_k W[n, k, e] X[t, k] + bias[e, n]), e the expert of row t, few rows, on SM90.

Layouts      X [T, K] row-major; W [N, K, E], each expert row- or column-major (16-byte strides);
             Y [T, N] row-major, rows of whole 16 bytes; offsets int32 [E + 1]: expert e has the
             rows offsets[e] to offsets[e + 1], clamped to [0, T] and to ascend.
Operands     swapped, as in gemm's kernel for few rows: 64 rows of W along M of ``wgmma.m64nTk16``,
             T tokens along N.  The swap changes no bit (docs/numerics.md).
Order        ``chain``, by the mainloop of gemm's kernels: one fp32 accumulator per output, K
             ascending in whole groups of 16, bias added in fp32, one rounding.  So a row has the
             bytes of ``ck.linear`` with its expert's weight, and of kernel_grouped_sm90.
Work         persistent: CTA c computes units c, c + CTAs, ...; a unit is ``tile_n`` rows of one
             expert's W times ``tile_m`` of its tokens.  Each CTA counts the units of all experts
             once, in shared memory; an expert without rows has none, and its W is not read.  Units
             of the same rows of W are neighbours: an expert with more tokens than a tile hits in
             L2.  The ring of loads runs on from unit to unit, through the epilogue.
K tail       as in dsl/mainloop.py.
M, N tails   a tile may load tokens of other experts, of which no output is stored; the last tile
             of T and of N starts early enough to end inside, if it can.  N's columns up to the next
             multiple of 4 are stored: they are padding of Y's own rows.
Roles        ``tile_n`` / 64 warpgroups multiply, one more warp loads.
Limits       SM90a only; bf16 and fp16; T, N, K < 2^31; at most MAX_EXPERTS experts; fewer than
             2^31 units.
Measured     docs/status/moe.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineTmaAsync

from ..compile import fake
from ..dsl import mma, pipeline, smem, swapped, tma
from ..dsl.mainloop import Mainloop
from ..dsl.swapped import QUAD, SharedTiles, SwappedTile, TileBounds
from ..schedulers.tiles import persistent_device as persistent
from .config import MAX_EXPERTS, GroupedFewConfig
from .device import operands, units
from .device.experts import rows_of
from .device.units import UnitTable

#: Shared memory that a CTA may have, less what barriers, alignment and counts of warps take.
SHARED_BYTES = 232448 - 4096
#: Named barrier of the consumer warpgroups.
CONSUMER_BARRIER = 1


@dataclass(frozen=True)
class Unit:
    """Some rows of one expert's W times some of its tokens.

    bounds: rows and columns of Y; end_m: the first row after those of the expert.
    """

    expert: cutlass.Int32
    bounds: TileBounds
    end_m: cutlass.Int32


class GroupedFewSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: GroupedFewConfig):
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        self.consumers = config.tile_n // 64
        self.threads = self.consumers * mma.WARPGROUP
        tile = config.tile_n, config.tile_m, config.tile_k
        sums_bytes = config.tile_m * (config.tile_n + QUAD) * 4
        space = SHARED_BYTES - 4 * MAX_EXPERTS - sums_bytes
        majors = (config.w_major, "k")
        self.mainloop = Mainloop(self.dtype, majors, tile, (1, 1), self.consumers, space)
        self.tile = SwappedTile(self.mainloop)

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mW: cute.Tensor,
        mY: cute.Tensor,
        mOffsets: cute.Tensor,
        mBias: cute.Tensor | None,
        ctas: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        sW_layout, sX_layout = self.mainloop.layouts()
        w, x = self.mainloop.sources(mW, mX)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.mainloop.stages]
            warps: cute.struct.MemRange[cutlass.Int32, units.COUNTERS // units.WARP]
            ends: cute.struct.MemRange[cutlass.Int32, MAX_EXPERTS]
            sums: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, self.tile.sums_size], 16]
            sW: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sW_layout)], smem.ALIGN
            ]
            sX: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sX_layout)], smem.ALIGN
            ]

        self.storage = Storage
        self.kernel(w, x, mY, mOffsets, mBias).launch(
            grid=(1, 1, ctas),
            block=(self.threads + 32, 1, 1),
            min_blocks_per_mp=1,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        w: tma.Source,
        x: tma.Source,
        mY: cute.Tensor,
        mOffsets: cute.Tensor,
        mBias: cute.Tensor | None,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == self.threads // 32:
            for source in (w, x):
                cpasync.prefetch_descriptor(source.atom)

        storage = SmemAllocator().allocate(self.storage)
        sW_layout, sX_layout = self.mainloop.layouts()
        sW = storage.sW.get_tensor(sW_layout.outer, swizzle=sW_layout.inner)
        sX = storage.sX.get_tensor(sX_layout.outer, swizzle=sX_layout.inner)
        smem_tiles = SharedTiles(sW, sX)
        alone = cute.make_layout((1, 1, 1))
        ring = self.mainloop.ring(storage.barriers.data_ptr(), alone)
        pipeline.announce_barriers((1, 1))

        table = UnitTable(mOffsets, storage.ends.get_tensor(cute.make_layout(MAX_EXPERTS)))
        sWarps = storage.warps.get_tensor(cute.make_layout(units.COUNTERS // units.WARP))
        columns = cute.ceil_div(mY.shape[1], self.config.tile_n)
        units.count_units(table, sWarps, mY.shape[0], columns, self.config.tile_m)
        # After this barrier of all threads the ring and the table can be read.
        pipeline.await_barriers((1, 1))

        if warp == self.threads // 32:
            self.load(w, x, smem_tiles, ring, mY, table)
        else:
            k = cute.size(x.tensor, mode=[1])
            sums = storage.sums.data_ptr()
            self.multiply(smem_tiles, sums, ring, mY, mBias, table, k)

    @cute.jit
    def load(
        self,
        w: tma.Source,
        x: tma.Source,
        smem_tiles: SharedTiles,
        ring: PipelineTmaAsync,
        mY: cute.Tensor,
        table: UnitTable,
    ):
        """Producer warp: load the K blocks of W and X of each unit, ascending."""
        blocks = cute.ceil_div(cute.size(x.tensor, mode=[1]), self.config.tile_k)
        alone = cute.make_layout((1, 1, 1))
        state = pipeline.producer_state(self.mainloop.stages)
        index, step = persistent.first_and_step()
        while index < table.count:
            unit = self.unit_at(index, mY, table)
            # W of one expert, and X from any of its rows on.
            w_expert = tma.Source(w.atom, w.tensor[None, None, unit.expert])
            origin = (unit.bounds.start_n, unit.bounds.start_m, 0)
            loads = self.mainloop.loads(
                (w_expert, x), smem_tiles.sW, smem_tiles.sX, alone, (0, 0), origin
            )
            state = self.mainloop.load(loads, ring, state, 0, 0, (0, blocks))
            index += step
        ring.producer_tail(state)

    @cute.jit
    def multiply(
        self,
        smem_tiles: SharedTiles,
        sums: cute.Pointer,
        ring: PipelineTmaAsync,
        mY: cute.Tensor,
        mBias: cute.Tensor | None,
        table: UnitTable,
        k: cutlass.Int32,
    ):
        """Consumer warpgroup: 64 rows of W times the tokens of each unit, then a share of Y."""
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP)
        operands = self.mainloop.operands(smem_tiles.sW, smem_tiles.sX, consumer)
        acc = self.mainloop.accumulator(operands)
        blocks = k // self.config.tile_k
        tail_groups = cute.ceil_div(k - blocks * self.config.tile_k, mma.K_GROUP)
        states = tuple(pipeline.consumer_state(self.mainloop.stages) for _ in range(2))
        index, step = persistent.first_and_step()
        while index < table.count:
            unit = self.unit_at(index, mY, table)
            # acc = Σ_k W[n, k, e] X[t, k]
            acc.fill(0.0)
            states = self.mainloop.chain(operands, acc, ring, states, blocks, tail_groups)
            # All consumers have read the sums of the unit before.
            self.sync_consumers()
            self.tile.store_sums(acc, sums, tidx)
            self.sync_consumers()
            self.store(sums, mY, mBias, unit, tidx)
            index += step

    @cute.jit
    def store(
        self,
        sums: cute.Pointer,
        mY: cute.Tensor,
        mBias: cute.Tensor | None,
        unit: Unit,
        tidx: cutlass.Int32,
    ):
        """Y = round(sums + bias) for the tokens and columns that the unit stores."""
        bounds, quads = unit.bounds, self.config.tile_n // QUAD
        count = self.config.tile_m * quads
        for i in cutlass.range_constexpr(cute.ceil_div(count, self.threads)):
            # By hand: quads of the tile, token-major.
            local = i * self.threads + tidx
            token, quad = local // quads, local % quads * QUAD
            row, column = bounds.start_m + token, bounds.start_n + quad
            inside_m = (row >= bounds.first_m) & (row < unit.end_m)
            inside = inside_m & (column >= bounds.first_n) & (column < mY.shape[1])
            if (local < count) & inside:
                source = (sums + (token * self.tile.pitch + quad)).align(16)
                rTotal = cute.make_rmem_tensor(QUAD, cutlass.Float32)
                rTotal.store(cute.make_tensor(source, cute.make_layout(QUAD)).load())
                swapped.store_quad(rTotal, mY, (row, column), mBias, unit.expert)

    def sync_consumers(self):
        """Barrier of the consumer warpgroups."""
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=self.threads)

    @cute.jit
    def unit_at(self, index: cutlass.Int32, mY: cute.Tensor, table: UnitTable) -> Unit:
        """Unit ``index``."""
        expert, local = units.expert_of(table, index)
        row0, rows = rows_of(expert, table.mOffsets, mY.shape[0])
        # Neighbours have the same rows of W: they hit in L2.
        tiles_m = cute.ceil_div(rows, self.config.tile_m)
        first_m = row0 + local % tiles_m * self.config.tile_m
        bounds = self.tile.bounds(first_m, local // tiles_m * self.config.tile_n, mY)
        return Unit(expert, bounds, row0 + rows)


def build(config: GroupedFewConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; needs no GPU."""
    arguments = operands.fakes(config.dtype, config.w_major, config.bias)
    return compile(GroupedFewSm90(config), *arguments, fake.stream(), options=fake.SM90_OPTIONS)
