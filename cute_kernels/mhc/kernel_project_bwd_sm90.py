"""Backward of a projection, on SM90: dx, with the other gradients of x, and partial sums of dpsi.

    dx_i = (dH psi)_i + (2 / K) dms x_i + Σ_j dy_j res[i, j] + dout pre_i
    parts[c, j, k] = Σ_m dH[m, j] x[m, k], m of chunk c of ``TOKENS`` tokens;  dpsi = Σ_c parts[c]

Layout       x, dy, dx [M, K] rows of streams (mhc/config.py); dout [M, C]; dH fp32 [M, W], pre, res
             and dms fp32, compact; psi fp32 [N, K]; parts fp32 [T, N, K].  2 / K is that of
             ``size``, the K of rows without padding.
Order        dx: dH, psi (and an fp32 x) are sums of T bf16 terms; products of terms a and b with
             a + b < T are added to one sum by ``mma.sync``, those of the largest a + b first; then
             x, dy (j ascending) and dout with one fma each.  dpsi: groups of 16 tokens, ascending,
             in a chain of ``mma.sync``.  The order does not depend on M, the grid or the warp.
Work         a warp has a slab, a vector of channels in each of four lanes, and one chunk of tokens;
             warps exchange no data; a CTA has neighbouring slabs.
M, C tails   tokens beyond the last are zeros in dpsi; they are not stored, nor are vectors beyond
             the last channel.
Measured     docs/status.md.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy
from ..dsl.ring import Slots
from .config import TOKENS, WIDTH, ProjectBackwardConfig, mappings
from .device import matrix
from .device.arguments import BackwardTensors, FakeRows, VectorInputs, backward_fakes
from .device.vector import Vector, load_compact, rounded, subview, to_fp32

WARP, ROWS = 32, 16
OCTET = 8


class MhcProjectBackwardSm90:
    """Kernel of one configuration; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: ProjectBackwardConfig):
        n = config.n
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        self.terms = 2 if config.precision == "bf16x2" else 3
        # A lane has 16 elements of a token, a warp 64: in "cn" two vectors of an octet, 4 apart; in
        # "nc" one of two octets, whose pieces are 8 bytes or more, so that four lanes read sectors.
        self.vectors = 2 if config.layout == "cn" else 1
        channels = OCTET // n if config.layout == "cn" else 16 // n
        self.vector = Vector(self.dtype, n, config.layout, channels)
        self.octets = self.vector.size // OCTET
        self.slab = 4 * channels * self.vectors
        self.columns = mappings(n)
        self.tiles = self.columns // 8
        self.width = WIDTH[n]
        self.threads = WARP * config.warps
        # Fragments of psi, in shared memory: groups of four registers for a pair of elements.
        self.quads = -(-self.terms * self.tiles // 4)
        # A stage of the ring: of two tokens x, dy, dout and dH; bytes of each access.
        size = self.dtype.width // 8
        streams = (self.vector.width * size,) * (self.vector.size // self.vector.width)
        channel = (self.vector.row_width * size,) * (channels // self.vector.row_width)
        self.x_pieces = streams * self.vectors
        self.dy_pieces = self.x_pieces if config.dy else ()
        self.dout_pieces = channel * self.vectors if config.d_out else ()
        pieces = (*self.x_pieces, *self.dy_pieces, *self.dout_pieces, *(8,) * self.tiles)
        self.slots = Slots(pieces * 2)
        self.stages = 3
        #: Pairs of terms: (of dH or x, of psi or dH), the largest a + b first.
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
        size: cutlass.Int32,
        ctas: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        tensors = BackwardTensors(mX, mDh, mDms, mDy, mRes, mDout, mPre, mDx, size)
        self.kernel(tensors, mPsi, mParts).launch(
            grid=(ctas, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.config.blocks,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, tensors: BackwardTensors, mPsi: cute.Tensor, mParts: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tidx // WARP)
        layout = cute.make_layout((8 * self.quads * WARP * 4, self.config.warps))
        allocator = SmemAllocator()
        sPsi_warps = allocator.allocate_tensor(cutlass.Int32, layout, byte_alignment=16)
        sPsi = sPsi_warps[None, warp]
        layout = cute.make_layout((self.stages, self.slots.size, self.config.warps))
        layout = cute.make_ordered_layout(layout.shape, order=(1, 0, 2))
        sRing_warps = allocator.allocate_tensor(cutlass.Uint8, layout, byte_alignment=16)
        sRing = sRing_warps[None, None, warp]
        total = tensors.mX.shape[1] // self.config.n
        groups = (total + self.slab * self.config.warps - 1) // (self.slab * self.config.warps)
        work = mParts.shape[0] * groups
        for index in cutlass.range(block, work, ctas, unroll=1):
            chunk = index // groups
            first = (index % groups * self.config.warps + warp) * self.slab
            if first < total:
                # All lanes must have read the last slab's fragments.
                cute.arch.sync_warp()
                self.fill(mPsi, sPsi, first, total)
                cute.arch.sync_warp()
                acc = cute.make_rmem_tensor(
                    cute.make_layout(2 * 2 * self.tiles * matrix.SUMS), cutlass.Float32
                )
                acc.fill(0.0)
                self.chunk(tensors, sPsi, sRing, acc, chunk, first, total)
                self.finish(acc, mParts, chunk, first, total)

    @cute.jit
    def chunk(
        self,
        tensors: BackwardTensors,
        sPsi: cute.Tensor,
        sRing: cute.Tensor,
        acc: cute.Tensor,
        chunk: cutlass.Int32,
        first: cutlass.Int32,
        total: cutlass.Int32,
    ):
        """Process all tokens of a chunk, 16 at a time, through a ring of stages."""
        m = tensors.mX.shape[0]
        begin = chunk * TOKENS
        end = cutlass.min(m, begin + TOKENS)
        for d in cutlass.range_constexpr(self.stages - 1):
            self.fetch(tensors, sRing, d, begin + d * ROWS, first, total)
        stage = cutlass.Int32(0)
        for row in cutlass.range(begin, end, ROWS, unroll=1):
            cute.arch.cp_async_wait_group(self.stages - 2)
            # The stage that was read last is filled next.
            free = stage + self.stages - 1
            free = free - self.stages if free >= self.stages else free
            following = row + (self.stages - 1) * ROWS
            self.fetch(tensors, sRing, free, following, first, total)
            self.rows(tensors, sPsi, acc, sRing[stage, None].iterator, row, first, total)
            stage = stage + 1
            stage = cutlass.Int32(0) if stage == self.stages else stage
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def fetch(
        self,
        tensors: BackwardTensors,
        sRing: cute.Tensor,
        stage: cutlass.Int32,
        row: cutlass.Int32,
        first: cutlass.Int32,
        total: cutlass.Int32,
    ):
        """Copy 16 tokens to a stage, asynchronously; those beyond the last read that token."""
        mX, mDh = tensors.mX, tensors.mDh
        mDy, mDout = tensors.mDy, tensors.mDout
        lane, m = cute.arch.lane_idx(), mX.shape[0]
        target = sRing[stage, None].iterator
        piece = 0
        for half in cutlass.range_constexpr(2):
            token = cutlass.min(row + lane // 4 + 8 * half, m - 1)
            # Computed by hand: rows begin at 64-bit offsets, and pieces differ in size.
            base = cutlass.Int64(token) * total
            for mStreams in (mX, mDy):
                if cutlass.const_expr(mStreams is not None):
                    for u in cutlass.range_constexpr(self.vectors):
                        c = self.inside(self.channel(first, u, lane), total)
                        width = self.vector.width
                        for a in cutlass.range_constexpr(self.vector.size // width):
                            offset = self.vector.offset(a * width, c, total)
                            element = base * self.config.n + offset
                            source = copy.aligned(mStreams, element, width)
                            self.slots.fetch(target, piece, source)
                            piece += 1
            if cutlass.const_expr(mDout is not None):
                for u in cutlass.range_constexpr(self.vectors):
                    c = self.inside(self.channel(first, u, lane), total)
                    width = self.vector.row_width
                    for a in cutlass.range_constexpr(self.vector.channels // width):
                        source = copy.aligned(mDout, base + (c + a * width), width)
                        self.slots.fetch(target, piece, source)
                        piece += 1
            dh_base = cutlass.Int64(token) * self.width + 2 * (lane % 4)
            for tile in cutlass.range_constexpr(self.tiles):
                self.slots.fetch(target, piece, copy.aligned(mDh, dh_base + 8 * tile, 2))
                piece += 1
        cute.arch.cp_async_commit_group()

    @cute.jit
    def inside(self, c: cutlass.Int64, total: cutlass.Int32) -> cutlass.Int64:
        """Return channel c, or channel 0 if c is beyond the last one."""
        return c if c < total else cutlass.Int64(0)

    def piece(self, half: int, name: str, u: int = 0, access: int = 0) -> int:
        """Index of a piece of a stage; ``name``: "x", "dy", "dout" or "dh"."""
        sizes = [len(t) for t in (self.x_pieces, self.dy_pieces, self.dout_pieces)]
        tensor = ("x", "dy", "dout", "dh").index(name)
        first = half * (sum(sizes) + self.tiles) + sum(sizes[:tensor])
        per_vector = sizes[tensor] // self.vectors if name != "dh" else 0
        return first + u * per_vector + access

    @cute.jit
    def read_streams(
        self,
        stage: cute.Pointer,
        half: cutlass.Constexpr[int],
        name: cutlass.Constexpr[str],
        u: cutlass.Constexpr[int],
    ) -> cute.Tensor:
        """Read a vector of one token from a stage; ``name``: "x" or "dy"."""
        rX = cute.make_rmem_tensor(cute.make_layout(self.vector.size), self.dtype)
        width = self.vector.width
        for a in cutlass.range_constexpr(self.vector.size // width):
            rAccess = subview(rX, a * width, width)
            self.slots.read(stage, self.piece(half, name, u, a), rAccess)
        return rX

    @cute.jit
    def read_channels(
        self, stage: cute.Pointer, half: cutlass.Constexpr[int], u: cutlass.Constexpr[int]
    ) -> cute.Tensor:
        """Read dout of a vector of one token from a stage."""
        channels, width = self.vector.channels, self.vector.row_width
        rDout = cute.make_rmem_tensor(cute.make_layout(channels), self.dtype)
        for a in cutlass.range_constexpr(channels // width):
            rAccess = subview(rDout, a * width, width)
            self.slots.read(stage, self.piece(half, "dout", u, a), rAccess)
        return rDout

    @cute.jit
    def load_dh(
        self,
        tensors: BackwardTensors,
        stage: cute.Pointer,
        half: cutlass.Constexpr[int],
        token: cutlass.Int32,
    ) -> list[cute.Tensor]:
        """Load a token's dH, as bf16 terms: columns 2 t, 2 t + 1, those + 8, those + 16."""
        m = tensors.mX.shape[0]
        values = cute.make_rmem_tensor(cute.make_layout(2 * self.tiles), cutlass.Float32)
        for tile in cutlass.range_constexpr(self.tiles):
            rAccess = subview(values, 2 * tile, 2)
            self.slots.read(stage, self.piece(half, "dh", 0, tile), rAccess)
            for side in cutlass.range_constexpr(2):
                rAccess[side] = rAccess[side] if token < m else cutlass.Float32(0.0)
        return matrix.terms(values, self.terms)

    @cute.jit
    def load_vector(
        self,
        tensors: BackwardTensors,
        stage: cute.Pointer,
        half: cutlass.Constexpr[int],
        u: cutlass.Constexpr[int],
        token: cutlass.Int32,
    ) -> VectorInputs:
        """Read one vector of one token from a stage."""
        m = tensors.mX.shape[0]
        x, dy, d_out = self.read_streams(stage, half, "x", u), None, None
        if cutlass.const_expr(tensors.mDy is not None):
            dy = self.read_streams(stage, half, "dy", u)
        if cutlass.const_expr(tensors.mDout is not None):
            d_out = self.read_channels(stage, half, u)
        # Tokens beyond the last are zeros in dpsi.
        bits = cute.recast_tensor(x, cutlass.Int32)
        for i in cutlass.range_constexpr(cute.size(bits)):
            bits[i] = bits[i] if token < m else cutlass.Int32(0)
        return VectorInputs(x, dy, d_out)

    @cute.jit
    def channel(
        self, first: cutlass.Int32, u: cutlass.Constexpr[int], lane: cutlass.Int32
    ) -> cutlass.Int64:
        """First channel of a lane's vector u, in the slab that begins at channel ``first``."""
        c = cutlass.Int64(first + self.vector.channels * (lane % 4))
        return c + u * 4 * self.vector.channels

    @cute.jit
    def fill(
        self, mPsi: cute.Tensor, sPsi: cute.Tensor, first: cutlass.Int32, total: cutlass.Int32
    ):
        """Write psi to shared memory as operand B of dH psi, in bf16 terms.

        Column g of pair J is element 2 J + g mod 2 of lane g / 2's octet, so that a lane's sums of
        the four pairs are its own octet.  Rows are 2 t, 2 t + 1, those + 8, those + 16.
        """
        lane = cute.arch.lane_idx()
        g, t = lane // 4, lane % 4
        k = mPsi.shape[1]
        size = 2 * self.tiles
        values = cute.make_rmem_tensor(cute.make_layout(8 * size), cutlass.Float32)
        # All loads first; a channel beyond the last one loads the first channel, and becomes 0.
        for pair in cutlass.range_constexpr(8):
            offset, inside = self.element(first, pair, g, total)
            for i in cutlass.range_constexpr(size):
                base = cutlass.Int64(i // 2 * 8 + 2 * t + i % 2) * k
                values[pair * size + i] = copy.aligned(mPsi, base + offset, 1)[0]
        for pair in cutlass.range_constexpr(8):
            _, inside = self.element(first, pair, g, total)
            rPair = subview(values, pair * size, size)
            for i in cutlass.range_constexpr(size):
                rPair[i] = rPair[i] if inside else cutlass.Float32(0.0)
            terms = matrix.terms(rPair, self.terms)
            for quad in cutlass.range_constexpr(self.quads):
                sQuad = self.fragment(sPsi, pair, quad)
                for i in cutlass.range_constexpr(4):
                    index = 4 * quad + i
                    if cutlass.const_expr(index < self.terms * self.tiles):
                        sQuad[i] = terms[index // self.tiles][index % self.tiles]

    @cute.jit
    def element(
        self,
        first: cutlass.Int32,
        pair: cutlass.Constexpr[int],
        g: cutlass.Int32,
        total: cutlass.Int32,
    ) -> tuple[cutlass.Int64, cutlass.Boolean]:
        """(offset in a row, whether the row has it) of element 2 pair + g mod 2 of lane g / 2."""
        c = self.channel(first, pair // 4 // self.octets, g // 2)
        p = pair % (4 * self.octets) * 2 + g % 2
        if cutlass.const_expr(self.config.layout == "cn"):
            inside = c + p // self.config.n < total
            offset = c * self.config.n + p
        else:
            channels = self.vector.channels
            inside = c + p % channels < total
            offset = cutlass.Int64(total) * (p // channels) + c + p % channels
        return (offset if inside else cutlass.Int64(0)), inside

    @cute.jit
    def fragment(
        self, sPsi: cute.Tensor, pair: cutlass.Constexpr[int], quad: cutlass.Constexpr[int]
    ) -> cute.Tensor:
        """View of four of a lane's registers of psi."""
        offset = ((pair * self.quads + quad) * WARP + cute.arch.lane_idx()) * 4
        # Computed by hand: the cast asserts the alignment of one 16-byte access.
        pointer = cute.make_ptr(
            cutlass.Int32,
            (sPsi.iterator + offset).toint(),
            cute.AddressSpace.smem,
            assumed_align=16,
        )
        return cute.make_tensor(pointer, cute.make_layout(4))

    @cute.jit
    def rows(
        self,
        tensors: BackwardTensors,
        sPsi: cute.Tensor,
        acc: cute.Tensor,
        stage: cute.Pointer,
        row: cutlass.Int32,
        first: cutlass.Int32,
        total: cutlass.Int32,
    ):
        """Process 16 tokens of one slab: acc += xᵀ dH, and dx."""
        lane = cute.arch.lane_idx()
        tokens = [row + lane // 4 + 8 * half for half in range(2)]
        dh = [self.load_dh(tensors, stage, half, tokens[half]) for half in range(2)]
        # dH of 16 tokens as operand B of xᵀ dH.
        columns = [
            [
                (matrix.transposed(dh[0][b][tile]), matrix.transposed(dh[1][b][tile]))
                for tile in range(self.tiles)
            ]
            for b in range(self.terms)
        ]
        for u in cutlass.range_constexpr(self.vectors):
            c = self.channel(first, u, lane)
            inputs = [self.load_vector(tensors, stage, half, u, tokens[half]) for half in range(2)]
            # dpsi += xᵀ dH
            self.add(acc, [one.x for one in inputs], columns, u)
            # dx = dH psi + ...
            products = [
                cute.make_rmem_tensor(cute.make_layout(self.vector.size), cutlass.Float32)
                for _ in range(2)
            ]
            for o in cutlass.range_constexpr(self.octets):
                self.product(products, dh, sPsi, u * self.octets + o, o)
            for half in cutlass.range_constexpr(2):
                self.store_dx(tensors, products[half], inputs[half], tokens[half], c, total)

    @cute.jit
    def product(
        self,
        products: list[cute.Tensor],
        dh: list[list[cute.Tensor]],
        sPsi: cute.Tensor,
        octet: cutlass.Constexpr[int],
        o: cutlass.Constexpr[int],
    ):
        """products[half] = dH psi of octet o of each token's vector: octet ``octet`` of the slab.

        Σ of dH_a psi_b over pairs of terms, the largest a + b first.
        """
        low, high = dh
        last = self.tiles - 1
        for pair in cutlass.range_constexpr(4):
            rProduct = cute.make_rmem_tensor(cute.make_layout(matrix.SUMS), cutlass.Float32)
            rProduct.fill(0.0)
            rPsi = cute.make_rmem_tensor(cute.make_layout(4 * self.quads), cutlass.Int32)
            for quad in cutlass.range_constexpr(self.quads):
                rQuad = subview(rPsi, 4 * quad, 4)
                rQuad.store(self.fragment(sPsi, octet * 4 + pair, quad).load())
            for a, b in self.pairs:
                first = b * self.tiles
                if cutlass.const_expr(self.tiles == 3):
                    rA = (low[a][0], high[a][0], low[a][1], high[a][1])
                    matrix.multiply(rProduct, 0, rA, (rPsi[first], rPsi[first + 1]))
                rA_last = (low[a][last], high[a][last])
                matrix.multiply_half(rProduct, 0, rA_last, rPsi[first + last])
            for half in cutlass.range_constexpr(2):
                for side in cutlass.range_constexpr(2):
                    value = rProduct[2 * half + side]
                    products[half][o * OCTET + 2 * pair + side] = value

    @cute.jit
    def add(
        self,
        acc: cute.Tensor,
        xs: list[cute.Tensor],
        columns: list[list[tuple[cutlass.Int32, cutlass.Int32]]],
        u: cutlass.Constexpr[int],
    ):
        """acc += xᵀ dH of vector u of 16 tokens: Σ of x_aᵀ dH_b over pairs of terms."""
        x = [matrix.terms(raw, self.terms) for raw in xs]
        for o in cutlass.range_constexpr(self.octets):
            for a, b in self.pairs:
                if cutlass.const_expr(a < len(x[0])):
                    for group in cutlass.range_constexpr(2):
                        index = o * 4 + 2 * group
                        rA = (
                            matrix.transposed(x[0][a][index]),
                            matrix.transposed(x[0][a][index + 1]),
                            matrix.transposed(x[1][a][index]),
                            matrix.transposed(x[1][a][index + 1]),
                        )
                        first = ((u * self.octets + o) * 2 + group) * self.tiles
                        for tile in cutlass.range_constexpr(self.tiles):
                            matrix.multiply(acc, first + tile, rA, columns[b][tile])

    @cute.jit
    def store_dx(
        self,
        tensors: BackwardTensors,
        product: cute.Tensor,
        inputs: VectorInputs,
        token: cutlass.Int32,
        c: cutlass.Int64,
        total: cutlass.Int32,
    ):
        """Compute and store dx of one vector of one token.

        dx_i = product_i + (2 / K) dms x_i + Σ_j dy_j res[i, j] + dout pre_i
        """
        n, m = self.config.n, tensors.mX.shape[0]
        read = cutlass.min(token, m - 1)
        # Loaded again for each vector: registers are short, and the data is in L1.
        factor = copy.aligned(tensors.mDms, cutlass.Int64(read), 1)[0] * (
            cutlass.Float32(2.0) / cutlass.Float32(tensors.size)
        )
        res = None if tensors.mRes is None else load_compact(tensors.mRes, read, n * n)
        pre = None if tensors.mPre is None else load_compact(tensors.mPre, read, n)
        x, dy, d_out = (
            None if rX is None else to_fp32(rX) for rX in (inputs.x, inputs.dy, inputs.d_out)
        )
        for p in cutlass.range_constexpr(self.vector.size):
            product[p] = cute.math.fma(x[p], factor, product[p])
        dx = self.vector.input_gradient(product, dy, d_out, res, pre)
        rDx = rounded(dx, self.dtype)
        base = cutlass.Int64(read) * total * n
        if (token < m) & (c < total):
            self.vector.store(rDx, tensors.mDx, base, c, total)

    @cute.jit
    def finish(
        self,
        acc: cute.Tensor,
        mParts: cute.Tensor,
        chunk: cutlass.Int32,
        first: cutlass.Int32,
        total: cutlass.Int32,
    ):
        """Store the slab's part of dpsi.

        Rows of the product xᵀ dH are elements g mod 2 of lane g / 2's pairs.
        """
        lane = cute.arch.lane_idx()
        g, t = lane // 4, lane % 4
        _, columns, k = mParts.shape
        for pair in cutlass.range_constexpr(8):
            offset, inside = self.element(first, pair, g, total)
            if inside:
                for tile in cutlass.range_constexpr(self.tiles):
                    index = (pair // 2 * self.tiles + tile) * matrix.SUMS + 2 * (pair % 2)
                    for side in cutlass.range_constexpr(2):
                        row = tile * 8 + 2 * t + side
                        base = (cutlass.Int64(chunk) * columns + row) * k
                        copy.aligned(mParts, base + offset, 1)[0] = acc[index + side]


def build(config: ProjectBackwardConfig, compile: Callable = cute.compile) -> Callable:
    """Compile one configuration against fake tensors; needs no GPU."""
    return compile(
        MhcProjectBackwardSm90(config),
        *backward_fakes(config, FakeRows(config.dtype, config.n)),
        cutlass.Int32(1),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
