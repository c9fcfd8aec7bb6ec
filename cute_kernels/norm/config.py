"""Every constant that the bits of norm depend on, and the configurations of its kernels.

A row is summed in one tree, a function of its width D.  What is summed over rows is cut into parts
of `part_rows(D)` rows, each added from zero; parts are added one by one, ascending, to what they
belong to.  Nothing follows the number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from .. import arch
from ..contracts import BATCH_INVARIANT, RUN_TO_RUN, SCHEDULE_INVARIANT, SPLIT_INVARIANT
from .triton.plan import TRITON

KINDS = ("rms", "layer")
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
#: The widest row that there are kernels for.
MAX_WIDTH = 65536
_NARROWEST = 64
#: Neighbours of a row that one thread has.
UNIT = 8
#: Threads of a CTA of an SM90 kernel, unless one row has more.
FORWARD_THREADS, BACKWARD_THREADS = 256, 512

_KEPT = frozenset({RUN_TO_RUN, BATCH_INVARIANT, SPLIT_INVARIANT})
#: Backend -> what it keeps.
KEPT: Mapping[str, frozenset[str]] = {
    arch.CUTE_SM90: _KEPT | {SCHEDULE_INVARIANT},
    arch.TRITON: _KEPT | {SCHEDULE_INVARIANT},
    arch.CPU: _KEPT,
}


def room(width: int) -> int:
    """The power of two that a row's threads have room for: all widths up to it share a tree."""
    return max(_NARROWEST, 1 << (width - 1).bit_length())


def part_rows(width: int) -> int:
    """Rows of a part of the sums over rows: 64, and more of narrow rows, as heads have."""
    return max(64, 32768 // room(width))


@dataclass(frozen=True)
class CpuPlan:
    """The CPU backend's sums: zeros up to ``room``, then each half onto half, over a row; over a
    part, of rows likewise."""

    order: str = "halves"


CPU = CpuPlan()


@dataclass(frozen=True)
class RowPlan:
    """How a row falls to threads: unit v of thread t is number v threads + t of the row."""

    threads: int
    units: int


def row_plan(width: int) -> RowPlan:
    """Of an SM90 kernel.  Eight warps and more hold what fewer would have no registers for."""
    size = room(width) // UNIT
    units = 1 if size <= 32 else 2
    while size // units > 512 and units < 4:
        units *= 2
    while size // units > 1024:
        units *= 2
    return RowPlan(size // units, units)


def plan(backend: str, device: arch.Device) -> dict[str, object]:
    """What a contract id covers."""
    widths = [1 << i for i in range(6, 17)]
    common: dict[str, object] = {"rows of a part": {w: part_rows(w) for w in widths}}
    if backend == arch.CPU:
        return common | {"cpu": asdict(CPU), "threads": device.threads}
    if backend == arch.TRITON:
        return common | asdict(TRITON)
    return common | {"units": UNIT, "threads": {w: asdict(row_plan(w)) for w in widths}}


@dataclass(frozen=True)
class ForwardConfig:
    """One compiled SM90 kernel.

    dtype: of the rows; weight: of weight and bias.  residual: whether one is added.
    threads, units: of a row.
    """

    kind: str
    dtype: str
    weight: str
    residual: bool
    threads: int
    units: int


@dataclass(frozen=True)
class BackwardConfig:
    """One compiled SM90 kernel; ``upstream``: whether dx starts from a gradient of h."""

    kind: str
    dtype: str
    weight: str
    upstream: bool
    threads: int
    units: int


@dataclass(frozen=True)
class SumConfig:
    """The compiled SM90 kernel that adds parts; ``into``: "add" to fp32, else the dtype made."""

    into: str
