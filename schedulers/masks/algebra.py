"""``And`` and ``Or`` of element rules, and how classes of blocks combine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .rules import EMPTY, FULL, UNKNOWN, Band, Rule


@dataclass(frozen=True, eq=False)
class _Many(Rule):
    parts: tuple[Rule, ...]

    @property
    def extent(self):
        return tuple(max(sizes) for sizes in zip(*(p.extent for p in self.parts), strict=True))

    def tensors(self):
        return [tensor for part in self.parts for tensor in part.tensors()]

    def structure(self):
        return f"{type(self).__name__}({', '.join(p.structure() for p in self.parts)})"

    def digest(self):
        digests = sorted({part.digest() for part in self.parts})
        if len(digests) == 1:
            return digests[0]
        return hashlib.sha256(type(self).__name__.encode() + b"".join(digests)).digest()

    def to(self, device, copy=False):
        return type(self)(tuple(part.to(device, copy) for part in self.parts))

    def __str__(self):
        sign = " & " if isinstance(self, And) else " | "
        return "(" + sign.join(str(part) for part in self.parts) + ")"


@dataclass(frozen=True, eq=False)
class And(_Many):
    """Allowed where every part allows."""

    def evaluate(self, b, h, q_idx, kv_idx):
        value = self.parts[0].evaluate(b, h, q_idx, kv_idx)
        for part in self.parts[1:]:
            value = value & part.evaluate(b, h, q_idx, kv_idx)
        return value

    def blocks(self, grid, b, h, m, n):
        value = self.parts[0].blocks(grid, b, h, m, n)
        for part in self.parts[1:]:
            value = value & part.blocks(grid, b, h, m, n)
        return value

    def classify(self, grid, b, h, m):
        return _fold(self.parts, grid, b, h, m, neutral=FULL, absorbing=EMPTY)


@dataclass(frozen=True, eq=False)
class Or(_Many):
    """Allowed where some part allows."""

    def evaluate(self, b, h, q_idx, kv_idx):
        value = self.parts[0].evaluate(b, h, q_idx, kv_idx)
        for part in self.parts[1:]:
            value = value | part.evaluate(b, h, q_idx, kv_idx)
        return value

    def blocks(self, grid, b, h, m, n):
        value = self.parts[0].blocks(grid, b, h, m, n)
        for part in self.parts[1:]:
            value = value | part.blocks(grid, b, h, m, n)
        return value

    def classify(self, grid, b, h, m):
        return _fold(self.parts, grid, b, h, m, neutral=EMPTY, absorbing=FULL)


def _fold(parts, grid, b, h, m, *, neutral: int, absorbing: int) -> Tensor:
    """Combine the classes of parts: UNKNOWN where two parts are partial."""
    value = parts[0].classify(grid, b, h, m)
    for part in parts[1:]:
        part_value = part.classify(grid, b, h, m)
        both = torch.full_like(value, UNKNOWN)
        both = torch.where(value == neutral, part_value, both)
        both = torch.where(part_value == neutral, value, both)
        value = both.masked_fill((value == absorbing) | (part_value == absorbing), absorbing)
    return value


def all_of(*rules: Rule) -> Rule:
    """Return the conjunction: nested ``And`` flattened, bands merged into one."""
    parts = [p for rule in rules for p in (rule.parts if isinstance(rule, And) else (rule,))]
    bands = [part for part in parts if isinstance(part, Band)]
    other_parts = [part for part in parts if not isinstance(part, Band)]
    if bands:
        lo = max((band.lo for band in bands if band.lo is not None), default=None)
        hi = min((band.hi for band in bands if band.hi is not None), default=None)
        if not other_parts or (lo, hi) != (None, None):
            other_parts.insert(0, Band(lo, hi))
    return other_parts[0] if len(other_parts) == 1 else And(tuple(other_parts))


def any_of(*rules: Rule) -> Rule:
    """The disjunction, nested ``Or`` flattened."""
    parts = [p for rule in rules for p in (rule.parts if isinstance(rule, Or) else (rule,))]
    return parts[0] if len(parts) == 1 else Or(tuple(parts))
