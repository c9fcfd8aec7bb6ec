"""dx and parts of dpsi of a projection, on SM90; with what else goes on to x.

    dx = dH psi + (2 / K) dms x + Σ_j dy_j res[i, j] + dout pre_i
    dpsi[j, k] = Σ_m dH[m, j] x[m, k], of each chunk of ``TOKENS`` tokens

Layout       x, dy, dx [M, K] rows of streams (mhc/config.py); dout [M, C]; dH fp32 [M, W], pre, res
             and dms fp32, compact; psi fp32 [N, K]; parts fp32 [T, N, K].
Order        dx: dH, psi (and an fp32 x) are sums of T bf16 terms; products of terms a and b with
             a + b < T are added to one sum by ``mma.sync``, those of the largest a + b first; then
             x, dy (j ascending) and dout with one fma each.  dpsi: groups of 16 tokens, ascending,
             in a chain of ``mma.sync``.  None of it follows M, the grid or the warp.
Work         a warp has a slab, a unit of channels in each of four lanes, and one chunk of tokens,
             and needs nobody else's data; a CTA has neighbouring slabs.
M, C tails   tokens behind the last are zeros in dpsi and are not stored, as channels behind the
             last are.
Measured     docs/status.md.
"""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy
from .config import TOKENS, WIDTH, ProjectBackwardConfig, mappings
from .device import matrix, unit
from .device.unit import Unit

WARP, ROWS = 32, 16
OCTET = 8


class MhcProjectBackwardSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: ProjectBackwardConfig):
        n = config.n
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        self.terms = 2 if config.precision == "bf16x2" else 3
        # Pieces of 8 bytes or more of a stream, so that four lanes read whole sectors.
        channels = OCTET // n if config.layout == "cn" else 16 // n
        self.unit = Unit(self.dtype, n, config.layout, channels, config.wide)
        self.octets = self.unit.size // OCTET
        self.columns = mappings(n)
        self.tiles = self.columns // 8
        self.width = WIDTH[n]
        self.threads = WARP * config.warps
        # Fragments of psi, which two octets have too many of for registers.
        self.shared = self.octets > 1
        self.fragments = self.octets * 4 * self.terms * self.tiles
        #: Of terms: (of dH or x, of psi or dH), the largest sum first.
        self.pairs = [(d - b, b) for d in range(self.terms - 1, -1, -1) for b in range(d + 1)]

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mDh: cute.Tensor,
        mDms: cute.Tensor,
        mPsi: cute.Tensor,
        mDy: cute.Tensor | None,
        mRes: cute.Tensor | None,
        mDout: cute.Tensor | None,
        mPre: cute.Tensor | None,
        mDx: cute.Tensor,
        mParts: cute.Tensor,
        ctas: cutlass.Int32,
        stream,
    ):
        self.kernel(mX, mDh, mDms, mPsi, (mDy, mRes, mDout, mPre), mDx, mParts).launch(
            grid=(ctas, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.config.blocks,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=10,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX, mDh, mDms, mPsi, upstream: tuple, mDx, mParts):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tidx // WARP)
        sPsi = None
        if cutlass.const_expr(self.shared):
            layout = cute.make_layout((WARP, self.fragments, self.config.warps))
            every = SmemAllocator().allocate_tensor(cutlass.Int32, layout, byte_alignment=16)
            sPsi = every[None, None, warp]
        total = mX.shape[1] // self.config.n
        slab = 4 * self.unit.channels
        groups = (total + slab * self.config.warps - 1) // (slab * self.config.warps)
        work = mParts.shape[0] * groups
        for index in cutlass.range(block, work, ctas, unroll=1):
            chunk = index // groups
            first = (index % groups * self.config.warps + warp) * slab
            if first < total:
                whole = (first + slab <= total) & self.config.wide
                tensors = (mX, mDh, mDms, upstream, mDx)
                psi = self.psi(mPsi, sPsi, first, total)
                acc = cute.make_rmem_tensor(
                    cute.make_layout(self.octets * 2 * self.tiles * matrix.SUMS), cutlass.Float32
                )
                acc.fill(0.0)
                self.chunk(tensors, psi, acc, chunk, first, total, whole)
                self.finish(acc, mParts, chunk, first, total)

    @cute.jit
    def chunk(self, tensors: tuple, psi, acc, chunk, first, total, whole):
        """All tokens of a chunk, 16 at a time."""
        m = tensors[0].shape[0]
        begin = chunk * TOKENS
        end = cutlass.min(m, begin + TOKENS)
        full = (end - begin) // ROWS if whole else 0
        for i in cutlass.range(full, unroll=1):
            self.rows(tensors, psi, acc, begin + i * ROWS, first, total, False)
        for row in cutlass.range(begin + full * ROWS, end, ROWS, unroll=1):
            self.rows(tensors, psi, acc, row, first, total, True)

    @cute.jit
    def psi(self, mPsi: cute.Tensor, sPsi: cute.Tensor | None, first, total):
        """Fragments of psi as B of dH psi: per octet, pair of elements and term three registers.

        Column g of pair J is element 2 J + g mod 2 of lane g / 2's octet, so that a lane's sums of
        the four pairs are its own octet.  Rows are 2 t, 2 t + 1, eight on, sixteen on.
        In registers, or in shared memory, each lane's own.
        """
        lane = cute.arch.lane_idx()
        g, t = lane // 4, lane % 4
        c = first + self.unit.channels * (g // 2)
        found = []
        for o in cutlass.range_constexpr(self.octets):
            for pair in cutlass.range_constexpr(4):
                values = cute.make_rmem_tensor(cute.make_layout(2 * self.tiles), cutlass.Float32)
                values.fill(0.0)
                for odd in cutlass.range_constexpr(2):
                    p = o * OCTET + 2 * pair + odd
                    if (g % 2 == odd) & (c + self.unit.channel(p) < total):
                        at = self.unit.offset(p, c, total)
                        for tile in cutlass.range_constexpr(self.tiles):
                            for side in cutlass.range_constexpr(2):
                                row = tile * 8 + 2 * t + side
                                base = cutlass.Int64(row) * mPsi.shape[1]
                                values[2 * tile + side] = copy.aligned(mPsi, base + at, 1)[0]
                terms = matrix.terms(values, self.terms)
                found.append(terms)
                if cutlass.const_expr(self.shared):
                    for b in cutlass.range_constexpr(self.terms):
                        for tile in cutlass.range_constexpr(self.tiles):
                            at = self.place(o, pair, b) + tile
                            sPsi[lane, at] = terms[b][tile]
        return sPsi if self.shared else found

    def place(self, octet: int, pair: int, term: int) -> int:
        """Of the first of some fragments in shared memory."""
        return ((octet * 4 + pair) * self.terms + term) * self.tiles

    @cute.jit
    def fragment(self, psi, octet: cutlass.Constexpr, pair: cutlass.Constexpr, term):
        """The registers of one term."""
        if cutlass.const_expr(not self.shared):
            return psi[octet * 4 + pair][term]
        first, lane = self.place(octet, pair, term), cute.arch.lane_idx()
        return [psi[lane, first + tile] for tile in range(self.tiles)]

    @cute.jit
    def rows(self, tensors: tuple, psi, acc, row, first, total, checked: cutlass.Constexpr):
        """16 tokens of one slab."""
        mX, mDh, mDms, (mDy, _, mDout, _), mDx = tensors
        lane = cute.arch.lane_idx()
        m, k = mX.shape
        c = first + self.unit.channels * (lane % 4)
        own = [row + lane // 4 + 8 * half for half in range(2)]
        reads = own
        if cutlass.const_expr(checked):
            reads = [cutlass.min(r, m - 1) for r in own]
        bases = [cutlass.Int64(r) * total for r in reads]
        xs, dys, douts = [], [], []
        for half in cutlass.range_constexpr(2):
            wide = bases[half] * self.config.n
            raw = self.unit.load(mX, wide, c, total, checked)
            if cutlass.const_expr(checked):
                for p in cutlass.range_constexpr(self.unit.size):
                    raw[p] = raw[p] if own[half] < m else self.dtype(0.0)
            xs.append(raw)
            dys.append(None if mDy is None else self.unit.load(mDy, wide, c, total, checked))
            douts.append(
                None
                if mDout is None
                else self.unit.load_channels(mDout, bases[half], c, total, checked)
            )
        dh = [self.gradient(mDh, own[half], reads[half], m, checked) for half in range(2)]
        self.add(acc, xs, dh)
        starts = [
            cute.make_rmem_tensor(cute.make_layout(self.unit.size), cutlass.Float32)
            for _ in range(2)
        ]
        for o in cutlass.range_constexpr(self.octets):
            self.product(starts, dh, psi, o)
        for half in cutlass.range_constexpr(2):
            self.give(
                tensors, starts[half], xs[half], dys[half], douts[half],
                (own[half], reads[half], m), (bases[half], c, total), checked,
            )  # fmt: skip

    @cute.jit
    def gradient(self, mDh: cute.Tensor, own, read, m, checked: cutlass.Constexpr) -> list:
        """Terms of one token's dH: columns 2 t, 2 t + 1, eight on, sixteen on."""
        lane = cute.arch.lane_idx()
        values = cute.make_rmem_tensor(cute.make_layout(2 * self.tiles), cutlass.Float32)
        base = cutlass.Int64(read) * self.width + 2 * (lane % 4)
        for tile in cutlass.range_constexpr(self.tiles):
            part = unit.piece(values, 2 * tile, 2)
            part.store(copy.aligned(mDh, base + 8 * tile, 2).load())
            if cutlass.const_expr(checked):
                for side in cutlass.range_constexpr(2):
                    part[side] = part[side] if own < m else cutlass.Float32(0.0)
        return matrix.terms(values, self.terms)

    @cute.jit
    def product(self, starts: list, dh: list, psi, octet: cutlass.Constexpr):
        """dH psi of an octet of 16 tokens, in the places of each token's unit."""
        made = cute.make_rmem_tensor(cute.make_layout(4 * matrix.SUMS), cutlass.Float32)
        made.fill(0.0)
        low, high = dh
        last = self.tiles - 1
        for pair in cutlass.range_constexpr(4):
            for a, b in self.pairs:
                of_psi = self.fragment(psi, octet, pair, b)
                if cutlass.const_expr(self.tiles == 3):
                    matrix.multiply(
                        made, pair, (low[a][0], high[a][0], low[a][1], high[a][1]),
                        (of_psi[0], of_psi[1]),
                    )  # fmt: skip
                matrix.multiply_half(made, pair, (low[a][last], high[a][last]), of_psi[last])
            for half in cutlass.range_constexpr(2):
                for side in cutlass.range_constexpr(2):
                    value = made[pair * matrix.SUMS + 2 * half + side]
                    starts[half][octet * OCTET + 2 * pair + side] = value

    @cute.jit
    def add(self, acc, xs: list, dh: list):
        """dpsi += xᵀ dH of 16 tokens; terms a of x and b of dH."""
        x = [matrix.terms(raw, self.terms) for raw in xs]
        columns = [
            [
                (matrix.transposed(dh[0][b][tile]), matrix.transposed(dh[1][b][tile]))
                for tile in range(self.tiles)
            ]
            for b in range(self.terms)
        ]
        for o in cutlass.range_constexpr(self.octets):
            for a, b in self.pairs:
                if cutlass.const_expr(a < len(x[0])):
                    for group in cutlass.range_constexpr(2):
                        at = o * 4 + 2 * group
                        rows = (
                            matrix.transposed(x[0][a][at]),
                            matrix.transposed(x[0][a][at + 1]),
                            matrix.transposed(x[1][a][at]),
                            matrix.transposed(x[1][a][at + 1]),
                        )
                        for tile in cutlass.range_constexpr(self.tiles):
                            where = (o * 2 + group) * self.tiles + tile
                            matrix.multiply(acc, where, rows, columns[b][tile])

    @cute.jit
    def give(
        self, tensors: tuple, start, raw, dy, d_out, row: tuple, at: tuple,
        checked: cutlass.Constexpr,
    ):  # fmt: skip
        """dx of one token."""
        mX, _, mDms, (_, mRes, _, mPre), mDx = tensors
        own, read, m = row
        base, c, total = at
        n = self.config.n
        factor = copy.aligned(mDms, cutlass.Int64(read), 1)[0] * (
            cutlass.Float32(2.0) / cutlass.Float32(mX.shape[1])
        )
        x = unit.widened(raw)
        for p in cutlass.range_constexpr(self.unit.size):
            start[p] = cute.math.fma(x[p], factor, start[p])
        res = None if mRes is None else unit.compact(mRes, read, n * n)
        pre = None if mPre is None else unit.compact(mPre, read, n)
        dy = None if dy is None else unit.widened(dy)
        dx = unit.narrowed(unit.passed(self.unit, start, dy, d_out, res, pre), self.dtype)
        if cutlass.const_expr(checked):
            if own < m:
                self.unit.store(dx, mDx, base * n, c, total, True)
        else:
            self.unit.store(dx, mDx, base * n, c, total, False)

    @cute.jit
    def finish(self, acc, mParts, chunk, first, total):
        """The slab's dpsi: rows of a product are elements g mod 2 of lane g / 2's pairs."""
        lane = cute.arch.lane_idx()
        g, t = lane // 4, lane % 4
        c = first + self.unit.channels * (g // 2)
        _, columns, k = mParts.shape
        for o in cutlass.range_constexpr(self.octets):
            for pair in cutlass.range_constexpr(4):
                for odd in cutlass.range_constexpr(2):
                    p = o * OCTET + 2 * pair + odd
                    if (g % 2 == odd) & (c + self.unit.channel(p) < total):
                        at = self.unit.offset(p, c, total)
                        for tile in cutlass.range_constexpr(self.tiles):
                            where = ((o * 2 + pair // 2) * self.tiles + tile) * matrix.SUMS
                            for side in cutlass.range_constexpr(2):
                                row = tile * 8 + 2 * t + side
                                base = (cutlass.Int64(chunk) * columns + row) * k
                                value = acc[where + 2 * (pair % 2) + side]
                                copy.aligned(mParts, base + at, 1)[0] = value


def build(config: ProjectBackwardConfig, compile=cute.compile):
    """Compiles one configuration against fake tensors; no GPU needed."""
    n, element = config.n, fake.DTYPES[config.dtype]
    m, k, c = (fake.size() for _ in range(3))
    align = 16 if config.wide else element.width // 8

    def streams(there: bool = True):
        return fake.compact(element, (m, k), align) if there else None

    def tokens(there: bool, columns: int):
        return fake.compact(cutlass.Float32, (m, columns), 16) if there else None

    return compile(
        MhcProjectBackwardSm90(config),
        streams(),
        tokens(True, WIDTH[n]),
        fake.compact(cutlass.Float32, (m,), 4),
        fake.compact(cutlass.Float32, (mappings(n), k), 4),
        streams(bool(config.dy)),
        tokens(config.dy == "res", n * n),
        fake.compact(element, (m, c), align) if config.d_out else None,
        tokens(config.d_out, n),
        streams(),
        fake.compact(cutlass.Float32, (fake.size(), mappings(n), k), 4),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
