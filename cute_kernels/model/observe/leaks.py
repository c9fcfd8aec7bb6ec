"""Test of whose rows follow what: a copy runs in several surroundings, its products mixed.

A sequence runs alone and in batches of 3 and 10, beside other ids and a row of NaN; behind a causal
model it also runs with longer tails, over three blocks of keys.  What it gives, and the gradient of
what its embeddings give, has the same bytes each time.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from . import ops
from .mixing import Mixing
from .repeats import pass_over

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
        return list(_leaks(_Passes(model, root)))


def _leaks(passes: _Passes) -> Iterator[Leak]:
    short, *longer = passes.lengths
    alone = {length: _Run(passes.target[:, :length], length=length) for length in passes.lengths}
    wide = passes.beside(10, short, row=5, dead=1)
    yield from passes.compared(alone[short], wide, _OF_ROWS)
    causal = not passes.bidirectional
    if longer:
        narrow = passes.beside(3, longer[0], row=1, dead=0)
        yield from passes.compared(alone[longer[0]], narrow, _OF_ROWS)
    if causal:
        for length, tail in zip(passes.lengths, longer, strict=False):
            behind = alone[tail]._replace(length=length)
            yield from passes.compared(alone[length], behind, _OF_TOKENS)
    count = short - _PADDING
    if passes.takes_masks and count > 0:
        padded = passes.beside(2, short, row=0, dead=1)._replace(length=count, padding=_PADDING)
        bare = alone[short] if causal else _Run(passes.target[:, :count])
        yield from passes.compared(bare._replace(length=count), padded, _OF_PADDING)
    if causal and passes.takes_caches and short > _SINGLE:
        single = alone[short]._replace(prefill=short - _SINGLE)
        three = passes.beside(3, short, row=1, dead=0)._replace(prefill=short - _SINGLE)
        yield from passes.compared(single, three, _OF_ROWS)
        yield from passes.compared(alone[short], single, _OF_CACHE)
    one = alone[short]._replace(gradient=True)
    three = passes.beside(3, short, row=1, dead=0)._replace(gradient=True)
    yield from passes.compared(one, three, _OF_GRADIENTS)


class _Passes:
    """Runs of a model, and what its row gave in each."""

    def __init__(self, model: nn.Module, root: nn.Module) -> None:
        self._model, self._root = model, root
        self._accepts = set(inspect.signature(type(root).forward).parameters)
        self.takes_masks = "attention_mask" in self._accepts
        self.takes_caches = {"past_key_values", "use_cache"} <= self._accepts
        limits = [getattr(root.config, name, None) for name in _LIMITS]
        most = min((limit for limit in limits if isinstance(limit, int)), default=_LENGTHS[-1])
        # Some models count positions from behind the id of padding.
        self.lengths = sorted({min(length, max(1, most - _OFFSET)) for length in _LENGTHS})
        embeddings = root.get_input_embeddings()
        count = getattr(embeddings, "num_embeddings", None) or root.config.vocab_size
        generator = torch.Generator(device="cpu").manual_seed(2)
        size = (11, _LENGTHS[-1])
        # Ids at the end may mean something to a model.
        most = max(2, count - count // 8)
        ids = torch.randint(1, most, size, generator=generator, device="cpu")
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
        if _differ(self._row(want), self._row(got)):
            together = want.prefill == got.prefill
            culprit = _culprit(self._trace(want), self._trace(got)) if together else ""
            yield Leak(culprit, text)

    def _row(self, run: _Run) -> list[torch.Tensor | None]:
        """Return the counted tokens of the row in each of the tensors that a run gives."""
        key = run._replace(ids=id(run.ids), length=0)
        if key not in self._known:
            self._known[key] = self._call(run)
        return [_part(t, run) for t in self._known[key]]

    def _call(self, run: _Run) -> list[torch.Tensor]:
        """Return what the model gives; of a run that goes backward, the embeddings' gradient."""
        leaf: list[torch.Tensor] = []

        def embedded(module: nn.Module, args: tuple, out: torch.Tensor) -> torch.Tensor:
            if run.gradient and not leaf:
                leaf.append(out.detach().requires_grad_())
                out = leaf[0]
            # Models may write into what the embedding gives: it is no leaf.
            out = out.clone()
            if run.dead is not None and len(out) == len(run.ids):
                out[run.dead] = float("nan")
            return out

        ids, options = run.ids, {"use_cache": False, "output_router_logits": False}
        if run.padding:
            ids, options["attention_mask"] = ids.clone(), torch.ones_like(ids)
            ids[run.row, -run.padding :] = getattr(self._root.config, "pad_token_id", None) or 0
            options["attention_mask"][run.row, -run.padding :] = 0
        options = {name: value for name, value in options.items() if name in self._accepts}
        torch.manual_seed(0)
        handle = self._root.get_input_embeddings().register_forward_hook(embedded)
        try:
            with self._mode, torch.set_grad_enabled(run.gradient):
                if run.prefill:
                    return self._cached(run, options)
                out = self._root(ids, **options)
                if not run.gradient:
                    return ops.tensors(out)
                upstream = torch.randn(2, *out[0].shape[1:], dtype=torch.float32, device="cpu")
                upstream = upstream.to(out[0].dtype)
                row = torch.arange(len(ids), device="cpu") == run.row
                out[0].backward(upstream[row.long()])
        finally:
            handle.remove()
        return [leaf[0].grad]

    def _cached(self, run: _Run, options: dict[str, object]) -> list[torch.Tensor]:
        """Return the first result of a prefill and of single tokens, [B, T, ...]."""
        tokens, past, parts = run.ids.shape[1], None, []
        cuts = [0, *range(run.prefill, tokens + 1)]
        for first, last in itertools.pairwise(cuts):
            out = self._root(
                run.ids[:, first:last], **{**options, "use_cache": True}, past_key_values=past
            )
            past = getattr(out, "past_key_values", None)
            if past is None:
                return []
            parts.append(out[0])
        return [torch.cat(parts, 1)]

    def _trace(self, run: _Run) -> list[_Event]:
        """Return what modules take and give, by whom it was computed, in the order of a run."""
        events: list[_Event] = []
        names = {id(module): name for name, module in self._model.named_modules()}
        stack, handles = [""], []
        followed: dict[int, tuple[torch.Tensor, str, bool]] = {}

        def note(author: str, values: object) -> None:
            # Masks and positions are not there in every run.
            floats = (t for t in ops.tensors(values) if t.is_floating_point())
            events.extend((author, _part(t, run)) for t in floats)

        def follow(values: object, author: str, before: bool) -> None:
            # A gradient is computed by the first module that took the tensor.
            for t in ops.tensors(values):
                if not t.requires_grad or followed.get(id(t), (t, "", False))[2]:
                    continue
                if id(t) not in followed:
                    t.register_hook(lambda grad, key=id(t): note(followed[key][1], grad))
                followed[id(t)] = (t, author, before)

        def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
            note(stack[-1], [*args, *kwargs.values()])
            stack.append(names[id(module)])
            follow([*args, *kwargs.values()], stack[-1], True)

        def leave(module: nn.Module, args: tuple, out: object) -> None:
            note(stack.pop(), out)
            follow(out, stack[-1], False)

        for module in self._model.modules():
            enters = module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
            handles += [enters, module.register_forward_hook(leave)]
        try:
            self._call(run)
        finally:
            for handle in handles:
                handle.remove()
        return events


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


def _differ(ours: Sequence[torch.Tensor | None], theirs: Sequence[torch.Tensor | None]) -> bool:
    return any(map(_apart, ours, theirs))


def _apart(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors with rows have other bytes."""
    if one is None or other is None:
        return False
    return one.shape != other.shape or not ops.bytes_of(one).equal(ops.bytes_of(other))


def _culprit(ours: list[_Event], theirs: list[_Event]) -> str:
    """Return who computed the first part that differs; the model, if it is in none of them."""
    pairs = zip(ours, theirs, strict=False)
    apart = (one[0] for one, other in pairs if one[0] != other[0] or _apart(one[1], other[1]))
    return next(apart, "")
