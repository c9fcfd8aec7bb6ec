"""Digests of every module's rows, by token, in one case."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ..observe import rows
from ..observe.calls import Key, bound, watched
from .cases import Call, Case
from .checks import Problem


@dataclass
class Table:
    """Digests [N, 2] of one tensor's rows, and for which tokens there is one [N].

    ``width``: bytes of a row.  ``stored``: of the tokens asked for, their bytes; ``dtype`` of all.
    """

    digests: torch.Tensor
    seen: torch.Tensor
    width: int = 0
    dtype: torch.dtype | None = None
    stored: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Entry:
    """One call of a module: its inputs' and outputs' tables, by path.

    ``unknown``: tokens at which an input should have had a row and had another shape.
    """

    parent: Key | None = None
    ins: dict[str, Table] = field(default_factory=dict)
    outs: dict[str, Table] = field(default_factory=dict)
    unknown: torch.Tensor | None = None


#: Entries in the order in which the calls ended: what is inside a module comes before it.
Trace = dict[Key, Entry]


class Recorder:
    """Watcher of a case.  ``keep``: key -> the tokens [N] whose output bytes are kept.

    entries: the trace.  call: the forward pass that runs.
    """

    def __init__(self, problem: Problem, keep: Mapping[Key, torch.Tensor]) -> None:
        self.entries: Trace = {}
        self.call: Call | None = None
        self._layouts, self._count, self._keep = problem.facts.layouts, problem.count, keep

    def before(self, key: Key, module: nn.Module, args: tuple, kwargs: dict) -> None:
        entry = self.entries.setdefault(key, Entry())
        for path, t in rows.tensors(bound(module, args, kwargs)):
            if not self._note(entry.ins, (key, "in", path), t):
                if entry.unknown is None:
                    entry.unknown = torch.zeros(self._count, dtype=torch.bool, device="cpu")
                entry.unknown[self.call.cells.cpu()] = True

    def after(self, key: Key, parent: Key | None, result: object) -> None:
        entry = self.entries[key] = self.entries.pop(key, Entry())
        entry.parent = parent
        for path, t in rows.tensors(result):
            self._note(entry.outs, (key, "out", path), t)

    def _note(self, tables: dict[str, Table], slot: tuple, t: torch.Tensor) -> bool:
        """Record a tensor's rows; return False if it should have rows and has none."""
        key, side, path = slot
        layout = self._layouts.get(slot)
        if layout is None:
            return True
        flat_places, cells = self.call.where.to(t.device), self.call.cells.to(t.device)
        data = rows.rows(t, layout, self.call.shape, flat_places)
        if data is None:
            return False
        if path not in tables:
            empty = torch.zeros(self._count, 2, dtype=torch.int64, device=t.device)
            seen = torch.zeros(self._count, dtype=torch.bool, device=t.device)
            tables[path] = Table(empty, seen, data.shape[1], t.dtype)
        table = tables[path]
        table.digests[cells] = rows.digest(data, t.dtype)
        table.seen[cells] = True
        if side == "out" and key in self._keep:
            cpu_cells = cells.cpu()
            picked = self._keep[key][cpu_cells].nonzero().flatten()
            copies = data[picked.to(t.device)].cpu()
            table.stored.update(zip(cpu_cells[picked].tolist(), copies, strict=True))
        return True


def record(
    problem: Problem, case: Case, keep: Mapping[Key, torch.Tensor], compiled: Callable | None = None
) -> Trace:
    """Run a case and follow every module; of a ``compiled`` model, the outputs alone."""
    recorder = Recorder(problem, keep)
    whole = compiled is not None
    run = compiled if whole else problem.model
    following = contextlib.nullcontext() if whole else watched(problem.model, recorder)
    with torch.no_grad(), following:
        for stream in case.streams:
            past = None
            for call in stream:
                recorder.call = call
                result = run(call.ids, **call.options(past))
                past = getattr(result, "past_key_values", None)
                if whole:
                    recorder.after(("", 0), None, result)
    return recorder.entries
