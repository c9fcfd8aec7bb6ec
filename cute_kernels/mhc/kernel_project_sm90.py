"""Sums over chunks of channels of x psiᵀ and x², on SM90; with the streams made on the way.

    sums[s, m, j] = Σ_k x[m, k] psi[j, k],  squares[s, m] = Σ_k x[m, k]²,  k of chunk s
    y_j = (f + bias) post_j + Σ_i x_i res[i, j] in place of x, and stored, if it is asked for
    out = Σ_i y_i pre_i, of the rounded y, likewise

Layout       x, y [M, K] rows of streams (mhc/config.py); psi fp32 [N, K]; sums [S, M, N],
             squares [S, M] fp32; f, out [M, C].
Order        a chunk is walked in steps of 32 channels, a step in the units of mhc/device/unit.py;
             each octet is two k16 groups of ``mma.sync`` whose sums go on.  psi is the sum of T
             bf16 terms, an fp32 x likewise; products of terms a and b with a + b = d have sums of
             their own, and are added from d = T - 1 down to 0.  Squares: four lanes have a chain
             each, neighbours are added first.  None of it follows M, the grid or the warp.
Work         a CTA keeps the terms of one chunk of psi in shared memory and streams tokens past
             them; (chunk, tile of 16 tokens) pairs are dealt out in contiguous ranges, a tile to a
             warp.
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

WARP, TOKENS = 32, 16
#: Channels of one step, and elements of an octet.
STEP, OCTET = 32, 8


class MhcProjectSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: ProjectConfig):
        n = config.n
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        self.terms = 2 if config.precision == "bf16x2" else 3
        self.chunk = chunk_channels(n, config.precision)
        self.steps = self.chunk // STEP * n  # of one octet a lane
        self.tiles = mappings(n) // 8
        channels = OCTET // n if config.layout == "cn" else OCTET
        self.unit = Unit(self.dtype, n, config.layout, channels, config.wide)
        self.units = STEP // 4 // channels  # of a lane, of a token, in a step
        self.octets = self.unit.size // OCTET  # of a unit
        # Units that are loaded before the first is used.
        self.ahead = 1 if config.collapse else min(self.units, 2) if config.expand else self.units
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
        registers = self.steps * self.tiles * self.terms * WARP * 4
        sPsi = SmemAllocator().allocate_tensor(
            cutlass.Int32, cute.make_layout(registers), byte_alignment=16
        )
        tiles = (mX.shape[0] + TOKENS - 1) // TOKENS
        total = cutlass.Int64(mSums.shape[0]) * tiles
        first, last = (total * (block + i) // ctas for i in range(2))
        for chunk in cutlass.range(
            (first // tiles).to(cutlass.Int32),
            ((last + tiles - 1) // tiles).to(cutlass.Int32),
            unroll=1,
        ):
            cute.arch.sync_threads()
            self.fill(sPsi, mPsi, chunk, tidx)
            cute.arch.sync_threads()
            begin = cutlass.Int64(chunk) * tiles
            low = cutlass.max(first, begin) - begin
            high = cutlass.min(last, begin + tiles) - begin
            for tile in cutlass.range(
                low.to(cutlass.Int32) + warp, high.to(cutlass.Int32), self.config.warps, unroll=1
            ):
                self.tile(mX, sPsi, mSums, mSquares, expand, collapse, chunk, tile)

    @cute.jit
    def place(self, step: cutlass.Int32, t):
        """(first channel in the chunk, position in the unit) of a lane's octet in a step."""
        within = step % self.config.n
        of_unit, octet = within // self.octets, within % self.octets
        channels = self.unit.channels
        c = step // self.config.n * STEP + of_unit * 4 * channels + channels * t
        return c, octet * OCTET

    @cute.jit
    def fill(self, sPsi: cute.Tensor, mPsi: cute.Tensor, chunk, tidx):
        """psi = Σ of terms: each lane's octet of row 8 J + g, of every step, where it reads it."""
        channels = mPsi.shape[1] // self.config.n
        for item in cutlass.range(tidx, self.steps * self.tiles * WARP, self.threads, unroll=1):
            lane, tile, step = item % WARP, item // WARP % self.tiles, item // (WARP * self.tiles)
            c, position = self.place(step, lane % 4)
            c = chunk * self.chunk + c
            at = cutlass.Int64(c * self.config.n)
            if cutlass.const_expr(self.config.layout == "nc"):
                at = cutlass.Int64(position // OCTET) * channels + c
            base = cutlass.Int64(tile * 8 + lane // 4) * mPsi.shape[1] + at
            values = cute.make_rmem_tensor(cute.make_layout(OCTET), cutlass.Float32)
            values.fill(0.0)
            width = 4 if self.config.wide else 1
            for a in cutlass.range_constexpr(OCTET // width):
                if c + self.unit.channel(a * width) < channels:
                    part = unit.piece(values, a * width, width)
                    part.store(copy.aligned(mPsi, base + a * width, width).load())
            for b, term in enumerate(matrix.terms(values, self.terms)):
                target = self.fragment(sPsi, step, tile, b, lane)
                target.store(term.load())

    @cute.jit
    def fragment(self, sPsi: cute.Tensor, step, tile, term, lane) -> cute.Tensor:
        """The four registers of a lane."""
        at = (((step * self.tiles + tile) * self.terms + term) * WARP + lane) * 4
        pointer = cute.make_ptr(
            cutlass.Int32, (sPsi.iterator + at).toint(), cute.AddressSpace.smem, assumed_align=16
        )
        return cute.make_tensor(pointer, cute.make_layout(4))

    @cute.jit
    def tile(self, mX, sPsi, mSums, mSquares, expand: tuple, collapse: tuple, chunk, tile):
        """One chunk of 16 tokens, by a warp: lanes of g have tokens g and g + 8."""
        config = self.config
        lane = cute.arch.lane_idx()
        m, k = mX.shape
        channels = k // config.n
        rows = [tile * TOKENS + lane // 4 + 8 * half for half in range(2)]
        reads = [cutlass.min(row, m - 1) for row in rows]
        coefficients = [self.coefficients(expand, collapse, row) for row in reads]
        acc = cute.make_rmem_tensor(
            cute.make_layout(self.terms * self.tiles * matrix.SUMS), cutlass.Float32
        )
        squares = cute.make_rmem_tensor(cute.make_layout(2), cutlass.Float32)
        acc.fill(0.0)
        squares.fill(0.0)
        state = (acc, squares)
        begin = chunk * self.chunk
        extent = cutlass.min(channels - begin, self.chunk)
        whole = extent // STEP
        tensors = (mX, sPsi, expand, collapse, coefficients)
        for step in cutlass.range(whole, unroll=1):
            self.step(tensors, state, rows, reads, begin, step, False)
        if whole * STEP < extent:
            self.step(tensors, state, rows, reads, begin, whole, True)
        self.finish(mSums, mSquares, state, rows, chunk)

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
    def step(
        self, tensors: tuple, state: tuple, rows, reads, begin, step, checked: cutlass.Constexpr
    ):
        """32 channels of 16 tokens: loads first, then what is made of them."""
        mX, sPsi, expand, collapse, coefficients = tensors
        m, k = mX.shape
        total = k // self.config.n
        lane = cute.arch.lane_idx()
        bases = [cutlass.Int64(row) * k for row in reads]
        first = begin + step * STEP + self.unit.channels * (lane % 4)
        for group in cutlass.range_constexpr(self.units // self.ahead):
            units = list(range(group * self.ahead, (group + 1) * self.ahead))
            places = [first + u * 4 * self.unit.channels for u in units]
            raws = [[self.unit.load(mX, base, c, total, checked) for base in bases] for c in places]
            if cutlass.const_expr(expand[0] is not None):
                for u in cutlass.range_constexpr(self.ahead):
                    for half in cutlass.range_constexpr(2):
                        raws[u][half] = self.expand(
                            expand, collapse, coefficients[half], raws[u][half],
                            (rows[half], reads[half], m), (places[u], total), checked,
                        )  # fmt: skip
            for u in cutlass.range_constexpr(self.ahead):
                octet = step * self.config.n + units[u] * self.octets
                self.unit_sums(sPsi, state, raws[u], octet)

    @cute.jit
    def unit_sums(self, sPsi, state: tuple, raws: list, octet):
        """The sums of one unit of 16 tokens; its octets from ``octet`` on."""
        acc, squares = state
        terms = []
        for half in cutlass.range_constexpr(2):
            values = unit.widened(raws[half])
            for p in cutlass.range_constexpr(self.unit.size):
                squares[half] = cute.math.fma(values[p], values[p], squares[half])
            terms.append(matrix.terms(raws[half], self.terms))
        for o in cutlass.range_constexpr(self.octets):
            self.multiply(sPsi, acc, terms, octet + o, o)

    @cute.jit
    def expand(
        self, expand: tuple, collapse: tuple, coefficients: tuple, raw, row: tuple, at: tuple,
        checked: cutlass.Constexpr,
    ):  # fmt: skip
        """A unit of y from one of x; both y and its collapse are stored."""
        mF, mBias, _, _, mY = expand
        mPre, mOut = collapse
        post, res, pre = coefficients
        own, read, m = row
        c, total = at
        base = cutlass.Int64(read) * total
        f = self.unit.load_channels(mF, base, c, total, checked)
        bias = None
        if cutlass.const_expr(mBias is not None):
            bias = self.unit.load_channels(mBias, cutlass.Int64(0), c, total, checked)
        y = unit.narrowed(
            unit.expanded(self.unit, unit.widened(raw), f, bias, post, res), self.dtype
        )
        if own < m:
            self.unit.store(y, mY, base * self.config.n, c, total, checked)
            if cutlass.const_expr(mOut is not None):
                out = unit.collapsed(self.unit, unit.widened(y), pre)
                self.unit.store_channels(out, mOut, base, c, total, checked)
        if cutlass.const_expr(checked):
            # f of a channel behind the last is 0, but the bias of none is not: nothing is added.
            for p in cutlass.range_constexpr(self.unit.size):
                inside = c + self.unit.channel(p) < total
                y[p] = y[p] if inside else self.dtype(0.0)
        return y

    @cute.jit
    def multiply(self, sPsi, acc: cute.Tensor, terms: list, step, octet: cutlass.Constexpr):
        """acc of distance a + b += x_a psi_bᵀ, both k16 groups of an octet."""
        lane = cute.arch.lane_idx()
        for tile in cutlass.range_constexpr(self.tiles):
            for b in cutlass.range_constexpr(self.terms):
                psi = cute.make_rmem_tensor(cute.make_layout(4), cutlass.Int32)
                psi.store(self.fragment(sPsi, step, tile, b, lane).load())
                for a in cutlass.range_constexpr(min(len(terms[0]), self.terms - b)):
                    low, high = terms[0][a], terms[1][a]
                    for group in cutlass.range_constexpr(2):
                        at = octet * 4 + 2 * group
                        matrix.multiply(
                            acc,
                            (a + b) * self.tiles + tile,
                            (low[at], high[at], low[at + 1], high[at + 1]),
                            (psi[2 * group], psi[2 * group + 1]),
                        )

    @cute.jit
    def finish(self, mSums, mSquares, state: tuple, rows, chunk):
        """The chunk's sums of 16 tokens, the smallest first."""
        acc, squares = state
        lane = cute.arch.lane_idx()
        _, m, columns = mSums.shape
        of_distance = self.tiles * matrix.SUMS
        for i in cutlass.range_constexpr(of_distance):
            total = acc[(self.terms - 1) * of_distance + i]
            for d in cutlass.range_constexpr(self.terms - 2, -1, -1):
                total = total + acc[d * of_distance + i]
            acc[i] = total
        for half in cutlass.range_constexpr(2):
            total = reduce.over_threads(squares[half], 4)
            if rows[half] < m:
                base = cutlass.Int64(chunk) * m + rows[half]
                for tile in cutlass.range_constexpr(self.tiles):
                    at = base * columns + tile * 8 + 2 * (lane % 4)
                    pair = copy.aligned(mSums, at, 2)
                    pair.store(unit.piece(acc, tile * matrix.SUMS + 2 * half, 2).load())
                if lane % 4 == 0:
                    copy.aligned(mSquares, base, 1)[0] = total


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
