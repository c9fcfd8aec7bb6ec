"""Log-probability, log2 Σ 2^y and entropy of a token from its states of all runs, on SM90.

    S = Σ_p states[p, t]      log2 Σ_v 2^y = 16 top - 24 + log2 Σ_j S_j 2^(-16 j)
    log p = ln 2 (z[target] scale - log2 Σ 2^y)
    entropy = ln 2 (log2 Σ 2^y - 16 top - Σ_j (A_j - 16 j S_j) 2^(-16 j) / Σ_j S_j 2^(-16 j))

The device half of `merge` and `finish` in ``logp/exact.py``, in the same fp64 operations.

Layouts      states int64 [P, T, C]; target int64 [T], scale fp32 [T]; results fp32 [T].
Order        states are exact sums; a lane adds every 32nd, then the lanes of a warp are added.
Measured     docs/status.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda

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
from .device import exact, fp64, tile, vectors

WARP = 32


@dataclass(frozen=True)
class TokenTensors:
    """Vectors [T] in global memory: a token's inputs and results; the entropy may be None."""

    mTarget: cute.Tensor
    mScale: cute.Tensor
    mLogp: cute.Tensor
    mLse2: cute.Tensor
    mEntropy: cute.Tensor | None


class LogpFinishSm90:
    """Kernel of one configuration; ``__call__`` is the host function that is compiled."""

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
        stream: cuda.CUstream,
    ):
        blocks = cute.ceil_div(mTarget.shape[0], self.config.warps)
        tokens = TokenTensors(mTarget, mScale, mLogp, mLse2, mEntropy)
        self.kernel(mStates, tokens).launch(
            grid=(blocks, 1, 1), block=(WARP * self.config.warps, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mStates: cute.Tensor, tokens: TokenTensors):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = tidx % WARP
        token = block * self.config.warps + tidx // WARP
        if token < tokens.mTarget.shape[0]:
            # state = Σ_p states[p, token]
            state = exact.make_state(1, self.config.entropy)
            exact.clear(state)
            for run in cutlass.range(lane, mStates.shape[0], WARP, unroll=1):
                exact.add_stored(state, 0, tile.row_of(mStates, run, token))
            for distance in cutlass.range_constexpr(5):
                exact.add_lane(state, 0, 1 << distance)
            if lane == 0:
                self.finish(state, token, tokens)

    @cute.jit
    def finish(self, state: exact.State, token: cutlass.Int32, tokens: TokenTensors):
        """Compute and store the results of one token; for one lane."""
        # lse2 = 16 top - 24 + log2 Σ_j S_j 2^(-16 j); NaN where an entry was NaN or overflowed
        total = self.mantissa(state.sums)
        is_finite = (state.top[0] < LOST) & (total > 0.0)
        total = total if is_finite else cutlass.Float64(1.0)
        log2_mantissa = fp64.add(fp64.log2(total), -float(FRACTION))
        lse2 = fp64.add((state.top[0] * BIN).to(cutlass.Float64), log2_mantissa)
        nan = cutlass.Float64(float("nan"))
        lse2 = lse2 if is_finite else nan
        # log p = ln 2 (y - lse2), at most 0; as with torch's clamp, NaN stays
        z = vectors.of_bits(state.chosen[0]).to(cutlass.Float64)
        y = fp64.mul(z, tokens.mScale[token].to(cutlass.Float64))
        logp = fp64.mul(fp64.add(y, -lse2), LN2)
        logp = cutlass.Float64(0.0) if logp > 0.0 else logp
        target = tokens.mTarget[token]
        logp = nan if target == OUTSIDE else logp
        logp = cutlass.Float64(0.0) if target == MASKED else logp
        tokens.mLogp[token] = logp.to(cutlass.Float32)
        tokens.mLse2[token] = lse2.to(cutlass.Float32)
        if cutlass.const_expr(tokens.mEntropy is not None):
            # entropy = ln 2 (lse2 - 16 top - mean of y - 16 top), at least 0
            mean = fp64.div(self.weighted_mantissa(state), total)
            entropy = fp64.mul(fp64.add(log2_mantissa, -mean), LN2)
            entropy = cutlass.Float64(0.0) if entropy < 0.0 else entropy
            entropy = entropy if is_finite else nan
            entropy = cutlass.Float64(0.0) if target == MASKED else entropy
            tokens.mEntropy[token] = entropy.to(cutlass.Float32)

    @cute.jit
    def mantissa(self, bins: cute.Tensor) -> cutlass.Float64:
        """Σ_j bins[j] 2^(-16 j), smallest terms first."""
        total = bins[BINS - 1, 0].to(cutlass.Float64)
        for j in cutlass.range_constexpr(BINS - 2, -1, -1):
            total = fp64.add(fp64.mul(total, 2.0**-BIN), bins[j, 0].to(cutlass.Float64))
        return total

    @cute.jit
    def weighted_mantissa(self, state: exact.State) -> cutlass.Float64:
        """Σ_j (A_j - 16 j S_j) 2^(-16 j), smallest terms first: weights y - 16 top."""
        total = self.shifted(state, BINS - 1)
        for j in cutlass.range_constexpr(BINS - 2, -1, -1):
            total = fp64.add(fp64.mul(total, 2.0**-BIN), self.shifted(state, j))
        return total

    @cute.jit
    def shifted(self, state: exact.State, j: cutlass.Constexpr[int]) -> cutlass.Float64:
        """A_j - 16 j S_j."""
        product = fp64.mul(state.sums[j, 0].to(cutlass.Float64), float(BIN * j))
        return fp64.add(state.weighted[j, 0].to(cutlass.Float64), -product)


def build(config: FinishConfig, compile: Callable = cute.compile) -> Callable:
    """Compile one configuration against fake tensors; needs no GPU."""
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
