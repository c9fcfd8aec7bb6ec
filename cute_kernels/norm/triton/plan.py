"""Every constant that the bits of the Triton norms depend on, and sizes that show in none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TritonPlan:
    """Constants that bits depend on; not tuned by measurement.

    ``forward_whole``, ``backward_whole``: the widest room of a row that registers hold, in the
    forward and the backward; it has as many lanes as `config.room`.  ``lanes``: of a wider row.
    ``tile``: elements of a step of the backward, whose rows are the lanes of a part's sums.
    ``row``: lanes of a row are added in pairs, neighbours first; those of a part half onto half.
    ``fp_fusion``: an fma is one that is written.
    """

    forward_whole: int = 16384
    backward_whole: int = 8192
    lanes: int = 4096
    tile: int = 2048
    row: str = "pairs"
    fp_fusion: bool = False


@dataclass(frozen=True)
class Sizes:
    """Sizes that no bit depends on; not tuned by measurement.

    ``forward_tile``: elements of a program, if one row has not more.
    ``..._elements``: of a tile, that one thread of warps of 32 has, up to ``most_warps``.
    ``part_columns``: of a program that adds the rows of a part of wide ones.
    ``sum_columns``, ``sum_ahead``: of a program that adds parts; parts that are loaded together.
    """

    forward_tile: int = 2048
    forward_elements: int = 16
    backward_elements: int = 8
    most_warps: int = 16
    part_columns: int = 512
    part_elements: int = 4
    sum_columns: int = 64
    sum_ahead: int = 32


TRITON = TritonPlan()
SIZES = Sizes()
