"""Probe of a model by a few tokens: where rows lie, which rows a module mixes, which ops it runs.

Two grids of tokens go through the model.  Their sizes say which dimension of which tensor counts
tokens.  In the first one, each module runs again with some rows replaced: whose other rows stay as
they were looks at one row at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .. import aten
from ..observe import rows
from ..observe.calls import Key, Stack, bound, watched
from ..observe.runs import accepted

#: (sequences, tokens of each): no count is another one of the same grid or of the other.
GRIDS = ((3, 5), (2, 7))

#: Scopes of an output row's dependencies: the same row of its inputs; rows of the same
#: sequence up to it; any row of the sequence.
ROW, PAST, SEQUENCE = _WIDER = ("row", "past", "sequence")

#: Columns whose rows are replaced: the last; some that alternate with unchanged ones.
_END, _SOME = (4,), (0, 2)

#: Relative to an output's largest number: the most that rounding changes, in units of the dtype's
#: eps, and a change that is never rounding.
_ROUNDING, _LEAST = 128, 0.05

#: Arguments whose name ends so are never replaced: positions must ascend.
_FIXED = "position_ids"

#: The call of the model itself.
_MODEL: Key = ("", 0)

#: (key, "in" or "out", path of the tensor)
Slot = tuple[Key, str, str]


@dataclass(frozen=True)
class Facts:
    """Results of the probe.

    layouts: of each tensor with rows.  scopes: what each call's rows depend on.  ops: those that a
    call ran itself, outside its children, in order.  kinds: class names.  caches: whether the model
    gives a cache when it is asked to.
    """

    layouts: Mapping[Slot, rows.Layout]
    scopes: Mapping[Key, str]
    ops: Mapping[Key, tuple[str, ...]]
    kinds: Mapping[str, str]
    caches: bool

    @property
    def scope(self) -> str:
        """Dependencies of the whole model's rows."""
        return self.scopes.get(_MODEL, SEQUENCE)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Paths of the model's outputs with a row for each token."""
        return tuple(path for key, side, path in self.layouts if (key, side) == (_MODEL, "out"))


def probe(model: nn.Module, pool: torch.Tensor, accepts: frozenset[str]) -> Facts:
    """The `Facts` of a model; ``pool``: ids [n] to draw from, ``accepts``: what forward takes."""
    recorders, ops = [], {}
    for batch, tokens in GRIDS:
        repeats = -(-batch * tokens // len(pool))
        ids = pool.repeat(repeats)[: batch * tokens].view(batch, tokens)
        positions = torch.arange(tokens, device=pool.device).expand(batch, tokens).contiguous()
        recorder = _Recorder()
        with torch.no_grad(), watched(model, recorder) as stack, _Ops(stack, ops):
            model(ids, **accepted(accepts, position_ids=positions, use_cache=False))
        recorders.append(recorder)
    first, second = recorders
    inferred = {
        (*call, path): rows.infer(t.shape, others[path].shape, GRIDS)
        for call, tensors in first.tensors.items()
        if (others := second.tensors.get(call)) is not None
        for path, t in tensors.items()
        if path in others
    }
    layouts = {slot: layout for slot, layout in inferred.items() if layout is not None}
    with torch.no_grad():
        scopes = _scopes(first, layouts)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    of_calls = {key: tuple(names) for key, names in ops.items()}
    return Facts(layouts, scopes, of_calls, kinds, _caches(model, pool, accepts))


def _caches(model: nn.Module, pool: torch.Tensor, accepts: frozenset[str]) -> bool:
    """Whether a forward pass with use_cache=True returns a cache."""
    if not {"past_key_values", "use_cache"} <= accepts:
        return False
    positions = torch.zeros(1, 1, dtype=torch.int64, device=pool.device)
    with torch.no_grad():
        options = accepted(accepts, position_ids=positions, use_cache=True)
        result = model(pool[None, :1], **options)
    return getattr(result, "past_key_values", None) is not None


@dataclass
class _RecordedCall:
    """A call that can be made again with copies of its tensors, and the call around it."""

    module: nn.Module
    args: tuple
    kwargs: dict
    parent: Key | None = None


class _Recorder:
    """Watcher that keeps calls, in the order in which they begin, and copies of their tensors.

    tensors: (key, "in" or "out") -> path -> a copy.
    """

    def __init__(self) -> None:
        self.calls: dict[Key, _RecordedCall] = {}
        self.tensors: dict[tuple[Key, str], dict[str, torch.Tensor]] = {}

    def before(self, key: Key, module: nn.Module, args: tuple, kwargs: dict) -> None:
        # Copied before the module can write to them.
        inputs = dict(rows.tensors(bound(module, args, kwargs)))
        copies = {id(t): t.clone() for t in inputs.values()}
        args, kwargs = _replaced((args, kwargs), lambda t: copies.get(id(t), t))
        self.tensors[key, "in"] = {path: copies[id(t)] for path, t in inputs.items()}
        self.calls[key] = _RecordedCall(module, args, kwargs)

    def after(self, key: Key, parent: Key | None, result: object) -> None:
        self.calls[key].parent = parent
        self.tensors[key, "out"] = {path: t.clone() for path, t in rows.tensors(result)}


def _replaced(values: object, change: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """Return arguments with ``change(tensor)`` for each tensor in tuples, lists and dicts."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, change, values)


class _Ops(TorchDispatchMode):
    """Mode that records each op under the innermost running call."""

    def __init__(self, stack: Stack, ops: dict[Key, dict[str, None]]) -> None:
        super().__init__()
        self._stack, self._found = stack, ops

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if self._stack and name.removesuffix("_") not in aten.VIEWS:
            self._found.setdefault(self._stack[-1], {})[name] = None
        return func(*args, **(kwargs or {}))


def _scopes(recorder: _Recorder, layouts: Mapping[Slot, rows.Layout]) -> dict[Key, str]:
    """Dependencies of each call's rows: never less than those of a call inside it."""
    scopes: dict[Key, str] = {}
    for key, call in reversed(recorder.calls.items()):  # inner calls come first
        moved = functools.partial(_moved, recorder, layouts, key)
        scopes[key] = max(_scope(moved), scopes.get(key, ROW), key=_WIDER.index)
        if call.parent is not None:
            scopes[call.parent] = max(scopes[key], scopes.get(call.parent, ROW), key=_WIDER.index)
    return scopes


def _scope(moved: Callable[..., bool]) -> str:
    """Dependencies of the rows of one call; the sequence where they cannot be determined."""
    try:
        if moved((), _changed, _bytes):
            # Equal inputs give other bytes: only a NaN that arrives tells of a row's way.  It would
            # pass a causal mask too, as 0 times NaN.
            return PAST if moved(_SOME, _no_number, _not_a_number) else ROW
        if moved(_END, _changed, _values):
            return SEQUENCE
        return PAST if moved(_SOME, _changed, _bytes) else ROW
    except Exception:  # a module that raises at such rows shows no dependency
        return SEQUENCE


def _changed(t: torch.Tensor, rows_of_t: torch.Tensor) -> torch.Tensor:
    if t.is_floating_point() or t.is_complex():
        return 1 - 4 * rows_of_t  # finite: a key of weight 0 then adds 0
    return torch.where(rows_of_t == t.max(), t.min(), t.max())  # another value of the tensor


def _no_number(t: torch.Tensor, rows_of_t: torch.Tensor) -> torch.Tensor:
    if t.is_floating_point() or t.is_complex():
        return torch.full_like(rows_of_t, float("nan"))
    return rows_of_t


def _bytes(was: torch.Tensor, now: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((was != now).any())


def _not_a_number(was: torch.Tensor, now: torch.Tensor, dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and _bytes(
        was.view(dtype).isnan(), now.view(dtype).isnan(), dtype
    )


def _values(was: torch.Tensor, now: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether values differ beyond rounding: the order of a sum is not a dependency."""
    if not dtype.is_floating_point or _not_a_number(was, now, dtype):
        return dtype.is_floating_point
    was, now = (t.view(dtype).double().nan_to_num() for t in (was, now))
    limit = min(_ROUNDING * torch.finfo(dtype).eps, _LEAST)
    return bool((was - now).abs().max() > limit * was.abs().max())


def _moved(
    recorder: _Recorder,
    layouts: Mapping[Slot, rows.Layout],
    key: Key,
    columns: tuple[int, ...],
    value: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    unlike: Callable[[torch.Tensor, torch.Tensor, torch.dtype], bool],
) -> bool:
    """Whether rows beside replaced ones came out otherwise, as ``unlike`` sees them.

    ``columns``, ``value``: the rows that are replaced, and by what.
    """
    call = recorder.calls[key]
    paths = {id(t): path for path, t in recorder.tensors[key, "in"].items()}
    replaced = torch.zeros(GRIDS[0], dtype=torch.bool, device="cpu")
    replaced[:, list(columns)] = True
    others = (~replaced).flatten().nonzero().flatten()

    def other_rows(t: torch.Tensor) -> torch.Tensor:
        path = paths.get(id(t), _FIXED)
        layout, changed = layouts.get((key, "in", path)), t.clone()
        # Positions stay as they are: attention refuses those that go down.
        if layout is not None and not path.endswith(_FIXED):
            of_t = rows.grid(changed, layout, GRIDS[0])
            mask = replaced[: of_t.shape[0]].to(t.device)
            of_t[mask] = value(t, of_t[mask])
        return changed

    args, kwargs = _replaced((call.args, call.kwargs), other_rows)
    after = dict(rows.tensors(call.module.forward(*args, **kwargs)))
    for path, was in recorder.tensors[key, "out"].items():
        layout = layouts.get((key, "out", path))
        if layout is not None:
            places = others.to(was.device)
            pair = [rows.rows(t, layout, GRIDS[0], places) for t in (was, after[path])]
            if unlike(*pair, was.dtype):
                return True
    return False
