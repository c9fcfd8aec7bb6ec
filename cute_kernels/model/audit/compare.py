"""Comparison of two traces: which modules are culprits, and which only received a difference.

A module is a *culprit* at a token if its output row differs from the reference's, all rows that
this one may depend on came in equal, and no call inside it is a culprit there.  So what a container
does between its children is the container's.  Where its row differs otherwise it is a *victim*.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..observe.calls import Key
from .probe import PAST, ROW, SEQUENCE, Facts
from .trace import Entry, Table, Trace


@dataclass(frozen=True)
class Verdict:
    """Verdict on one call of a module: masks over tokens [N]."""

    compared: torch.Tensor
    differs: torch.Tensor
    culprit: torch.Tensor


def compare(want: Trace, got: Trace, facts: Facts, starts: Sequence[int]) -> dict[Key, Verdict]:
    """Return the verdict on each call that has rows in both traces, in the order of their ends."""
    verdicts: dict[Key, Verdict] = {}
    explained: dict[Key | None, torch.Tensor] = {}
    none = torch.zeros(starts[-1], dtype=torch.bool, device="cpu")
    for key, entry in got.items():
        inside = explained.get(key, none)
        if key in want:
            scope = facts.scopes.get(key, SEQUENCE)
            inside = spread(inside, scope, starts)
            verdicts[key] = verdict = _judge(want[key], entry, inside, scope, starts)
            inside = inside | verdict.culprit
        # A container passes the culprits inside it on to the module around it.
        explained[entry.parent] = explained.get(entry.parent, none) | inside
    return {key: verdict for key, verdict in verdicts.items() if bool(verdict.compared.any())}


def _judge(
    want: Entry, got: Entry, inside: torch.Tensor, scope: str, starts: Sequence[int]
) -> Verdict:
    compared, differs = _differing(want.outs, got.outs, starts[-1])
    _, other_inputs = _differing(want.ins, got.ins, starts[-1])
    for entry in (want, got):
        if entry.unknown is not None:
            other_inputs = other_inputs | entry.unknown
    victims = spread(other_inputs, scope, starts)
    return Verdict(compared, differs, differs & ~victims & ~inside)


def _differing(
    want: Mapping[str, Table], got: Mapping[str, Table], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens with a row in both, those whose row differs), over all common tensors."""
    compared, differs = torch.zeros(2, count, dtype=torch.bool, device="cpu")
    for path in want.keys() & got.keys():
        both = want[path].seen & got[path].seen
        unlike = (want[path].digests != got[path].digests).any(dim=1)
        compared, differs = compared | both.cpu(), differs | (both & unlike).cpu()
    return compared, differs


def spread(mask: torch.Tensor, scope: str, starts: Sequence[int]) -> torch.Tensor:
    """Return the tokens whose row may depend on a token of ``mask``."""
    if scope == ROW:
        return mask
    reached = torch.zeros_like(mask)
    for first, end in itertools.pairwise(starts):
        part = mask[first:end]
        reached[first:end] = part.cummax(0).values if scope == PAST else part.any()
    return reached
