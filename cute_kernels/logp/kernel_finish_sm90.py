"""(log p, log2 Σ 2^y, entropy) of a token from the states of all runs of a vocabulary, on SM90.

What ``logp/exact.py`` says in `merge` and `finish`, in the same fp64 operations.

Layouts      states int64 [P, T, C]; target int64 [T], scale fp32 [T]; results fp32 [T].
Order        states are exact sums; a lane takes every 32nd, then lanes meet.
Measured     docs/status.md.
"""

import cutlass
import cutlass.cute as cute

from ..compile import fake
from .config import (
    BIN,
    BINS,
    FRACTION,
    LN2,
    LOST,
    MASKED,
    OUTSIDE,
    FinishConfig,
    columns_of_state,
)
from .device import exact, fp64, tile, units

WARP = 32


class LogpFinishSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: FinishConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        mStates: cute.Tensor,
        mTarget: cute.Tensor,
        mScale: cute.Tensor,
        mLogp: cute.Tensor,
        mLse2: cute.Tensor,
        mEntropy: cute.Tensor | None,
        stream,
    ):
        blocks = cute.ceil_div(mTarget.shape[0], self.config.warps)
        self.kernel(mStates, mTarget, mScale, mLogp, mLse2, mEntropy).launch(
            grid=(blocks, 1, 1), block=(WARP * self.config.warps, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mStates: cute.Tensor,
        mTarget: cute.Tensor,
        mScale: cute.Tensor,
        mLogp: cute.Tensor,
        mLse2: cute.Tensor,
        mEntropy: cute.Tensor | None,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = tidx % WARP
        token = block * self.config.warps + tidx // WARP
        if token < mTarget.shape[0]:
            own = exact.state(1, self.config.entropy)
            exact.clear(own)
            for part in cutlass.range(lane, mStates.shape[0], WARP, unroll=1):
                exact.take(own, 0, tile.row_of(mStates, part, token))
            for distance in cutlass.range_constexpr(5):
                exact.meet(own, 0, 1 << distance)
            if lane == 0:
                self.finish(own, token, mTarget, mScale, mLogp, mLse2, mEntropy)

    @cute.jit
    def finish(self, own, token, mTarget, mScale, mLogp, mLse2, mEntropy):
        """The results of one token, by one lane."""
        total = self.mantissa(own.sums)
        known = (own.top[0] < LOST) & (total > 0.0)
        total = total if known else cutlass.Float64(1.0)
        of_mantissa = fp64.add(fp64.log2(total), -float(FRACTION))
        lse2 = fp64.add((own.top[0] * BIN).to(cutlass.Float64), of_mantissa)
        nan = cutlass.Float64(float("nan"))
        lse2 = lse2 if known else nan
        z = units.of_bits(own.chosen[0]).to(cutlass.Float64)
        y = fp64.mul(z, mScale[token].to(cutlass.Float64))
        logp = fp64.mul(fp64.add(y, -lse2), LN2)
        # As torch's clamp: NaN stays.
        logp = cutlass.Float64(0.0) if logp > 0.0 else logp
        target = mTarget[token]
        logp = nan if target == OUTSIDE else logp
        logp = cutlass.Float64(0.0) if target == MASKED else logp
        mLogp[token] = logp.to(cutlass.Float32)
        mLse2[token] = lse2.to(cutlass.Float32)
        if cutlass.const_expr(mEntropy is not None):
            mean = fp64.div(self.weighted_mantissa(own), total)
            entropy = fp64.mul(fp64.add(of_mantissa, -mean), LN2)
            entropy = cutlass.Float64(0.0) if entropy < 0.0 else entropy
            entropy = entropy if known else nan
            entropy = cutlass.Float64(0.0) if target == MASKED else entropy
            mEntropy[token] = entropy.to(cutlass.Float32)

    @cute.jit
    def mantissa(self, bins):
        """Σ_j bins[j] 2^(-16 j), from the smallest on."""
        total = bins[BINS - 1, 0].to(cutlass.Float64)
        for j in cutlass.range_constexpr(BINS - 2, -1, -1):
            total = fp64.add(fp64.mul(total, 2.0**-BIN), bins[j, 0].to(cutlass.Float64))
        return total

    @cute.jit
    def weighted_mantissa(self, own):
        """The same of sums weighted with y - 16 top in place of y - 16 bin."""
        total = self.moved(own, BINS - 1)
        for j in cutlass.range_constexpr(BINS - 2, -1, -1):
            total = fp64.add(fp64.mul(total, 2.0**-BIN), self.moved(own, j))
        return total

    @cute.jit
    def moved(self, own, j: cutlass.Constexpr):
        """A_j - 16 j S_j."""
        by = fp64.mul(own.sums[j, 0].to(cutlass.Float64), float(BIN * j))
        return fp64.add(own.weighted[j, 0].to(cutlass.Float64), -by)


def build(config: FinishConfig, compile=cute.compile):
    """Compiles one configuration against fake tensors; no GPU needed."""
    t, runs = fake.size(), fake.size()
    return compile(
        LogpFinishSm90(config),
        fake.compact(cutlass.Int64, (runs, t, columns_of_state(config.entropy)), 8),
        fake.compact(cutlass.Int64, (t,), 8),
        *(fake.vector("fp32", t) for _ in range(3)),
        fake.vector("fp32", t) if config.entropy else None,
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
