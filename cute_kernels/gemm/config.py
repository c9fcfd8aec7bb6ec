"""Every constant that the bits of gemm depend on, and the configurations of its kernels.

The reduction tree of an output element is a function of (op, N, K, dtype, arch) alone.  Nothing
here reads M.  `tiles` does: it chooses who adds, not in which order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from .. import arch
from ..contracts import BATCH_INVARIANT, RUN_TO_RUN, SCHEDULE_INVARIANT, SPLIT_INVARIANT
from ..schedulers.tiles.leaves import LEAVES
from .triton.plan import TRITON, TRITON_FP32

#: ``chain``: one fp32 accumulator, ascending K in groups of 16, one rounding.
#: ``tree``: K is cut into at most eight leaves of ``leaves.length(K)``; a leaf is a chain; leaves
#: are added in fp32, ascending; one rounding.
ORDER = "chain"
ORDERS = (ORDER, "tree")
#: The leaves of ``tree``, added as they arrive: for `skinny_linear(deterministic=False)` only.
UNORDERED = "unordered"
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
    ``epilogue``: ``"plain"``, ``"bias"`` (fp32 add before the rounding), ``"accumulate"`` (the
    accumulator starts from an fp32 tensor that is updated in place) or ``"fp32"`` (the accumulator
    is stored as it is).  ``order``: of ``ORDERS``.
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

    @property
    def stores_fp32(self) -> bool:
        """Whether the result is an fp32 tensor."""
        return self.epilogue in ("accumulate", "fp32")


@dataclass(frozen=True)
class SkinnyConfig:
    """One compiled SM90 kernel for few rows: tiles of ``tile_n`` weight rows by ``tile_m`` tokens.

    ``w_major``: of the weight, as in `Config`.  ``order``: of ``ORDERS``, or ``UNORDERED``.
    ``split``: CTAs of a cluster that share a tile's leaves.  ``pair``: CTAs of a cluster that share
    rows of the weight, with tokens of their own.  ``ctas_per_sm``: that many rings of loads under
    way on an SM.
    """

    dtype: str
    w_major: str
    bias: bool
    order: str
    tile_m: int
    split: int = 1
    pair: int = 1
    tile_n: int = 64
    tile_k: int = 64
    ctas_per_sm: int = 2


@dataclass(frozen=True)
class CpuPlan:
    """Blocks of the CPU backend: rows and columns of a block, and the multiple K is padded to.

    ``wide`` rows, and all columns, are multiplied at once where that is shown to give the bits of
    single blocks.
    dbias: ``sum_rows`` rows are added half onto half, then block after block.
    """

    rows: int = 64
    wide: int = 256
    columns: int = 256
    pad: int = 16
    sum_rows: int = 64
    sum_order: str = "halves"


@dataclass(frozen=True)
class ColumnSumPlan:
    """dbias: each of ``lanes`` threads adds every lanes-th row in order; then lanes in order."""

    lanes: int = 32
    columns: int = 64


@dataclass(frozen=True)
class ColumnSumConfig(ColumnSumPlan):
    """One compiled SM90 kernel of dbias."""

    dtype: str = "bf16"


CPU = CpuPlan()
COLUMN_SUM = ColumnSumPlan()


def contract_facts(backend: str, device: arch.Device) -> dict[str, object]:
    """Constants that a contract id covers: both orders, and the instruction family.

    On SM90 no tile is in it, as no bit depends on which one a call takes.
    """
    common: dict[str, object] = {
        "orders": ORDERS,
        "k_group": K_GROUP,
        "leaves": {"at most": LEAVES, "of": f"{K_GROUP} ceil(K / {LEAVES * K_GROUP})"},
        "rounding": "once, from fp32",
    }
    if backend == arch.CUTE_SM90:
        family = f"wgmma.m64nNk{K_GROUP}.f32"
        return common | {"family": family, "column_sum": asdict(COLUMN_SUM)}
    if backend == arch.TRITON:
        plans = {"16-bit": asdict(TRITON), "fp32": asdict(TRITON_FP32)}
        return common | {"family": "tl.dot", "plans": plans, "column_sum": asdict(COLUMN_SUM)}
    return common | {"family": "blas", "blocks": asdict(CPU), "threads": device.threads}
