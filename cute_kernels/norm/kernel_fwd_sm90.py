"""rms_norm and layer_norm of rows, on SM90.

    h = x + residual, rounded;  mean = Σ h / D (0 of an RMS norm)
    rstd = 1 / √(Σ (h - mean)² / D + eps)
    y = x̂ (weight + offset) + bias,  x̂ = h rstd - mean rstd

Layout       x, residual, h, y [M, 8 ⌈D / 8⌉], zeros behind D, rows at multiples of 16 bytes; weight
             and bias likewise; mean, rstd fp32 [M]; inverse: 1 / D.
Order        of a sum over a row: a thread's elements ascending, one fma each; lanes of a warp,
             nearest first; warps ascending.  Which thread has what follows from D.
Work         A CTA has one row or more at a time (config.forward_residency).  Either as many CTAs as
             that takes; or CTAs that stay, whose next rows are under way while one is summed
             (device/ahead.py).
Measured     docs/status.md.
"""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from ..compile import fake
from .config import LAYER, UNIT, ForwardConfig, forward_residency
from .device import rows
from .device.ahead import Ahead
from .device.rows import WARP, Group


class NormForwardSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: ForwardConfig):
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        self.group = Group(config.threads, config.units)
        held = forward_residency(config)
        self.threads, self.ctas = held.threads, held.ctas
        self.rows = held.threads // config.threads
        self.layer, self.stays = config.kind == LAYER, held.stages > 0
        # Where many CTAs share the registers, a row is kept in 16 bits while a sum is under way.
        self.again = not self.stays and self.dtype.width == 16
        self.ahead = Ahead(self.group, self.dtype, 1 + config.residual, 0, held.stages)

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mResidual: cute.Tensor | None,
        mWeight: cute.Tensor,
        mBias: cute.Tensor | None,
        mH: cute.Tensor | None,
        mY: cute.Tensor,
        mMean: cute.Tensor | None,
        mRstd: cute.Tensor,
        eps: cutlass.Float32,
        offset: cutlass.Float32,
        inverse: cutlass.Float32,
        width: cutlass.Int32,
        ctas: cutlass.Int32,
        stream,
    ):
        numbers = (eps, offset, inverse, width)
        self.kernel((mX, mResidual), (mWeight, mBias), (mH, mY), (mMean, mRstd), numbers).launch(
            grid=(ctas, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.ctas,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, read: tuple, scale: tuple, made: tuple, stats: tuple, numbers: tuple):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        m = made[1].shape[0]
        group, lane = tidx // self.group.threads, tidx % self.group.threads
        allocator = SmemAllocator()
        layout = cute.make_ordered_layout((2, self.rows, self.group.warps), order=(2, 1, 0))
        sPartials = allocator.allocate_tensor(cutlass.Float32, layout, byte_alignment=16)
        read = [t for t in read if t is not None]
        scale = [t for t in scale if t is not None]
        first, slot = block * self.rows + group, cutlass.Int32(0)
        if cutlass.const_expr(not self.stays):
            there = first < m
            raws = [self.group.load(t, first, lane, there) for t in read]
            at = (sPartials, slot, group, lane)
            self.finish(raws, scale, made, stats, (first, there), at, numbers)
        else:
            scale = [self.group.load_vector(t, lane) for t in scale]
            stages = self.ahead.stages
            step, stage = ctas * self.rows, cutlass.Int32(0)
            warp = cute.arch.make_warp_uniform(tidx // WARP)
            ring = self.ahead.allocate(allocator, self.threads, warp)
            for d in cutlass.range_constexpr(stages - 1):
                early = first + d * step
                self.ahead.fetch(ring, d, read, [], (early, early < m, lane))
            # The CTA's threads meet in every sum: groups without a row go round as well.
            for base in cutlass.range(block * self.rows, m, step, unroll=1):
                row = base + group
                last = row + (stages - 1) * step
                free = self.ahead.behind(stage, stages - 1)
                self.ahead.fetch(ring, free, read, [], (last, last < m, lane))
                self.ahead.wait()
                raws = [self.ahead.taken(ring, stage, i) for i in range(len(read))]
                at = (sPartials, slot, group, lane)
                self.finish(raws, scale, made, stats, (row, row < m), at, numbers)
                stage = self.ahead.behind(stage, 1)
                slot = slot ^ 1

    @cute.jit
    def finish(
        self, raws: list, scale: list, made: tuple, stats: tuple, row: tuple, at: tuple, numbers
    ):
        """All that is made of a row that has come.  row: (its number, whether it is there)."""
        (row, there), (sPartials, slot, group, lane) = row, at
        eps, offset, inverse, width = numbers
        raw = self.added(raws)
        if cutlass.const_expr(made[0] is not None):
            self.group.store(raw, made[0], row, lane, there)
        own, mean = rows.widened(raw), cutlass.Float32(0.0)
        if cutlass.const_expr(self.layer):
            mean = self.group.sum(self.total(own), sPartials, 0, group, lane) * inverse
            own = self.renewed(raw, own)
        squares = self.squares(own, mean, lane, width)
        if cutlass.const_expr(not self.stays):
            # Behind the sums, where registers are free; other CTAs have brought the weights near.
            scale = [self.group.load_vector(t, lane) for t in scale]
        # The second sum of a layer norm has a slot of its own.
        slot = 1 if self.layer else slot
        squares = self.group.sum(squares, sPartials, slot, group, lane)
        rstd = cutlass.Float32(1.0) / cute.math.sqrt(cute.math.fma(squares, inverse, eps))
        own = self.renewed(raw, own)
        self.scale(own, mean, rstd, scale, offset)
        self.group.store(rows.narrowed(own, self.dtype), made[1], row, lane, there)
        if (lane == 0) & there:
            stats[1][row] = rstd
            if cutlass.const_expr(stats[0] is not None):
                stats[0][row] = mean

    @cute.jit
    def added(self, raws: list) -> cute.Tensor:
        """h, rounded."""
        if cutlass.const_expr(len(raws) == 1):
            return raws[0]
        total = rows.widened(raws[0])
        total.store(total.load() + rows.widened(raws[1]).load())
        return rows.narrowed(total, self.dtype)

    @cute.jit
    def renewed(self, raw: cute.Tensor, own: cute.Tensor) -> cute.Tensor:
        """h in fp32 behind a sum: ``own``, or widened anew."""
        if cutlass.const_expr(self.again):
            own = rows.widened(rows.unrelated(raw))
        return own

    @cute.jit
    def total(self, own: cute.Tensor):
        """Σ h over a thread's elements."""
        total = cutlass.Float32(0.0)
        for i in cutlass.range_constexpr(self.group.size):
            total = total + own[i]
        return total

    @cute.jit
    def squares(self, own: cute.Tensor, mean, lane, width):
        """Σ (h - mean)² over a thread's elements of the row."""
        apart = own
        if cutlass.const_expr(self.layer):
            apart = cute.make_rmem_tensor(cute.make_layout(self.group.size), cutlass.Float32)
            for i in cutlass.range_constexpr(self.group.size):
                apart[i] = own[i] - mean
            self.group.without_tail(apart, lane, width)
        squares = cutlass.Float32(0.0)
        for i in cutlass.range_constexpr(self.group.size):
            squares = cute.math.fma(apart[i], apart[i], squares)
        return squares

    @cute.jit
    def scale(self, own: cute.Tensor, mean, rstd, scale: list, offset):
        """h becomes y, in fp32; scale: weight, and of a layer norm, which has no offset, bias."""
        scale = [rows.widened(t) for t in scale]
        for i in cutlass.range_constexpr(self.group.size):
            if cutlass.const_expr(self.layer):
                x_hat = cute.math.fma(own[i], rstd, -mean * rstd)
                own[i] = cute.math.fma(x_hat, scale[0][i], scale[1][i])
            else:
                own[i] = own[i] * rstd * (scale[0][i] + offset)


def build(config: ForwardConfig, compile=cute.compile):
    """Compiles one configuration against fake tensors; no GPU needed."""
    m, columns = fake.size(), fake.size(UNIT)
    layer = config.kind == LAYER

    def matrix():
        return fake.matrix(config.dtype, m, columns, "k")

    def vector():
        return fake.compact(fake.DTYPES[config.weight], (columns,), 16)

    return compile(
        NormForwardSm90(config),
        matrix(),
        matrix() if config.residual else None,
        vector(),
        vector() if layer else None,
        matrix() if config.residual else None,
        matrix(),
        fake.vector("fp32", m) if layer else None,
        fake.vector("fp32", m),
        cutlass.Float32(0.0),
        cutlass.Float32(0.0),
        cutlass.Float32(1.0),
        cutlass.Int32(1),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
