"""Sums of x psiᵀ and x² over chunks of channels by TMA and WGMMA, on SM90.

    sums[s, m, j] = Σ_k x[m, k] psi[j, k],  squares[s, m] = Σ_k x[m, k]²,  k of chunk s
    psi = phi, or phi ⊙ norm_weight
    expand:   y_j = (f + bias) post_j + Σ_i x_i res[i, j] takes the place of x, and is stored
    collapse: out = Σ_i y_i pre_i, of the rounded y, is stored

Layout       x bf16 [M, K] rows of streams (mhc/config.py); phi fp32 [N, K], norm_weight fp32
             [1, K]; sums [S, M, N], squares [S, M] fp32; f, out [M, C], y [M, K], "cn" alone.
Order        that of kernel_project_sm90, whose bytes these are: steps of 32 elements (channels of
             one stream in "nc"), a step as two k16 groups, elements 8 t + 4 u + {0, 1, 2, 3} of
             lanes t in group u; a chain for each bf16 term of psi, terms added smallest first.
             Squares: octets from zero, in a chain; then four lanes, neighbours first.
Work         the flat list of (chunk, unit of 16 tokens) is cut into one range for each CTA; a
             range is processed in groups of up to 64 tokens a consumer warpgroup.  Which CTA and
             warp have a unit shows in no bit.
Roles        warpgroup 0: one warp loads panels of 64 elements by TMA, of x into a ring for each
             consumer, of phi into one for all; three warps split phi into bf16 terms.  The other
             warpgroups multiply: x from registers, which the squares need too, psi from shared
             memory.
M, K tails   TMA fills zeros beyond the last token, element and channel; rows beyond the last are
             not stored.
Measured     docs/status.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers

from ..compile import fake
from ..dsl import copy, mma, reduce, smem, tma
from .config import ProjectWgmmaConfig, chunk_channels, mappings
from .device import psi, staged, unit
from .device.arguments import CollapseTensors, ExpandTensors
from .device.expanded import Expansion
from .device.panels import PANEL, TILE, UNIT, Panels
from .device.project_loads import Group, Loader, Shared, Sources, ring_stage

WARP, OCTET = 32, 8
#: Warps that split psi, after the one that loads.
SPLITTERS = 3


@dataclass(frozen=True)
class Outputs:
    """Results in global memory, fp32: mSums [S, M, N], mSquares [S, M]; and operands of y."""

    mSums: cute.Tensor
    mSquares: cute.Tensor
    expand: ExpandTensors
    collapse: CollapseTensors


class MhcProjectWgmmaSm90:
    """Kernel of one configuration; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: ProjectWgmmaConfig):
        n = config.n
        assert config.x_stages % config.burst == 0 and config.psi_stages % config.burst == 0
        self.config = config
        self.dtype = cutlass.BFloat16
        self.terms = 2 if config.precision == "bf16x2" else 3
        self.chunk = chunk_channels(n, config.precision)
        self.columns = mappings(n)
        self.rows = self.terms * self.columns
        self.threads = mma.WARPGROUP * (1 + config.warpgroups)
        # Units of a group.
        self.units = TILE // UNIT * config.warpgroups
        # Channels of a panel, and what makes y of it.
        self.channels = PANEL // n
        self.expansion = Expansion(n)
        stages = config.x_stages * config.warpgroups
        self.panels = Panels(n, config.layout, self.chunk, stages, config.psi_stages)
        self.loader = Loader(config, self.panels, self.columns)

    # ---- layouts ---------------------------------------------------------------------------------

    def psi_layout(self) -> cute.ComposedLayout:
        """Layout of staged terms of psi: operand B."""
        return smem.operand_layout(self.dtype, self.rows, PANEL, "k", self.config.psi_stages)

    def f_layout(self, rows: int) -> cute.Layout:
        """Layout of staged boxes of ``rows`` rows of f."""
        stages = self.config.x_stages * self.config.warpgroups * (TILE // rows)
        return cute.make_ordered_layout((self.channels, rows, stages), order=(0, 1, 2))

    def storage(self) -> type:
        """Return the struct of a CTA's shared memory; host code."""
        config = self.config
        x_barriers = config.x_stages * config.warpgroups

        def tiles(dtype: type[cutlass.Numeric], size: int):
            return cute.struct.Align[cute.struct.MemRange[dtype, size], smem.ALIGN]

        def barriers(count: int):
            return cute.struct.MemRange[cutlass.Int64, count]

        weight = cute.cosize(self.panels.fp32_layout(1)) if config.weighted else 0
        f = cute.cosize(self.f_layout(TILE)) if config.expand else 0

        @cute.struct
        class Storage:
            x_full: barriers(x_barriers)
            x_empty: barriers(x_barriers)
            phi_full: barriers(config.psi_stages)
            phi_empty: barriers(config.psi_stages)
            psi_full: barriers(config.psi_stages)
            psi_empty: barriers(config.psi_stages)
            sX: tiles(self.dtype, cute.cosize(self.panels.x_layout()))
            sPsi: tiles(self.dtype, cute.cosize(self.psi_layout()))
            sPhi: tiles(cutlass.Float32, cute.cosize(self.panels.fp32_layout(self.columns)))
            sWeight: tiles(cutlass.Float32, weight)
            sF: tiles(self.dtype, f)

        return Storage

    # ---- host ------------------------------------------------------------------------------------

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mPhi: cute.Tensor,
        mWeight: cute.Tensor | None,
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
        stream: cuda.CUstream,
    ):
        weight = f = f_unit = None
        if cutlass.const_expr(mF is not None):
            rows = tma.view(mF, [1, 0])
            f = tma.load(rows, self.f_layout(TILE), (self.channels, TILE), 1)
            f_unit = tma.load(rows, self.f_layout(UNIT), (self.channels, UNIT), 1)
        if cutlass.const_expr(mWeight is not None):
            weight = self.panels.source(mWeight, self.panels.fp32_layout(1), self.panels.box(1))
        sources = Sources(
            self.panels.source(mX, self.panels.x_layout(), self.panels.box(TILE)),
            self.panels.source(mX, self.panels.unit_layout(), self.panels.box(UNIT, 1)),
            self.panels.source(
                mPhi, self.panels.fp32_layout(self.columns), self.panels.box(self.columns)
            ),
            weight,
            f,
            f_unit,
        )
        collapse = CollapseTensors(mPre, mOut)
        outputs = Outputs(mSums, mSquares, ExpandTensors(mF, mBias, mPost, mRes, mY), collapse)
        self.kernel(sources, outputs, mX.shape[1] // self.config.n).launch(
            grid=(ctas, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=100,
            stream=stream,
        )

    # ---- device ----------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, sources: Sources, outputs: Outputs, channels: cutlass.Int32):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tidx // WARP)
        shared, sUnits = self.shared()
        if warp == 0:
            self.walk("load", sources, shared, sUnits, outputs, channels)
        elif warp <= SPLITTERS:
            self.walk("split", sources, shared, sUnits, outputs, channels)
        else:
            self.walk("multiply", sources, shared, sUnits, outputs, channels)

    @cute.jit
    def shared(self) -> tuple[Shared, cute.Tensor]:
        """Allocate shared memory and initialise barriers; return x in units besides."""
        config = self.config
        tidx, _, _ = cute.arch.thread_idx()
        storage = SmemAllocator().allocate(self.storage())
        x_full, x_empty = storage.x_full.data_ptr(), storage.x_empty.data_ptr()
        phi_full, phi_empty = storage.phi_full.data_ptr(), storage.phi_empty.data_ptr()
        psi_full, psi_empty = storage.psi_full.data_ptr(), storage.psi_empty.data_ptr()
        warps = mma.WARPGROUP // WARP
        if tidx == 0:
            for i in cutlass.range_constexpr(config.x_stages * config.warpgroups):
                cute.arch.mbarrier_init(x_full + i, 1)
                cute.arch.mbarrier_init(x_empty + i, warps)
            for i in cutlass.range_constexpr(config.psi_stages):
                cute.arch.mbarrier_init(phi_full + i, 1)
                cute.arch.mbarrier_init(phi_empty + i, SPLITTERS)
                cute.arch.mbarrier_init(psi_full + i, SPLITTERS)
                cute.arch.mbarrier_init(psi_empty + i, warps * config.warpgroups)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        x, units, terms = self.panels.x_layout(), self.panels.unit_layout(), self.psi_layout()
        sWeight = None
        if cutlass.const_expr(config.weighted):
            sWeight = storage.sWeight.get_tensor(self.panels.fp32_layout(1))
        sF = sFUnits = None
        if cutlass.const_expr(config.expand):
            sF = storage.sF.get_tensor(self.f_layout(TILE))
            sFUnits = storage.sF.get_tensor(self.f_layout(UNIT))
        shared = Shared(
            x_full,
            x_empty,
            phi_full,
            phi_empty,
            psi_full,
            psi_empty,
            storage.sX.get_tensor(x.outer, swizzle=x.inner),
            storage.sPhi.get_tensor(self.panels.fp32_layout(self.columns)),
            sWeight,
            storage.sPsi.get_tensor(terms.outer, swizzle=terms.inner),
            sF,
            sFUnits,
        )
        return shared, storage.sX.get_tensor(units.outer, swizzle=units.inner)

    @cute.jit
    def walk(
        self,
        role: cutlass.Constexpr[str],
        sources: Sources,
        shared: Shared,
        sUnits: cute.Tensor,
        outputs: Outputs,
        channels: cutlass.Int32,
    ):
        """Process the groups of this CTA's range of (chunk, unit), in one role."""
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        chunks, m, _ = outputs.mSums.shape
        units = (m + UNIT - 1) // UNIT
        total = chunks * units
        share, extra = total // ctas, total % ctas
        position = block * share + cutlass.min(block, extra)
        end = position + share + (1 if block < extra else 0)
        count = cutlass.Int32(0)
        while position < end:
            chunk, first = position // units, position % units
            # The rest of the range in this chunk, in groups of even size.
            rest = cutlass.min(end - position, units - first)
            pieces = (rest + self.units - 1) // self.units
            size = (rest + pieces - 1) // pieces
            extent = cutlass.min(channels - chunk * self.chunk, self.chunk)
            group = Group(chunk, first, size, self.panels.count(extent), count)
            if cutlass.const_expr(role == "load"):
                self.loader.load(group, sources, shared, sUnits)
            elif cutlass.const_expr(role == "split"):
                self.split(group, shared)
            else:
                self.multiply(group, shared, outputs)
            count = count + group.panels
            position = position + size

    # ---- psi -------------------------------------------------------------------------------------

    @cute.jit
    def split(self, group: Group, shared: Shared):
        """Splitting warps: write the bf16 terms of psi."""
        config = self.config
        tidx, _, _ = cute.arch.thread_idx()
        thread, shape = tidx - WARP, (self.columns, self.terms)
        for panel in cutlass.range(group.panels, unroll=1):
            stage, phase = ring_stage(group.count + panel, config.psi_stages)
            cute.arch.mbarrier_wait(shared.phi_full + stage, phase)
            cute.arch.mbarrier_wait(shared.psi_empty + stage, 1 - phase)
            if thread // 4 < self.columns:
                sources = (shared.sPhi, shared.sWeight)
                psi.split(*sources, shared.sPsi, self.panels, shape, stage, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.arrive(shared.phi_empty + stage)
            self.arrive(shared.psi_full + stage)

    @cute.jit
    def arrive(self, barrier: cute.Pointer):
        """Arrive on an mbarrier once for the warp, after all of its lanes."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    # ---- products --------------------------------------------------------------------------------

    def psi_mma(self) -> cute.TiledMma:
        """WGMMA of x psiᵀ, x in registers."""
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            (1, 1, 1),
            (TILE, self.rows),
            warpgroup.OperandSource.RMEM,
        )

    @cute.jit
    def multiply(self, group: Group, shared: Shared, outputs: Outputs):
        """Consumer warpgroup: the sums of a tile of tokens over one chunk."""
        config = self.config
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) - 1
        warp = cute.arch.make_warp_uniform(tidx % mma.WARPGROUP // WARP)
        tiled = self.psi_mma()
        thread = tiled.get_slice(tidx % mma.WARPGROUP)
        tCrPsi = tiled.make_fragment_B(tiled.get_slice(0).partition_B(shared.sPsi))
        rX = tiled.make_fragment_A(thread.partition_shape_A((TILE, PANEL)))
        acc = cute.make_rmem_tensor(thread.partition_shape_C((TILE, self.rows)), cutlass.Float32)
        acc.fill(0.0)
        squares = cute.make_rmem_tensor(cute.make_layout(2), cutlass.Float32)
        squares.fill(0.0)
        octets = cute.make_rmem_tensor(cute.make_layout(4 * OCTET), self.dtype)
        registers = cute.recast_tensor(rX, cutlass.Int32)
        words = cute.recast_tensor(octets, cutlass.Int32)
        tokens = None
        if cutlass.const_expr(config.expand):
            first = (group.unit + consumer * (TILE // UNIT) + warp) * UNIT
            operands = outputs.expand, outputs.collapse
            # Tokens of the group: other ones are another group's.
            end = cutlass.min(outputs.mSums.shape[1], (group.unit + group.units) * UNIT)
            tokens = [
                self.expansion.coefficients(*operands, first + self.row(half), end)
                for half in range(2)
            ]
        for panel in cutlass.range(group.panels, unroll=1):
            index = group.count + panel
            stage, phase = ring_stage(index, config.x_stages)
            slot = consumer * config.x_stages + stage
            cute.arch.mbarrier_wait(shared.x_full + slot, phase)
            self.read(shared.sX, slot, warp, octets)
            if cutlass.const_expr(config.expand):
                channel = group.chunk * self.chunk + panel * self.channels
                self.expand(octets, shared.sF, slot * TILE + warp * UNIT, tokens, channel, outputs)
            self.arrive(shared.x_empty + slot)
            # The products of the panel before have read their operands.
            cute.nvgpu.warpgroup.wait_group(0)
            if panel > 0:
                before, _ = ring_stage(index - 1, config.psi_stages)
                self.arrive(shared.psi_empty + before)
            for k in cutlass.range_constexpr(PANEL // mma.K_GROUP):
                for pair in cutlass.range_constexpr(2):
                    for half in cutlass.range_constexpr(2):
                        source = (2 * (k // 2) + half) * 4 + 2 * (k % 2) + pair
                        registers[k * 4 + 2 * pair + half] = words[source]
            psi_stage, psi_phase = ring_stage(index, config.psi_stages)
            cute.arch.mbarrier_wait(shared.psi_full + psi_stage, psi_phase)
            mma.extend(tiled, acc, rX, tCrPsi, psi_stage)
            for half in cutlass.range_constexpr(2):
                for step in cutlass.range_constexpr(2):
                    octet = unit.piece(octets, (2 * step + half) * OCTET, OCTET)
                    squares[half] = squares[half] + self.square(octet)
        cute.nvgpu.warpgroup.wait_group(0)
        last, _ = ring_stage(group.count + group.panels - 1, config.psi_stages)
        self.arrive(shared.psi_empty + last)
        self.finish(group, consumer * (TILE // UNIT) + warp, acc, squares, outputs)

    @cute.jit
    def row(self, half: cutlass.Constexpr[int]) -> cutlass.Int32:
        """Token of a warp's 16 that a lane has as row g or g + 8 of the product.

        Rows of 128 bytes are permuted so that eight lanes read different banks.
        """
        g = cute.arch.lane_idx() // 4
        if cutlass.const_expr(self.config.layout == "cn"):
            return 8 * half + g % 2 * 4 + g // 2
        return 8 * half + g

    @cute.jit
    def read(self, sX: cute.Tensor, slot: cutlass.Int32, warp: cutlass.Int32, octets: cute.Tensor):
        """Load a lane's octets of one panel: [step, row]."""
        t = cute.arch.lane_idx() % 4
        row_bytes = PANEL // self.panels.steps * self.dtype.width // 8
        base = slot * (TILE * PANEL * self.dtype.width // 8)
        for step in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                row = warp * UNIT + self.row(half)
                offset = self.panels.place(0, row, TILE, step) * (self.dtype.width // 8) + t * 16
                sOctet = staged.swizzled(sX, offset, row_bytes, base, OCTET)
                unit.piece(octets, (2 * step + half) * OCTET, OCTET).store(sOctet.load())

    @cute.jit
    def expand(
        self,
        octets: cute.Tensor,
        sF: cute.Tensor,
        first: cutlass.Int32,
        tokens: list,
        channel: cutlass.Int32,
        outputs: Outputs,
    ):
        """Replace a lane's octets of one panel by y; ``first``: row of the warp in sF."""
        width = OCTET // self.config.n
        total = outputs.expand.mF.shape[1]
        for step in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                c = step * (self.channels // 2) + cute.arch.lane_idx() % 4 * width
                position = (first + self.row(half)) * self.channels + c
                self.expansion.replace(
                    unit.piece(octets, (2 * step + half) * OCTET, OCTET),
                    staged.neighbours(sF, position, width),
                    tokens[half],
                    outputs.expand,
                    outputs.collapse,
                    channel + c,
                    total,
                )

    @cute.jit
    def square(self, octet: cute.Tensor) -> cutlass.Float32:
        """Σ x² of an octet, from zero."""
        values = unit.to_fp32(octet)
        total = values[0] * values[0]
        for p in cutlass.range_constexpr(1, OCTET):
            total = cute.math.fma(values[p], values[p], total)
        return total

    @cute.jit
    def finish(
        self,
        group: Group,
        index: cutlass.Int32,
        acc: cute.Tensor,
        squares: cute.Tensor,
        outputs: Outputs,
    ):
        """Store the sums of unit ``index`` of the group: Σ over psi's terms, smallest first."""
        t = cute.arch.lane_idx() % 4
        mSums, mSquares = outputs.mSums, outputs.mSquares
        _, m, columns = mSums.shape
        blocks = self.columns // 8
        for half in cutlass.range_constexpr(2):
            token = (group.unit + index) * UNIT + self.row(half)
            inside = (index < group.units) & (token < m)
            row = cutlass.Int64(group.chunk) * m + token
            if inside:
                for block in cutlass.range_constexpr(blocks):
                    pair = cute.make_rmem_tensor(cute.make_layout(2), cutlass.Float32)
                    for side in cutlass.range_constexpr(2):
                        value = None
                        for b in cutlass.range_constexpr(self.terms - 1, -1, -1):
                            term = acc[(b * blocks + block) * 4 + 2 * half + side]
                            value = term if value is None else value + term
                        pair[side] = value
                    offset = row * columns + 8 * block + 2 * t
                    copy.aligned(mSums, offset, 2).store(pair.load())
            total = reduce.over_threads(squares[half], 4)
            if inside & (t == 0):
                copy.aligned(mSquares, row, 1)[0] = total


def build(config: ProjectWgmmaConfig, compile: Callable = cute.compile) -> Callable:
    """Compile one configuration against fake tensors; needs no GPU."""
    n = config.n
    m, k, chunks = (
        fake.size(),
        fake.size(8 * (n if config.layout == "nc" else 1)),
        fake.size(),
    )
    columns = mappings(n)

    def weights(rows: int):
        return fake.compact(cutlass.Float32, (rows, k), fake.TMA_ALIGN)

    def rows(columns):
        return fake.compact(cutlass.BFloat16, (m, columns), fake.TMA_ALIGN)

    expand, collapse, c = (None,) * 5, (None, None), fake.size(8)
    if config.expand:
        bias = fake.compact(cutlass.BFloat16, (c,), fake.TMA_ALIGN) if config.bias else None
        of_tokens = (fake.rows("fp32", m, n), fake.rows("fp32", m, n * n))
        expand = (rows(c), bias, *of_tokens, rows(k))
    if config.collapse:
        collapse = (fake.rows("fp32", m, n), rows(c))
    return compile(
        MhcProjectWgmmaSm90(config),
        rows(k),
        weights(columns),
        weights(1) if config.weighted else None,
        fake.compact(cutlass.Float32, (chunks, m, columns), 16),
        fake.compact(cutlass.Float32, (chunks, m), 4),
        *expand,
        *collapse,
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
