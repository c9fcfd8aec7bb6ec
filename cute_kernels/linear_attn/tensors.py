"""Operands of each op, and the sequences of a batch or of a pack."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..errors import ArgumentValueError, expected


class Conv(NamedTuple):
    """Operands of a convolution.

    x: Rows [N, D].  weight: [D, W].  bias: [D] or None.  initial: [S, D, W - 1], the rows before
    each sequence, or None: zeros.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    initial: torch.Tensor | None


class DeltaRule(NamedTuple):
    """Operands of a gated delta rule.

    q, k: Rows [N, Hk, K].  v: [N, HV, V]; k head h serves the HV / Hk v heads from h HV / Hk on.
    g: [N, HV], or [N, HV, K] of Kimi delta attention, fp32, the natural log of a row's decay.
    beta: [N, HV], the dtype of q or fp32.
    initial: [S, HV, K, V], fp32, the state before each sequence's first row, or None: zeros.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial: torch.Tensor | None


class Last(NamedTuple):
    """Last states of sequences, and the rows after which they are taken.

    states: [S, HV, K, V], fp32.  lag: -1: after the last row; else after the last whole chunk of
    all rows but the last ``lag``, which may yet be dropped; the initial state if there is none.
    """

    states: torch.Tensor
    lag: int = -1


class DeltaSaved(NamedTuple):
    """Tensors that the forward of a gated delta rule leaves to its backward.

    states: [slots, HV, K, V], the state before each chunk, at its slot of `Sequences.slots`; fp32
    on the CPU, whose other tensors are of size 0, and bf16 in Triton.  decay: as g, fp32.
    inner, and with gates by channel scores: [N, HV, chunk], bf16.  u: [N, HV, V], bf16.
    """

    states: torch.Tensor
    decay: torch.Tensor
    inner: torch.Tensor
    u: torch.Tensor
    scores: torch.Tensor


class DeltaRecord(NamedTuple):
    """Tensors of a cache; `triton.delta_step.delta_step` writes all of it.

    tensors: state [slots, HV, K, V], fp32, and the rings of k, v, g, beta, [slots R + 1, H, ...].
    derived: Those of r and u [slots R + 1, HV, V] and of rows of A [slots R + 1, HV, 64], bf16.
    rounded: [slots, HV, K V], bf16, the state rounded, in the order of the SM90 kernel, without
        which it is empty.
    grid, length, made, rounded_at: [slots], int64; made: rows before it are in the derived rings;
        rounded_at: the grid + 1 where ``rounded`` holds its state.
    rows: R.  drafts: Last rows that may yet be dropped.
    """

    tensors: tuple[torch.Tensor, ...]
    derived: tuple[torch.Tensor, ...]
    rounded: torch.Tensor
    grid: torch.Tensor
    length: torch.Tensor
    made: torch.Tensor
    rounded_at: torch.Tensor
    rows: int
    drafts: int


class StepOptions(NamedTuple):
    """How the steps of a state space are made of dt: softplus first, then clamped, or neither."""

    softplus: bool
    low: float
    high: float


class StateSpace(NamedTuple):
    """Operands of a state space scan, or of a selective scan.

    x, z: Rows [N, H, P].  dt: [N, H].  A: [H], fp32.  B, C: [N, G, N_]; group g serves the H / G
    heads from g H / G on.  D: [H] or [H, P].  dt_bias: [H].  initial: [S, H, P, N_], fp32, the
    state before each sequence's first row.  D, z, dt_bias, initial may be None.

    A selective scan has H channels: x, z [N, H], A [H, N_], D [H] and initial [S, H, N_].
    """

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial: torch.Tensor | None


class StateSpaceSaved(NamedTuple):
    """Tensors that the forward of a state space scan leaves to its backward.

    states: [slots, H, P, N_], the state before each chunk, at its slot of `Sequences.slots`; fp32
    on the CPU, whose other tensors are of size 0, and bf16 in Triton.  step, decay: [H, N], fp32.
    ungated: [N, H, P], bf16, the rows before the gate z; of size 0 without z.

    A selective scan has fp32 states, [slots, H, N_] on the CPU and [slots, N_, H] in Triton, which
    has step [N, H] too; the others are of size 0.
    """

    states: torch.Tensor
    step: torch.Tensor
    decay: torch.Tensor
    ungated: torch.Tensor


class Gate(NamedTuple):
    """Operands of a decay.

    a: Rows [N, C], C a multiple of H: C / H consecutive channels have a head's A_log.  A_log: [H].
    dt_bias: [C] or None.
    """

    a: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor | None


@dataclass(frozen=True)
class Sequences:
    """Sequences among N rows: a batch of equal lengths, or a pack.

    Attributes:
        rows: N; those of a pack that lie after its last sequence belong to none.
        length: Rows of each sequence of a batch; 0 of a pack.
        offsets: [S + 1], int32 or int64, the rows at which sequences of a pack begin and the last
            one ends; None of a batch.
    """

    rows: int
    length: int
    offsets: torch.Tensor | None

    @property
    def count(self) -> int:
        """Number of sequences."""
        if self.offsets is not None:
            return self.offsets.shape[0] - 1
        return self.rows // self.length if self.length else 0

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(N, rows of a sequence of a batch, sequences), as kernels take them."""
        return self.rows, self.length, self.count

    def bounds(self) -> list[tuple[int, int]]:
        """(first row, end) of each sequence; reads the offsets on the host.

        Raises:
            ArgumentValueError: the offsets do not ascend from 0 to at most N.
        """
        if self.offsets is None:
            return [(i * self.length, (i + 1) * self.length) for i in range(self.count)]
        offsets = self.offsets.tolist()
        if offsets != sorted(offsets) or offsets[0] != 0 or offsets[-1] > self.rows:
            want = f"numbers that ascend from 0 to at most {self.rows}, the T of x"
            raise ArgumentValueError(expected("cu_seqlens", want, offsets))
        return list(itertools.pairwise(offsets))

    def slots(self, size: int) -> int:
        """Number of programs that a grid needs for all chunks, whatever the offsets say.

        Chunk c of sequence s of a pack has slot offsets[s] // size + s + c; those that no chunk has
        do nothing, and the last sequence's are followed by the rows that belong to none.
        """
        if self.offsets is None:
            return self.count * -(-self.length // size)
        return self.rows // size + self.count + 1


class Gated(NamedTuple):
    """Operands of a gated norm: x and gate, rows [M, D]; weight [D] or None (1)."""

    x: torch.Tensor
    weight: torch.Tensor | None
    gate: torch.Tensor


class GatedRule(NamedTuple):
    """Rule of a gated norm; ``activation``: "silu" or "sigmoid"."""

    activation: str
    eps: float
    norm_before_gate: bool
    group_size: int


#: Gradients have the tuples of their operands; None: one that is not needed.  Those of rows and
#: states are written, of the operands' dtypes; those of parameters, fp32, are added to.
ConvGradients, GateGradients, GatedGradients = Conv, Gate, Gated
DeltaGradients, StateSpaceGradients = DeltaRule, StateSpace
