"""Sums over chunks of channels of x psiᵀ and x², on SM90; with the streams made on the way.

    sums[s, m, j] = Σ_k x[m, k] psi[j, k],  squares[s, m] = Σ_k x[m, k]²,  k of chunk s
    y_j = (f + bias) post_j + Σ_i x_i res[i, j] in place of x, and stored, if it is asked for
    out = Σ_i y_i pre_i, of the rounded y, likewise

Layout       x, y [M, K] rows of streams (mhc/config.py); psi fp32 [N, K]; sums [S, M, N],
             squares [S, M] fp32; f, out [M, C].
Order        a chunk is walked in steps of 32 channels, a step in the units of mhc/device/unit.py;
             each octet is two k16 groups of ``mma.sync`` whose sums go on.  psi is the sum of T
             bf16 terms, and so is an fp32 x; each term of psi has sums of its own, which are added
             from the smallest on.  Squares: a lane adds those of an octet from zero, and octets
             in a chain; of four lanes neighbours are added first.  A chain of single squares would
             be too small, as those of bf16 numbers are rounded down more often than up.  None of
             it follows M, the grid or the warp.
Work         a CTA keeps the terms of one chunk of psi in shared memory and streams tokens past
             them, a tile of 16 or 32 to a warp; as many CTAs as fit share a chunk.
M, C tails   rows behind the last are read as the last, and not stored; channels behind the last
             are zeros.
Measured     docs/status.md.
"""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy, reduce
from .config import ProjectConfig, chunk_channels, mappings
from .device import matrix, unit
from .device.unit import Unit

WARP = 32
#: Channels of one step, and elements of an octet.
STEP, OCTET = 32, 8
#: Lanes' parts of psi that a thread loads before it splits the first.
FILL = 2


class MhcProjectSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: ProjectConfig):
        n = config.n
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        self.terms = 2 if config.precision == "bf16x2" else 3
        self.chunk = chunk_channels(n, config.precision)
        self.steps = self.chunk // STEP * n  # of one octet a lane
        self.columns = mappings(n)
        # Tiles of 16 rows: the rows of psi's first term, then those of the next.
        self.tiles = -(-self.terms * self.columns // matrix.ROWS)
        channels = OCTET // n if config.layout == "cn" else OCTET
        self.unit = Unit(self.dtype, n, config.layout, channels, config.wide)
        # What a lane loads at once: an octet; or a unit, if y needs all streams of its channels.
        self.octets = self.unit.size // OCTET if config.expand else 1
        self.items = n // self.octets  # of 32 channels
        # A warp has two rows of eight tokens: rows g and g + 8.
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
        mPre: cute.Tensor | None,
        mOut: cute.Tensor | None,
        ctas: cutlass.Int32,
        stream,
    ):
        self.kernel(mX, mPsi, mSums, mSquares, (mF, mBias, mPost, mRes, mY), (mPre, mOut)).launch(
            grid=(ctas, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.config.blocks,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX, mPsi, mSums, mSquares, expand: tuple, collapse: tuple):
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
        # So many CTAs share a chunk, each a part of its tiles.
        sharers = cutlass.max(ctas // chunks, 1)
        for chunk in cutlass.range(block // sharers, chunks, ctas // sharers, unroll=1):
            cute.arch.sync_threads()
            self.fill(sPsi, mPsi, chunk, tidx)
            cute.arch.sync_threads()
            for tile in cutlass.range(
                block % sharers * warps + warp, tiles, sharers * warps, unroll=1
            ):
                self.tile(mX, sPsi, mSums, mSquares, expand, collapse, chunk, tile)

    @cute.jit
    def place(self, step, i, t):
        """(first channel in the chunk, stream in "nc") of a lane's octet i of a step."""
        channels = self.unit.channels
        if cutlass.const_expr(self.config.layout == "cn"):
            return step * STEP + i * (4 * channels) + channels * t, 0
        return step * STEP + channels * t, i

    @cute.jit
    def octet(self, tensor, base, at: tuple, total, checked: cutlass.Constexpr):
        """Eight elements of a row; ``at``: (channel, stream); 0 behind the last channel."""
        c, stream = at
        raw = cute.make_rmem_tensor(cute.make_layout(OCTET), tensor.element_type)
        width = 128 // tensor.element_type.width if self.config.wide else 1
        offset = cutlass.Int64(c) * self.config.n
        if cutlass.const_expr(self.config.layout == "nc"):
            offset = cutlass.Int64(total) * stream + c
        for a in cutlass.range_constexpr(OCTET // width):
            part = unit.piece(raw, a * width, width)
            at = base + offset + a * width
            if cutlass.const_expr(checked):
                # The row's first elements are read in place of what lies behind its last one.
                inside = c + self.unit.channel(a * width) < total
                part.store(copy.aligned(tensor, at if inside else base, width).load())
                for e in cutlass.range_constexpr(width):
                    part[e] = part[e] if inside else tensor.element_type(0.0)
            else:
                part.store(copy.aligned(tensor, at, width).load())
        return raw

    @cute.jit
    def fill(self, sPsi: cute.Tensor, mPsi: cute.Tensor, chunk, tidx):
        """psi = Σ of terms: a thread has all that one lane reads in a step."""
        channels = mPsi.shape[1] // self.config.n
        begin = chunk * self.chunk
        items = self.steps * WARP
        # All of a whole chunk, several at a time; what is behind the last channel is zeros.
        if (begin + self.chunk <= channels) & self.config.wide:
            for item in cutlass.range(tidx, items, self.threads, unroll=FILL):
                self.fill_item(sPsi, mPsi, begin, item, channels, False)
        else:
            for item in cutlass.range(tidx, items, self.threads, unroll=1):
                self.fill_item(sPsi, mPsi, begin, item, channels, True)

    @cute.jit
    def fill_item(self, sPsi, mPsi, begin, item, channels, checked: cutlass.Constexpr):
        """The octets of rows g, g + 8, ... of psi, as terms: rows g and g + 8 of every tile."""
        lane, step = item % WARP, item // WARP
        n, blocks = self.config.n, self.columns // 8
        c, stream = self.place(step // n, step % n, lane % 4)
        rows = []
        for block in cutlass.range_constexpr(blocks):
            base = cutlass.Int64(block * 8 + lane // 4) * mPsi.shape[1]
            octet = self.octet(mPsi, base, (begin + c, stream), channels, checked)
            rows.append(matrix.terms(octet, self.terms))
        for tile in cutlass.range_constexpr(self.tiles):
            for group in cutlass.range_constexpr(2):
                made = cute.make_rmem_tensor(cute.make_layout(4), cutlass.Int32)
                made.fill(0)
                for half in cutlass.range_constexpr(2):
                    # Blocks of eight rows: of the first term, then of the next.
                    at = 2 * tile + half
                    if cutlass.const_expr(at < self.terms * blocks):
                        for pair in cutlass.range_constexpr(2):
                            of_term = rows[at % blocks][at // blocks]
                            made[half + 2 * pair] = of_term[2 * group + pair]
                self.fragment(sPsi, step, tile, lane, group).store(made.load())

    @cute.jit
    def fragment(self, sPsi: cute.Tensor, step, tile, lane, group) -> cute.Tensor:
        """The four registers of a lane in one k16 group."""
        at = (((step * self.tiles + tile) * 2 + group) * WARP + lane) * 4
        pointer = cute.make_ptr(
            cutlass.Int32, (sPsi.iterator + at).toint(), cute.AddressSpace.smem, assumed_align=16
        )
        return cute.make_tensor(pointer, cute.make_layout(4))

    @cute.jit
    def tile(self, mX, sPsi, mSums, mSquares, expand: tuple, collapse: tuple, chunk, tile):
        """One chunk of a warp's tokens: lanes of row g read tokens g, g + 8, ..."""
        config = self.config
        lane = cute.arch.lane_idx()
        m, k = mX.shape
        total = k // config.n
        own = [tile * (8 * self.rows) + lane // 4 + 8 * h for h in range(self.rows)]
        reads = [cutlass.min(row, m - 1) for row in own]
        rows = list(zip(own, reads))
        # Where they leave no registers they are read again for each unit.
        coefficients = [None] * self.rows
        if cutlass.const_expr(config.layout == "cn" and not config.collapse):
            coefficients = [self.coefficients(expand, collapse, row) for row in reads]
        acc = [
            cute.make_rmem_tensor(cute.make_layout(self.tiles * matrix.SUMS), cutlass.Float32)
            for _ in range(self.rows)
        ]
        squares = cute.make_rmem_tensor(cute.make_layout(self.rows), cutlass.Float32)
        for of_row in acc:
            of_row.fill(0.0)
        squares.fill(0.0)
        begin = chunk * self.chunk
        extent = cutlass.min(total - begin, self.chunk)
        whole = extent // STEP if config.wide else 0
        tensors = (mX, expand, collapse, coefficients, rows, begin, total)
        state = (sPsi, acc, squares)
        if whole > 0:
            self.walk(tensors, state, whole)
        for step in cutlass.range(whole, (extent + STEP - 1) // STEP, unroll=1):
            for i in cutlass.range_constexpr(self.items):
                self.use(tensors, state, self.load(tensors, step, i, True), step, i, True)
        self.finish(mSums, mSquares, acc, squares, own, chunk)

    @cute.jit
    def walk(self, tensors: tuple, state: tuple, steps):
        """Whole steps, of which the next one is under way while one is used."""
        last = steps - 1
        items = [self.load(tensors, 0, i, False) for i in range(self.items)]
        for step in cutlass.range(steps, unroll=1):
            following = cutlass.min(step + 1, last)
            after = [self.load(tensors, following, i, False) for i in range(self.items)]
            for i in cutlass.range_constexpr(self.items):
                self.use(tensors, state, items[i], step, i, False)
                self.replace(items[i], after[i])

    @cute.jit
    def replace(self, item: list, by: list):
        """An item's registers by those of another one."""
        for old, new in zip(item, by):
            for left, right in zip(old, new):
                if cutlass.const_expr(left is not None):
                    left.store(right.load())

    @cute.jit
    def load(self, tensors: tuple, step, i: cutlass.Constexpr, checked: cutlass.Constexpr) -> list:
        """(x raw, f) of item i of a step, of every row."""
        mX, expand, _, _, rows, begin, total = tensors
        lane = cute.arch.lane_idx()
        found = []
        for _, read in rows:
            base = cutlass.Int64(read) * total
            wide = base * self.config.n
            if cutlass.const_expr(expand[0] is None):
                c, stream = self.place(step, i, lane % 4)
                x = self.octet(mX, wide, (begin + c, stream), total, checked)
                found.append((x, None))
            else:
                c = begin + self.channel_of(step, i)
                x = self.unit.load(mX, wide, c, total, checked)
                found.append((x, self.unit.load_raw(expand[0], base, c, total, checked)))
        return found

    @cute.jit
    def channel_of(self, step, i: cutlass.Constexpr):
        """The first channel of a lane's unit, in the chunk."""
        channels = self.unit.channels
        return step * STEP + i * (4 * channels) + channels * (cute.arch.lane_idx() % 4)

    @cute.jit
    def use(
        self, tensors: tuple, state: tuple, item: list, step, i: cutlass.Constexpr,
        checked: cutlass.Constexpr,
    ):  # fmt: skip
        """The sums of item i of a step."""
        _, expand, collapse, coefficients, rows, begin, total = tensors
        sPsi, acc, squares = state
        terms, raws = [], []
        for h in cutlass.range_constexpr(self.rows):
            raw, f = item[h]
            if cutlass.const_expr(expand[0] is not None):
                at = (begin + self.channel_of(step, i), total, tensors[0].shape[0])
                made = (expand, collapse, coefficients[h])
                raw = self.expand(made, item[h], rows[h], at, checked)
            raws.append(raw)
            terms.append(matrix.terms(raw, self.terms))
        for o in cutlass.range_constexpr(self.octets):
            octet = step * self.config.n + i * self.octets + o
            self.multiply(sPsi, acc, terms, octet, o)
        # Behind the products, whose fragments of psi take the registers that this needs.
        for h in cutlass.range_constexpr(self.rows):
            values = unit.widened(raws[h])
            for o in cutlass.range_constexpr(self.octets):
                of_octet = values[o * OCTET] * values[o * OCTET]
                for p in cutlass.range_constexpr(o * OCTET + 1, (o + 1) * OCTET):
                    of_octet = cute.math.fma(values[p], values[p], of_octet)
                squares[h] = squares[h] + of_octet

    @cute.jit
    def coefficients(self, expand: tuple, collapse: tuple, row) -> tuple:
        """(post, res, pre) of a token, of what there is."""
        n = self.config.n
        post = res = pre = None
        if cutlass.const_expr(expand[0] is not None):
            post = unit.coefficients(expand[2], row, n)
            res = unit.coefficients(expand[3], row, n * n)
        if cutlass.const_expr(collapse[0] is not None):
            pre = unit.coefficients(collapse[0], row, n)
        return post, res, pre

    @cute.jit
    def expand(self, made: tuple, item: tuple, row: tuple, at: tuple, checked: cutlass.Constexpr):
        """A unit of y from one of x; both y and its collapse are stored."""
        expand, collapse, coefficients = made
        _, mBias, _, _, mY = expand
        _, mOut = collapse
        raw, f = item
        own, read = row
        c, total, m = at
        if cutlass.const_expr(coefficients is None):
            coefficients = self.coefficients(expand, collapse, read)
        post, res, pre = coefficients
        base = cutlass.Int64(read) * total
        bias = None
        if cutlass.const_expr(mBias is not None):
            bias = self.unit.load_channels(mBias, cutlass.Int64(0), c, total, checked)
        y = unit.expanded(self.unit, unit.widened(raw), unit.widened(f), bias, post, res)
        y = unit.narrowed(y, self.dtype)
        if own < m:
            self.unit.store(y, mY, base * self.config.n, c, total, checked)
            if cutlass.const_expr(mOut is not None):
                out = unit.collapsed(self.unit, unit.widened(y), pre)
                self.unit.store_channels(out, mOut, base, c, total, checked)
        if cutlass.const_expr(checked):
            # What is behind the last channel counts for nothing.
            for p in cutlass.range_constexpr(self.unit.size):
                inside = c + self.unit.channel(p) < total
                y[p] = y[p] if inside else self.dtype(0.0)
        return y

    @cute.jit
    def multiply(self, sPsi, acc: list, terms: list, step, octet: cutlass.Constexpr):
        """acc += psi xᵀ of both k16 groups of an octet; the smallest term of x first."""
        lane = cute.arch.lane_idx()
        for tile in cutlass.range_constexpr(self.tiles):
            for group in cutlass.range_constexpr(2):
                psi = cute.make_rmem_tensor(cute.make_layout(4), cutlass.Int32)
                psi.store(self.fragment(sPsi, step, tile, lane, group).load())
                at = octet * 4 + 2 * group
                for h in cutlass.range_constexpr(self.rows):
                    for term in reversed(terms[h]):
                        matrix.multiply(
                            acc[h], tile, [psi[i] for i in range(4)], (term[at], term[at + 1])
                        )

    @cute.jit
    def finish(self, mSums, mSquares, acc: list, squares, own: list, chunk):
        """The chunk's sums of the warp's tokens: psi's terms, the smallest first.

        A lane has rows g + 8 i of psi, terms one after the other, of tokens 2 t and 2 t + 1.
        """
        lane = cute.arch.lane_idx()
        g, t = lane // 4, lane % 4
        _, m, columns = mSums.shape
        blocks = self.columns // 8
        for h in cutlass.range_constexpr(self.rows):
            first = own[h] - g
            for side in cutlass.range_constexpr(2):
                token = first + 2 * t + side
                if token < m:
                    base = (cutlass.Int64(chunk) * m + token) * columns + g
                    for block in cutlass.range_constexpr(blocks):
                        value = None
                        for b in cutlass.range_constexpr(self.terms - 1, -1, -1):
                            i = b * blocks + block
                            of_term = acc[h][i // 2 * matrix.SUMS + 2 * (i % 2) + side]
                            value = of_term if value is None else value + of_term
                        copy.aligned(mSums, base + 8 * block, 1)[0] = value
            total = reduce.over_threads(squares[h], 4)
            if (own[h] < m) & (t == 0):
                copy.aligned(mSquares, cutlass.Int64(chunk) * m + own[h], 1)[0] = total


def build(config: ProjectConfig, compile=cute.compile):
    """Compiles one configuration against fake tensors; no GPU needed."""
    n = config.n
    m, k, c, chunks = (fake.size() for _ in range(4))
    align = 16 if config.wide else fake.DTYPES[config.dtype].width // 8
    element = fake.DTYPES[config.dtype]

    def streams():
        return fake.compact(element, (m, k), align)

    def channels():
        return fake.compact(element, (m, c), align)

    def tokens(columns: int):
        return fake.rows("fp32", m, columns)

    expand, collapse = (None,) * 5, (None, None)
    if config.expand:
        bias = fake.compact(element, (c,), align) if config.bias else None
        expand = (channels(), bias, tokens(n), tokens(n * n), streams())
    if config.collapse:
        collapse = (tokens(n), channels())
    return compile(
        MhcProjectSm90(config),
        streams(),
        fake.compact(cutlass.Float32, (mappings(n), k), 16 if config.wide else 4),
        fake.compact(cutlass.Float32, (chunks, m, mappings(n)), 16),
        fake.compact(cutlass.Float32, (chunks, m), 4),
        *expand,
        *collapse,
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
