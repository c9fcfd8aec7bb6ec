"""``And`` and ``Or`` of element rules, and how classes of blocks combine."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from .rules import EMPTY, FULL, UNKNOWN, Band, Rule


@dataclass(frozen=True, eq=False)
class _Many(Rule):
    parts: tuple[Rule, ...]
    #: How elements of two parts combine.
    combine: ClassVar[Callable[[Tensor, Tensor], Tensor]]
    #: The class of a block that leaves it to the other parts, and the one that decides it.
    neutral: ClassVar[int]
    absorbing: ClassVar[int]

    def evaluate(self, b, h, q_idx, kv_idx):
        return reduce(self.combine, [part.evaluate(b, h, q_idx, kv_idx) for part in self.parts])

    def blocks(self, grid, b, h, m, n):
        return reduce(self.combine, [part.blocks(grid, b, h, m, n) for part in self.parts])

    def classify(self, grid, b, h, m):
        """Combine the classes of the parts: UNKNOWN where two parts are partial."""
        value = self.parts[0].classify(grid, b, h, m)
        for part in self.parts[1:]:
            part_value = part.classify(grid, b, h, m)
            both = torch.full_like(value, UNKNOWN)
            both = torch.where(value == self.neutral, part_value, both)
            both = torch.where(part_value == self.neutral, value, both)
            decided = (value == self.absorbing) | (part_value == self.absorbing)
            value = both.masked_fill(decided, self.absorbing)
        return value

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

    combine, neutral, absorbing = operator.and_, FULL, EMPTY


@dataclass(frozen=True, eq=False)
class Or(_Many):
    """Allowed where some part allows."""

    combine, neutral, absorbing = operator.or_, EMPTY, FULL


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
