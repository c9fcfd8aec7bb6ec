"""The element rule of a block mask: a small tree that every backend can lower.

Leaves say which (query, key) pairs are allowed (here, in ``document``, ``spans`` and ``bits``),
``And`` and ``Or`` (``algebra``) combine them.  A rule answers three questions: ``evaluate``
(element by element), ``classify`` (whole blocks at once, analytic and exact for a leaf) and
``digest`` (a hash that does not depend on device, or on the order of the parts of ``And`` and
``Or``).

Lowering: dispatch on the class; ``tensors()`` are the run-time operands in tree order, with
their layouts in the class docstrings.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

# Block classes.  Only And, Or and Bits answer UNKNOWN; build then evaluates the elements.
EMPTY, PARTIAL, FULL, UNKNOWN = 0, 1, 2, 3

# The most elements that one temporary of a mask computation has (unless one block is larger).
CHUNK = 1 << 22


@dataclass(frozen=True)
class Grid:
    """A [q_len, kv_len] score matrix cut into blocks of (q, kv) elements; the last may be short."""

    q_len: int
    kv_len: int
    block_size: tuple[int, int]

    @property
    def num_q_blocks(self) -> int:
        return -(-self.q_len // self.block_size[0])

    @property
    def num_kv_blocks(self) -> int:
        return -(-self.kv_len // self.block_size[1])

    @property
    def tile(self) -> tuple[int, int]:
        """Block size cut to the lengths: the size of a stored block."""
        return min(self.block_size[0], self.q_len), min(self.block_size[1], self.kv_len)

    def q_span(self, m: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and last query position of blocks ``m``, cut to the length."""
        first = m * self.block_size[0]
        return first, (first + self.block_size[0] - 1).clamp(max=self.q_len - 1)

    def kv_span(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the first and last key position of every key block, each int64 [num_kv_blocks]."""
        first = indices(self.num_kv_blocks, device) * self.block_size[1]
        return first, (first + self.block_size[1] - 1).clamp(max=self.kv_len - 1)

    def positions(self, m: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """Return query [T, tile_q, 1] and key [T, 1, tile_kv] positions of blocks (m[t], n[t])."""
        q_idx = m[:, None] * self.block_size[0] + indices(self.tile[0], m.device)
        kv_idx = n[:, None] * self.block_size[1] + indices(self.tile[1], m.device)
        return q_idx[:, :, None], kv_idx[:, None, :]

    def inside(self, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx < self.q_len) & (kv_idx < self.kv_len)


def indices(size: int, device: torch.device) -> Tensor:
    """Return int64 [size]: 0, 1, 2, ..., whatever torch's default dtype and device are."""
    return torch.arange(size, dtype=torch.int64, device=device)


def kind_of(any_allowed: Tensor, every: Tensor) -> Tensor:
    """Return EMPTY, PARTIAL or FULL as uint8 from "any element is allowed" and "all are"."""
    return any_allowed.to(torch.uint8) + (any_allowed & every).to(torch.uint8)


def take(index: Tensor, size: int) -> Tensor:
    """Return a batch or head index into a dimension of ``size``, which may be 1."""
    return index if size > 1 else torch.zeros_like(index)


class Rule(ABC):
    """One node of the tree.  ``extent`` is (batch or 1, head or 1)."""

    @property
    def extent(self) -> tuple[int, int]:
        return 1, 1

    @abstractmethod
    def evaluate(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return bool, broadcast with the four int64 tensors; positions lie within the lengths."""

    @abstractmethod
    def classify(self, grid: Grid, b: Tensor, h: Tensor, m: Tensor) -> Tensor:
        """Classify every key block for R query blocks (b, h, m): uint8 [R, num_kv_blocks]."""

    def blocks(self, grid: Grid, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        """Return elements of T blocks, bool [T, tile_q, tile_kv]; undefined past the lengths."""
        q_idx, kv_idx = grid.positions(m, n)
        value = self.evaluate(
            b[:, None, None],
            h[:, None, None],
            q_idx.clamp(max=grid.q_len - 1),
            kv_idx.clamp(max=grid.kv_len - 1),
        )
        return value.expand(m.numel(), *grid.tile)

    def tensors(self) -> list[Tensor]:
        """Return the run-time operands, in tree order."""
        values = (getattr(self, field.name) for field in fields(self))
        return [value for value in values if isinstance(value, Tensor)]

    def structure(self) -> str:
        """Describe all but the contents of the tensors, as text."""
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            text = str(value.dtype) + str(list(value.shape)) if isinstance(value, Tensor) else value
            parts.append(f"{field.name}={text}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def digest(self) -> bytes:
        """Digest of 32 bytes, equal for equal rules on any device and in any operand order."""
        h = hashlib.sha256(self.structure().encode())
        for tensor in self.tensors():
            h.update(tensor_bytes(tensor))
        return h.digest()

    def to(self, device: torch.device | str, copy: bool = False) -> Rule:
        """Move the rule to a device; ``copy``: copy its tensors even if they are on it."""
        moved = {
            field.name: value.to(device, copy=copy)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved) if moved else self

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        settings = [f"{k}={v}" for k, v in values.items() if not isinstance(v, Tensor)]
        return f"{type(self).__name__}({', '.join(settings)})"


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return the elements of a tensor as bytes, in row-major order, for a digest."""
    # A clone, as a tensor of one element and any stride counts as contiguous but has no byte view.
    copy = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return copy.view(-1).view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True)
class Band(Rule):
    """``lo <= kv - q <= hi``; None is no bound.  Causal and sliding windows are bands."""

    lo: int | None
    hi: int | None

    def evaluate(self, b, h, q_idx, kv_idx):
        distance = kv_idx - q_idx
        value = torch.ones_like(distance, dtype=torch.bool)
        if self.lo is not None:
            value &= distance >= self.lo
        if self.hi is not None:
            value &= distance <= self.hi
        return value

    def classify(self, grid, b, h, m):
        q_first, q_last = grid.q_span(m)
        kv_first, kv_last = grid.kv_span(m.device)
        low = kv_first - q_last[:, None]
        high = kv_last - q_first[:, None]
        # A block holds every distance from low to high.
        lo = low if self.lo is None else low.clamp(min=self.lo)
        hi = high if self.hi is None else high.clamp(max=self.hi)
        return kind_of(lo <= hi, (lo == low) & (hi == high))


@dataclass(frozen=True, eq=False)
class Prefix(Rule):
    """``kv < length[b]``; length int32 [B or 1]."""

    length: Tensor

    @property
    def extent(self):
        return self.length.shape[0], 1

    def evaluate(self, b, h, q_idx, kv_idx):
        return kv_idx < self.length[take(b, self.length.shape[0])]

    def classify(self, grid, b, h, m):
        first, last = grid.kv_span(m.device)
        length = self.length[take(b, self.length.shape[0])][:, None]
        return kind_of(first < length, last < length)


@dataclass(frozen=True)
class Dilated(Rule):
    """``(kv - q) % step == phase``, 0 <= phase < step."""

    step: int
    phase: int

    def evaluate(self, b, h, q_idx, kv_idx):
        return (kv_idx - q_idx - self.phase) % self.step == 0

    def classify(self, grid, b, h, m):
        q_first, q_last = grid.q_span(m)
        kv_first, kv_last = grid.kv_span(m.device)
        low = kv_first - q_last[:, None] - self.phase
        high = kv_last - q_first[:, None] - self.phase
        largest_multiple = torch.div(high, self.step, rounding_mode="floor") * self.step
        every = (low == high) if self.step > 1 else torch.ones_like(low, dtype=torch.bool)
        return kind_of(largest_multiple >= low, every)
