"""Find modules whose rows follow other rows: a copy runs in several surroundings.

Its products are mixed.  A sequence runs alone and in batches of 3 and 10, beside other ids and a
row of NaN; a causal model also runs with longer tails, over three blocks of keys.  Results, and the
gradient of the embeddings' results, must have the same bytes each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from . import ops
from .calls import Key, watched
from .mixing import Mixing
from .repeats import pass_over
from .runs import Passes

#: Tokens of a sequence: in a part of a block of keys, in two blocks, in three.
_LENGTHS = (23, 133, 300)
#: Tokens of padding.
_PADDING = 7
#: Tokens that come one by one, behind what a cache has.
_SINGLE = 2
#: Positions that a model may leave out at the beginning.
_OFFSET = 8
#: Attributes of configs that say how many tokens a model takes.
_LIMITS = ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx", "max_seq_len")

_OF_ROWS = "its rows follow other sequences of the batch"
_OF_GRADIENTS = "its gradient follows other sequences of the batch"
_OF_TOKENS = "its rows follow the tokens behind them, or how many there are"
_OF_PADDING = "its rows follow the padding behind them"
_OF_CACHE = "its rows are others with a cache"


#: Who computed a tensor, and the part of it that counts.
_Event = tuple[str, "torch.Tensor | None"]


class Leak(NamedTuple):
    """A module whose rows follow more than they may, and what they follow."""

    module: str
    text: str


class _Run(NamedTuple):
    """One pass: ids [B, T], and the row that is looked at, of which ``length`` tokens count.

    dead: a row that is NaN.  padding: how many tokens at the end of ``row`` are padding.
    gradient: whether it goes backward.  prefill: how many tokens are in a cache when the rest is
    given one by one; 0: without a cache.
    """

    ids: torch.Tensor
    row: int = 0
    length: int = 0
    dead: int | None = None
    padding: int = 0
    gradient: bool = False
    prefill: int = 0


def leaks(model: nn.Module, root: nn.Module, ran: Mapping[str, set[str]]) -> list[Leak]:
    """Return the modules whose rows follow other rows, each by the first surroundings that show it.

    Args:
        model: A replica that was observed; it is changed.
        root: The model inside that takes ids.
        ran: Names of the ops that ran in it, by module.

    Raises whatever the model raises.
    """
    pass_over(model, ran)
    with torch.random.fork_rng(devices=[]):
        return list(_leaks(_Rows(model, root)))


def _leaks(rows: _Rows) -> Iterator[Leak]:
    short, *longer = rows.lengths
    alone = {length: _Run(rows.target[:, :length], length=length) for length in rows.lengths}
    wide = rows.beside(10, short, row=5, dead=1)
    yield from rows.compared(alone[short], wide, _OF_ROWS)
    causal = not rows.bidirectional
    if longer:
        narrow = rows.beside(3, longer[0], row=1, dead=0)
        yield from rows.compared(alone[longer[0]], narrow, _OF_ROWS)
    if causal:
        for length, tail in zip(rows.lengths, longer, strict=False):
            longer_run = alone[tail]._replace(length=length)
            yield from rows.compared(alone[length], longer_run, _OF_TOKENS)
    count = short - _PADDING
    if "attention_mask" in rows.accepts and count > 0:
        padded = rows.beside(2, short, row=0, dead=1)._replace(length=count, padding=_PADDING)
        bare = alone[short] if causal else _Run(rows.target[:, :count])
        yield from rows.compared(bare._replace(length=count), padded, _OF_PADDING)
    if causal and "past_key_values" in rows.accepts and short > _SINGLE:
        single = alone[short]._replace(prefill=short - _SINGLE)
        three = rows.beside(3, short, row=1, dead=0)._replace(prefill=short - _SINGLE)
        yield from rows.compared(single, three, _OF_ROWS)
        yield from rows.compared(alone[short], single, _OF_CACHE)
    one = alone[short]._replace(gradient=True)
    three = rows.beside(3, short, row=1, dead=0)._replace(gradient=True)
    yield from rows.compared(one, three, _OF_GRADIENTS)


class _Rows:
    """Rows of one sequence that a model gives in several surroundings."""

    def __init__(self, model: nn.Module, root: nn.Module) -> None:
        self._model, self._passes = model, Passes(root)
        self.accepts = self._passes.accepts
        limits = [getattr(root.config, name, None) for name in _LIMITS]
        most = min((limit for limit in limits if isinstance(limit, int)), default=_LENGTHS[-1])
        # Some models count positions from behind the id of padding.
        self.lengths = sorted({min(length, max(1, most - _OFFSET)) for length in _LENGTHS})
        ids = self._passes.ids(11, _LENGTHS[-1])
        self.target, self._others = ids[:1], ids[1:]
        self._mode = Mixing()
        self._known: dict[_Run, list[torch.Tensor]] = {}

    @property
    def bidirectional(self) -> bool:
        """Whether an attention that ran reads keys behind its queries."""
        return self._mode.bidirectional

    def beside(self, batch: int, length: int, row: int, dead: int) -> _Run:
        """Return the run of the target in a batch of other sequences."""
        parts = (self._others[:row], self.target, self._others[row : batch - 1])
        return _Run(torch.cat(parts)[:, :length], row, length, dead)

    def compared(self, want: _Run, got: _Run, text: str) -> Iterator[Leak]:
        """Yield a leak if the row of the second run has another byte than that of the first."""
        if any(map(_differ, self._row(want), self._row(got))):
            events = []
            if want.prefill == got.prefill:
                events = zip(self._trace(want), self._trace(got), strict=False)
            # Who computed the first part that differs; the model, if it is in none of them.
            differing = (a[0] for a, b in events if a[0] != b[0] or _differ(a[1], b[1]))
            yield Leak(next(differing, ""), text)

    def _row(self, run: _Run) -> list[torch.Tensor | None]:
        """Return the counted tokens of the row in each of the tensors that a run gives."""
        key = run._replace(ids=id(run.ids), length=0)
        if key not in self._known:
            self._known[key] = self._call(run)
        return [_part(t, run) for t in self._known[key]]

    def _call(self, run: _Run) -> list[torch.Tensor]:
        """Return what the model gives; of a run that goes backward, the embeddings' gradient."""
        leaf: list[torch.Tensor] = []

        def changed(out: torch.Tensor) -> torch.Tensor:
            if run.gradient and not leaf:
                leaf.append(out.detach().requires_grad_())
                out = leaf[0]
            if run.dead is None or len(out) != len(run.ids):
                return out
            dead = torch.arange(len(out), device="cpu") == run.dead
            return out.masked_fill(dead.view(-1, *(1 for _ in out.shape[1:])), float("nan"))

        ids, options = run.ids, {}
        if run.padding:
            ids, options["attention_mask"] = ids.clone(), torch.ones_like(ids)
            pad = getattr(self._passes.root.config, "pad_token_id", None)
            ids[run.row, -run.padding :] = pad or 0
            options["attention_mask"][run.row, -run.padding :] = 0
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed GPUs as well
        with self._passes.embedded(changed), self._mode, torch.set_grad_enabled(run.gradient):
            if run.prefill:
                ends = range(run.prefill, ids.shape[1] + 1)
                results = list(self._passes.through_cache(ids, ends))
                whole = len(results) == len(ends)
                return [torch.cat([out[0] for out in results], 1)] if whole else []
            out = self._passes.run(ids, **options)
            if not run.gradient:
                return ops.tensors(out)
            upstream = torch.randn(2, *out[0].shape[1:], dtype=torch.float32, device="cpu")
            row = torch.arange(len(ids), device="cpu") == run.row
            out[0].backward(upstream.to(out[0].dtype)[row.long()])
        return [leaf[0].grad]

    def _trace(self, run: _Run) -> list[_Event]:
        """Return what modules take and give, by whom it was computed, in the order of a run."""
        trace = _Trace(run)
        with watched(self._model, trace):
            self._call(run)
        return trace.events


class _Trace:
    """Watcher that records the counted rows of a run, and of gradients, by who computed them."""

    def __init__(self, run: _Run) -> None:
        self.events: list[_Event] = []
        self._run, self._open = run, [""]
        self._followed: dict[int, tuple[torch.Tensor, str, bool]] = {}

    def before(self, key: Key, module: nn.Module, args: tuple, kwargs: dict) -> None:
        values = [*args, *kwargs.values()]
        self._note(self._open[-1], values)
        self._open.append(key[0])
        self._follow(values, key[0], True)

    def after(self, key: Key, parent: Key | None, result: object) -> None:
        self._note(self._open.pop(), result)
        self._follow(result, self._open[-1], False)

    def _note(self, author: str, values: object) -> None:
        # Masks and positions are not there in every run.
        floats = (t for t in ops.tensors(values) if t.is_floating_point())
        self.events.extend((author, _part(t, self._run)) for t in floats)

    def _follow(self, values: object, author: str, before: bool) -> None:
        # A gradient is computed by the first module that took the tensor.
        for t in ops.tensors(values):
            known = self._followed.get(id(t))
            if not t.requires_grad or (known is not None and known[2]):
                continue
            if known is None:
                t.register_hook(lambda g, key=id(t): self._note(self._followed[key][1], g))
            self._followed[id(t)] = (t, author, before)


def _part(t: torch.Tensor, run: _Run) -> torch.Tensor | None:
    """Return the counted tokens of a run's row, [length, ...]; None: a tensor without rows."""
    batch, tokens = run.ids.shape
    if not t.is_floating_point() or not t.dim():
        return None
    if len(t) == batch:
        row = t[run.row]
    elif len(t) == batch * tokens:
        row = t[run.row * tokens : (run.row + 1) * tokens]
    else:
        return None
    dims = [dim for dim, size in enumerate(row.shape) if size == tokens]
    if not dims:
        return row.detach() if run.length == tokens else None
    return row.detach().movedim(dims[0], 0)[: run.length].clone()


def _differ(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors with rows have other bytes."""
    return one is not None and other is not None and not ops.same_bytes(one, other)
