"""Forward passes of each transform: which tokens are in which pass, and next to which others.

A case is a list of streams; a stream is a list of forward passes that share a cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..patch import classes
from .checks import Problem

#: The reference: each sequence alone, in one forward pass.
ALONE = "alone"

#: Of a tensor of two gradients, cuts at multiples of this many tokens keep `split_invariant`.
CUT = 16


@dataclass(frozen=True)
class Call:
    """One forward pass: ids [B, T], and the tokens in it whose rows are compared.

    where: flat places b T + t.  cells: which token each is, counted over all sequences.
    """

    ids: torch.Tensor
    where: torch.Tensor
    cells: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None
    cached: bool
    accepts: frozenset[str] = field(default_factory=frozenset)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (B, T) of the ids."""
        return tuple(self.ids.shape)

    def options(self, past: object) -> dict[str, object]:
        """Return the options of the model's forward besides ids."""
        options = {
            "position_ids": self.positions,
            "attention_mask": self.mask,
            "use_cache": self.cached,
            "past_key_values": past,
        }
        return {
            name: value
            for name, value in options.items()
            if name in self.accepts and value is not None
        }


@dataclass(frozen=True)
class Case:
    """One run of all tokens under a transform."""

    transform: str
    label: str
    streams: tuple[tuple[Call, ...], ...]


@dataclass(frozen=True)
class Grid:
    """Sequences side by side, padded to one width, with the columns of each padding before them."""

    problem: Problem
    ids: torch.Tensor
    cells: torch.Tensor
    pads: torch.Tensor

    @property
    def width(self) -> int:
        return self.ids.shape[1]

    def call(self, first: int = 0, end: int | None = None, cached: bool = False) -> Call:
        """Return the forward pass of columns first to end, after all before them."""
        end = self.width if end is None else end
        columns = torch.arange(self.width, device=self.ids.device)
        real = self.cells >= 0
        positions = (columns - self.pads[:, None]).clamp(min=0)
        padded = not bool(self._sequence().all())
        mask = self._sequence()[:, :end].long() if padded else None
        flat_places = real[:, first:end].flatten().nonzero().flatten()
        return Call(
            self.ids[:, first:end].contiguous(),
            flat_places,
            self.cells[:, first:end].flatten()[flat_places],
            positions[:, first:end].contiguous(),
            mask,
            cached,
            self.problem.accepts,
        )

    def cut(self, ends: Sequence[int]) -> tuple[Call, ...]:
        """Return forward passes through one cache, each to the next of these columns."""
        return tuple(self.call(*pair, cached=True) for pair in itertools.pairwise((0, *ends)))

    def _sequence(self) -> torch.Tensor:
        """Return the mask [B, T] of tokens, those of neighbours that are not compared included."""
        return self.cells != PADDING


PADDING, STRANGER = -2, -1


def grid(
    problem: Problem, members: Sequence[int], left_padded: bool = False, extra_columns: int = 0
) -> Grid:
    """Pad some sequences on one side to the longest and ``extra_columns``, in one batch."""
    width = max(len(problem.sequences[i]) for i in members) + extra_columns
    ids = torch.full((len(members), width), problem.pad, dtype=torch.int64, device=problem.device)
    cells = torch.full_like(ids, PADDING)
    pads = torch.zeros(len(members), dtype=torch.int64, device=problem.device)
    for row, i in enumerate(members):
        sequence = problem.sequences[i]
        pads[row] = first_column = (width - len(sequence)) if left_padded else 0
        ids[row, first_column : first_column + len(sequence)] = sequence
        first = problem.starts[i]
        cells[row, first_column : first_column + len(sequence)] = torch.arange(
            first, first + len(sequence), device=problem.device
        )
    return Grid(problem, ids, cells, pads)


def among(problem: Problem, i: int, count: int) -> Grid:
    """Batch of sequence i after count - 1 others of its length, made of all tokens."""
    target = grid(problem, [i])
    pool = torch.cat(problem.sequences)
    strangers = [
        pool.roll(7 * k + 1).repeat(-(-target.width // len(pool))) for k in range(count - 1)
    ]
    ids = torch.stack([*(s[: target.width] for s in strangers), target.ids[0]])
    cells = torch.full_like(ids, STRANGER)
    cells[-1] = target.cells[0]
    return Grid(problem, ids, cells, torch.zeros(count, dtype=torch.int64, device=ids.device))


def alone(problem: Problem, transform: str = ALONE) -> Case:
    """Case with each sequence in a forward pass of its own."""
    calls = [grid(problem, [i]).call() for i in range(len(problem.sequences))]
    return Case(transform, "each sequence alone", tuple((call,) for call in calls))


def _single_passes(transform: str, label: str, grids: Sequence[Grid]) -> Case:
    return Case(transform, label, tuple((each.call(),) for each in grids))


def _batch(problem: Problem) -> list[Case]:
    return [_single_passes("batch", "all in one batch", [grid(problem, problem.all)])]


def _compositions(problem: Problem) -> list[Case]:
    cases = [
        _single_passes(
            "compositions", f"behind {n - 1} others", [among(problem, i, n) for i in problem.all]
        )
        for n in (2, 5)
    ]
    if len(problem.all) > 1 and problem.joinable:
        backwards = problem.all[::-1]
        cases.append(
            _single_passes("compositions", "one batch, reversed", [grid(problem, backwards)])
        )
    if len(problem.all) > 2 and problem.joinable:
        pairs = [problem.all[i : i + 2] for i in range(0, len(problem.all), 2)]
        cases.append(
            _single_passes("compositions", "two at a time", [grid(problem, p) for p in pairs])
        )
    return cases


def _padding(transform: str, left_padded: bool) -> Callable[[Problem], list[Case]]:
    def cases(problem: Problem) -> list[Case]:
        grids = [[grid(problem, [i], left_padded, 1) for i in problem.all]]
        grids.append([grid(problem, problem.all, left_padded, 5)])
        labels = ("each alone and 1 column", "one batch and 5 columns")
        return [_single_passes(transform, label, g) for label, g in zip(labels, grids, strict=True)]

    return cases


def _through_cache(
    transform: str, label: str, grids: Sequence[Grid], ends: Callable[[Grid], list[int]]
) -> Case:
    return Case(transform, label, tuple(each.cut(ends(each)) for each in grids))


def _chunks(problem: Problem) -> list[Case]:
    def third(g: Grid) -> list[int]:
        step = max(1, -(-g.width // 3))
        return [*range(step, g.width, step), g.width]

    def behind_padding(g: Grid) -> list[int]:
        first = int(g.pads.max()) + 1
        return sorted({first, (first + g.width) // 2, g.width})

    single = [grid(problem, [i]) for i in problem.all]
    cases = [_through_cache("chunks", "each alone, in thirds", single, third)]
    if problem.joinable_left:
        batch = [grid(problem, problem.all, left_padded=True)]
        cases.append(_through_cache("chunks", "one batch, three cuts", batch, behind_padding))
    return cases


def _decode(problem: Problem) -> list[Case]:
    def after_half(g: Grid) -> list[int]:
        return list(range(max(1, g.width // 2), g.width + 1))

    def from_the_first(g: Grid) -> list[int]:
        return list(range(int(g.pads.max()) + 1, g.width + 1))

    single = [grid(problem, [i]) for i in problem.all]
    cases = [_through_cache("decode", "each alone, behind its first half", single, after_half)]
    if problem.joinable_left:
        batch = [grid(problem, problem.all, left_padded=True)]
        cases.append(_through_cache("decode", "one batch, token by token", batch, from_the_first))
    return cases


#: Transform -> its cases.  Gradients and compiled models have runs of another kind.
CASES: dict[str, Callable[[Problem], list[Case]]] = {
    "repeat": lambda problem: [alone(problem, "repeat")],
    "batch": _batch,
    "compositions": _compositions,
    "left_padding": _padding("left_padding", True),
    "right_padding": _padding("right_padding", False),
    "chunks": _chunks,
    "decode": _decode,
}


def cases(problem: Problem, transform: str) -> list[Case]:
    """Return the cases of one transform of outputs."""
    return CASES[transform](problem)


def micro_batches(problem: Problem, groups: Sequence[Sequence[int]]) -> list[Call]:
    """Return one forward pass per group of sequences, all padded to one width.

    The width is a multiple of `CUT` tokens where the model can be padded, or of as many as its
    patched modules ask for, so that every cut is.
    """
    longest = max(map(len, problem.sequences))
    step = max(CUT, classes.granularity_of(problem.model))
    width = longest + (-longest % step if problem.pads_right else 0)
    calls = []
    for group in groups:
        extra_columns = width - max(len(problem.sequences[i]) for i in group)
        calls.append(grid(problem, group, extra_columns=extra_columns).call())
    return calls
