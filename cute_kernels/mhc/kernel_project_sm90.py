"""Sums of x psiᵀ and x² over chunks of channels, on SM90; optionally fused with expand_combine.

    sums[s, m, j] = Σ_k x[m, k] psi[j, k],  squares[s, m] = Σ_k x[m, k]²,  k of chunk s
    expand: y_j = (f + bias) post_j + Σ_i x_i res[i, j] takes the place of x, and is stored

Layout       x, y [M, K] rows of streams (mhc/config.py); psi fp32 [N, K]; sums [S, M, N],
             squares [S, M] fp32; f [M, C].
Order        a chunk is added in steps of 32 channels, a step in vectors (device/vector.py); each
             octet is two k16 groups of ``mma.sync``, in one chain.  psi is the sum of T bf16
             terms, and so is an fp32 x; each term of psi has its own sums, which are added
             smallest term first.  Squares: a lane adds those of an octet from zero, and octets in
             a chain; then four lanes, neighbours first.  A chain of single squares would be too
             small, as squares of bf16 numbers are rounded down more often than up.  The order
             does not depend on M, the grid or the warp.
Work         a CTA keeps the terms of one chunk of psi in shared memory and streams tokens past
             them, a tile of 16 to a warp; as many CTAs as fit share a chunk.
M, C tails   rows beyond the last read that row, and are not stored; vectors beyond the last
             channel are zeros.
Measured     docs/status.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy, reduce
from .config import ProjectConfig, chunk_channels, mappings, vector_channels
from .device import matrix
from .device.arguments import ExpandTensors, FakeRows
from .device.vector import TokenCoefficients, Vector, load_token, rounded, subview, to_fp32

WARP = 32
#: Channels of one step, and elements of an octet.
STEP, OCTET = 32, 8
#: Items of psi that a thread loads before it splits the first into terms.
FILL = 2


@dataclass(frozen=True)
class TokenRow:
    """One of a lane's tokens, and the token that it reads: the last one where that is beyond it."""

    token: cutlass.Int32
    read: cutlass.Int32


@dataclass(frozen=True)
class TileInputs:
    """Inputs of a warp's tile of tokens, in one chunk.

    coefficients: of each row; None where they are loaded again for each vector.
    begin:        first channel of the chunk.
    total:        channels, C.
    """

    mX: cute.Tensor
    expand: ExpandTensors
    coefficients: list[TokenCoefficients | None]
    rows: list[TokenRow]
    begin: cutlass.Int32
    total: cutlass.Int32


@dataclass(frozen=True)
class TileSums:
    """Running sums of a tile.

    sPsi:    fragments of psi, the other operand.
    acc:     Σ_k psi x of each row.
    squares: Σ_k x² of each row.
    """

    sPsi: cute.Tensor
    acc: list[cute.Tensor]
    squares: cute.Tensor


@dataclass(frozen=True)
class RowLoads:
    """Elements of one row that a lane loads at once: x, and f if y is computed; unconverted."""

    x: cute.Tensor
    f: cute.Tensor | None


class MhcProjectSm90:
    """Kernel of one configuration; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: ProjectConfig):
        n = config.n
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        self.terms = 2 if config.precision == "bf16x2" else 3
        self.chunk = chunk_channels(n, config.precision)
        self.steps = self.chunk // STEP * n  # steps of one octet a lane
        self.columns = mappings(n)
        # Tiles of 16 rows: the rows of psi's first term, then those of the next.
        self.tiles = -(-self.terms * self.columns // matrix.ROWS)
        self.vector = Vector(self.dtype, n, config.layout, vector_channels(n, config.layout))
        # An item is an octet; or a vector, where y needs all streams of its channels.
        self.octets = self.vector.size // OCTET if config.expand else 1
        self.items = n // self.octets  # items of 32 channels
        # A lane has two tokens, g and g + 8, of the 16 of a warp.
        self.rows = 2
        self.threads = WARP * config.warps

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mPsi: cute.Tensor,
        mSums: cute.Tensor,
        mSquares: cute.Tensor,
        mF: cute.Tensor | None,
        mBias: cute.Tensor | None,
        mPost: cute.Tensor | None,
        mRes: cute.Tensor | None,
        mY: cute.Tensor | None,
        ctas: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        expand = ExpandTensors(mF, mBias, mPost, mRes, mY)
        self.kernel(mX, mPsi, mSums, mSquares, expand).launch(
            grid=(ctas, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.config.blocks,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mPsi: cute.Tensor,
        mSums: cute.Tensor,
        mSquares: cute.Tensor,
        expand: ExpandTensors,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tidx // WARP)
        registers = self.steps * self.tiles * WARP * OCTET
        sPsi = SmemAllocator().allocate_tensor(
            cutlass.Int32, cute.make_layout(registers), byte_alignment=16
        )
        tiles = (mX.shape[0] + 8 * self.rows - 1) // (8 * self.rows)
        chunks, warps = mSums.shape[0], self.config.warps
        # CTAs that share a chunk; each has some of its tiles.
        sharers = cutlass.max(ctas // chunks, 1)
        for chunk in cutlass.range(block // sharers, chunks, ctas // sharers, unroll=1):
            cute.arch.sync_threads()
            self.fill(sPsi, mPsi, chunk, tidx)
            cute.arch.sync_threads()
            for tile in cutlass.range(
                block % sharers * warps + warp, tiles, sharers * warps, unroll=1
            ):
                self.tile(mX, sPsi, mSums, mSquares, expand, chunk, tile)

    @cute.jit
    def octet_coord(self, step: cutlass.Int32, i: cutlass.Int32, t: cutlass.Int32) -> cute.Coord:
        """(first channel in the chunk, stream in "nc") of a lane's octet i of a step."""
        channels = self.vector.channels
        if cutlass.const_expr(self.config.layout == "cn"):
            return step * STEP + i * (4 * channels) + channels * t, 0
        return step * STEP + channels * t, i

    @cute.jit
    def octet(
        self,
        mX: cute.Tensor,
        base: cutlass.Int64,
        coord: cute.Coord,
        total: cutlass.Int32,
        checked: cutlass.Constexpr[bool],
    ) -> cute.Tensor:
        """Load eight elements of a row from ``coord`` = (channel, stream); 0 beyond ``total``."""
        c, stream = coord
        rX = cute.make_rmem_tensor(cute.make_layout(OCTET), mX.element_type)
        width = 128 // mX.element_type.width
        # Computed by hand: 64-bit offsets, and one form that serves both layouts.
        offset = cutlass.Int64(c) * self.config.n
        if cutlass.const_expr(self.config.layout == "nc"):
            offset = cutlass.Int64(total) * stream + c
        for a in cutlass.range_constexpr(OCTET // width):
            rAccess = subview(rX, a * width, width)
            element = base + offset + a * width
            if cutlass.const_expr(checked):
                # Beyond the last channel the row's first elements are read, and replaced by 0.
                inside = c + self.vector.channel(a * width) < total
                rAccess.store(copy.aligned(mX, element if inside else base, width).load())
                for e in cutlass.range_constexpr(width):
                    rAccess[e] = rAccess[e] if inside else mX.element_type(0.0)
            else:
                rAccess.store(copy.aligned(mX, element, width).load())
        return rX

    @cute.jit
    def fill(self, sPsi: cute.Tensor, mPsi: cute.Tensor, chunk: cutlass.Int32, tidx: cutlass.Int32):
        """Write the fragments of a chunk of psi = Σ of bf16 terms to shared memory.

        An item is what one lane reads in a step.
        """
        channels = mPsi.shape[1] // self.config.n
        begin = chunk * self.chunk
        items = self.steps * WARP
        # A whole chunk: several items in flight.  Else zeros beyond the last channel.
        if begin + self.chunk <= channels:
            for item in cutlass.range(tidx, items, self.threads, unroll=FILL):
                self.fill_item(sPsi, mPsi, begin, item, channels, False)
        else:
            for item in cutlass.range(tidx, items, self.threads, unroll=1):
                self.fill_item(sPsi, mPsi, begin, item, channels, True)

    @cute.jit
    def fill_item(
        self,
        sPsi: cute.Tensor,
        mPsi: cute.Tensor,
        begin: cutlass.Int32,
        item: cutlass.Int32,
        channels: cutlass.Int32,
        checked: cutlass.Constexpr[bool],
    ):
        """Split octets of rows g, g + 8, ... of psi into terms: rows g and g + 8 of every tile."""
        lane, step = item % WARP, item // WARP
        n, blocks = self.config.n, self.columns // 8
        c, stream = self.octet_coord(step // n, step % n, lane % 4)
        rows = []
        for block in cutlass.range_constexpr(blocks):
            base = cutlass.Int64(block * 8 + lane // 4) * mPsi.shape[1]
            octet = self.octet(mPsi, base, (begin + c, stream), channels, checked)
            rows.append(matrix.terms(octet, self.terms))
        for tile in cutlass.range_constexpr(self.tiles):
            for group in cutlass.range_constexpr(2):
                rPsi = cute.make_rmem_tensor(cute.make_layout(4), cutlass.Int32)
                rPsi.fill(0)
                for half in cutlass.range_constexpr(2):
                    # Blocks of eight rows: those of the first term, then of the next.
                    index = 2 * tile + half
                    if cutlass.const_expr(index < self.terms * blocks):
                        for pair in cutlass.range_constexpr(2):
                            term = rows[index % blocks][index // blocks]
                            rPsi[half + 2 * pair] = term[2 * group + pair]
                self.fragment(sPsi, step, tile, lane, group).store(rPsi.load())

    @cute.jit
    def fragment(
        self,
        sPsi: cute.Tensor,
        step: cutlass.Int32,
        tile: cutlass.Constexpr[int],
        lane: cutlass.Int32,
        group: cutlass.Constexpr[int],
    ) -> cute.Tensor:
        """View of the four registers of a lane in one k16 group of psi."""
        offset = (((step * self.tiles + tile) * 2 + group) * WARP + lane) * 4
        # Computed by hand: the cast asserts the alignment of one 16-byte access.
        pointer = cute.make_ptr(
            cutlass.Int32,
            (sPsi.iterator + offset).toint(),
            cute.AddressSpace.smem,
            assumed_align=16,
        )
        return cute.make_tensor(pointer, cute.make_layout(4))

    @cute.jit
    def tile(
        self,
        mX: cute.Tensor,
        sPsi: cute.Tensor,
        mSums: cute.Tensor,
        mSquares: cute.Tensor,
        expand: ExpandTensors,
        chunk: cutlass.Int32,
        tile: cutlass.Int32,
    ):
        """Sums of one chunk of the tokens of a warp: lanes of row g have tokens g and g + 8."""
        config = self.config
        lane = cute.arch.lane_idx()
        m, k = mX.shape
        total = k // config.n
        tokens = [tile * (8 * self.rows) + lane // 4 + 8 * h for h in range(self.rows)]
        reads = [cutlass.min(token, m - 1) for token in tokens]
        rows = [TokenRow(token, read) for token, read in zip(tokens, reads)]
        # Where registers are short, coefficients are loaded again for each vector.
        coefficients = [None] * self.rows
        if cutlass.const_expr(config.layout == "cn"):
            coefficients = [
                load_token(config.n, row, None, expand.mPost, expand.mRes) for row in reads
            ]
        acc = [
            cute.make_rmem_tensor(cute.make_layout(self.tiles * matrix.SUMS), cutlass.Float32)
            for _ in range(self.rows)
        ]
        squares = cute.make_rmem_tensor(cute.make_layout(self.rows), cutlass.Float32)
        for row_acc in acc:
            row_acc.fill(0.0)
        squares.fill(0.0)
        begin = chunk * self.chunk
        extent = cutlass.min(total - begin, self.chunk)
        whole = extent // STEP
        inputs = TileInputs(mX, expand, coefficients, rows, begin, total)
        sums = TileSums(sPsi, acc, squares)
        if whole > 0:
            self.whole_steps(inputs, sums, whole)
        for step in cutlass.range(whole, (extent + STEP - 1) // STEP, unroll=1):
            for i in cutlass.range_constexpr(self.items):
                self.add_item(inputs, sums, self.load(inputs, step, i, True), step, i, True)
        self.finish(mSums, mSquares, sums, rows, chunk)

    @cute.jit
    def whole_steps(self, inputs: TileInputs, sums: TileSums, steps: cutlass.Int32):
        """Add ``steps`` whole steps; the loads of the next step are in flight during each."""
        last = steps - 1
        items = [self.load(inputs, 0, i, False) for i in range(self.items)]
        for step in cutlass.range(steps, unroll=1):
            following = cutlass.min(step + 1, last)
            next_items = [self.load(inputs, following, i, False) for i in range(self.items)]
            for i in cutlass.range_constexpr(self.items):
                self.add_item(inputs, sums, items[i], step, i, False)
                self.replace(items[i], next_items[i])

    @cute.jit
    def replace(self, item: list[RowLoads], source: list[RowLoads]):
        """Copy the registers of item ``source`` to those of ``item``, for each row."""
        for old, new in zip(item, source):
            old.x.store(new.x.load())
            if cutlass.const_expr(old.f is not None):
                old.f.store(new.f.load())

    @cute.jit
    def load(
        self,
        inputs: TileInputs,
        step: cutlass.Int32,
        i: cutlass.Constexpr[int],
        checked: cutlass.Constexpr[bool],
    ) -> list[RowLoads]:
        """Load item i of a step, of each row."""
        mX, mF = inputs.mX, inputs.expand.mF
        begin, total = inputs.begin, inputs.total
        lane = cute.arch.lane_idx()
        items = []
        for row in inputs.rows:
            # Computed by hand: rows begin at 64-bit offsets.
            base = cutlass.Int64(row.read) * total
            x_base = base * self.config.n
            if cutlass.const_expr(mF is None):
                c, stream = self.octet_coord(step, i, lane % 4)
                x = self.octet(mX, x_base, (begin + c, stream), total, checked)
                items.append(RowLoads(x, None))
            else:
                c = begin + self.channel_of(step, i)
                x = self.vector.load(mX, x_base, c, total, checked)
                items.append(RowLoads(x, self.vector.load_raw(mF, base, c, total, checked)))
        return items

    @cute.jit
    def channel_of(self, step: cutlass.Int32, i: cutlass.Constexpr[int]) -> cutlass.Int32:
        """First channel of a lane's vector, in the chunk."""
        channels = self.vector.channels
        return step * STEP + i * (4 * channels) + channels * (cute.arch.lane_idx() % 4)

    @cute.jit
    def add_item(
        self,
        inputs: TileInputs,
        sums: TileSums,
        item: list[RowLoads],
        step: cutlass.Int32,
        i: cutlass.Constexpr[int],
        checked: cutlass.Constexpr[bool],
    ):
        """Add item i of a step: Σ_k x psi and Σ_k x², of y in place of x if it is computed."""
        terms, rXs = [], []
        for h in cutlass.range_constexpr(self.rows):
            rX = item[h].x
            if cutlass.const_expr(inputs.expand.mF is not None):
                c = inputs.begin + self.channel_of(step, i)
                rX = self.expand(inputs, h, item[h], c, checked)
            rXs.append(rX)
            terms.append(matrix.terms(rX, self.terms))
        for o in cutlass.range_constexpr(self.octets):
            octet = step * self.config.n + i * self.octets + o
            self.multiply(sums, terms, octet, o)
        # After the products, whose fragments of psi take the registers that this needs.
        for h in cutlass.range_constexpr(self.rows):
            values = to_fp32(rXs[h])
            for o in cutlass.range_constexpr(self.octets):
                octet_sum = values[o * OCTET] * values[o * OCTET]
                for p in cutlass.range_constexpr(o * OCTET + 1, (o + 1) * OCTET):
                    octet_sum = cute.math.fma(values[p], values[p], octet_sum)
                sums.squares[h] = sums.squares[h] + octet_sum

    @cute.jit
    def expand(
        self,
        inputs: TileInputs,
        h: cutlass.Constexpr[int],
        item: RowLoads,
        c: cutlass.Int32,
        checked: cutlass.Constexpr[bool],
    ) -> cute.Tensor:
        """Compute and store the vector of y at channel c of row h.

        y_j = (f + bias) post_j + Σ_i x_i res[i, j]
        """
        vector, row, total = self.vector, inputs.rows[h], inputs.total
        mBias = inputs.expand.mBias
        coefficients = inputs.coefficients[h]
        if cutlass.const_expr(coefficients is None):
            mPost, mRes = inputs.expand.mPost, inputs.expand.mRes
            coefficients = load_token(self.config.n, row.read, None, mPost, mRes)
        base = cutlass.Int64(row.read) * total
        bias = None
        if cutlass.const_expr(mBias is not None):
            bias = vector.load_channels(mBias, cutlass.Int64(0), c, total, checked)
        x, f = to_fp32(item.x), to_fp32(item.f)
        y = vector.expanded(x, f, bias, coefficients.post, coefficients.res)
        y = rounded(y, self.dtype)
        if row.token < inputs.mX.shape[0]:
            vector.store(y, inputs.expand.mY, base * self.config.n, c, total, checked)
        if cutlass.const_expr(checked):
            # Zeros beyond the last channel, for the sums.
            for p in cutlass.range_constexpr(vector.size):
                inside = c + vector.channel(p) < total
                y[p] = y[p] if inside else self.dtype(0.0)
        return y

    @cute.jit
    def multiply(
        self,
        sums: TileSums,
        terms: list[list[cute.Tensor]],
        step: cutlass.Int32,
        octet: cutlass.Constexpr[int],
    ):
        """acc += psi xᵀ of both k16 groups of an octet; smallest term of x first."""
        lane = cute.arch.lane_idx()
        for tile in cutlass.range_constexpr(self.tiles):
            for group in cutlass.range_constexpr(2):
                rPsi = cute.make_rmem_tensor(cute.make_layout(4), cutlass.Int32)
                rPsi.store(self.fragment(sums.sPsi, step, tile, lane, group).load())
                first = octet * 4 + 2 * group
                for h in cutlass.range_constexpr(self.rows):
                    for term in reversed(terms[h]):
                        rA = tuple(rPsi[i] for i in range(4))
                        matrix.multiply(sums.acc[h], tile, rA, (term[first], term[first + 1]))

    @cute.jit
    def finish(
        self,
        mSums: cute.Tensor,
        mSquares: cute.Tensor,
        sums: TileSums,
        rows: list[TokenRow],
        chunk: cutlass.Int32,
    ):
        """Store the chunk's sums of the warp's tokens: Σ over psi's terms, smallest first.

        A lane has rows g + 8 i of psi, term by term, of tokens 2 t and 2 t + 1.
        """
        lane = cute.arch.lane_idx()
        g, t = lane // 4, lane % 4
        _, m, columns = mSums.shape
        blocks = self.columns // 8
        for h in cutlass.range_constexpr(self.rows):
            first = rows[h].token - g
            for side in cutlass.range_constexpr(2):
                token = first + 2 * t + side
                if token < m:
                    base = (cutlass.Int64(chunk) * m + token) * columns + g
                    for block in cutlass.range_constexpr(blocks):
                        value = None
                        for b in cutlass.range_constexpr(self.terms - 1, -1, -1):
                            i = b * blocks + block
                            term = sums.acc[h][i // 2 * matrix.SUMS + 2 * (i % 2) + side]
                            value = term if value is None else value + term
                        copy.aligned(mSums, base + 8 * block, 1)[0] = value
            total = reduce.over_threads(sums.squares[h], 4)
            token = rows[h].token
            if (token < m) & (t == 0):
                copy.aligned(mSquares, cutlass.Int64(chunk) * m + token, 1)[0] = total


def build(config: ProjectConfig, compile: Callable = cute.compile) -> Callable:
    """Compile one configuration against fake tensors; needs no GPU."""
    rows, chunks = FakeRows(config.dtype, config.n), fake.size()
    columns = mappings(config.n)
    return compile(
        MhcProjectSm90(config),
        rows.streams(),
        fake.compact(cutlass.Float32, (columns, rows.k), 16),
        fake.compact(cutlass.Float32, (chunks, rows.m, columns), 16),
        fake.compact(cutlass.Float32, (chunks, rows.m), 4),
        *(rows.expand(config.bias) if config.expand else (None,) * 5),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
