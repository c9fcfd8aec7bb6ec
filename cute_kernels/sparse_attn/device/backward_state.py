"""Typed bundles of a backward: shared memory, barriers, rings, tensors, positions."""

from dataclasses import dataclass
from typing import Protocol

import cutlass
from cutlass import cute
from cutlass.pipeline import PipelineTmaAsync

from ...dsl import tma
from . import walk


class SharedStorage(Protocol):
    """Shared memory of a CTA, the struct of ``BackwardTiles.storage``.

    q_ring, do_ring, singles, dq, tickets: mbarriers; slots: the tickets in flight; sLse2, sDelta:
    statistics of the rows of each stage; sK to sdQ: buffers of tiles.
    """

    q_ring: cute.struct.MemRange
    do_ring: cute.struct.MemRange
    singles: cute.struct.MemRange
    dq: cute.struct.MemRange
    tickets: cute.struct.MemRange
    slots: cute.struct.MemRange
    sLse2: cute.struct.MemRange
    sDelta: cute.struct.MemRange
    sK: cute.struct.MemRange
    sV: cute.struct.MemRange
    sQ: cute.struct.MemRange
    sdO: cute.struct.MemRange
    sdS: cute.struct.MemRange
    sdQ: cute.struct.MemRange


@dataclass(frozen=True)
class Barriers:
    """mbarriers of the buffers of K, of V, and of dQ; of tickets whose last turns have come.

    tail: of a varlen batch's tiles that a sequence ends in, see ``device/varlen``.
    """

    k_full: cute.Pointer
    k_empty: cute.Pointer
    v_full: cute.Pointer
    v_empty: cute.Pointer
    last_turns: cute.Pointer
    dq_full: cute.Pointer
    dq_empty: cute.Pointer
    tail: cute.Pointer | None = None


@dataclass(frozen=True)
class Rings:
    """Rings of Q with lse2, and of dO with delta."""

    q: PipelineTmaAsync
    do: PipelineTmaAsync


@dataclass(frozen=True)
class Sources:
    """TMA sources of Q, dO, K and V, and the targets of dK and dV."""

    q: tma.Source
    do: tma.Source
    k: tma.Source
    v: tma.Source
    dk: tma.Source
    dv: tma.Source


@dataclass(frozen=True)
class Tensors:
    """Global tensors besides: statistics of the rows, fp32 dQ, its semaphores, tickets, the mask.

    mTile: the mask tile of each entry; mWords: the words of the mask tiles, keys as rows; mTable,
    mdK, mdV: of a varlen batch, or None.
    """

    mLse2: cute.Tensor
    mDelta: cute.Tensor
    mdQ: cute.Tensor
    mSemaphore: cute.Tensor
    mCounter: cute.Tensor
    lists: walk.Lists | walk.VarlenLists
    sizes: walk.Sizes
    mTile: cute.Tensor | None
    mWords: cute.Tensor | None
    mTable: cute.Tensor | None
    mdK: cute.Tensor | None
    mdV: cute.Tensor | None


@dataclass(frozen=True)
class Scalars:
    """Factors: scale of dK; c of exp2; inner of the softcap's tanh.  The band lo, hi."""

    scale: cutlass.Float32
    c: cutlass.Float32
    inner: cutlass.Float32
    lo: cutlass.Int32
    hi: cutlass.Int32


@dataclass(frozen=True)
class Cta:
    """What the roles of a CTA work with; sP: P in fp32, of wide heads, or None."""

    sources: Sources
    tensors: Tensors
    scalars: Scalars
    shared: SharedStorage
    sP: cute.Tensor | None
    rings: Rings
    barriers: Barriers
    work: walk.Work


@dataclass(frozen=True)
class Staging:
    """A tile of dK or dV on its way out: its buffer, the matrix and tensor that it goes to.

    pTile: first element of the buffer; mX: the tensor of a varlen batch.
    """

    matrix: tma.Source
    sTile: cute.Tensor
    pTile: cute.Pointer
    mX: cute.Tensor | None
