"""Typed bundles of a backward: shared memory, barriers, rings, tensors, positions."""

from dataclasses import dataclass
from typing import Protocol

import cutlass
from cutlass import cute
from cutlass.pipeline import PipelineTmaAsync

from ...dsl import tma
from ...schedulers.tiles import ticket_device
from . import varlen, walk


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
    """Global inputs of a backward: TMA sources, and the fp32 statistics of the rows."""

    q: tma.Source
    do: tma.Source
    k: tma.Source
    v: tma.Source
    mLse2: cute.Tensor
    mDelta: cute.Tensor


@dataclass(frozen=True)
class Work:
    """Tickets of a CTA: where they come from, the lists that they name, the problem sizes."""

    tickets: ticket_device.TicketRing
    lists: walk.Lists | walk.VarlenLists
    sizes: walk.Sizes


@dataclass(frozen=True)
class VarlenGrads:
    """Table of a varlen batch, and its dK and dV [B, T, H, D]."""

    mTable: cute.Tensor
    mdK: cute.Tensor
    mdV: cute.Tensor


@dataclass(frozen=True)
class Outputs:
    """dK and dV as TMA stores them; varlen_grads: the tensors themselves, of a varlen batch."""

    dk: tma.Source
    dv: tma.Source
    varlen_grads: VarlenGrads | None


@dataclass(frozen=True)
class DqTensors:
    """fp32 dQ and its semaphores."""

    mdQ: cute.Tensor
    mSemaphore: cute.Tensor


@dataclass(frozen=True)
class Scales:
    """Factors: scale of dK; c, that of exp2; inner, that of the softcap's tanh."""

    scale: cutlass.Float32
    c: cutlass.Float32
    inner: cutlass.Float32


@dataclass(frozen=True)
class Buffers:
    """Shared memory of the consumers; sP: P in fp32, of wide heads."""

    shared: SharedStorage
    sP: cute.Tensor | None


@dataclass(frozen=True)
class KvCoord:
    """Position of a ticket's keys: head, block, and the half of the block (of wide heads)."""

    head: cutlass.Int32
    block: cutlass.Int32
    sizes: walk.Sizes
    part: cutlass.Int32 | None = None


@dataclass(frozen=True)
class Staging:
    """Buffer that dK or dV is stored through: its first element, its layout, its shape."""

    pointer: cute.Pointer
    layout: cute.ComposedLayout
    shape: varlen.TileShape
