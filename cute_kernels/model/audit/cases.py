"""Forward passes of each transform: which tokens are in which pass, and next to which others.

A case is a list of streams; a stream is a list of forward passes that share a cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..observe.runs import accepted
from ..patch import api as patch_api
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
    accepts: frozenset[str]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (B, T) of the ids."""
        return tuple(self.ids.shape)

    def options(self, past: object) -> dict[str, object]:
        """Return the options of the model's forward besides ids."""
        return accepted(
            self.accepts,
            position_ids=self.positions,
            attention_mask=self.mask,
            use_cache=self.cached,
            past_key_values=past,
        )


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

    def cut(self, ends: Iterable[int] | None) -> tuple[Call, ...]:
        """Return forward passes through one cache, each to the next end; None: one without."""
        if ends is None:
            return (self.call(),)
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


#: Label of a case, its batches, and the columns at which passes through one cache end; None: one
#: pass without a cache.
Series = tuple[str, list[Grid], Callable[[Grid], Iterable[int]] | None]


def _batch(problem: Problem) -> Iterator[Series]:
    yield "all in one batch", [grid(problem, problem.all)], None


def _compositions(problem: Problem) -> Iterator[Series]:
    every = problem.all
    for n in (2, 5):
        yield f"behind {n - 1} others", [among(problem, i, n) for i in every], None
    if len(every) > 1 and problem.joinable:
        yield "one batch, reversed", [grid(problem, every[::-1])], None
    if len(every) > 2 and problem.joinable:
        pairs = [every[i : i + 2] for i in range(0, len(every), 2)]
        yield "two at a time", [grid(problem, pair) for pair in pairs], None


def _padding(problem: Problem, left: bool) -> Iterator[Series]:
    yield "each alone and 1 column", [grid(problem, [i], left, 1) for i in problem.all], None
    yield "one batch and 5 columns", [grid(problem, problem.all, left, 5)], None


def _chunks(problem: Problem) -> Iterator[Series]:
    def thirds(g: Grid) -> Iterable[int]:
        step = max(1, -(-g.width // 3))
        return *range(step, g.width, step), g.width

    def behind_padding(g: Grid) -> Iterable[int]:
        first = int(g.pads.max()) + 1
        return sorted({first, (first + g.width) // 2, g.width})

    yield "each alone, in thirds", [grid(problem, [i]) for i in problem.all], thirds
    if problem.joinable_left:
        yield "one batch, three cuts", [grid(problem, problem.all, True)], behind_padding


def _decode(problem: Problem) -> Iterator[Series]:
    def behind_half(g: Grid) -> Iterable[int]:
        return range(max(1, g.width // 2), g.width + 1)

    def behind_padding(g: Grid) -> Iterable[int]:
        return range(int(g.pads.max()) + 1, g.width + 1)

    single = [grid(problem, [i]) for i in problem.all]
    yield "each alone, behind its first half", single, behind_half
    if problem.joinable_left:
        yield "one batch, token by token", [grid(problem, problem.all, True)], behind_padding


#: Transform -> its cases.  Gradients and compiled models have runs of another kind.
SERIES: dict[str, Callable[[Problem], Iterator[Series]]] = {
    "batch": _batch,
    "compositions": _compositions,
    "left_padding": lambda problem: _padding(problem, True),
    "right_padding": lambda problem: _padding(problem, False),
    "chunks": _chunks,
    "decode": _decode,
}


def cases(problem: Problem, transform: str) -> list[Case]:
    """Return the cases of one transform of outputs."""
    if transform not in SERIES:  # repeat, compile
        return [alone(problem, transform)]
    return [
        Case(transform, label, tuple(each.cut(ends and ends(each)) for each in grids))
        for label, grids, ends in SERIES[transform](problem)
    ]


def micro_batches(problem: Problem, groups: Sequence[Sequence[int]]) -> list[Call]:
    """Return one forward pass per group of sequences, all padded to one width.

    The width is a multiple of `CUT` tokens where the model can be padded, or of as many as its
    patched modules ask for, so that every cut is.
    """
    longest = max(map(len, problem.sequences))
    step = max(CUT, patch_api.granularity_of(problem.model))
    width = longest + (-longest % step if problem.pads_right else 0)
    calls = []
    for group in groups:
        extra_columns = width - max(len(problem.sequences[i]) for i in group)
        calls.append(grid(problem, group, extra_columns=extra_columns).call())
    return calls
