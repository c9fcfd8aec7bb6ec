"""Backward of a projection by TMA and WGMMA, on SM90: dx and partial sums of dpsi.

    dx_i = (dH psi)_i + (2 / K) dms x_i + Σ_j dy_j res[i, j] + dout pre_i
    parts[c, j, k] = Σ_m dH[m, j] x[m, k], m of chunk c of ``TOKENS`` tokens;  dpsi = Σ_c parts[c]

Layout       x, dy, dx bf16 [M, K] rows of streams in the layout "cn" (mhc/config.py); dout [M, C];
             row strides are multiples of 16 bytes.  dH fp32 [M, W], pre, res and dms fp32,
             compact; psi fp32 [N, K]; parts fp32 [T, N, K].
Order        that of kernel_project_bwd_sm90, whose bytes these are: dH and psi are sums of two bf16
             terms; products of terms a and b with a + b < 2 are added to one sum, those of the
             largest a + b first, the columns of dH ascending in groups of 16; then x, dy (j
             ascending) and dout with one fma each.  dpsi: groups of 16 tokens, ascending, the
             second term of dH first.  Groups of tokens wholly beyond the last are not added.
Work         a CTA is one warpgroup; it has a slab of K, whose psi it keeps, and one chunk of
             tokens.  TMA loads tiles of 64 tokens into a ring; WGMMA reads x from there for dpsi;
             dx replaces x in its stage, and TMA stores it.
M, K tails   TMA fills zeros beyond the last token and element, and stores nothing there; dH is
             zero beyond the last token.
Measured     docs/status.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy, mma, smem, tma
from .config import TOKENS, ProjectBackwardWgmmaConfig, mappings
from .device import batches, staged, token
from .device.arguments import FakeTmaRows, backward_fakes
from .device.token import TokenHalf, TokenRows
from .device.vector import Vector, rounded

WARP, OCTET = 32, 8
#: Tokens of a tile, and elements of a panel: a row of 128 bytes, the widest swizzle.
TILE, PANEL = 64, 64
#: bf16 terms of dH and of psi.
TERMS = 2
#: Pairs of terms (of dH, of psi), the largest a + b first.
PAIRS = ((1, 0), (0, 1), (0, 0))


@dataclass(frozen=True)
class Sources:
    """Streams as TMA addresses them, the contiguous dimension first; None for those not read."""

    x: tma.Source
    dy: tma.Source | None
    d_out: tma.Source | None
    dx: tma.Source


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA.

    full:   mbarriers [stage].
    sX:     [element, token, stage and panel]; sDy likewise.
    sDout:  [channel, token, stage].
    sDh:    [token, column, buffer and term], and sDhT, the same memory as [column, token, ...].
    sPsi:   [element, column, term]; elements in the order of `fill`.
    sFactor, sRes, sPre: fp32 [token], [token, n²], [token, n] of the tile: coefficients of x, dy
            and dout.
    """

    full: cute.Pointer
    sX: cute.Tensor
    sDy: cute.Tensor | None
    sDout: cute.Tensor | None
    sDh: cute.Tensor
    sDhT: cute.Tensor
    sPsi: cute.Tensor
    sFactor: cute.Tensor
    sRes: cute.Tensor | None
    sPre: cute.Tensor | None


@dataclass(frozen=True)
class TmaCopy:
    """A TMA copy: tXsX [box, stage and panel] and tXgX [box, tile of K or C, tile of tokens]."""

    atom: cute.CopyAtom
    tXsX: cute.Tensor
    tXgX: cute.Tensor


@dataclass(frozen=True)
class Copies:
    """TMA copies of a CTA, and the mbarriers of its ring."""

    full: cute.Pointer
    x: TmaCopy
    dy: TmaCopy | None
    d_out: TmaCopy | None
    dx: TmaCopy


@dataclass(frozen=True)
class Products:
    """WGMMA of dx and of dpsi, with their operands in shared memory.

    dx_operands:    A = dH [token, column], B = psi [element, column]; of ``dx_mma``.
    dpsi_operands:  A = xᵀ [element, token], B = dHᵀ [column, token]; of ``dpsi``.
    acc:            dpsi of each panel.
    """

    dx_operands: tuple[cute.Tensor, cute.Tensor]
    dpsi: cute.TiledMma
    dpsi_operands: tuple[cute.Tensor, cute.Tensor]
    acc: list[cute.Tensor]


@dataclass(frozen=True)
class WorkTile:
    """A CTA's part of the work: a chunk of tokens from ``begin`` to ``end``, and a slab of K.

    k:      elements of a row, K.
    tiles:  of the chunk.
    count:  tiles of all items before this one.
    """

    k: cutlass.Int32
    chunk: cutlass.Int32
    slab: cutlass.Int32
    begin: cutlass.Int32
    end: cutlass.Int32
    tiles: cutlass.Int32
    count: cutlass.Int32


class MhcProjectBackwardWgmmaSm90:
    """Kernel of one configuration; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: ProjectBackwardWgmmaConfig):
        n = config.n
        assert config.slab in (PANEL, 2 * PANEL)
        self.config = config
        self.dtype = cutlass.BFloat16
        self.threads = mma.WARPGROUP
        self.vector = Vector(self.dtype, n, "cn", OCTET // n)
        self.columns = mappings(n)
        # Columns of dH in whole groups of WGMMA; those beyond the last are zeros.
        self.padded = -(-self.columns // mma.K_GROUP) * mma.K_GROUP
        self.panels = config.slab // PANEL
        self.channels = config.slab // n
        streams = 2 if config.dy else 1
        elements = streams * config.slab + (self.channels if config.d_out else 0)
        self.stage_bytes = elements * TILE * self.dtype.width // 8
        # Columns of psi that a thread splits into terms.
        self.psi_columns = self.columns * config.slab // self.threads

    # ---- layouts ---------------------------------------------------------------------------------

    def stream_layout(self) -> cute.ComposedLayout:
        """Layout of staged panels of x: operand A of dpsi, and a TMA box each."""
        panels = self.config.stages * self.panels
        return smem.operand_layout(self.dtype, PANEL, TILE, "mn", panels)

    def channel_layout(self) -> cute.Layout:
        """Layout of staged tiles of dout."""
        return cute.make_ordered_layout((self.channels, TILE, self.config.stages), order=(0, 1, 2))

    def dh_layouts(self) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
        """Layouts of dH: operand A of dx, and operand B of dpsi; the same memory.

        A stage is a term; there are two buffers, of this tile and of the next.
        """
        return (
            smem.operand_layout(self.dtype, TILE, self.padded, "k", 2 * TERMS),
            smem.operand_layout(self.dtype, self.padded, TILE, "mn", 2 * TERMS),
        )

    def psi_layout(self) -> cute.ComposedLayout:
        """Layout of the terms of psi: operand B of dx."""
        return smem.operand_layout(self.dtype, self.config.slab, self.padded, "k", TERMS)

    def token_layout(self, columns: int) -> cute.Layout:
        """Layout of coefficients of the tokens of a tile."""
        return cute.make_ordered_layout((TILE, columns), order=(1, 0))

    def storage(self) -> type:
        """Return the struct of a CTA's shared memory; host code."""
        n, streams = self.config.n, cute.cosize(self.stream_layout())
        channels = cute.cosize(self.channel_layout()) if self.config.d_out else 0

        def tiles(size: int):
            return cute.struct.Align[cute.struct.MemRange[self.dtype, size], smem.ALIGN]

        def floats(size: int):
            return cute.struct.Align[cute.struct.MemRange[cutlass.Float32, size], 16]

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[cutlass.Int64, self.config.stages]
            sX: tiles(streams)
            sDy: tiles(streams if self.config.dy else 0)
            sDout: tiles(channels)
            sDh: tiles(cute.cosize(self.dh_layouts()[0]))
            sPsi: tiles(cute.cosize(self.psi_layout()))
            sFactor: floats(TILE)
            sRes: floats(TILE * n * n if self.config.dy == "res" else 0)
            sPre: floats(TILE * n if self.config.d_out else 0)

        return Storage

    # ---- host ------------------------------------------------------------------------------------

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
        stream: cuda.CUstream,
    ):
        layout, box = self.stream_layout(), (PANEL, TILE)
        dy = d_out = None
        if cutlass.const_expr(mDy is not None):
            dy = tma.load(tma.view(mDy, [1, 0]), layout, box, 1)
        if cutlass.const_expr(mDout is not None):
            channels = (self.channels, TILE)
            d_out = tma.load(tma.view(mDout, [1, 0]), self.channel_layout(), channels, 1)
        sources = Sources(
            tma.load(tma.view(mX, [1, 0]), layout, box, 1),
            dy,
            d_out,
            tma.store(tma.view(mDx, [1, 0]), layout, box),
        )
        rows = TokenRows(mDh, mDms, mRes, mPre)
        self.kernel(sources, rows, mPsi, mParts).launch(
            grid=(ctas, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.config.blocks,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=100,
            stream=stream,
        )

    # ---- device ----------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, sources: Sources, rows: TokenRows, mPsi: cute.Tensor, mParts: cute.Tensor):
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        shared = self.shared()
        copies = self.copies(sources, shared)
        products = self.products(shared)
        m, k = rows.mDms.shape[0], mParts.shape[2]
        slabs = (k + self.config.slab - 1) // self.config.slab
        count = cutlass.Int32(0)
        for index in cutlass.range(block, mParts.shape[0] * slabs, ctas, unroll=1):
            chunk = index // slabs
            begin = chunk * TOKENS
            end = cutlass.min(m, begin + TOKENS)
            tiles = (end - begin + TILE - 1) // TILE
            item = WorkTile(k, chunk, index % slabs, begin, end, tiles, count)
            self.process(item, copies, products, shared, rows, (mPsi, mParts))
            count = count + tiles
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def shared(self) -> Shared:
        """Allocate shared memory, initialise barriers, and clear the columns beyond the last."""
        config = self.config
        tidx, _, _ = cute.arch.thread_idx()
        storage = SmemAllocator().allocate(self.storage())
        full = storage.full.data_ptr()
        if tidx == 0:
            for stage in cutlass.range_constexpr(config.stages):
                cute.arch.mbarrier_init(full + stage, 1)
        cute.arch.mbarrier_init_fence()
        sDy = sDout = sRes = sPre = None
        streams, (dh, dh_transposed) = self.stream_layout(), self.dh_layouts()
        if cutlass.const_expr(config.dy != ""):
            sDy = storage.sDy.get_tensor(streams.outer, swizzle=streams.inner)
        if cutlass.const_expr(config.d_out):
            sDout = storage.sDout.get_tensor(self.channel_layout())
            sPre = storage.sPre.get_tensor(self.token_layout(config.n))
        if cutlass.const_expr(config.dy == "res"):
            sRes = storage.sRes.get_tensor(self.token_layout(config.n * config.n))
        psi = self.psi_layout()
        for memory, layout in ((storage.sDh, dh), (storage.sPsi, psi)):
            staged.clear(memory.data_ptr(), cute.cosize(layout), self.threads)
        cute.arch.sync_threads()
        return Shared(
            full,
            storage.sX.get_tensor(streams.outer, swizzle=streams.inner),
            sDy,
            sDout,
            storage.sDh.get_tensor(dh.outer, swizzle=dh.inner),
            storage.sDh.get_tensor(dh_transposed.outer, swizzle=dh_transposed.inner),
            storage.sPsi.get_tensor(psi.outer, swizzle=psi.inner),
            storage.sFactor.get_tensor(cute.make_layout(TILE)),
            sRes,
            sPre,
        )

    @cute.jit
    def copies(self, sources: Sources, shared: Shared) -> Copies:
        """Partition the TMA copies of this kernel into boxes."""
        one, box = cute.make_layout(1), (PANEL, TILE)

        def partition(source: tma.Source | None, sTile: cute.Tensor, shape: tuple[int, int]):
            if cutlass.const_expr(source is None):
                return None
            gTiles = cute.local_tile(source.tensor, shape, (None, None))
            return TmaCopy(source.atom, *tma.partition(source.atom, 0, one, sTile, gTiles))

        dy = partition(sources.dy, shared.sDy, box)
        d_out = partition(sources.d_out, shared.sDout, (self.channels, TILE))
        x = partition(sources.x, shared.sX, box)
        return Copies(shared.full, x, dy, d_out, partition(sources.dx, shared.sX, box))

    def dx_mma(self) -> cute.TiledMma:
        """WGMMA of dH psi; made where it is used, as its first product does not accumulate."""
        return mma.tiled_mma(self.dtype, "k", "k", 1, self.config.slab)

    @cute.jit
    def products(self, shared: Shared) -> Products:
        """Products of this CTA, with accumulators of dpsi."""
        dx = self.dx_mma()
        dpsi = mma.tiled_mma(self.dtype, "mn", "mn", 1, self.padded)
        dpsi.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        shape = dpsi.get_slice(0).partition_shape_C((PANEL, self.padded))
        return Products(
            mma.operands(dx, 0, shared.sDh, shared.sPsi),
            dpsi,
            mma.operands(dpsi, 0, shared.sX, shared.sDhT),
            [cute.make_rmem_tensor(shape, cutlass.Float32) for _ in range(self.panels)],
        )

    @cute.jit
    def process(
        self,
        item: WorkTile,
        copies: Copies,
        products: Products,
        shared: Shared,
        rows: TokenRows,
        weights: tuple[cute.Tensor, cute.Tensor],
    ):
        """Process one chunk of one slab; ``weights``: psi and parts."""
        mPsi, mParts = weights
        config = self.config
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tidx // WARP)
        if warp == 0:
            # The last item's stores must have read their stages.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            for i in cutlass.range(cutlass.min(item.tiles, config.stages), unroll=1):
                self.load(copies, item, i)
        values = token.registers(config.n, config.dy == "res", config.d_out)
        row, half = item.begin + tidx // 2, tidx % 2
        shape = (TILE, self.padded, TERMS)
        token.load_dh(values, rows, config.n, row, half)
        token.load_coefficients(values, rows, config.n, row, half)
        self.fill(mPsi, shared.sPsi, item.slab * config.slab)
        token.store_dh(values, shared.sDh, shape, cutlass.Int32(0), item.end - item.begin)
        token.load_dh(values, rows, config.n, row + TILE, half)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        for acc in products.acc:
            acc.fill(0.0)
        for i in cutlass.range(item.tiles, unroll=1):
            self.tile(item, i, copies, products, shared, rows, values)
        self.finish(products.acc, mParts, item)

    @cute.jit
    def stage(self, item: WorkTile, i: cutlass.Int32) -> tuple[cutlass.Int32, cutlass.Int32]:
        """(stage, phase) of tile i."""
        count = item.count + i
        return count % self.config.stages, count // self.config.stages % 2

    @cute.jit
    def load(self, copies: Copies, item: WorkTile, i: cutlass.Int32):
        """Load tile i of an item into its stage; by one warp."""
        stage, _ = self.stage(item, i)
        tokens = item.chunk * (TOKENS // TILE) + i
        full = copies.full + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.stage_bytes)
        for source in (copies.x, copies.dy):
            if cutlass.const_expr(source is not None):
                for panel in cutlass.range_constexpr(self.panels):
                    tXgX = source.tXgX[None, item.slab * self.panels + panel, tokens]
                    tXsX = source.tXsX[None, stage * self.panels + panel]
                    cute.copy(source.atom, tXgX, tXsX, tma_bar_ptr=full)
        if cutlass.const_expr(copies.d_out is not None):
            d_out = copies.d_out
            tXgX = d_out.tXgX[None, item.slab, tokens]
            cute.copy(d_out.atom, tXgX, d_out.tXsX[None, stage], tma_bar_ptr=full)

    @cute.jit
    def tile(
        self,
        item: WorkTile,
        i: cutlass.Int32,
        copies: Copies,
        products: Products,
        shared: Shared,
        rows: TokenRows,
        values: TokenHalf,
    ):
        """Process tile i: acc += xᵀ dH, and dx.

        ``values``: coefficients of this tile and dH of the next, then of the tiles after them.
        """
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tidx // WARP)
        n = self.config.n
        stage, phase = self.stage(item, i)
        row = item.begin + i * TILE
        token.store_coefficients(values, shared.sFactor, shared.sRes, shared.sPre, item.k)
        token.load_coefficients(values, rows, n, row + TILE + tidx // 2, tidx % 2)
        cute.arch.mbarrier_wait(copies.full + stage, phase)
        # dx = dH psi;  acc += xᵀ dH
        buffer = i % 2 * TERMS
        dx_mma = self.dx_mma()
        shape = dx_mma.get_slice(0).partition_shape_C((TILE, self.config.slab))
        product = cute.make_rmem_tensor(shape, cutlass.Float32)
        batches.sum_stages(dx_mma, product, *products.dx_operands, PAIRS, buffer)
        self.add(products, stage, buffer, item.end - row)
        if warp == 0:
            # The stage of the last tile is free once its store has read it.
            if (i > 0) & (i - 1 + self.config.stages < item.tiles):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                self.load(copies, item, i - 1 + self.config.stages)
        # dH of the next tile is split while these products are made.
        dh_shape = (TILE, self.padded, TERMS)
        token.store_dh(values, shared.sDh, dh_shape, TERMS - buffer, item.end - row - TILE)
        token.load_dh(values, rows, n, row + 2 * TILE + tidx // 2, tidx % 2)
        lane = tidx % WARP
        cute.nvgpu.warpgroup.wait_group(0)
        # All warps' products have read x, which dx replaces.
        cute.arch.sync_threads()
        for half in cutlass.range_constexpr(2):
            self.store_dx(product, half, shared, stage, warp * 16 + lane // 4 + 8 * half)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if tidx == 0:
            for panel in cutlass.range_constexpr(self.panels):
                tXsX = copies.dx.tXsX[None, stage * self.panels + panel]
                tXgX = copies.dx.tXgX[None, item.slab * self.panels + panel, row // TILE]
                cute.copy(copies.dx.atom, tXsX, tXgX)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def add(
        self,
        products: Products,
        stage: cutlass.Int32,
        buffer: cutlass.Int32,
        tokens: cutlass.Int32,
    ):
        """acc += xᵀ dH of the groups of 16 that have one of the ``tokens`` left, ascending."""
        tCrX, tCrDh = products.dpsi_operands
        first = stage * self.panels
        tCrPanels = [tCrX[None, None, None, first + panel] for panel in range(self.panels)]
        groups = (tokens + mma.K_GROUP - 1) // mma.K_GROUP
        whole = tuple(range(TILE // mma.K_GROUP))
        # The second term of dH first.
        terms = (buffer + 1, buffer)
        if groups >= len(whole):
            batches.add_stages(products.dpsi, products.acc, tCrPanels, tCrDh, whole, terms)
        else:
            for group in cutlass.range(groups, unroll=1):
                batches.add_stages(products.dpsi, products.acc, tCrPanels, tCrDh, (group,), terms)

    # ---- dH and psi ------------------------------------------------------------------------------

    @cute.jit
    def fill(self, mPsi: cute.Tensor, sPsi: cute.Tensor, first: cutlass.Int32):
        """Write psi of the slab that begins at element ``first`` to shared memory, in bf16 terms.

        A lane of WGMMA's result has columns 2 t, 2 t + 1 of each eight.  Rows of psi are in an
        order in which those are the neighbouring elements 16 t to 16 t + 15 of a panel.
        """
        tidx, _, _ = cute.arch.thread_idx()
        slab, k = self.config.slab, mPsi.shape[1]
        element = tidx % slab
        column = tidx // slab * self.psi_columns
        inside = first + element < k
        # An element beyond the last one loads the first, and becomes 0.
        offset = cutlass.Int64(first + element if inside else 0)
        values = cute.make_rmem_tensor(cute.make_layout(self.psi_columns), cutlass.Float32)
        for i in cutlass.range_constexpr(self.psi_columns):
            values[i] = copy.aligned(mPsi, cutlass.Int64(column + i) * k + offset, 1)[0]
        for i in cutlass.range_constexpr(self.psi_columns):
            values[i] = values[i] if inside else cutlass.Float32(0.0)
        octet, p = element % PANEL // OCTET, element % OCTET
        row = element // PANEL * PANEL + octet % 2 * 32 + p // 2 * 8 + octet // 2 * 2 + p % 2
        staged.store_terms(sPsi, row, column, values, (slab, self.padded, TERMS))

    # ---- results ---------------------------------------------------------------------------------

    @cute.jit
    def store_dx(
        self,
        product: cute.Tensor,
        half: cutlass.Constexpr[int],
        shared: Shared,
        stage: cutlass.Int32,
        row: cutlass.Int32,
    ):
        """Replace x by dx in a stage: a lane's two octets of each panel of one of its tokens.

        dx_i = product_i + factor x_i + Σ_j dy_j res[i, j] + dout pre_i
        """
        vector, n = self.vector, self.config.n
        factor, res, pre = shared.sFactor[row], None, None
        if cutlass.const_expr(shared.sRes is not None):
            res = staged.read(staged.neighbours(shared.sRes, row * n * n, n * n))
        if cutlass.const_expr(shared.sPre is not None):
            pre = staged.read(staged.neighbours(shared.sPre, row * n, n))
        t = cute.arch.lane_idx() % 4
        row_bytes = PANEL * self.dtype.width // 8
        for panel in cutlass.range_constexpr(self.panels):
            base = (stage * self.panels + panel) * (TILE * row_bytes)
            for side in cutlass.range_constexpr(2):
                offset = row * row_bytes + (2 * t + side) * (OCTET * 2)
                sX = staged.swizzled(shared.sX, offset, row_bytes, base, OCTET)
                x = staged.read(sX)
                dy = d_out = None
                if cutlass.const_expr(shared.sDy is not None):
                    dy = staged.read(staged.swizzled(shared.sDy, offset, row_bytes, base, OCTET))
                if cutlass.const_expr(shared.sDout is not None):
                    channel = panel * (PANEL // n) + (2 * t + side) * vector.channels
                    position = (stage * TILE + row) * self.channels + channel
                    d_out = staged.read(staged.neighbours(shared.sDout, position, vector.channels))
                start = cute.make_rmem_tensor(cute.make_layout(OCTET), cutlass.Float32)
                for p in cutlass.range_constexpr(OCTET):
                    index = (panel * 8 + side * 4 + p // 2) * 4 + 2 * half + p % 2
                    start[p] = cute.math.fma(x[p], factor, product[index])
                dx = vector.input_gradient(start, dy, d_out, res, pre)
                sX.store(rounded(dx, self.dtype).load())

    @cute.jit
    def finish(self, accs: list[cute.Tensor], mParts: cute.Tensor, item: WorkTile):
        """Store the slab's part of dpsi: a lane has elements g, g + 8 of its warp's 16."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % WARP
        g, t = lane // 4, lane % 4
        _, columns, k = mParts.shape
        for panel in cutlass.range_constexpr(self.panels):
            for half in cutlass.range_constexpr(2):
                first = item.slab * self.config.slab + panel * PANEL
                element = first + tidx // WARP * 16 + g + 8 * half
                if element < k:
                    for i in cutlass.range_constexpr(2 * self.columns // 8):
                        column = i // 2 * 8 + 2 * t + i % 2
                        base = (cutlass.Int64(item.chunk) * columns + column) * k
                        value = accs[panel][i // 2 * 4 + 2 * half + i % 2]
                        copy.aligned(mParts, base + element, 1)[0] = value


def build(config: ProjectBackwardWgmmaConfig, compile: Callable = cute.compile) -> Callable:
    """Compile one configuration against fake tensors; needs no GPU."""
    return compile(
        MhcProjectBackwardWgmmaSm90(config),
        *backward_fakes(config, FakeTmaRows("bf16", config.n)),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
