"""Every constant that the bits or the speed of gemm depend on, and Problem -> Config.

The reduction tree of an output element is a function of (op, N, K, dtype, arch) alone.  One
function here reads M, `tile_columns`: WGMMA's bits are the same at every width of the instruction
(docs/gemm.md), so how wide a tile is decides who adds, not in which order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields

import torch

from .. import arch
from ..contracts import BATCH_INVARIANT, RUN_TO_RUN, SCHEDULE_INVARIANT, SPLIT_INVARIANT
from .triton.plan import TRITON, TRITON_FP32

#: The order of every backend here: one fp32 accumulator, ascending K in groups of 16, one rounding.
ORDER = "chain"
ORDERS = (ORDER,)
K_GROUP = 16

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

KEPT: Mapping[str, frozenset[str]] = {
    arch.CUTE_SM90: frozenset({RUN_TO_RUN, BATCH_INVARIANT, SPLIT_INVARIANT, SCHEDULE_INVARIANT}),
    arch.TRITON: frozenset({RUN_TO_RUN, BATCH_INVARIANT, SPLIT_INVARIANT, SCHEDULE_INVARIANT}),
    # A CPU has no SMs; its bits hold for one thread count (part of the contract id).
    arch.CPU: frozenset({RUN_TO_RUN, BATCH_INVARIANT, SPLIT_INVARIANT}),
}


@dataclass(frozen=True)
class Config:
    """One compiled SM90 kernel.

    ``a_major`` / ``b_major``: ``"k"`` when the reduction dimension is contiguous, else ``"mn"``.
    ``epilogue``: ``"plain"``, ``"bias"`` (fp32 add before the rounding) or ``"accumulate"`` (the
    accumulator starts from an fp32 tensor that is updated in place).  ``order``: of ``ORDERS``.
    """

    dtype: str
    a_major: str
    b_major: str
    epilogue: str
    order: str
    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    cluster_m: int = 2
    cluster_n: int = 1
    raster_group: int = 8


@dataclass(frozen=True)
class CpuPlan:
    """Blocks of the CPU backend: rows of a block, and the multiple that N and K are padded to.

    ``wide`` rows are multiplied at once where that is shown to give the bits of single blocks.
    """

    rows: int = 64
    wide: int = 256
    pad: int = 16
    sum_rows: int = 64


@dataclass(frozen=True)
class ColumnSumPlan:
    """dbias: each of ``lanes`` threads adds every lanes-th row in order; then lanes in order."""

    lanes: int = 32
    columns: int = 64


@dataclass(frozen=True)
class ColumnSumConfig(ColumnSumPlan):
    """One compiled SM90 kernel of dbias."""

    dtype: str = "bf16"


#: Widths of the SM90 tile, widest first, and what a column of each costs beside one of the widest:
#: perf/results/tune.jsonl, H200, 2026-11-20.
TILE_COST: Mapping[int, float] = {256: 1.00, 128: 1.02}

CPU = CpuPlan()
COLUMN_SUM = ColumnSumPlan()


# Cached, as every launch asks; bounded, as a server meets ever new numbers of rows.
@functools.lru_cache(maxsize=4096)
def tile_columns(rows: int, columns: int, clusters: int) -> int:
    """The width of the SM90 tile for a [rows, columns] product on so many clusters at once.

    The one of least predicted time, waves x width x cost of a column; the widest of equals.
    """

    down = _ceil_div(rows, Config.tile_m * Config.cluster_m)

    def time(width: int) -> float:
        across = _ceil_div(columns, width * Config.cluster_n)
        return _ceil_div(down * across, clusters) * width * TILE_COST[width]

    return min(TILE_COST, key=time)


def choose(
    dtype: torch.dtype,
    a_major: str,
    b_major: str,
    epilogue: str,
    tile_n: int = Config.tile_n,
    order: str = ORDER,
) -> Config:
    """The configuration of the SM90 kernel for one product, at one of the tile's widths."""
    return Config(DTYPE_NAMES[dtype], a_major, b_major, epilogue, order, tile_n=tile_n)


def catalogue() -> Iterator[Config]:
    """Every configuration that ``choose`` can return for a width of ``TILE_COST``."""
    dtypes = (torch.bfloat16, torch.float16)
    majors, epilogues = ("k", "mn"), ("plain", "bias", "accumulate")
    for width, dtype, a, b, epilogue in itertools.product(
        TILE_COST, dtypes, majors, majors, epilogues
    ):
        yield choose(dtype, a, b, epilogue, width)


def plan(backend: str, device: arch.Device) -> dict[str, object]:
    """What a contract id covers: every constant of the plan, and the instruction family.

    Every tile is in it, whichever a call takes.  What a tile costs is not: no bit depends on it.
    """
    common: dict[str, object] = {"order": ORDER, "k_group": K_GROUP, "rounding": "once, from fp32"}
    if backend == arch.CUTE_SM90:
        tiles = [choose(torch.bfloat16, "k", "k", "plain", width) for width in TILE_COST]
        return common | {
            "family": ", ".join(f"wgmma.m64n{tile.tile_n}k{K_GROUP}.f32" for tile in tiles),
            "tiles": {f"{tile.tile_m} x {tile.tile_n}": _constants(tile) for tile in tiles},
            "column_sum": asdict(COLUMN_SUM),
        }
    if backend == arch.TRITON:
        plans = {"16-bit": asdict(TRITON), "fp32": asdict(TRITON_FP32)}
        return common | {"family": "tl.dot", "plans": plans, "column_sum": asdict(COLUMN_SUM)}
    return common | {"family": "blas", "blocks": asdict(CPU), "threads": device.threads}


def _constants(tile: Config) -> dict[str, object]:
    """The fields of a Config that are the plan's; the others are the caller's."""
    return {f.name: getattr(tile, f.name) for f in fields(tile) if f.default is not MISSING}


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
