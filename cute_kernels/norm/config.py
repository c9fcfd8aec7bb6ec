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

RMS, LAYER = "rms", "layer"
KINDS = RMS, LAYER
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
#: The widest row that there are kernels for.
MAX_WIDTH = 65536
_NARROWEST = 64
#: Neighbours of a row that one thread has.
UNIT = 8
#: Threads of a CTA of an SM90 kernel, unless one row has more.
FORWARD_THREADS, BACKWARD_THREADS = 256, 512
#: Threads of a CTA without a ring -> CTAs of an SM, which have 40 registers a thread.
_ALONE = {128: 12, 256: 6, 512: 3}
#: Between the columns of a group in shared memory, so that neighbours lie in other banks.
PAD = 4
#: Bytes of an SM's rows under way, bytes of its shared memory for them, stages of a ring.
_UNDER_WAY, _SHARED, _MOST_STAGES = 96 << 10, 220 << 10, 8
#: Stages of a backward's ring, of rows with one unit a thread and with more.
_BACKWARD_STAGES = 3, 2
#: Threads of a row from which on the copy engine brings a backward's (device/bulk.py).
_BULK_THREADS = 64

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
    """Rows of a part of the sums over rows: 64.

    More of narrow ones, as heads have; 32 of wide ones, of which a batch has too few for all SMs.
    """
    return 32 if room(width) > 4096 else max(64, 32768 // room(width))


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
    """Row plan of an SM90 kernel.  Wide rows take eight warps or more, for their registers."""
    size = room(width) // UNIT
    units = 1 if size <= 32 else 2
    while size // units > 512 and units < 4:
        units *= 2
    while size // units > 1024:
        units *= 2
    return RowPlan(size // units, units)


def contract_facts(backend: str, device: arch.Device) -> dict[str, object]:
    """Constants that a contract id covers."""
    widths = [1 << i for i in range(6, 17)]
    common: dict[str, object] = {"rows of a part": {w: part_rows(w) for w in widths}}
    if backend == arch.CPU:
        return common | {"cpu": asdict(CPU), "threads": device.threads}
    if backend == arch.TRITON:
        return common | asdict(TRITON)
    threads = {w: asdict(row_plan(w)) for w in widths}
    tree = {"units": UNIT, "threads": threads, "backward": BACKWARD_THREADS}
    return common | tree | {"means": "sum * (1 / D)", "x_hat": "fma(h, rstd, -mean * rstd)"}


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
class Residency:
    """Occupancy of a kernel: CTAs an SM, their threads, and the stages of each one's ring.

    stages: 0 of CTAs without a ring.  Such a forward kernel has one for each of its rows.
    bulk: whether the copy engine fills the ring, not the threads that read it.
    """

    threads: int
    ctas: int
    stages: int
    bulk: bool = False


def _stages(wanted: int, room: int) -> int:
    """Stages of a ring with this capacity; 0 where no row could be in flight."""
    stages = min(wanted, room)
    return stages if stages > 1 else 0


def _residency(threads: int, ctas: int, stage: int) -> Residency:
    """Occupancy of CTAs with stages of so many bytes: enough bytes in flight, if they fit."""
    wanted = min(-(-_UNDER_WAY // (ctas * stage)) + 1, _MOST_STAGES)
    return Residency(threads, ctas, _stages(wanted, _SHARED // ctas // stage))


def forward_residency(config: ForwardConfig) -> Residency:
    """Bits do not follow it; docs/notes/norm_sm90.md has what was tried."""
    threads = max(FORWARD_THREADS, config.threads)
    layer, wide = config.kind == "layer", config.dtype == "fp32"
    if not wide and config.units <= 2:
        if not (layer and config.weight == "fp32"):
            # A row that is widened anew for each use, and weights that come behind its sums, fit.
            threads = config.threads if config.threads in _ALONE else threads
            return Residency(threads, _ALONE[threads], 0)
        # Weight and bias would be four times a row's bytes, asked for again with each row.
        if threads == FORWARD_THREADS:
            return Residency(threads, 3 - config.residual, 2)
        return Residency(threads, 1, 3)
    # Rows of fp32 have 80 registers a thread, or 128 where more is done with them.
    ctas = (2 if layer or config.residual else 3) if threads == FORWARD_THREADS else 1
    itemsize = 4 if wide else 2
    stage = threads * config.units * UNIT * itemsize * (1 + config.residual)
    return _residency(threads, ctas, stage)


def backward_residency(config: BackwardConfig) -> Residency:
    """Backward occupancy: one CTA an SM, limited by registers.

    Some 32 KB are under way.  With more, half of the SMs are served before the other half, which
    then works on alone at the end (docs/notes/norm_sm90.md, rounds 9 and 10).
    """
    threads = max(BACKWARD_THREADS, config.threads)
    groups, size = threads // config.threads, config.units * UNIT
    itemsize = 4 if config.dtype == "fp32" else 2
    numbers = 1 + (config.kind == "layer")
    stage = threads * (size * itemsize * (2 + config.upstream) + 4 * numbers)
    sums = 4 * numbers * groups * size * (config.threads + PAD) if groups > 1 else 0
    wanted = _BACKWARD_STAGES[config.units > 1]
    stages = _stages(wanted, (_SHARED - sums) // stage)
    return Residency(threads, 1, stages, stages > 0 and config.threads >= _BULK_THREADS)


@dataclass(frozen=True)
class SumConfig:
    """The compiled SM90 kernel that adds parts.

    into: "add" to fp32, else the dtype made.  pair: of dweight and dbias in one launch.
    """

    into: str
    pair: bool
