"""Forward passes of each transform: which tokens are in which pass, and next to which others.

A case is a list of streams; a stream is a list of forward passes that share a cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    fixed: the options of the model's forward besides ids and the cache.
    """

    ids: torch.Tensor
    where: torch.Tensor
    cells: torch.Tensor
    fixed: Mapping[str, object]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (B, T) of the ids."""
        return tuple(self.ids.shape)

    def options(self, past: object) -> dict[str, object]:
        """Return the options of the model's forward besides ids."""
        return {**self.fixed, **({} if past is None else {"past_key_values": past})}


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

    def call(self, first: int, end: int, cached: bool) -> Call:
        """Return the forward pass of columns first to end, after all before them."""
        columns = torch.arange(self.width, device=self.ids.device)
        positions = (columns - self.pads[:, None]).clamp(min=0)
        # Neighbours that are not compared are tokens too.
        is_token = self.cells != PADDING
        cells = self.cells[:, first:end].flatten()
        flat_places = (cells >= 0).nonzero().flatten()
        fixed = accepted(
            self.problem.accepts,
            position_ids=positions[:, first:end].contiguous(),
            attention_mask=None if is_token.all() else is_token[:, :end].long(),
            use_cache=cached,
        )
        return Call(self.ids[:, first:end].contiguous(), flat_places, cells[flat_places], fixed)

    def cut(self, ends: Iterable[int] | None) -> tuple[Call, ...]:
        """Return forward passes through one cache, each to the next end; None: one without."""
        if ends is None:
            return (self.call(0, self.width, False),)
        return tuple(self.call(*pair, True) for pair in itertools.pairwise((0, *ends)))


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
        sequence, start = problem.sequences[i], problem.starts[i]
        pads[row] = first = (width - len(sequence)) if left_padded else 0
        columns = slice(first, first + len(sequence))
        ids[row, columns] = sequence
        cells[row, columns] = torch.arange(start, start + len(sequence), device=problem.device)
    return Grid(problem, ids, cells, pads)


def among(problem: Problem, i: int, count: int) -> Grid:
    """Batch of sequence i after count - 1 others of its length, made of all tokens."""
    target = grid(problem, [i])
    pool = torch.cat(problem.sequences)
    strangers = [pool.roll(7 * k + 1)[: target.width] for k in range(count - 1)]
    ids = torch.stack([*strangers, target.ids[0]])
    cells = torch.full_like(ids, STRANGER)
    cells[-1] = target.cells[0]
    return Grid(problem, ids, cells, torch.zeros_like(ids[:, 0]))


def singles(problem: Problem, left_padded: bool = False, extra_columns: int = 0) -> list[Grid]:
    """Each sequence in a grid of its own."""
    return [grid(problem, [i], left_padded, extra_columns) for i in problem.all]


def alone(problem: Problem, transform: str = ALONE) -> Case:
    """Case with each sequence in a forward pass of its own."""
    streams = tuple(each.cut(None) for each in singles(problem))
    return Case(transform, "each sequence alone", streams)


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
    yield "each alone and 1 column", singles(problem, left, 1), None
    yield "one batch and 5 columns", [grid(problem, problem.all, left, 5)], None


def _chunks(problem: Problem) -> Iterator[Series]:
    def thirds(g: Grid) -> Iterable[int]:
        step = max(1, -(-g.width // 3))
        return *range(step, g.width, step), g.width

    def behind_padding(g: Grid) -> Iterable[int]:
        first = int(g.pads.max()) + 1
        return sorted({first, (first + g.width) // 2, g.width})

    yield "each alone, in thirds", singles(problem), thirds
    if problem.joinable_left:
        yield "one batch, three cuts", [grid(problem, problem.all, True)], behind_padding


def _decode(problem: Problem) -> Iterator[Series]:
    def behind_half(g: Grid) -> Iterable[int]:
        return range(max(1, g.width // 2), g.width + 1)

    def behind_padding(g: Grid) -> Iterable[int]:
        return range(int(g.pads.max()) + 1, g.width + 1)

    yield "each alone, behind its first half", singles(problem), behind_half
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
        calls += grid(problem, group, extra_columns=extra_columns).cut(None)
    return calls
