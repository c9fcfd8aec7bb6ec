"""Typed bundles of ``kernel_paged_values_sm90``: a unit, scratch, results, the ring of V."""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from .paged_tiles import Tile

#: Warps that read a stage of V.
READERS = 4


@dataclass(frozen=True)
class Inputs:
    """A unit: its rows and keys, its KV head, and what scales its scores; sinks [Hq] or None."""

    mSinks: cute.Tensor | None
    tile: Tile
    head: cutlass.Int32
    c: cutlass.Float32


@dataclass(frozen=True)
class Scratch:
    """Scores and maxima of all units (``long_tiles``), and the unit."""

    mScores: cute.Tensor
    mMaxima: cute.Tensor
    unit: cutlass.Int64


@dataclass(frozen=True)
class Results:
    """O [T, Hq, Dv], LSE [Hq, T], and the first column of O that a CTA has."""

    mO: cute.Tensor
    mLse: cute.Tensor
    column: cutlass.Int32


@dataclass(frozen=True)
class ValueRing:
    """mbarriers of the stages of V: ``full`` when its bytes have landed, ``empty`` when read."""

    full: cute.Pointer
    empty: cute.Pointer

    def init(self, stages: int):
        """Initialise the mbarriers; by one thread, before the CTA's barrier."""
        for stage in range(stages):
            cute.arch.mbarrier_init(self.full + stage, 1)
            cute.arch.mbarrier_init(self.empty + stage, READERS)
