"""Probe of a model by a few tokens: where rows lie, which rows a module mixes, which ops it runs.

Two grids of tokens go through the model.  Their sizes say which dimension of which tensor counts
tokens.  In the first one, each module runs again with some rows replaced: whose other rows stay as
they were looks at one row at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .. import aten
from ..observe.calls import Key, Stack, bound, watched
from . import rows

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

#: Argument that is never replaced: positions must ascend.
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
    shapes, recorded, parents, ops = [], {}, {}, {}
    for number, (batch, tokens) in enumerate(GRIDS):
        repeats = -(-batch * tokens // len(pool))
        ids = pool.repeat(repeats)[: batch * tokens].view(batch, tokens)
        positions = torch.arange(tokens, device=pool.device).expand(batch, tokens).contiguous()
        candidates = {"position_ids": positions, "use_cache": False}
        options = {name: value for name, value in candidates.items() if name in accepts}
        watcher = _Shapes(keep=number == 0)
        with torch.no_grad(), watched(model, watcher) as stack, _Ops(stack, ops):
            model(ids, **options)
        shapes.append(watcher.shapes)
        recorded |= watcher.kept
        parents |= {} if number else watcher.parents
    layouts = {}
    for slot in shapes[0].keys() & shapes[1].keys():
        layout = rows.infer(shapes[0][slot], shapes[1][slot], GRIDS)
        if layout is not None:
            layouts[slot] = layout
    with torch.no_grad():
        scopes = _scopes(recorded, parents, layouts)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    of_calls = {key: tuple(names) for key, names in ops.items()}
    return Facts(layouts, scopes, of_calls, kinds, _caches(model, pool, accepts))


def _caches(model: nn.Module, pool: torch.Tensor, accepts: frozenset[str]) -> bool:
    """Whether a forward pass with use_cache=True returns a cache."""
    if not {"past_key_values", "use_cache"} <= accepts:
        return False
    candidates = {"position_ids": torch.zeros(1, 1, dtype=torch.int64, device=pool.device)}
    options = {name: value for name, value in candidates.items() if name in accepts}
    with torch.no_grad():
        result = model(pool[None, :1], use_cache=True, **options)
    return getattr(result, "past_key_values", None) is not None


@dataclass(frozen=True)
class _RecordedCall:
    """A call of the first grid, to be made again.

    given: (args, kwargs); paths: of their tensors, by id.  after: its outputs, by path.
    """

    module: nn.Module
    given: tuple
    paths: Mapping[int, str]
    after: dict[str, torch.Tensor] = field(default_factory=dict)


class _Shapes:
    """Watcher that records the shapes of every tensor and, optionally, a copy."""

    def __init__(self, keep: bool) -> None:
        self.shapes: dict[Slot, tuple[int, ...]] = {}
        self.kept: dict[Key, _RecordedCall] = {}
        self.parents: dict[Key, Key | None] = {}
        self._keep = keep

    def before(self, key: Key, module: nn.Module, args: tuple, kwargs: dict) -> None:
        arguments = bound(module, args, kwargs)
        self._note(key, "in", arguments)
        if self._keep:  # copied before the module can write to them
            copies = {id(t): t.clone() for _, t in rows.tensors(arguments)}
            paths = {id(copies[id(t)]): path for path, t in rows.tensors(arguments)}
            copied = rows.replaced((args, kwargs), lambda t: copies.get(id(t), t))
            self.kept[key] = _RecordedCall(module, copied, paths)

    def after(self, key: Key, parent: Key | None, result: object) -> None:
        self._note(key, "out", result)
        self.parents[key] = parent
        if self._keep:
            self.kept[key].after.update((path, t.clone()) for path, t in rows.tensors(result))

    def _note(self, key: Key, side: str, value: object) -> None:
        for path, t in rows.tensors(value):
            self.shapes[key, side, path] = tuple(t.shape)


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


def _scopes(
    calls: Mapping[Key, _RecordedCall],
    parents: Mapping[Key, Key | None],
    layouts: Mapping[Slot, rows.Layout],
) -> dict[Key, str]:
    """Dependencies of each call's rows: never less than those of a call inside it."""
    scopes: dict[Key, str] = {}
    for key, parent in parents.items():  # inner calls come first
        scope = _scope(key, calls[key], layouts)
        scopes[key] = max(scope, scopes.get(key, ROW), key=_WIDER.index)
        if parent is not None:
            scopes[parent] = max(scopes[key], scopes.get(parent, ROW), key=_WIDER.index)
    return scopes


def _scope(key: Key, call: _RecordedCall, layouts: Mapping[Slot, rows.Layout]) -> str:
    """Dependencies of the rows of one call; the sequence where they cannot be determined."""
    try:
        if _moved(key, call, layouts, ((), _changed), _bytes):
            # Equal inputs give other bytes: only a NaN that arrives tells of a row's way.  It would
            # pass a causal mask too, as 0 times NaN.
            return PAST if _moved(key, call, layouts, (_SOME, _no_number), _not_a_number) else ROW
        if _moved(key, call, layouts, (_END, _changed), _values):
            return SEQUENCE
        return PAST if _moved(key, call, layouts, (_SOME, _changed), _bytes) else ROW
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
    key: Key,
    call: _RecordedCall,
    layouts: Mapping[Slot, rows.Layout],
    change: tuple[tuple[int, ...], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]],
    unlike: Callable[[torch.Tensor, torch.Tensor, torch.dtype], bool],
) -> bool:
    """Whether rows before or between replaced ones came out otherwise, as ``unlike`` sees them.

    ``change``: the columns that are replaced, and by what.
    """
    columns, value = change
    batch, tokens = GRIDS[0]
    device = next((t.device for t in call.after.values()), torch.device("cpu"))
    cells = torch.arange(batch * tokens, device=device)
    hit = torch.isin(cells % tokens, torch.tensor(columns, dtype=torch.int64, device=device))

    def other_rows(t: torch.Tensor) -> torch.Tensor:
        path = call.paths.get(id(t), _FIXED)
        layout, changed = layouts.get((key, "in", path)), t.clone()
        # Positions stay as they are: attention refuses those that go down.
        if layout is not None and path != _FIXED and not path.endswith("position_ids"):
            of_t = rows.grid(changed, layout, GRIDS[0])
            mask = hit.view(GRIDS[0])[: of_t.shape[0]]
            of_t[mask] = value(t, of_t[mask])
        return changed

    args, kwargs = rows.replaced(call.given, other_rows)
    after = dict(rows.tensors(call.module.forward(*args, **kwargs)))
    for path, was in call.after.items():
        layout = layouts.get((key, "out", path))
        if layout is None:
            continue
        pair = [rows.rows(t, layout, GRIDS[0], cells[~hit]) for t in (was, after[path])]
        if unlike(*pair, was.dtype):
            return True
    return False
