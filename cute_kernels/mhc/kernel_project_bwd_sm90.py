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
M, C tails   tokens behind the last are zeros in dpsi and are not stored, nor are channels behind
             the last.
Measured     docs/status.md.
"""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy
from ..dsl.ring import Slots
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
        # A warp has 64 elements of a token: in "cn" two units of an octet, 4 apart; in "nc" one of
        # two octets, whose pieces are 8 bytes or more, so that four lanes read whole sectors.
        self.units = 2 if config.layout == "cn" else 1
        channels = OCTET // n if config.layout == "cn" else 16 // n
        self.unit = Unit(self.dtype, n, config.layout, channels, config.wide)
        self.octets = self.unit.size // OCTET
        self.slab = 4 * channels * self.units
        self.columns = mappings(n)
        self.tiles = self.columns // 8
        self.width = WIDTH[n]
        self.threads = WARP * config.warps
        # Fragments of psi, in shared memory: of a pair of elements so many times four registers.
        self.vectors = -(-self.terms * self.tiles // 4)
        # What is under way: of two tokens x, dy, dout and dH, in the pieces of their accesses.
        size = self.dtype.width // 8
        streams = (self.unit.width * size,) * (self.unit.size // self.unit.width)
        channel = (self.unit.row_width * size,) * (channels // self.unit.row_width)
        self.of_x = streams * self.units
        self.of_dy = self.of_x if config.dy else ()
        self.of_dout = channel * self.units if config.d_out else ()
        self.slots = Slots(
            (*self.of_x, *self.of_dy, *self.of_dout, *(8,) * self.tiles) * 2 if config.wide else ()
        )
        self.stages = 3
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
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX, mDh, mDms, mPsi, upstream: tuple, mDx, mParts):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tidx // WARP)
        size = 8 * self.vectors * WARP * 4
        layout = cute.make_layout((size, self.config.warps))
        allocator = SmemAllocator()
        every = allocator.allocate_tensor(cutlass.Int32, layout, byte_alignment=16)
        sPsi = every[None, warp]
        layout = cute.make_layout((self.stages, max(self.slots.size, 16), self.config.warps))
        layout = cute.make_ordered_layout(layout.shape, order=(1, 0, 2))
        rings = allocator.allocate_tensor(cutlass.Uint8, layout, byte_alignment=16)
        ring = rings[None, None, warp]
        total = mX.shape[1] // self.config.n
        groups = (total + self.slab * self.config.warps - 1) // (self.slab * self.config.warps)
        work = mParts.shape[0] * groups
        for index in cutlass.range(block, work, ctas, unroll=1):
            chunk = index // groups
            first = (index % groups * self.config.warps + warp) * self.slab
            if first < total:
                tensors = (mX, mDh, mDms, upstream, mDx)
                # The last slab's fragments have been read by the whole warp.
                cute.arch.sync_warp()
                self.psi(mPsi, sPsi, first, total)
                cute.arch.sync_warp()
                acc = cute.make_rmem_tensor(
                    cute.make_layout(2 * 2 * self.tiles * matrix.SUMS), cutlass.Float32
                )
                acc.fill(0.0)
                self.chunk(tensors, (sPsi, ring), acc, chunk, first, total)
                self.finish(acc, mParts, chunk, first, total)

    @cute.jit
    def chunk(self, tensors: tuple, shared: tuple, acc, chunk, first, total):
        """All tokens of a chunk, 16 at a time; of wide rows the next ones are under way."""
        sPsi, ring = shared
        m = tensors[0].shape[0]
        begin = chunk * TOKENS
        end = cutlass.min(m, begin + TOKENS)
        if cutlass.const_expr(self.config.wide):
            for d in cutlass.range_constexpr(self.stages - 1):
                self.fetch(tensors, ring, d, begin + d * ROWS, first, total)
            stage = cutlass.Int32(0)
            for row in cutlass.range(begin, end, ROWS, unroll=1):
                cute.arch.cp_async_wait_group(self.stages - 2)
                # The stage that was read last is the next to be filled.
                free = stage + self.stages - 1
                free = free - self.stages if free >= self.stages else free
                following = row + (self.stages - 1) * ROWS
                self.fetch(tensors, ring, free, following, first, total)
                source = ring[stage, None].iterator
                self.rows(tensors, sPsi, acc, source, row, first, total)
                stage = stage + 1
                stage = cutlass.Int32(0) if stage == self.stages else stage
            cute.arch.cp_async_wait_group(0)
        else:
            for row in cutlass.range(begin, end, ROWS, unroll=1):
                self.rows(tensors, sPsi, acc, None, row, first, total)

    @cute.jit
    def fetch(self, tensors: tuple, ring, stage, row, first, total):
        """The pieces of 16 tokens into a stage; what is behind the last is read as the last."""
        mX, mDh, _, (mDy, _, mDout, _), _ = tensors
        lane, m = cute.arch.lane_idx(), mX.shape[0]
        target = ring[stage, None].iterator
        piece = 0
        for half in cutlass.range_constexpr(2):
            own = cutlass.min(row + lane // 4 + 8 * half, m - 1)
            base = cutlass.Int64(own) * total
            for tensor in (mX, mDy):
                if cutlass.const_expr(tensor is not None):
                    for u in cutlass.range_constexpr(self.units):
                        c = self.inside(self.channel(first, u, lane), total)
                        for a in cutlass.range_constexpr(self.unit.size // self.unit.width):
                            at = self.unit.offset(a * self.unit.width, c, total)
                            wide = base * self.config.n + at
                            source = copy.aligned(tensor, wide, self.unit.width)
                            self.slots.fetch(target, piece, source)
                            piece += 1
            if cutlass.const_expr(mDout is not None):
                for u in cutlass.range_constexpr(self.units):
                    c = self.inside(self.channel(first, u, lane), total)
                    width = self.unit.row_width
                    for a in cutlass.range_constexpr(self.unit.channels // width):
                        source = copy.aligned(mDout, base + (c + a * width), width)
                        self.slots.fetch(target, piece, source)
                        piece += 1
            of_token = cutlass.Int64(own) * self.width + 2 * (lane % 4)
            for tile in cutlass.range_constexpr(self.tiles):
                self.slots.fetch(target, piece, copy.aligned(mDh, of_token + 8 * tile, 2))
                piece += 1
        cute.arch.cp_async_commit_group()

    @cute.jit
    def inside(self, c, total):
        """A channel, or the first one in place of those behind the last."""
        return c if c < total else cutlass.Int64(0)

    def piece(self, half: int, of: str, u: int = 0, access: int = 0) -> int:
        """The number of a piece; ``of``: "x", "dy", "dout" or "dh"."""
        sizes = [len(t) for t in (self.of_x, self.of_dy, self.of_dout)]
        of_unit = ("x", "dy", "dout", "dh").index(of)
        first = half * (sum(sizes) + self.tiles) + sum(sizes[:of_unit])
        per_unit = sizes[of_unit] // self.units if of != "dh" else 0
        return first + u * per_unit + access

    @cute.jit
    def taken(self, stage: cute.Pointer, half: cutlass.Constexpr, of: cutlass.Constexpr, u):
        """A unit of one token from a stage; ``of``: "x" or "dy"."""
        raw = cute.make_rmem_tensor(cute.make_layout(self.unit.size), self.dtype)
        width = self.unit.width
        for a in cutlass.range_constexpr(self.unit.size // width):
            part = unit.piece(raw, a * width, width)
            self.slots.read(stage, self.piece(half, of, u, a), part)
        return raw

    @cute.jit
    def taken_channels(self, stage: cute.Pointer, half: cutlass.Constexpr, u: cutlass.Constexpr):
        """dout of a unit, likewise."""
        channels, width = self.unit.channels, self.unit.row_width
        raw = cute.make_rmem_tensor(cute.make_layout(channels), self.dtype)
        for a in cutlass.range_constexpr(channels // width):
            part = unit.piece(raw, a * width, width)
            self.slots.read(stage, self.piece(half, "dout", u, a), part)
        return raw

    @cute.jit
    def gradient(self, tensors: tuple, stage, half: cutlass.Constexpr, own) -> list:
        """Terms of one token's dH: columns 2 t, 2 t + 1, eight on, sixteen on."""
        lane, m = cute.arch.lane_idx(), tensors[0].shape[0]
        values = cute.make_rmem_tensor(cute.make_layout(2 * self.tiles), cutlass.Float32)
        base = cutlass.Int64(cutlass.min(own, m - 1)) * self.width + 2 * (lane % 4)
        for tile in cutlass.range_constexpr(self.tiles):
            part = unit.piece(values, 2 * tile, 2)
            if cutlass.const_expr(self.config.wide):
                self.slots.read(stage, self.piece(half, "dh", 0, tile), part)
            else:
                part.store(copy.aligned(tensors[1], base + 8 * tile, 2).load())
            for side in cutlass.range_constexpr(2):
                part[side] = part[side] if own < m else cutlass.Float32(0.0)
        return matrix.terms(values, self.terms)

    @cute.jit
    def given(self, tensors: tuple, stage, half, u, own, at: tuple):
        """(x, dy, dout) of one unit of one token, of what there is; raw."""
        mX, _, _, (mDy, _, mDout, _), _ = tensors
        c, total = at
        m = mX.shape[0]
        dy = d_out = None
        if cutlass.const_expr(self.config.wide):
            x = self.taken(stage, half, "x", u)
            if cutlass.const_expr(mDy is not None):
                dy = self.taken(stage, half, "dy", u)
            if cutlass.const_expr(mDout is not None):
                d_out = self.taken_channels(stage, half, u)
        else:
            base = cutlass.Int64(cutlass.min(own, m - 1)) * total
            wide = base * self.config.n
            x = self.unit.load(mX, wide, c, total, True)
            if cutlass.const_expr(mDy is not None):
                dy = self.unit.load(mDy, wide, c, total, True)
            if cutlass.const_expr(mDout is not None):
                d_out = self.unit.load_raw(mDout, base, c, total, True)
        # A token that there is not counts for nothing in dpsi.
        bits = cute.recast_tensor(x, cutlass.Int32)
        for i in cutlass.range_constexpr(cute.size(bits)):
            bits[i] = bits[i] if own < m else cutlass.Int32(0)
        return x, dy, d_out

    @cute.jit
    def channel(self, first, u: cutlass.Constexpr, lane):
        """The first channel of a lane's unit."""
        own = cutlass.Int64(first + self.unit.channels * (lane % 4))
        return own + u * 4 * self.unit.channels

    @cute.jit
    def psi(self, mPsi: cute.Tensor, sPsi: cute.Tensor, first, total):
        """Fragments of psi as B of dH psi: per octet, pair of elements and term three registers.

        Column g of pair J is element 2 J + g mod 2 of lane g / 2's octet, so that a lane's sums of
        the four pairs are its own octet.  Rows are 2 t, 2 t + 1, eight on, sixteen on.
        """
        lane = cute.arch.lane_idx()
        g, t = lane // 4, lane % 4
        k = mPsi.shape[1]
        size = 2 * self.tiles
        values = cute.make_rmem_tensor(cute.make_layout(8 * size), cutlass.Float32)
        # All loads first: of a channel behind the last one of the first channel, and not used.
        for pair in cutlass.range_constexpr(8):
            at, inside = self.element(first, pair, g, total)
            for i in cutlass.range_constexpr(size):
                base = cutlass.Int64(i // 2 * 8 + 2 * t + i % 2) * k
                values[pair * size + i] = copy.aligned(mPsi, base + at, 1)[0]
        for pair in cutlass.range_constexpr(8):
            _, inside = self.element(first, pair, g, total)
            own = unit.piece(values, pair * size, size)
            for i in cutlass.range_constexpr(size):
                own[i] = own[i] if inside else cutlass.Float32(0.0)
            terms = matrix.terms(own, self.terms)
            for v in cutlass.range_constexpr(self.vectors):
                target = self.fragment(sPsi, pair, v)
                for i in cutlass.range_constexpr(4):
                    at = 4 * v + i
                    if cutlass.const_expr(at < self.terms * self.tiles):
                        target[i] = terms[at // self.tiles][at % self.tiles]

    @cute.jit
    def element(self, first, pair: cutlass.Constexpr, g, total):
        """(offset in a row, whether it is one) of element 2 pair + g mod 2 of lane g / 2."""
        c = self.channel(first, pair // 4 // self.octets, g // 2)
        p = pair % (4 * self.octets) * 2 + g % 2
        if cutlass.const_expr(self.config.layout == "cn"):
            inside = c + p // self.config.n < total
            at = c * self.config.n + p
        else:
            inside = c + p % self.unit.channels < total
            at = cutlass.Int64(total) * (p // self.unit.channels) + c + p % self.unit.channels
        return (at if inside else cutlass.Int64(0)), inside

    @cute.jit
    def fragment(self, sPsi: cute.Tensor, pair, vector) -> cute.Tensor:
        """Four of a lane's registers."""
        at = ((pair * self.vectors + vector) * WARP + cute.arch.lane_idx()) * 4
        pointer = cute.make_ptr(
            cutlass.Int32, (sPsi.iterator + at).toint(), cute.AddressSpace.smem, assumed_align=16
        )
        return cute.make_tensor(pointer, cute.make_layout(4))

    @cute.jit
    def rows(self, tensors: tuple, sPsi, acc, stage, row, first, total):
        """16 tokens of one slab."""
        lane = cute.arch.lane_idx()
        m = tensors[0].shape[0]
        owns = [row + lane // 4 + 8 * half for half in range(2)]
        dh = [self.gradient(tensors, stage, half, owns[half]) for half in range(2)]
        columns = [
            [
                (matrix.transposed(dh[0][b][tile]), matrix.transposed(dh[1][b][tile]))
                for tile in range(self.tiles)
            ]
            for b in range(self.terms)
        ]
        for u in cutlass.range_constexpr(self.units):
            c = self.channel(first, u, lane)
            read = [
                self.given(tensors, stage, half, u, owns[half], (c, total)) for half in range(2)
            ]
            self.add(acc, [x for x, _, _ in read], columns, u)
            starts = [
                cute.make_rmem_tensor(cute.make_layout(self.unit.size), cutlass.Float32)
                for _ in range(2)
            ]
            for o in cutlass.range_constexpr(self.octets):
                self.product(starts, dh, sPsi, u * self.octets + o, o)
            for half in cutlass.range_constexpr(2):
                own = owns[half]
                # Read for each unit: registers are few, and the second time they are near.
                coefficients = self.coefficients(tensors, own, cutlass.min(own, m - 1))
                self.give(tensors, starts[half], read[half], coefficients, (c, total, m))

    @cute.jit
    def coefficients(self, tensors: tuple, own, read) -> tuple:
        """(token, token that is read, factor of x, res, pre) of what there is."""
        mX, _, mDms, (_, mRes, _, mPre), _ = tensors
        n = self.config.n
        factor = copy.aligned(mDms, cutlass.Int64(read), 1)[0] * (
            cutlass.Float32(2.0) / cutlass.Float32(mX.shape[1])
        )
        res = None if mRes is None else unit.compact(mRes, read, n * n)
        pre = None if mPre is None else unit.compact(mPre, read, n)
        return own, read, factor, res, pre

    @cute.jit
    def product(self, starts: list, dh: list, sPsi, octet: cutlass.Constexpr, o: cutlass.Constexpr):
        """dH psi of one of two octets of 16 tokens, octet o of each token's unit."""
        low, high = dh
        last = self.tiles - 1
        for pair in cutlass.range_constexpr(4):
            made = cute.make_rmem_tensor(cute.make_layout(matrix.SUMS), cutlass.Float32)
            made.fill(0.0)
            psi = cute.make_rmem_tensor(cute.make_layout(4 * self.vectors), cutlass.Int32)
            for v in cutlass.range_constexpr(self.vectors):
                part = unit.piece(psi, 4 * v, 4)
                part.store(self.fragment(sPsi, octet * 4 + pair, v).load())
            for a, b in self.pairs:
                at = b * self.tiles
                if cutlass.const_expr(self.tiles == 3):
                    matrix.multiply(
                        made, 0, (low[a][0], high[a][0], low[a][1], high[a][1]),
                        (psi[at], psi[at + 1]),
                    )  # fmt: skip
                matrix.multiply_half(made, 0, (low[a][last], high[a][last]), psi[at + last])
            for half in cutlass.range_constexpr(2):
                for side in cutlass.range_constexpr(2):
                    value = made[2 * half + side]
                    starts[half][o * OCTET + 2 * pair + side] = value

    @cute.jit
    def add(self, acc, xs: list, columns: list, u: cutlass.Constexpr):
        """dpsi += xᵀ dH of a unit of 16 tokens; terms a of x and b of dH."""
        x = [matrix.terms(raw, self.terms) for raw in xs]
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
                        first = ((u * self.octets + o) * 2 + group) * self.tiles
                        for tile in cutlass.range_constexpr(self.tiles):
                            matrix.multiply(acc, first + tile, rows, columns[b][tile])

    @cute.jit
    def give(self, tensors: tuple, start, read: tuple, coefficients: tuple, at: tuple):
        """dx of one unit of one token."""
        mDx = tensors[4]
        own, source, factor, res, pre = coefficients
        c, total, m = at
        raw, dy, d_out = (None if t is None else unit.widened(t) for t in read)
        for p in cutlass.range_constexpr(self.unit.size):
            start[p] = cute.math.fma(raw[p], factor, start[p])
        dx = unit.narrowed(unit.passed(self.unit, start, dy, d_out, res, pre), self.dtype)
        base = cutlass.Int64(source) * total * self.config.n
        if (own < m) & (c < total):
            self.unit.store(dx, mDx, base, c, total, not self.config.wide)

    @cute.jit
    def finish(self, acc, mParts, chunk, first, total):
        """The slab's dpsi: rows of a product are elements g mod 2 of lane g / 2's pairs."""
        lane = cute.arch.lane_idx()
        g, t = lane // 4, lane % 4
        _, columns, k = mParts.shape
        for pair in cutlass.range_constexpr(8):
            at, inside = self.element(first, pair, g, total)
            if inside:
                for tile in cutlass.range_constexpr(self.tiles):
                    where = (pair // 2 * self.tiles + tile) * matrix.SUMS + 2 * (pair % 2)
                    for side in cutlass.range_constexpr(2):
                        row = tile * 8 + 2 * t + side
                        base = (cutlass.Int64(chunk) * columns + row) * k
                        copy.aligned(mParts, base + at, 1)[0] = acc[where + side]


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
