"""A step of decoding on SM90: its memory, and the fragments of its products."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from ...cpu import elementary
from ...dsl import copy, smem
from .walks import BLOCK, ROWS, DeltaStepConfig

BLOCKS = ROWS // BLOCK
#: Columns of V of a warp, and of a lane.
WARP_COLUMNS, LANE_COLUMNS = 32, 4
#: Rows of a k16 step that a lane has of operand A, from 2 (lane mod 4) on.
STEP_ROWS = 0, 1, 8, 9
#: Elements behind a row of shared memory, so that 8 rows have their 16 bytes in all banks.
PAD = 8
#: Warps of an SM, which limit registers.
RESIDENT_WARPS = 12
#: Steps of products that are unrolled; loads of more of them would take too many registers.
UNROLL = 2
#: What a CTA finds out once: its slot; the first new row among the operands; from the grid on, how
#: many rows are old, are there, have r, u and A in rings, are of chunks that close for good; the
#: grid's row in rings; whether S^ is there; 0.
PLACE = "slot", "first", "opened", "total", "made", "whole", "turn", "rounded", "zero"
LOG2E = elementary.LOG2E_FP32[0]


@dataclass(frozen=True)
class Operands:
    """The new rows, and o of them."""

    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mG: cute.Tensor
    mBeta: cute.Tensor
    mOut: cute.Tensor


@dataclass(frozen=True)
class Record:
    """States and S^, scratch for both, and rings."""

    mState: cute.Tensor
    mRounded: cute.Tensor
    mScratch: cute.Tensor
    mScratchRounded: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mG: cute.Tensor
    mBeta: cute.Tensor
    mR: cute.Tensor
    mU: cute.Tensor
    mA: cute.Tensor


@dataclass(frozen=True)
class Counters:
    """First rows of sequences, their slots, and the counters of slots."""

    mOffsets: cute.Tensor
    mSlots: cute.Tensor
    mGrid: cute.Tensor
    mLength: cute.Tensor
    mMade: cute.Tensor
    mRoundedAt: cute.Tensor


@dataclass(frozen=True)
class Scalars:
    """scale; rows of a sequence of a batch, 0 of a pack; whether slots are given; drafts; R."""

    scale: cutlass.Float32
    length: cutlass.Int32
    by_slot: cutlass.Int32
    drafts: cutlass.Int32
    ring: cutlass.Int32


@dataclass(frozen=True)
class Shared:
    """A CTA's shared memory: k and A of a chunk's rows; q, L, P and T of a block's; S^; G, β.

    sDiagonal: the transpose of L's block on the diagonal, fp32.  sPlace: numbers of `PLACE`.
    """

    sK: cute.Tensor
    sKt: cute.Tensor
    sA: cute.Tensor
    sAt: cute.Tensor
    sQ: cute.Tensor
    sL: cute.Tensor
    sP: cute.Tensor
    sT: cute.Tensor
    sS: cute.Tensor
    sDiagonal: cute.Tensor
    sDecay: cute.Tensor
    sBeta: cute.Tensor
    sPlace: cute.Tensor


@dataclass(frozen=True)
class State:
    """Addresses of a lane's parts of a state and of S^."""

    exact: cutlass.Int64
    rounded: cutlass.Int64


@dataclass(frozen=True)
class Lane:
    """A lane's row and pair of columns of a fragment, and its first column of V."""

    row: cutlass.Int32
    pair: cutlass.Int32
    column: cutlass.Int32
    warp: cutlass.Int32
    index: cutlass.Int32


@dataclass(frozen=True)
class Step:
    """All that a CTA works on in a chunk, whose rows are counted from its first one.

    product: instruction of products.  group: v heads of a k head.
    slot, first, opened, total, made: as in `PLACE`.
    of_v, of_k: the chunk's first row of the head in rings, counted in rows of one head.
    """

    operands: Operands
    record: Record
    scalars: Scalars
    shared: Shared
    product: cute.TiledMma
    lane: Lane
    head: cutlass.Int32
    k_head: cutlass.Int32
    group: cutlass.Int32
    slot: cutlass.Int32
    first: cutlass.Int32
    opened: cutlass.Int32
    total: cutlass.Int32
    made: cutlass.Int32
    of_v: cutlass.Int64
    of_k: cutlass.Int64


@cute.jit
def add(a: cutlass.Float32, b: cutlass.Float32) -> cutlass.Float32:
    """Return a + b of products that must be rounded before it."""
    return cute.arch.inline_ptx(
        "add.rn.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[cutlass.Float32],
        read_only_args=[a, b],
    )


class StepParts:
    """Shared and global memory of a configuration, and operands of its products."""

    def __init__(self, config: DeltaStepConfig):
        self.keys, self.values = config.keys, config.values
        self.warps = config.values // WARP_COLUMNS
        self.threads = 32 * self.warps
        self.dtype = cutlass.BFloat16

    # ---- shared memory ---------------------------------------------------------------------------

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Name -> rows and columns of each tile of bf16."""
        return {
            "sK": (ROWS, self.keys),
            "sA": (ROWS, ROWS),
            "sQ": (BLOCK, self.keys),
            "sL": (BLOCK, ROWS),
            "sP": (BLOCK, ROWS),
            "sT": (BLOCK, BLOCK),
            "sS": (self.keys // 8, 8 * self.threads),
        }

    def storage(self) -> type:
        """Struct of all of a CTA's shared memory."""
        tiles = {
            name: cute.struct.MemRange[self.dtype, rows * (columns + PAD)]
            for name, (rows, columns) in self.sizes().items()
        }
        numbers = {"sDiagonal": BLOCK * BLOCK, "sDecay": ROWS, "sBeta": ROWS}
        numbers = {n: cute.struct.MemRange[cutlass.Float32, size] for n, size in numbers.items()}
        numbers["sPlace"] = cute.struct.MemRange[cutlass.Int32, len(PLACE)]
        fields = {n: cute.struct.Align[memory, 16] for n, memory in (tiles | numbers).items()}
        return smem.struct(**fields)

    def make_shared(self, storage: cute.struct) -> Shared:
        """Views of shared memory."""
        tiles = {}
        for name, (rows, columns) in self.sizes().items():
            memory, pitch = getattr(storage, name), columns + PAD
            layouts = {
                name: cute.make_layout((rows, columns), stride=(pitch, 1)),
                f"{name}t": cute.make_layout((columns, rows), stride=(1, pitch)),
            }
            tiles |= {n: memory.get_tensor(layout) for n, layout in layouts.items()}
        square = cute.make_ordered_layout((BLOCK, BLOCK), order=(1, 0))
        return Shared(
            *(tiles[name] for name in ("sK", "sKt", "sA", "sAt", "sQ", "sL", "sP", "sT", "sS")),
            storage.sDiagonal.get_tensor(square),
            storage.sDecay.get_tensor(cute.make_layout(ROWS)),
            storage.sBeta.get_tensor(cute.make_layout(ROWS)),
            storage.sPlace.get_tensor(cute.make_layout(len(PLACE))),
        )

    def vectors(
        self, step: Step, rows: int, columns: int
    ) -> list[tuple[cutlass.Int32, cutlass.Int32]]:
        """(row, vector) of a thread's shares of 16 bytes of a tile."""
        in_row, thread = columns // 8, 32 * step.lane.warp + step.lane.index
        shares = [i * self.threads + thread for i in range(rows * in_row // self.threads)]
        return [(share // in_row, share % in_row) for share in shares]

    def vector_of(self, tile: cute.Tensor, row: cutlass.Int32, number: cutlass.Int32):
        """16 bytes of a row of a tile of shared memory."""
        pointer = tile.iterator + (row * tile.stride[0] + 8 * number)
        pointer = cute.make_ptr(
            cutlass.Int32, pointer.toint(), cute.AddressSpace.smem, assumed_align=16
        )
        return cute.make_tensor(pointer, cute.make_layout(4))

    def fetch(self, source: cutlass.Int64, target: cute.Tensor, there: cutlass.Boolean):
        """Copy 16 bytes to shared memory, asynchronously; zeros where they are not there."""
        count = cutlass.Int32(there) * 16
        cute.arch.inline_ptx(
            "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
            read_only_args=[target.iterator.toint(), source, count],
        )

    def put(self, source: cute.Tensor, target: cute.Tensor):
        """Store 16 bytes of shared memory."""
        cute.recast_tensor(target, cutlass.Int32).store(source.load())

    # ---- global memory ---------------------------------------------------------------------------

    def state(
        self, mState: cute.Tensor, mRounded: cute.Tensor, slot: cutlass.Int32, step: Step
    ) -> State:
        """Find a lane's parts of a state and of S^."""
        lane, head = step.lane, step.head
        exact = copy.vector(mState, (slot, head, lane.pair, lane.column), LANE_COLUMNS)
        vector = 32 * lane.warp + lane.index
        rounded = copy.vector(mRounded, (slot, head, 8 * vector), 8)
        return State(exact.iterator.toint(), rounded.iterator.toint())

    def state_row(self, exact: cutlass.Int64, row: int) -> cute.Tensor:
        """A lane's columns of a state, ``row`` rows behind its first one."""
        address = exact + row * self.values * 4
        pointer = cute.make_ptr(
            cutlass.Float32, address, cute.AddressSpace.gmem, assumed_align=4 * LANE_COLUMNS
        )
        return cute.make_tensor(pointer, cute.make_layout(LANE_COLUMNS))

    def rounded_part(self, rounded: cutlass.Int64, s: int, half: int) -> cute.Tensor:
        """A lane's 8 elements of S^, a half of those of operand A of k16 step ``s``."""
        address = rounded + (2 * s + half) * self.threads * 16
        pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout(8))

    def ring(
        self,
        mRing: cute.Tensor,
        step: Step,
        i: cutlass.Int32,
        column: cutlass.Int32,
        count: int,
    ) -> cute.Tensor:
        """``count`` columns of row i of the chunk, of the v head, in a ring."""
        size = 1 if cute.rank(mRing) == 2 else mRing.shape[2]
        row = step.of_v + cutlass.Int64(i) * step.operands.mV.shape[1]
        return copy.aligned(mRing, row * size + column, count)

    def ring_columns(self, mRing: cute.Tensor, step: Step, i: cutlass.Int32) -> cute.Tensor:
        """A lane's columns of row i of the chunk in a ring of rows of V."""
        return self.ring(mRing, step, i, step.lane.column, LANE_COLUMNS)

    def ring_keys(self, step: Step, i: cutlass.Int32, column: cutlass.Int32) -> cute.Tensor:
        """8 columns of row i of the chunk, of the k head."""
        row = step.of_k + cutlass.Int64(i) * step.operands.mK.shape[1]
        return copy.aligned(step.record.mK, row * self.keys + column, 8)

    def new_row(
        self,
        tensor: cute.Tensor,
        step: Step,
        i: cutlass.Int32,
        head: cutlass.Int32,
        column: cutlass.Int32,
        count: int,
    ) -> cute.Tensor:
        """``count`` columns of row i of the chunk, a new one, of an operand or o."""
        row = step.first + (i - step.opened)
        return copy.vector(tensor, (row, head, column), count)

    # ---- fragments -------------------------------------------------------------------------------

    def fragment_a(self, step: Step, rows: int, k: int) -> cute.Tensor:
        """Registers of an operand A [rows, k]."""
        return step.product.make_fragment_A(step.product.partition_shape_A((rows, k)))

    def accumulator(self, step: Step, rows: int, columns: int) -> cute.Tensor:
        """An accumulator [rows, columns] of zeros."""
        shape = step.product.partition_shape_C((rows, columns))
        acc = cute.make_rmem_tensor(shape, cutlass.Float32)
        acc.fill(0.0)
        return acc

    def load(self, step: Step, side: str, tile: cute.Tensor, transposed: bool = False):
        """Operand "A" or "B" from a tile [rows or columns, k] of shared memory."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transposed, 4), self.dtype)
        product, thread = step.product, step.product.get_slice(step.lane.index)
        if side == "A":
            loads, fragment = (
                cute.make_tiled_copy_A(atom, product),
                product.make_fragment_A(thread.partition_A(tile)),
            )
        else:
            loads, fragment = (
                cute.make_tiled_copy_B(atom, product),
                product.make_fragment_B(thread.partition_B(tile)),
            )
        loads = loads.get_slice(step.lane.index)
        cute.copy(loads, loads.partition_S(tile), loads.retile(fragment))
        return fragment

    def square(self, tile: cute.Tensor, i: cutlass.Int32, j: cutlass.Int32) -> cute.Tensor:
        """Block (i, j) of 16 rows and columns of a tile."""
        return cute.local_tile(tile, (BLOCK, BLOCK), (i, j))

    def multiply(self, step: Step, acc: cute.Tensor, rA: cute.Tensor, rB: cute.Tensor):
        """acc += A B of one k16 step."""
        cute.gemm(step.product, acc, rA[None, None, 0], rB[None, None, 0], acc)

    def transposed(self, step: Step, rows: list[cute.TensorSSA]) -> cute.Tensor:
        """Operand A [32 columns of V, 16] of a lane's columns of its `STEP_ROWS`, rounded."""
        rA = self.fragment_a(step, WARP_COLUMNS, BLOCK)
        for i, row in enumerate(rows):
            values = row.to(self.dtype)
            for c in range(LANE_COLUMNS):
                rA[i % 2 + 2 * (c % 2) + 4 * (i // 2) + 8 * (c // 2)] = values[c]
        return rA

    def as_operand(self, step: Step, acc: cute.Tensor) -> cute.Tensor:
        """Operand A of an accumulator of 16 columns, rounded."""
        tiles = cute.size(acc, mode=[1])
        rA = self.fragment_a(step, 16 * tiles, BLOCK)
        rounded = cute.make_rmem_tensor(acc.layout, self.dtype)
        rounded.store(acc.load().to(self.dtype))
        for n in range(2):
            for t in range(tiles):
                for i in range(4):
                    rA[i + 4 * n + 8 * t] = rounded[i + 4 * (t + tiles * n)]
        return rA

    def columns_of(self, rA: cute.Tensor, j: int) -> cute.Tensor:
        """A lane's columns of the ``j``-th of its `STEP_ROWS`, of an operand A [32, 16]."""
        out = cute.make_rmem_tensor(cute.make_layout(LANE_COLUMNS), self.dtype)
        for c in range(LANE_COLUMNS):
            out[c] = rA[j % 2 + 2 * (c % 2) + 4 * (j // 2) + 8 * (c // 2)]
        return out

    def elements(self, j: int) -> list[int]:
        """Elements of an accumulator [32, 16] that are a lane's columns of its ``j``-th row."""
        return [j % 2 + 8 * (j // 2) + 2 * c for c in range(LANE_COLUMNS)]

    def fetch_rounded(self, step: Step, rounded: cutlass.Int64):
        """Load a lane's parts of S^, which no other one reads."""
        for s in range(self.keys // BLOCK):
            for half in range(2):
                source = self.rounded_part(rounded, s, half).iterator.toint()
                self.fetch(source, self.fetched_part(step, s, half), True)

    def fetched_part(self, step: Step, s: int, half: int) -> cute.Tensor:
        """A lane's 16 bytes of S^ in shared memory, as `rounded_part`."""
        thread = 32 * step.lane.warp + step.lane.index
        return self.vector_of(step.shared.sS, 2 * s + half, thread)

    def rounded_state(self, step: Step, s: int) -> cute.Tensor:
        """Operand A of k16 step ``s`` of S^ᵀ, which this lane has loaded."""
        fragment = self.fragment_a(step, WARP_COLUMNS, BLOCK)
        for half in range(2):
            part = cute.make_tensor(fragment.iterator + 8 * half, cute.make_layout(8))
            part = cute.recast_tensor(part, cutlass.Int32)
            part.store(self.fetched_part(step, s, half).load())
        return fragment

    def keep_rounded(self, fragment: cute.Tensor, rounded: cutlass.Int64, s: cutlass.Int32):
        """Store step ``s`` of S^ᵀ."""
        for half in range(2):
            part = cute.make_tensor(fragment.iterator + 8 * half, cute.make_layout(8))
            self.rounded_part(rounded, s, half).store(part.load())

    @cute.jit
    def round_state(self, step: Step, state: State):
        """Make S^ of a state."""
        for s in cutlass.range(self.keys // BLOCK, unroll=1):
            rows = [self.state_row(state.exact, BLOCK * s + i).load() for i in STEP_ROWS]
            self.keep_rounded(self.transposed(step, rows), state.rounded, s)

    def rows_before(self, mRing: cute.Tensor, step: Step, s: int, b: cutlass.Int32) -> cute.Tensor:
        """Rows of block ``s`` in a ring, as an operand A; those of another one if s >= b."""
        first = cutlass.min(s, cutlass.max(b - 1, 0)) * BLOCK + step.lane.pair
        rows = [self.ring_columns(mRing, step, first + i).load() for i in STEP_ROWS]
        return self.transposed(step, rows)

    @cute.jit
    def keep(self, mRing: cute.Tensor, rA: cute.Tensor, step: Step, b: cutlass.Int32):
        """Store the rows of block ``b`` that were not made before in a ring."""
        for j in cutlass.range_constexpr(len(STEP_ROWS)):
            i = b * BLOCK + step.lane.pair + STEP_ROWS[j]
            if (i >= step.made) & (i < step.total):
                self.ring_columns(mRing, step, i).store(self.columns_of(rA, j).load())
