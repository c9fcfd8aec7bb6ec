"""Sums in an order that is written here: down columns, along rows, over threads.

fp32 throughout.  No order follows the grid, the number of SMs or what else runs.
"""

import math

import cutlass
from cutlass import cute


@cute.jit
def add_products(total, a: cute.Tensor, b: cute.Tensor):
    """total + a[0] b[0] + a[1] b[1] + ..., one chain, ascending."""
    for i in cutlass.range_constexpr(cute.size(a)):
        total += a[i].to(cutlass.Float32) * b[i].to(cutlass.Float32)
    return total


@cute.jit
def over_threads(value, threads: cutlass.Constexpr):
    """Σ over ``threads`` neighbours of a warp, a power of two: a butterfly, nearest first.

    All of them have the sum.
    """
    for step in cutlass.range_constexpr(int(math.log2(threads))):
        value += cute.arch.shuffle_sync_bfly(value, offset=1 << step)
    return value


@cute.jit
def down_rows(sums: cute.Tensor, load, first, lanes, count, ahead: cutlass.Constexpr):
    """sums += load(first) + load(first + lanes) + ..., ``count`` rows, ascending.

    ``load`` gives a row's values in fp32; ``ahead`` are under way before the first is added.
    """
    for chunk in cutlass.range(count // ahead, unroll=1):
        values = [load(first + (chunk * ahead + i) * lanes) for i in range(ahead)]
        for row in values:
            sums.store(sums.load() + row)
    for i in cutlass.range(count // ahead * ahead, count, unroll=1):
        sums.store(sums.load() + load(first + i * lanes))


@cute.jit
def over_lanes(partial: cute.Tensor, column):
    """partial[0, column] + partial[1, column] + ..., lanes ascending; in shared memory."""
    total = cutlass.Float32(0.0)
    for lane in cutlass.range_constexpr(cute.size(partial, mode=[0])):
        total += partial[lane, column]
    return total
