"""Operands, shared memory and rings of a forward, as all of its roles take them."""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.pipeline import PipelineTmaAsync

from ...dsl import tma
from .output import Handover
from .tile_scheduler import TileInfo


@dataclass(frozen=True)
class Sources:
    """TMA sources of Q, K and V, and the target of O."""

    q: tma.Source
    k: tma.Source
    v: tma.Source
    o: tma.Source


@dataclass(frozen=True)
class Tensors:
    """Global tensors besides the TMA sources; what the mask's form does not need is None.

    mK: for its shape; mLse: [B, H, Sq]; mCount, mEntry, mTile, mWords: as ``LoweredMask`` has them;
    mRanges: int32 [B, Sq, 4], see ``kv_ranges``; mSinks: [H, Sq]; mO, mTable: of a varlen batch;
    mCounter: of ``tile_scheduler``.
    """

    mK: cute.Tensor
    mLse: cute.Tensor
    mCount: cute.Tensor | None
    mEntry: cute.Tensor | None
    mTile: cute.Tensor | None
    mWords: cute.Tensor | None
    mRanges: cute.Tensor | None
    mSinks: cute.Tensor | None
    mO: cute.Tensor | None
    mTable: cute.Tensor | None
    mCounter: cute.Tensor


@dataclass(frozen=True)
class Scalars:
    """The band lo, hi; factors of the scores: c of exp2, inner of the softcap's tanh."""

    lo: cutlass.Int32
    hi: cutlass.Int32
    c: cutlass.Float32
    inner: cutlass.Float32


@dataclass(frozen=True)
class Sizes:
    """Sizes that tiles are counted by: all tiles of the launch, rows of a head, heads."""

    tiles: cutlass.Int32
    q_len: cutlass.Int32
    heads: cutlass.Int32
    kv_heads: cutlass.Int32


@dataclass(frozen=True)
class Rings:
    """Rings of Q, K and V."""

    q: PipelineTmaAsync
    k: PipelineTmaAsync
    v: PipelineTmaAsync


@dataclass(frozen=True)
class Buffers:
    """Shared memory of a CTA.

    steps: by list, `Step` or mask tile, and the stage of K a step before; the first step's come
    with its K.  pV: start of the stages of V.  tail: a varlen batch's tail barrier.
    """

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    steps: cute.Tensor
    tile_info: TileInfo
    pV: cute.Pointer
    tail: cute.Pointer
    handover: Handover
