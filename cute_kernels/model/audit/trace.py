"""Digests of every module's rows, by token, in one case."""

from __future__ import annotations

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

    ``width``: bytes of a row.  ``kept``: of the tokens asked for, their bytes; ``dtype`` of all.
    """

    digests: torch.Tensor
    seen: torch.Tensor
    width: int = 0
    dtype: torch.dtype | None = None
    kept: dict[int, torch.Tensor] = field(default_factory=dict)


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
    """Watcher of a case.  ``keep``: key -> the tokens [N] whose output bytes are kept."""

    def __init__(self, problem: Problem, keep: Mapping[Key, torch.Tensor]) -> None:
        self.entries: dict[Key, Entry] = {}
        self._facts, self._count, self._keep = problem.facts, problem.count, keep
        self._ended: dict[Key, None] = {}
        self._call: Call | None = None
        self._places: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, call: Call) -> None:
        """Set the forward pass that runs next."""
        self._call, self._places = call, {}

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (places in tensors, tokens) of the call, moved once: a copy synchronizes."""
        if device not in self._places:
            moved = self._call.where.to(device), self._call.cells.to(device)
            self._places[device] = moved
        return self._places[device]

    def before(self, key: Key, module: nn.Module, args: tuple, kwargs: dict) -> None:
        entry = self.entries.setdefault(key, Entry())
        for path, t in rows.tensors(bound(module, args, kwargs)):
            if not self._note(entry.ins, (key, "in", path), t):
                if entry.unknown is None:
                    entry.unknown = torch.zeros(self._count, dtype=torch.bool, device=t.device)
                entry.unknown[self._call.cells] = True

    def after(self, key: Key, parent: Key | None, result: object) -> None:
        entry = self.entries.setdefault(key, Entry())
        entry.parent = parent
        self._ended[key] = None
        for path, t in rows.tensors(result):
            self._note(entry.outs, (key, "out", path), t)

    def _note(self, tables: dict[str, Table], slot: tuple, t: torch.Tensor) -> bool:
        """Record a tensor's rows; return False if it should have rows and has none."""
        key, side, path = slot
        layout = self._facts.layouts.get(slot)
        if layout is None:
            return True
        call = self._call
        flat_places, cells = self._on(t.device)
        data = rows.rows(t, layout, call.shape, flat_places)
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
            cpu_cells = call.cells.cpu()
            picked = self._keep[key][cpu_cells].nonzero().flatten()
            copies = data[picked.to(t.device)].cpu()
            table.kept.update(zip(cpu_cells[picked].tolist(), copies, strict=True))
        return True

    def trace(self) -> Trace:
        """Return the record, on the CPU."""
        for entry in self.entries.values():
            for table in (*entry.ins.values(), *entry.outs.values()):
                table.digests, table.seen = table.digests.cpu(), table.seen.cpu()
            if entry.unknown is not None:
                entry.unknown = entry.unknown.cpu()
        return {key: self.entries[key] for key in self._ended}


def record(problem: Problem, case: Case, keep: Mapping[Key, torch.Tensor]) -> Trace:
    """Run a case and follow every module."""
    recorder = Recorder(problem, keep)
    with torch.no_grad(), watched(problem.model, recorder):
        for stream in case.streams:
            past = None
            for call in stream:
                recorder.begin(call)
                result = problem.model(call.ids, **call.options(past))
                past = getattr(result, "past_key_values", None)
    return recorder.trace()


def record_whole(
    run: Callable, problem: Problem, case: Case, keep: Mapping[Key, torch.Tensor]
) -> Trace:
    """Record a model without modules to follow (a compiled one): its outputs alone."""
    recorder = Recorder(problem, keep)
    with torch.no_grad():
        for (call,) in case.streams:
            recorder.begin(call)
            recorder.after(("", 0), None, run(call.ids, **call.options(None)))
    return recorder.trace()
