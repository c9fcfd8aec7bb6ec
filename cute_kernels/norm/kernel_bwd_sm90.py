"""The gradients of rms_norm and layer_norm, on SM90: dx, and parts of dweight and dbias.

    x̂ = (h - mean) rstd;  g = dy (weight + offset)
    dx = dh + rstd (g - mean(g) - x̂ mean(g x̂)),  mean(g) of a layer norm only
    dweight = Σ_m dy x̂;  dbias = Σ_m dy, of the rows of a part

Layout       dy, dh, h, dx [M, 8 ⌈D / 8⌉], zeros behind D, rows at multiples of 16 bytes; weight
             likewise; mean, rstd fp32 [M]; parts fp32 [P, 8 ⌈D / 8⌉]; inverse: 1 / D.
Order        over a row as in the forward kernel.  Over the rows of a part: its rows are dealt to
             the groups of a CTA in runs of neighbours; a group adds its own ascending, one fma
             each; groups ascending.
Work         a CTA for a part; with more parts than CTAs, CTAs are persistent.  The next rows are in
             flight while one is summed, those of the next part among them: wide ones by bulk
             copies of TMA (device/bulk.py), others by cp.async (device/ahead.py).  The kernel that
             adds the parts is launched while this one runs.
Measured     docs/status.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy
from .config import LAYER, PAD, UNIT, BackwardConfig, backward_residency, part_rows
from .device import rows
from .device.ahead import CpAsyncRing
from .device.bulk import TmaRing
from .device.rows import WARP, Exchange, Group, Row

#: Elements of a sum that a thread stores at once.
QUAD = 4


@dataclass(frozen=True)
class Scale:
    """A thread's elements of the weight, and the offset that is added to them."""

    weight: cute.Tensor
    offset: cutlass.Float32


class NormBackwardSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        self.group = Group(config.threads, config.units)
        held = backward_residency(config)
        self.threads = held.threads
        self.groups = self.threads // config.threads
        self.layer = config.kind == LAYER
        # Rows of a part, and of a group's run in it.
        self.rows = part_rows(config.threads * self.group.size)
        self.run = self.rows // self.groups
        # Shape of a sum in shared memory: (quads of a thread, threads).
        self.quads = (self.group.size // QUAD, config.threads + PAD)
        tensors, numbers = 2 + config.upstream, 1 + self.layer
        self.stages, self.bulk = held.stages, held.bulk
        ring = self.group, self.dtype, tensors, numbers, held.stages
        self.ring = TmaRing(*ring, self.groups) if self.bulk else CpAsyncRing(*ring)

    @cute.jit
    def __call__(
        self,
        mDy: cute.Tensor,
        mDh: cute.Tensor | None,
        mH: cute.Tensor,
        mMean: cute.Tensor | None,
        mRstd: cute.Tensor,
        mWeight: cute.Tensor,
        mDx: cute.Tensor,
        mWeightParts: cute.Tensor,
        mBiasParts: cute.Tensor | None,
        offset: cutlass.Float32,
        inverse: cutlass.Float32,
        ctas: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            mDy, mH, mDh, mMean, mRstd, mWeight, mDx, mWeightParts, mBiasParts, offset, inverse
        ).launch(
            grid=(ctas, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            # In percent.  Without it the compiler queries a device, and a host may have none.
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mDy: cute.Tensor,
        mH: cute.Tensor,
        mDh: cute.Tensor | None,
        mMean: cute.Tensor | None,
        mRstd: cute.Tensor,
        mWeight: cute.Tensor,
        mDx: cute.Tensor,
        mWeightParts: cute.Tensor,
        mBiasParts: cute.Tensor | None,
        offset: cutlass.Float32,
        inverse: cutlass.Float32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        m, count = mDx.shape[0], mWeightParts.shape[0]
        # The kernel that adds the parts may be scheduled now; it waits for the end of this one.
        cute.arch.griddepcontrol_launch_dependents()
        group, lane = tidx // self.group.threads, tidx % self.group.threads
        allocator = SmemAllocator()
        # One or two sums a row; consecutive rows alternate between two sets of slots.
        slots = 1 + self.layer
        layout = cute.make_ordered_layout(
            (2 * slots, self.groups, self.group.warps), order=(2, 1, 0)
        )
        sPartials = allocator.allocate_tensor(cutlass.Float32, layout, byte_alignment=16)
        sSums = None
        if cutlass.const_expr(self.groups > 1):
            shape = (1 + self.layer, self.groups, *self.quads, QUAD)
            layout = cute.make_ordered_layout(shape, order=(4, 3, 2, 1, 0))
            sSums = allocator.allocate_tensor(cutlass.Float32, layout, byte_alignment=16)
        exchange = Exchange(sPartials, group, lane)
        inputs = [mDy, mH] if mDh is None else [mDy, mH, mDh]
        stats = [mRstd] if mMean is None else [mMean, mRstd]
        stages, ring = self.stages, None
        # Stage of the next row, the phase of its mbarrier, and its set of slots.
        stage, phase, slot = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        # The row that is fetched next: its part, and its number in the group's run.
        fetch_part, number = block, cutlass.Int32(0)
        if cutlass.const_expr(self.bulk):
            ring = self.ring.allocate(allocator, group, lane, mDx.shape[1])
        elif cutlass.const_expr(stages > 0):
            warp = cute.arch.make_warp_uniform(tidx // WARP)
            ring = self.ring.allocate(allocator, self.threads, warp)
        for d in cutlass.range_constexpr(stages):
            early = self.row(fetch_part, number, count, m, exchange)
            self.ring.fetch(ring, d, inputs, stats, early)
            fetch_part, number = self.next_row(fetch_part, number, ctas)
        scale = Scale(self.group.load_vector(mWeight, lane), offset)
        for part in cutlass.range(block, count, ctas, unroll=1):
            sums = [self.zeros(), self.zeros()] if self.layer else [self.zeros()]
            for r in cutlass.range(self.run, unroll=1):
                row = self.row(part, r, count, m, exchange)
                if cutlass.const_expr(self.bulk):
                    raws, row_stats = self.ring.read(ring, stage, phase, row)
                elif cutlass.const_expr(stages > 0):
                    self.ring.wait()
                    raws = [self.ring.read(ring, stage, i) for i in range(len(inputs))]
                    row_stats = [self.ring.read_scalar(ring, stage, i) for i in range(len(stats))]
                else:
                    raws = [self.group.load(t, row) for t in inputs]
                    row_stats = [self.statistic(t, row) for t in stats]
                rDy, rXHat = rows.widened(raws[0]), rows.widened(raws[1])
                self.add(rDy, rXHat, sums, row_stats)
                means = self.means(rDy, rXHat, scale, exchange, slot * slots, inverse)
                slot = slot ^ 1
                if cutlass.const_expr(stages > 0):
                    # After the sums all threads of the row have read their elements.
                    ahead = self.row(fetch_part, number, count, m, exchange)
                    self.ring.fetch(ring, stage, inputs, stats, ahead)
                    fetch_part, number = self.next_row(fetch_part, number, ctas)
                    last = stage == stages - 1
                    stage = cutlass.Int32(0) if last else stage + 1
                    phase = phase ^ 1 if last else phase
                self.finish(rDy, rXHat, raws[2:], means, row_stats[-1])
                self.group.store(rows.narrowed(rDy, self.dtype), mDx, row)
            parts = [mWeightParts, mBiasParts] if self.layer else [mWeightParts]
            self.store_sums(sums, parts, sSums, part, exchange)

    @cute.jit
    def row(
        self,
        part: cutlass.Int32,
        number: cutlass.Int32,
        count: cutlass.Int32,
        m: cutlass.Int32,
        exchange: Exchange,
    ) -> Row:
        """Row ``number`` of the group's run in part ``part`` of ``count``."""
        index = part * self.rows + exchange.group * self.run + number
        return Row(index, (part < count) & (index < m), exchange.lane)

    @cute.jit
    def next_row(
        self, part: cutlass.Int32, number: cutlass.Int32, ctas: cutlass.Int32
    ) -> tuple[cutlass.Int32, cutlass.Int32]:
        """(part, number) of the row that a group reads after this one."""
        number = number + 1
        last = number == self.run
        return (part + ctas if last else part), (cutlass.Int32(0) if last else number)

    @cute.jit
    def zeros(self) -> cute.Tensor:
        """Return fp32 zeros, one for each of a thread's elements."""
        values = cute.make_rmem_tensor(cute.make_layout(self.group.size), cutlass.Float32)
        values.fill(0.0)
        return values

    @cute.jit
    def statistic(self, tensor: cute.Tensor, row: Row) -> cutlass.Float32:
        """tensor[row], and 0 for an invalid row, which then adds 0 to every sum."""
        value = cutlass.Float32(0.0)
        if row.valid:
            value = tensor[row.index]
        return value

    @cute.jit
    def add(
        self,
        rDy: cute.Tensor,
        rXHat: cute.Tensor,
        sums: list[cute.Tensor],
        stats: list[cutlass.Float32],
    ):
        """x̂ = (h - mean) rstd, in place of h; dweight += dy x̂; dbias += dy.

        ``sums``: dweight, and dbias of a layer norm; ``stats``: its mean, and rstd.  After the
        last column dy is 0, which adds 0.
        """
        rstd = stats[-1]
        for i in cutlass.range_constexpr(self.group.size):
            if cutlass.const_expr(self.layer):
                rXHat[i] = cute.math.fma(rXHat[i], rstd, -stats[0] * rstd)
                sums[1][i] = sums[1][i] + rDy[i]
            else:
                rXHat[i] = rXHat[i] * rstd
            sums[0][i] = cute.math.fma(rDy[i], rXHat[i], sums[0][i])

    @cute.jit
    def means(
        self,
        rDy: cute.Tensor,
        rXHat: cute.Tensor,
        scale: Scale,
        exchange: Exchange,
        slot: cutlass.Int32,
        inverse: cutlass.Float32,
    ) -> list[cutlass.Float32]:
        """g = dy (weight + offset), in place of dy; return mean(g x̂) and a layer norm's mean(g)."""
        sum_g = cutlass.Float32(0.0)
        sum_products = cutlass.Float32(0.0)
        for i in cutlass.range_constexpr(self.group.size):
            rDy[i] = rDy[i] * (scale.weight[i].to(cutlass.Float32) + scale.offset)
            sum_products = cute.math.fma(rDy[i], rXHat[i], sum_products)
            if cutlass.const_expr(self.layer):
                sum_g = sum_g + rDy[i]
        sums = [sum_products, sum_g] if self.layer else [sum_products]
        return [total * inverse for total in self.group.sums(sums, exchange, slot)]

    @cute.jit
    def finish(
        self,
        rG: cute.Tensor,
        rXHat: cute.Tensor,
        dh: list[cute.Tensor],
        means: list[cutlass.Float32],
        rstd: cutlass.Float32,
    ):
        """dx = dh + rstd (g - x̂ mean(g x̂) - mean(g)), in place of g, in fp32.

        ``dh``: none or one; ``means``: as ``means`` returns them.
        """
        upstream = [rows.widened(t) for t in dh]
        for i in cutlass.range_constexpr(self.group.size):
            inner = cute.math.fma(-rXHat[i], means[0], rG[i])
            # dx = rstd inner + Σ terms
            terms = [t[i] for t in upstream] + [-mean * rstd for mean in means[1:]]
            if cutlass.const_expr(len(terms) > 0):
                rG[i] = cute.math.fma(inner, rstd, sum(terms[1:], terms[0]))
            else:
                rG[i] = inner * rstd

    @cute.jit
    def store_sums(
        self,
        sums: list[cute.Tensor],
        parts: list[cute.Tensor],
        sSums: cute.Tensor | None,
        part: cutlass.Int32,
        exchange: Exchange,
    ):
        """parts[part] = sum of group 0 + sum of group 1 + ..., groups ascending."""
        group, lane = exchange.group, exchange.lane
        columns = parts[0].shape[1]
        base = cutlass.Int64(part) * parts[0].stride[0]
        if cutlass.const_expr(self.groups == 1):
            for total, mParts in zip(sums, parts):
                for v in cutlass.range_constexpr(self.group.vectors):
                    c = self.group.column(v, lane)
                    if c < columns:
                        for a in cutlass.range_constexpr(UNIT // QUAD):
                            target = copy.aligned(mParts, base + c + QUAD * a, QUAD)
                            target.store(rows.piece(total, v * UNIT + QUAD * a, QUAD).load())
        else:
            tidx, _, _ = cute.arch.thread_idx()
            cute.arch.sync_threads()
            for s, total in enumerate(sums):
                for i in cutlass.range_constexpr(self.group.size // QUAD):
                    sSums[s, group, i, lane, None].store(rows.piece(total, QUAD * i, QUAD).load())
            cute.arch.sync_threads()
            for c in cutlass.range(tidx * QUAD, columns, self.threads * QUAD, unroll=1):
                # By hand: column c belongs to quad i of thread t.
                vector = c // UNIT
                i = vector // self.group.threads * (UNIT // QUAD) + c % UNIT // QUAD
                t = vector % self.group.threads
                for s, mParts in enumerate(parts):
                    total = sSums[s, 0, i, t, None].load()
                    for g in cutlass.range_constexpr(1, self.groups):
                        total = total + sSums[s, g, i, t, None].load()
                    copy.aligned(mParts, base + c, QUAD).store(total)


def build(config: BackwardConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; needs no GPU."""
    m, parts, columns = fake.size(), fake.size(), fake.size(UNIT)
    layer = config.kind == LAYER

    def matrix():
        return fake.matrix(config.dtype, m, columns, "k")

    def sums():
        return fake.compact(cutlass.Float32, (parts, columns), 16)

    return compile(
        NormBackwardSm90(config),
        matrix(),
        matrix() if config.upstream else None,
        matrix(),
        fake.vector("fp32", m) if layer else None,
        fake.vector("fp32", m),
        fake.compact(fake.DTYPES[config.weight], (columns,), 16),
        matrix(),
        sums(),
        sums() if layer else None,
        cutlass.Float32(0.0),
        cutlass.Float32(1.0),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
