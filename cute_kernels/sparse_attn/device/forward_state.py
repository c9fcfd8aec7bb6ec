"""Typed bundles of a forward: buffers, tensors by row, operands, registers, positions."""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from .forward_loads import TileInfo
from .output import Handover


@dataclass(frozen=True)
class ConsumerBuffers:
    """Shared memory of the consumers.

    words: by list, word or tile, and the stage of K a step before; pV: start of the stages of V.
    """

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    words: cute.Tensor
    tile_info: TileInfo
    pV: cute.Pointer
    handover: Handover


@dataclass(frozen=True)
class RowTensors:
    """Global tensors by row: LSE [B, H, Sq], sinks [H, Sq] or None, a varlen batch's table or None.

    kv_len: Sk; q_len: rows of a head.
    """

    mLse: cute.Tensor
    mSinks: cute.Tensor | None
    mTable: cute.Tensor | None
    q_len: cutlass.Int32
    kv_len: cutlass.Int32


@dataclass(frozen=True)
class ConsumerCoord:
    """Position of a consumer thread: tile, consumer, lane in it; the ring position of step 0."""

    tile: cutlass.Int32
    consumer: cutlass.Int32
    lane: cutlass.Int32
    first_step: cutlass.Int32


@dataclass(frozen=True)
class Operands:
    """WGMMA operands of S = Q Kᵀ and O += P V."""

    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrP: cute.Tensor
    tOrV: cute.Tensor


@dataclass(frozen=True)
class Registers:
    """Accumulators and softmax state of a consumer thread; bits: mask words of its rows."""

    acc_s: cute.Tensor
    acc_o: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    factor: cute.Tensor
    shift: cute.Tensor
    bits: cute.Tensor


@dataclass(frozen=True)
class Scales:
    """Factors of the scores: c, that of exp2; inner, that of the softcap's tanh."""

    c: cutlass.Float32
    inner: cutlass.Float32
