"""rms_norm and layer_norm of rows, on SM90.

    h = x + residual, rounded;  mean = Σ h / D (0 of an RMS norm)
    rstd = 1 / √(Σ (h - mean)² / D + eps)
    y = x̂ (weight + offset) + bias,  x̂ = h rstd - mean rstd

Layout       x, residual, h, y [M, 8 ⌈D / 8⌉], zeros behind D, rows at multiples of 16 bytes; weight
             and bias likewise; mean, rstd fp32 [M]; inverse: 1 / D.
Order        of a sum over a row: a thread's elements ascending, one fma each; lanes of a warp,
             nearest first; warps ascending.  Which thread has what follows from D.
Work         A CTA has one row or more at a time (config.forward_residency).  Either as many CTAs as
             that takes; or persistent CTAs, whose next rows are in flight while one is summed
             (device/ahead.py).
Measured     docs/status.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from ..compile import fake
from .config import LAYER, UNIT, ForwardConfig, forward_residency
from .device import rows
from .device.ahead import CpAsyncRing
from .device.rows import WARP, Exchange, Group, Row


@dataclass(frozen=True)
class Affine:
    """Scale and shift of y, in global memory or as a thread's registers; bias of a layer norm."""

    weight: cute.Tensor
    bias: cute.Tensor | None


@dataclass(frozen=True)
class Outputs:
    """Results in global memory; h and the mean where they are wanted."""

    mH: cute.Tensor | None
    mY: cute.Tensor
    mMean: cute.Tensor | None
    mRstd: cute.Tensor


@dataclass(frozen=True)
class Scalars:
    """Constants of a launch: eps, the weight's offset, 1 / D, and D."""

    eps: cutlass.Float32
    offset: cutlass.Float32
    inverse: cutlass.Float32
    width: cutlass.Int32


class NormForwardSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: ForwardConfig):
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        self.group = Group(config.threads, config.units)
        held = forward_residency(config)
        self.threads, self.ctas = held.threads, held.ctas
        self.rows = held.threads // config.threads
        self.layer, self.persistent = config.kind == LAYER, held.stages > 0
        # Where many CTAs share the registers, a row is kept in 16 bits across a sum.
        self.rewidens = not self.persistent and self.dtype.width == 16
        self.ring = CpAsyncRing(self.group, self.dtype, 1 + config.residual, 0, held.stages)

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
        stream: cuda.CUstream,
    ):
        self.kernel(
            mX, mResidual, mWeight, mBias, mH, mY, mMean, mRstd, eps, offset, inverse, width
        ).launch(
            grid=(ctas, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.ctas,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
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
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        m = mY.shape[0]
        group, lane = tidx // self.group.threads, tidx % self.group.threads
        allocator = SmemAllocator()
        layout = cute.make_ordered_layout((2, self.rows, self.group.warps), order=(2, 1, 0))
        sPartials = allocator.allocate_tensor(cutlass.Float32, layout, byte_alignment=16)
        inputs = [mX] if mResidual is None else [mX, mResidual]
        affine = Affine(mWeight, mBias)
        outputs, scalars = Outputs(mH, mY, mMean, mRstd), Scalars(eps, offset, inverse, width)
        exchange = Exchange(sPartials, group, lane)
        first, slot = block * self.rows + group, cutlass.Int32(0)
        if cutlass.const_expr(not self.persistent):
            row = Row(first, first < m, lane)
            raws = [self.group.load(t, row) for t in inputs]
            self.finish(raws, affine, outputs, row, exchange, slot, scalars)
        else:
            affine = self.load_affine(affine, lane)
            stages = self.ring.stages
            step, stage = ctas * self.rows, cutlass.Int32(0)
            warp = cute.arch.make_warp_uniform(tidx // WARP)
            sRing = self.ring.allocate(allocator, self.threads, warp)
            for d in cutlass.range_constexpr(stages - 1):
                early = first + d * step
                self.ring.fetch(sRing, d, inputs, [], Row(early, early < m, lane))
            # Every sum has a barrier: groups without a row take part as well.
            for base in cutlass.range(block * self.rows, m, step, unroll=1):
                index = base + group
                last = index + (stages - 1) * step
                free = self.ring.advanced(stage, stages - 1)
                self.ring.fetch(sRing, free, inputs, [], Row(last, last < m, lane))
                self.ring.wait()
                raws = [self.ring.read(sRing, stage, i) for i in range(len(inputs))]
                self.finish(
                    raws, affine, outputs, Row(index, index < m, lane), exchange, slot, scalars
                )
                stage = self.ring.advanced(stage, 1)
                slot = slot ^ 1

    @cute.jit
    def finish(
        self,
        raws: list[cute.Tensor],
        affine: Affine,
        outputs: Outputs,
        row: Row,
        exchange: Exchange,
        slot: cutlass.Int32,
        scalars: Scalars,
    ):
        """Compute and store all outputs of a row whose inputs are in registers."""
        lane = row.lane
        # h = x + residual
        raw = self.added(raws)
        if cutlass.const_expr(outputs.mH is not None):
            self.group.store(raw, outputs.mH, row)
        # mean = Σ h / D
        rH, mean = rows.widened(raw), cutlass.Float32(0.0)
        if cutlass.const_expr(self.layer):
            mean = self.group.sum(self.total(rH), exchange, 0) * scalars.inverse
            rH = self.rewidened(raw, rH)
        # rstd = 1 / √(Σ (h - mean)² / D + eps)
        squares = self.squares(rH, mean, lane, scalars.width)
        if cutlass.const_expr(not self.persistent):
            # Between the sums, where registers are free; other CTAs have brought them to L2.
            affine = self.load_affine(affine, lane)
        # The second sum of a layer norm has its own slot.
        slot = 1 if self.layer else slot
        squares = self.group.sum(squares, exchange, slot)
        variance = cute.math.fma(squares, scalars.inverse, scalars.eps)
        rstd = cutlass.Float32(1.0) / cute.math.sqrt(variance)
        # y = x̂ (weight + offset) + bias
        rH = self.rewidened(raw, rH)
        self.scale(rH, mean, rstd, affine, scalars.offset)
        self.group.store(rows.narrowed(rH, self.dtype), outputs.mY, row)
        if (lane == 0) & row.valid:
            outputs.mRstd[row.index] = rstd
            if cutlass.const_expr(outputs.mMean is not None):
                outputs.mMean[row.index] = mean

    @cute.jit
    def load_affine(self, affine: Affine, lane: cutlass.Int32) -> Affine:
        """Load a thread's elements of weight and bias."""
        weight, bias = self.group.load_vector(affine.weight, lane), affine.bias
        if cutlass.const_expr(bias is not None):
            bias = self.group.load_vector(bias, lane)
        return Affine(weight, bias)

    @cute.jit
    def added(self, raws: list[cute.Tensor]) -> cute.Tensor:
        """h = round(x + residual)."""
        if cutlass.const_expr(len(raws) == 1):
            return raws[0]
        total = rows.widened(raws[0])
        total.store(total.load() + rows.widened(raws[1]).load())
        return rows.narrowed(total, self.dtype)

    @cute.jit
    def rewidened(self, raw: cute.Tensor, rH: cute.Tensor) -> cute.Tensor:
        """h in fp32 after a sum: ``rH``, or ``raw`` widened again."""
        if cutlass.const_expr(self.rewidens):
            rH = rows.widened(rows.opaque_copy(raw))
        return rH

    @cute.jit
    def total(self, rH: cute.Tensor) -> cutlass.Float32:
        """Σ h over a thread's elements."""
        total = cutlass.Float32(0.0)
        for i in cutlass.range_constexpr(self.group.size):
            total = total + rH[i]
        return total

    @cute.jit
    def squares(
        self,
        rH: cute.Tensor,
        mean: cutlass.Float32,
        lane: cutlass.Int32,
        width: cutlass.Int32,
    ) -> cutlass.Float32:
        """Σ (h - mean)² over a thread's elements of the row."""
        rCentered = rH
        if cutlass.const_expr(self.layer):
            rCentered = cute.make_rmem_tensor(cute.make_layout(self.group.size), cutlass.Float32)
            for i in cutlass.range_constexpr(self.group.size):
                rCentered[i] = rH[i] - mean
            self.group.without_tail(rCentered, lane, width)
        squares = cutlass.Float32(0.0)
        for i in cutlass.range_constexpr(self.group.size):
            squares = cute.math.fma(rCentered[i], rCentered[i], squares)
        return squares

    @cute.jit
    def scale(
        self,
        rH: cute.Tensor,
        mean: cutlass.Float32,
        rstd: cutlass.Float32,
        affine: Affine,
        offset: cutlass.Float32,
    ):
        """Replace h by y = x̂ weight + bias of a layer norm, x̂ (weight + offset) of an RMS norm."""
        weight = rows.widened(affine.weight)
        if cutlass.const_expr(self.layer):
            bias = rows.widened(affine.bias)
        for i in cutlass.range_constexpr(self.group.size):
            if cutlass.const_expr(self.layer):
                x_hat = cute.math.fma(rH[i], rstd, -mean * rstd)
                rH[i] = cute.math.fma(x_hat, weight[i], bias[i])
            else:
                rH[i] = rH[i] * rstd * (weight[i] + offset)


def build(config: ForwardConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; needs no GPU."""
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
