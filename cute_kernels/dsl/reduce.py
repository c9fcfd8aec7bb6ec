"""Sums in a fixed order: down columns, along rows, over threads; in fp32.

No order depends on the grid, the number of SMs or what else runs.
"""

import math
from collections.abc import Callable

import cutlass
from cutlass import cute


@cute.jit
def add_products(total: cutlass.Float32, a: cute.Tensor, b: cute.Tensor) -> cutlass.Float32:
    """total + a[0] b[0] + a[1] b[1] + ..., one chain, ascending."""
    for i in cutlass.range_constexpr(cute.size(a)):
        total += a[i].to(cutlass.Float32) * b[i].to(cutlass.Float32)
    return total


@cute.jit
def over_threads(value: cutlass.Float32, threads: cutlass.Constexpr[int]) -> cutlass.Float32:
    """Σ over ``threads`` neighbouring lanes, a power of two: a butterfly, nearest first.

    All of these lanes get the sum.
    """
    for step in cutlass.range_constexpr(int(math.log2(threads))):
        value += cute.arch.shuffle_sync_bfly(value, offset=1 << step)
    return value


@cute.jit
def down_rows(
    rSums: cute.Tensor,
    load: Callable[[cutlass.Int32], cute.TensorSSA],
    first: cutlass.Int32,
    lanes: cutlass.Int32,
    count: cutlass.Int32,
    ahead: cutlass.Constexpr[int],
):
    """rSums += load(first) + load(first + lanes) + ..., ``count`` rows, ascending.

    ``load`` returns a row's values in fp32; ``ahead`` rows are in flight before one is added.
    """
    for chunk in cutlass.range(count // ahead, unroll=1):
        values = [load(first + (chunk * ahead + i) * lanes) for i in range(ahead)]
        for row in values:
            rSums.store(rSums.load() + row)
    for i in cutlass.range(count // ahead * ahead, count, unroll=1):
        rSums.store(rSums.load() + load(first + i * lanes))


@cute.jit
def over_lanes(sPartials: cute.Tensor, column: cutlass.Int32) -> cutlass.Float32:
    """sPartials[0, column] + sPartials[1, column] + ..., lanes ascending."""
    total = cutlass.Float32(0.0)
    for lane in cutlass.range_constexpr(cute.size(sPartials, mode=[0])):
        total += sPartials[lane, column]
    return total
