"""A tile of logits in registers: how it is made, and what becomes of it before it is used."""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...dsl import mma, pipeline, softmax
from ...dsl.mainloop import Mainloop
from ...schedulers.tiles import leaves
from ..config import LOG2E
from .units import QUAD, ROWS, bits


@dataclass(frozen=True)
class Walk:
    """A mainloop over all of D for one tile after the other, in one of the two orders."""

    mainloop: Mainloop
    tree: bool

    @cute.jit
    def load(self, sources, shared, cluster, rank, ring, state, at):
        """The producer: every K block of tile ``at`` (of tokens, of the vocabulary)."""
        k = cute.size(sources[0].tensor, mode=[1])
        if cutlass.const_expr(self.tree):
            for leaf in cutlass.range(leaves.count(k), unroll=1):
                start, size = self.span(leaf, k)
                loads = self.mainloop.loads(sources, *shared, cluster, rank, (0, 0, start))
                blocks = cute.ceil_div(size, self.mainloop.tile[2])
                state = self.mainloop.load(loads, ring, state, *at, (0, blocks))
        else:
            loads = self.mainloop.loads(sources, *shared, cluster, rank)
            state = self.mainloop.load(loads, ring, state, *at, (0, loads.blocks))
        return state

    def start(self):
        """Where a consumer's reads and releases begin."""
        return tuple(pipeline.consumer_state(self.mainloop.stages) for _ in range(2))

    def accumulators(self, operands):
        """(a chain's, the tile's): one and the same but in a tree."""
        acc = self.mainloop.accumulator(operands)
        return acc, self.mainloop.accumulator(operands) if self.tree else acc

    @cute.jit
    def multiply(self, operands, accumulators, ring, states, k):
        """A consumer: the tile's sums over D, in its order."""
        acc, total = accumulators
        if cutlass.const_expr(self.tree):
            # What adds nothing is -0: +0 would take the sign of a leaf of -0.
            total.fill(-0.0)
            for leaf in cutlass.range(leaves.count(k), unroll=1):
                _, size = self.span(leaf, k)
                states = self.chain(operands, acc, ring, states, size)
                total.store(total.load() + acc.load())
        else:
            states = self.chain(operands, acc, ring, states, k)
        return states

    @cute.jit
    def chain(self, operands, acc, ring, states, size):
        """acc = one chain over ``size`` elements of D."""
        tile_k = self.mainloop.tile[2]
        blocks = size // tile_k
        tail_groups = cute.ceil_div(size - blocks * tile_k, mma.K_GROUP)
        acc.fill(0.0)
        return self.mainloop.chain(operands, acc, ring, states, blocks, tail_groups)

    def span(self, leaf, k):
        """(first k, elements) of a leaf."""
        return leaf * leaves.length(k), leaves.size(leaf, k, cutlass.min, cutlass.max)


@cute.jit
def finish_logits(acc, mBias, at, column0, softcap, capped: cutlass.Constexpr):
    """acc = softcap tanh((acc + bias) / softcap); without either, as it is."""
    if cutlass.const_expr(mBias is not None):
        last = mBias.shape[0] - 1
        for four in cutlass.range_constexpr(cute.size(acc) // 4):
            for side in cutlass.range_constexpr(2):
                column = cutlass.min(column0 + at[4 * four + side][1], last)
                bias = mBias[column].to(cutlass.Float32)
                acc[4 * four + side] += bias
                acc[4 * four + side + 2] += bias
    if cutlass.const_expr(capped):
        inner = cutlass.Float32(2.0 * LOG2E) / softcap
        softmax.cap(acc, inner)
        for i in cutlass.range_constexpr(cute.size(acc) // 4):
            for j in cutlass.range_constexpr(4 * i, 4 * i + 4):
                acc[j] = acc[j] * softcap


@cute.jit
def choose(acc, at, target, column0, chosen):
    """chosen = the bits of the target's logit, on the lane that has it."""
    columns = cute.size(acc) // (2 * ROWS) * 2 * QUAD
    for half in cutlass.range_constexpr(ROWS):
        column = target[half] - column0
        if (column >= 0) & (column < columns):
            for i in cutlass.range_constexpr(cute.size(acc) // 4):
                for side in cutlass.range_constexpr(2):
                    value = 4 * i + 2 * half + side
                    if at[value][1] == column:
                        chosen[half] = bits(acc[value])


@cute.jit
def mask(acc, at, column0, valid):
    """acc = -inf in columns that are not of the vocabulary."""
    columns = cute.size(acc) // (2 * ROWS) * 2 * QUAD
    if column0 + columns > valid:
        for i in cutlass.range_constexpr(cute.size(acc) // 4):
            for j in cutlass.range_constexpr(4 * i, 4 * i + 4):
                if column0 + at[j][1] >= valid:
                    acc[j] = -cutlass.Float32.inf


@cute.jit
def row_of(tensor, run, row):
    """The last mode of ``tensor`` [runs, rows, any], with offsets of 64 bits."""
    offset = cutlass.Int64(run) * tensor.stride[0] + cutlass.Int64(row) * tensor.stride[1]
    return cute.make_tensor(tensor.iterator + offset, cute.make_layout(tensor.shape[2]))
