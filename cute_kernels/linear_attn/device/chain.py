"""A walk over the chunks of a sequence with a state in registers: what its directions share.

A CTA has a sequence, a v head and 64 columns of V.  The last warp loads chunks ahead; warps 0 to 3
have the state, [64 columns of V, K] in fp32, as the accumulator of a WGMMA.  All products are
transposed, columns of V being an instruction's rows: what one makes is, rounded, the operand of the
next one that lies in registers.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from ...dsl import copy, mma, smem, tma
from .walks import ROWS, DeltaConfig

#: Columns of V of a CTA.
COLUMNS = 64
#: Warps of a warpgroup.
WARPS = 4
#: Numbers of a row that follow from its gates, at most.
GATES = 5
#: Named barrier of the warps that have the state; 0 is the CTA's.
BARRIER = 1


@dataclass(frozen=True)
class Place:
    """A CTA's sequence, head and first column; first row, end, chunks, slot of the first chunk."""

    sequence: cutlass.Int32
    head: cutlass.Int32
    column: cutlass.Int32
    first: cutlass.Int32
    end: cutlass.Int32
    chunks: cutlass.Int32
    slot: cutlass.Int32


@dataclass(frozen=True)
class Shared:
    """A CTA's shared memory: barriers of stages, numbers of rows, tiles by name."""

    full: cute.Pointer
    empty: cute.Pointer
    sGates: cute.Tensor
    tiles: dict[str, cute.Tensor]


@dataclass(frozen=True)
class Operand:
    """One operand of a chunk: rows by columns, or the transpose of columns from the CTA's on."""

    source: tma.Source
    tile: cute.Tensor
    head: cutlass.Int32
    transposed: bool


@dataclass(frozen=True)
class Gates:
    """What the numbers of rows follow from: G, β, [N, HV], and the scale."""

    mDecay: cute.Tensor
    mBeta: cute.Tensor
    scale: cutlass.Float32


@dataclass(frozen=True)
class RowGates:
    """Of a row: 2^G, β, 2^(G_C - G); and 2^G_C of its chunk, and the scale."""

    grown: cutlass.Float32
    beta: cutlass.Float32
    to_end: cutlass.Float32
    whole: cutlass.Float32
    scale: cutlass.Float32


@dataclass(frozen=True)
class Result:
    """Rows of a result: their target for whole chunks, their tile, the tensor."""

    source: tma.Source
    tile: cute.Tensor
    tensor: cute.Tensor


@dataclass(frozen=True)
class Accumulators:
    """Accumulators of the rows of a chunk and of the state, with the coordinates of elements."""

    by_keys: cute.TiledMma
    by_rows: cute.TiledMma
    update: cute.TiledMma
    rows: cute.Layout
    state: cute.Layout
    cR: cute.Tensor
    cS: cute.Tensor


class Chain:
    """One configuration of a walk; a kernel gives tiles, operands and the work of a chunk.

    Its ``layouts()``: name -> layout of each tile.
    """

    #: Warpgroups that read a stage.
    readers = 1

    def __init__(self, config: DeltaConfig):
        self.config, self.keys, self.stages = config, config.keys, config.stages
        self.dtype = cutlass.BFloat16

    # ---- global memory ---------------------------------------------------------------------------

    def load_keys(self, tensor: cute.Tensor) -> tma.Source:
        """Source of rows by K of [N, H, K]."""
        return tma.load(tma.view(tensor, [0, 2, 1]), self.of_keys(), (ROWS, self.keys), 1)

    def load_square(self, tensor: cute.Tensor) -> tma.Source:
        """Source of rows by rows of [N, HV, 64]."""
        return tma.load(tma.view(tensor, [0, 2, 1]), self.square("k"), (ROWS, ROWS), 1)

    def load_columns(self, tensor: cute.Tensor) -> tma.Source:
        """Source of columns by rows of [N, HV, V]."""
        tile, layout = (COLUMNS, ROWS), self.of_columns(self.stages)
        return tma.load(tma.view(tensor, [2, 0, 1]), layout, tile, 1)

    def store_columns(self, tensor: cute.Tensor) -> tma.Source:
        """Target of columns by rows of [N, HV, V]."""
        return tma.store(tma.view(tensor, [2, 0, 1]), self.of_columns(1), (COLUMNS, ROWS))

    def store_states(self, tensor: cute.Tensor) -> tma.Source:
        """Target of columns by K of [slots, HV, K, V]."""
        tile, layout = (COLUMNS, self.keys), self.of_columns(1, self.keys)
        return tma.store(tma.view(tensor, [3, 2, 1, 0]), layout, tile)

    # ---- shared memory ---------------------------------------------------------------------------

    def of_keys(self) -> cute.ComposedLayout:
        """Stages of rows by K."""
        return smem.operand_layout(self.dtype, ROWS, self.keys, "k", self.stages)

    def of_keys_transposed(self) -> cute.ComposedLayout:
        """Stages of K by rows, the same memory."""
        return smem.operand_layout(self.dtype, self.keys, ROWS, "mn", self.stages)

    def square(self, major: str) -> cute.ComposedLayout:
        """Stages of rows by rows; "mn": of the transpose, in the same memory."""
        return smem.operand_layout(self.dtype, ROWS, ROWS, major, self.stages)

    def of_columns(self, stages: int, rows: int = ROWS) -> cute.ComposedLayout:
        """Stages of columns of V by rows, or by K."""
        return smem.operand_layout(self.dtype, COLUMNS, rows, "mn", stages)

    def renamed(self) -> dict[str, str]:
        """Tiles that are another's memory."""
        return {}

    def storage(self) -> type:
        """Struct of all of a CTA's shared memory."""
        fields = {
            "full": cute.struct.MemRange[cutlass.Int64, self.stages],
            "empty": cute.struct.MemRange[cutlass.Int64, self.stages],
            "gates": cute.struct.MemRange[cutlass.Float32, self.stages * GATES * ROWS],
        }
        own = {n: layout for n, layout in self.layouts().items() if n not in self.renamed()}
        fields |= self.more_fields()
        return smem.struct(**fields, **{n: smem.tiles(self.dtype, own[n]) for n in own})

    def more_fields(self) -> dict[str, cute.struct.MemRange]:
        """Fields of shared memory that a kernel needs besides."""
        return {}

    def make_shared(self, storage: cute.struct) -> Shared:
        """Views of shared memory, whose barriers are made."""
        gates = cute.make_ordered_layout((ROWS, GATES, self.stages), order=(0, 1, 2))
        tiles = {}
        for name, layout in self.layouts().items():
            memory = getattr(storage, self.renamed().get(name, name))
            tiles[name] = memory.get_tensor(layout.outer, swizzle=layout.inner)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        self.init(full, empty)
        return Shared(full, empty, storage.gates.get_tensor(gates), tiles)

    @cute.jit
    def init(self, full: cute.Pointer, empty: cute.Pointer):
        """Initialise the barriers: a stage is full with its bytes and all lanes' numbers."""
        tidx, _, _ = cute.arch.thread_idx()
        if tidx == 0:
            for stage in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(full + stage, 1 + 32)
                cute.arch.mbarrier_init(empty + stage, self.readers * WARPS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

    @cute.jit
    def place(self, mOffsets: cute.Tensor, slots: cutlass.Int32):
        """Find where this CTA works; slots: of a sequence of a batch, 0 of a pack."""
        sequence, head, part = cute.arch.block_idx()
        first, end = mOffsets[sequence], mOffsets[sequence + 1]
        slot = sequence * slots
        if slots == 0:
            slot = first // ROWS + sequence
        chunks = (end - first + ROWS - 1) // ROWS
        return Place(sequence, head, part * COLUMNS, first, end, chunks, slot)

    # ---- the warp that loads ---------------------------------------------------------------------

    @cute.jit
    def load(
        self,
        operands: cutlass.Constexpr[tuple[Operand, ...]],
        full: cute.Pointer,
        stage: cutlass.Int32,
        start: cutlass.Int32,
        place: Place,
    ):
        """Load a chunk's operands into a stage; by a warp."""
        size = sum(cute.cosize(o.tile.layout) for o in operands) // self.stages
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, size * self.dtype.width // 8)
        for operand in operands:
            coord = (place.column, start) if operand.transposed else (start, 0)
            shape = cute.product_each(cute.slice_(operand.tile.layout, (None, None, 0)).shape)
            matrix = operand.source.tensor[None, None, operand.head]
            gX = cute.local_tile(cute.domain_offset(coord, matrix), shape, (0, 0))
            atom = operand.source.atom
            tXsX, tXgX = tma.partition(atom, 0, cute.make_layout(1), operand.tile, gX)
            cute.copy(atom, tXgX, tXsX[None, stage], tma_bar_ptr=full)

    def chunk(self, n: cutlass.Int32, place: Place) -> cutlass.Int32:
        """Number of the chunk that is the walk's ``n``-th."""
        return n

    @cute.jit
    def produce_chunks(
        self,
        operands: cutlass.Constexpr[tuple[Operand, ...]],
        gates: Gates,
        shared: Shared,
        place: Place,
    ):
        """Load each chunk, and the kernel's ``of_gates`` of its rows; by a warp."""
        lane, head = cute.arch.lane_idx(), place.head
        for n in cutlass.range(place.chunks, unroll=1):
            stage, phase = n % self.stages, n // self.stages % 2
            full, start = shared.full + stage, place.first + self.chunk(n, place) * ROWS
            cute.arch.mbarrier_wait(shared.empty + stage, phase ^ 1)
            self.load(operands, full, stage, start, place)
            last = cutlass.min(start + ROWS, place.end) - 1
            whole = gates.mDecay[last, head]
            sGates = shared.sGates[None, None, stage]
            for half in cutlass.range_constexpr(ROWS // 32):
                i = lane + 32 * half
                row = cutlass.min(start + i, last)
                decay, beta = gates.mDecay[row, head], gates.mBeta[row, head]
                grown, to_end, at_end = (
                    cute.math.exp2(x, fastmath=True) for x in (decay, whole - decay, whole)
                )
                row_gates = RowGates(grown, beta.to(cutlass.Float32), to_end, at_end, gates.scale)
                numbers = self.of_gates(row_gates)
                for which in cutlass.range_constexpr(len(numbers)):
                    sGates[i, which] = numbers[which]
            cute.arch.mbarrier_arrive(full)

    # ---- the warps that compute ------------------------------------------------------------------

    def accumulators(self, lane: cutlass.Int32) -> Accumulators:
        """The products of a walk, by the operand that lies in shared memory."""
        by_keys, by_rows = (
            self.product(ROWS, major) for major in (OperandMajorMode.K, OperandMajorMode.MN)
        )
        update = self.product(self.keys, OperandMajorMode.MN)
        rows, state = (COLUMNS, ROWS), (COLUMNS, self.keys)
        of_rows, of_state = by_keys.get_slice(lane), update.get_slice(lane)
        return Accumulators(
            by_keys,
            by_rows,
            update,
            cute.make_layout(of_rows.partition_shape_C(rows)),
            cute.make_layout(of_state.partition_shape_C(state)),
            of_rows.partition_C(cute.make_identity_tensor(rows)),
            of_state.partition_C(cute.make_identity_tensor(state)),
        )

    def product(self, n: int, b_major: OperandMajorMode) -> cute.TiledMma:
        """Product with operand A in registers, of 64 rows and ``n`` columns."""
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            b_major,
            cutlass.Float32,
            (1, 1, 1),
            (COLUMNS, n),
            warpgroup.OperandSource.RMEM,
        )

    def fragment_a(self, tiled: cute.TiledMma, columns: int) -> cute.Tensor:
        """Registers of an operand A [64, columns]."""
        return tiled.make_fragment_A(tiled.get_slice(0).partition_shape_A((COLUMNS, columns)))

    def fragment_b(self, tiled: cute.TiledMma, tile: cute.Tensor) -> cute.Tensor:
        """Stages of an operand B in shared memory."""
        return tiled.make_fragment_B(tiled.get_slice(0).partition_B(tile))

    @cute.jit
    def multiply(
        self,
        product: cute.TiledMma,
        acc: cute.Tensor,
        rA: cute.Tensor,
        tCrB: cute.Tensor,
        stage: cutlass.Int32,
        from_zero: cutlass.Constexpr[bool],
    ):
        """acc (+)= A B of one stage, A in registers, k16 steps ascending; one batch."""
        warpgroup.fence()
        for group in cutlass.range_constexpr(cute.size(rA, mode=[2])):
            product.set(warpgroup.Field.ACCUMULATE, group > 0 or not from_zero)
            cute.gemm(product, acc, rA[None, None, group], tCrB[None, None, group, stage], acc)
        warpgroup.commit_group()

    def round(self, values: cute.Tensor, rounded: cute.Tensor):
        """Round an accumulator to an operand A, which has its order."""
        in_order = cute.make_tensor(rounded.iterator, values.layout)
        in_order.store(values.load().to(self.dtype))

    @cute.jit
    def values(
        self, tile: cute.Tensor, stage: cutlass.Int32, acc: Accumulators, lane: cutlass.Int32
    ):
        """Columns of V of a chunk's rows, in the order of an accumulator."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), self.dtype)
        loads = cute.make_tiled_copy_C(atom, acc.by_keys).get_slice(lane)
        out = cute.make_rmem_tensor(acc.rows, self.dtype)
        cute.copy(loads, loads.partition_S(tile)[None, None, None, stage], loads.retile(out))
        return out

    def numbers(self, sGates: cute.Tensor, which: int, lane: cutlass.Int32) -> cute.Tensor:
        """Number ``which`` of the rows that a thread's accumulators are of: see `of_row`."""
        pair = sGates.iterator + (which * ROWS + 2 * (lane % 4))
        pointer = cute.make_ptr(
            cutlass.Float32, pair.toint(), cute.AddressSpace.smem, assumed_align=8
        )
        out = cute.make_rmem_tensor((2, ROWS // 8), cutlass.Float32)
        cute.autovec_copy(
            cute.make_tensor(pointer, cute.make_layout((2, ROWS // 8), stride=(1, 8))), out
        )
        return out

    def of_row(self, numbers: cute.Tensor, i: int) -> cutlass.Float32:
        """Pick that of element ``i`` of an accumulator: two rows, two columns, eights of rows."""
        return numbers[i % 2, i // 4]

    @cute.jit
    def clear_values(self, values: cute.Tensor, count: cutlass.Int32, acc: Accumulators):
        """Write zeros over an accumulator's rows from ``count`` on."""
        for i in cutlass.range_constexpr(cute.size(values)):
            if acc.cR[i][1] >= count:
                values[i] = cutlass.Float32(0.0)

    @cute.jit
    def weigh(
        self,
        values: cute.Tensor,
        numbers: cute.Tensor,
        count: cutlass.Int32,
        acc: Accumulators,
        rounded: cute.Tensor,
    ):
        """rounded = values times a number of their row, 0 of rows from ``count`` on."""
        weighed = cute.make_rmem_tensor(acc.rows, cutlass.Float32)
        for i in cutlass.range_constexpr(cute.size(weighed)):
            weighed[i] = values[i].to(cutlass.Float32) * self.of_row(numbers, i)
        if count < ROWS:
            self.clear_values(weighed, count, acc)
        self.round(weighed, rounded)

    @cute.jit
    def clear_rows(
        self,
        tiles: cutlass.Constexpr[tuple[cute.Tensor, ...]],
        stage: cutlass.Int32,
        count: cutlass.Int32,
        lane: cutlass.Int32,
    ):
        """Write zeros over rows from ``count`` on: those of other sequences, which may be NaN."""
        zero = self.dtype(0.0)
        for tile in tiles:
            columns = cute.size(tile, mode=[1])
            for i in cutlass.range_constexpr(ROWS * columns // mma.WARPGROUP):
                place = i * mma.WARPGROUP + lane
                row, column = place // columns, place % columns
                if row >= count:
                    tile[row, column, stage] = zero
        self.publish_tiles(BARRIER)

    @cute.jit
    def release(self, shared: Shared, stage: cutlass.Int32, lane: cutlass.Int32):
        """Give a stage back, whose products are done."""
        cute.arch.sync_warp()
        if lane % 32 == 0:
            cute.arch.mbarrier_arrive(shared.empty + stage)

    # ---- results ---------------------------------------------------------------------------------

    def keep(
        self, values: cute.Tensor, target: cute.Tensor, tiled: cute.TiledMma, lane: cutlass.Int32
    ):
        """Write 16-bit values in the order of an accumulator to a tile of shared memory."""
        atom = hopper_helpers.get_smem_store_op(LayoutEnum.COL_MAJOR, self.dtype, cutlass.Float32)
        stores = cute.make_tiled_copy_C(atom, tiled).get_slice(lane)
        cute.copy(stores, stores.retile(values), stores.partition_D(target)[None, None, None, 0])

    @cute.jit
    def await_tiles(self, barrier: cutlass.Constexpr[int], lane: cutlass.Int32):
        """Wait until the tiles that a warpgroup stored are read."""
        if lane < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=mma.WARPGROUP)

    def publish_tiles(self, barrier: int):
        """Let TMA and WGMMA see tiles that all threads of a warpgroup wrote."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=barrier, number_of_threads=mma.WARPGROUP)

    @cute.jit
    def store_tile(self, source: tma.Source, tile: cute.Tensor, matrix: cute.Tensor):
        """Store a tile to the origin of a matrix; by a warp."""
        shape = cute.product_each(cute.slice_(tile.layout, (None, None, 0)).shape)
        gX = cute.local_tile(matrix, shape, (0, 0))
        tXsX, tXgX = tma.partition(source.atom, 0, cute.make_layout(1), tile, gX)
        cute.copy(source.atom, tXsX[None, 0], tXgX)

    @cute.jit
    def store_state(self, source: tma.Source, tile: cute.Tensor, slot: cutlass.Int32, place: Place):
        """Store a tile of a rounded state to a slot [K, V]; by a warp."""
        matrix = source.tensor[None, None, place.head, slot]
        self.store_tile(source, tile, cute.domain_offset((place.column, 0), matrix))
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_rows(
        self,
        result: Result,
        start: cutlass.Int32,
        count: cutlass.Int32,
        place: Place,
        lane: cutlass.Int32,
    ):
        """Store rows of a chunk; of one that is not whole, row by row."""
        source, tile, target = result.source, result.tile, result.tensor
        if count >= ROWS:
            if lane < 32:
                matrix = source.tensor[None, None, place.head]
                self.store_tile(source, tile, cute.domain_offset((place.column, start), matrix))
                cute.arch.cp_async_bulk_commit_group()
        else:
            for i in cutlass.range_constexpr(ROWS * COLUMNS // 8 // mma.WARPGROUP):
                row, piece = i * 16 + lane // 8, lane % 8
                if row < count:
                    words = smem.chunk(tile.iterator, ROWS, 2 * COLUMNS, row, piece)
                    self.store_piece(target, start + row, place, piece, words)

    @cute.jit
    def store_piece(
        self,
        target: cute.Tensor,
        row: cutlass.Int32,
        place: Place,
        piece: cutlass.Int32,
        words: cute.Tensor,
    ):
        """Store 16 bytes of a row."""
        to = copy.vector(target, (row, place.head, place.column + 8 * piece), 8)
        cute.recast_tensor(to, cutlass.Int32).store(words.load())

    @cute.jit
    def load_state(self, states: cute.Tensor, state: cute.Tensor, acc: Accumulators, place: Place):
        """Load a sequence's state, fp32 [K, V]."""
        for part in cutlass.range_constexpr(self.keys // 8):
            for i in cutlass.range_constexpr(4):
                state[4 * part + i] = self.elements(states, acc, place, part, i)[0]

    @cute.jit
    def save_state(self, states: cute.Tensor, state: cute.Tensor, acc: Accumulators, place: Place):
        """Store a sequence's state, fp32 [K, V]."""
        for part in cutlass.range_constexpr(self.keys // 8):
            for i in cutlass.range_constexpr(4):
                self.elements(states, acc, place, part, i)[0] = state[4 * part + i]

    @cute.jit
    def elements(
        self,
        states: cute.Tensor,
        acc: Accumulators,
        place: Place,
        part: cutlass.Constexpr[int],
        i: cutlass.Constexpr[int],
    ):
        """One element of a sequence's state [K, V], ``i`` of a thread's four of eight keys."""
        column, key = acc.cS[i]
        coord = (place.sequence, place.head, key, place.column + column)
        first = copy.vector(states, coord, 1)
        return cute.make_tensor(first.iterator + 8 * part * states.stride[2], first.layout)
