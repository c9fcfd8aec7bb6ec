"""`recompute_streams`: backwards that make the streams between sites again (docs/mhc.md).

The sites of a context form groups.  Of a group, autograd keeps the streams before the first site;
each later site's mhc_mix saves a `Position` in their place.  A position refers to the nodes of
*earlier* sites only, as autograd's own edges do: a reference to a later one would close a cycle
that no garbage collector sees.

What a recomputation reads (f, H_post, H_res, the first streams) it takes out of those nodes, where
autograd keeps it anyway.  So autograd checks that nothing was written in place, and frees it.  They
are not freed yet: in a backward, gradients come to a site before they come to the sites before it.
The bias is copied, since fully_shard frees a gathered weight between forward and backward.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import UnsupportedTransformError
from ..runtime.dynamo import untraced
from . import checks, op

#: Autograd nodes that may lie between a site's result and the next site's streams: views, hooks.
_MAX_NODES_BETWEEN = 16


class _Streams:
    """Recomputed streams of one group that no backward has consumed, by position in the group."""

    def __init__(self) -> None:
        # Backward threads of several devices, or several backwards, may ask at once.
        self.lock = threading.RLock()
        self.by_index: dict[int, torch.Tensor] = {}


class Position:
    """The streams before one site of a group, in place of the tensor.

    before: The result of the site before it; None: the first site of a group.
    """

    def __init__(
        self, index: int, streams: _Streams, n: int, layout: str, before: _Result | None
    ) -> None:
        self.index, self.streams, self.n, self.layout = index, streams, n, layout
        self.before = before
        #: Of the first site: its mhc_mix, which keeps the streams.
        self.mix_node: Any = None
        #: Of the streams where mhc_mix read them.
        self.version = 0

    def take(self) -> torch.Tensor:
        """Return the streams as rows [M, K], and keep them no longer."""
        with self.streams.lock:
            if self.index not in self.streams.by_index:
                self._recompute_group()
            return self.streams.by_index.pop(self.index)

    def _recompute_group(self) -> None:
        """Compute the streams of this position and of those before it."""
        results: list[_Result] = []
        position = self
        while position.before is not None:
            results.insert(0, position.before)
            position = position.before.position
        x = position.mix_node.saved_tensors[0].detach()
        sites = []
        for result in results:
            f, _, post, _, res = result.expand_node.saved_tensors
            sites.append((f, result.bias, post, res))
        operands = map(list, zip(*sites, strict=True))
        streams = op.recompute(x, *operands, self.n, self.layout)
        self.streams.by_index |= enumerate(streams, 1)


class _Result:
    """Output of a site; a site that reads it joins the group."""

    def __init__(
        self,
        y: torch.Tensor,
        expand_node: Any,
        position: Position,
        bias: torch.Tensor | None,
    ) -> None:
        # A weak reference: the address of a living one is no other storage's.
        self.storage = StorageWeakRef(y.untyped_storage())
        self.view = _view_of(y)
        self.cuda_stream = _cuda_stream(y)
        self.expand_node, self.position, self.bias = expand_node, position, bias

    def is_read_by(self, x: torch.Tensor) -> bool:
        """Whether x are these streams, unwritten, and autograd knows that they are."""
        return (
            x.untyped_storage()._cdata == self.storage.cdata
            and _view_of(x) == self.view
            and _cuda_stream(x) == self.cuda_stream
            and _reaches(x.grad_fn, self.expand_node)
        )


def _view_of(rows: torch.Tensor) -> tuple:
    view = rows.shape, rows.dtype, rows.storage_offset(), rows.is_contiguous(), rows.is_neg()
    return *view, rows._version


def _cuda_stream(t: torch.Tensor) -> object:
    return torch.cuda.current_stream(t.device) if t.is_cuda else None


def _reaches(node: Any, end: Any) -> bool:
    """Whether ``end`` is a node's ancestor in the graph, a few nodes away."""
    pending = [node]
    for _ in range(_MAX_NODES_BETWEEN):
        if not pending:
            return False
        node = pending.pop(0)
        if node is end:
            return True
        if node is not None:
            pending += [before for before, _ in node.next_functions]
    return False


class Groups:
    """The sites of one entry of a `recompute_streams`, as they are called."""

    def __init__(self, sites: int, context: object) -> None:
        self.sites, self.context = sites, context
        self._last: _Result | None = None

    @untraced
    def run_mix(self, mix: Callable, n: int, layout: str, x: torch.Tensor, *args) -> tuple:
        """Run mhc_mix of a site; return (its position, or None if autograd keeps x; results)."""
        last, self._last = self._last, None
        if not _groupable(x):
            return None, mix(x, *args)
        position = self._next(last, n, layout, x)
        first = position.before is None
        position.version = x._version
        _local.position = None if first else position
        try:
            results = mix(x, *args)
        finally:
            _local.position = None
        node = results[0].grad_fn
        if not hasattr(node, "position"):
            return None, results  # no gradient is asked for, or something intercepted the call
        if first:
            position.mix_node = node
        return position, results

    def _next(self, last: _Result | None, n: int, layout: str, x: torch.Tensor) -> Position:
        """Position of a site that reads x: behind the last one, or the first of a group."""
        if last is not None:
            group = last.position
            full = group.index + 1 >= self.sites
            alike = (n, layout) == (group.n, group.layout)
            if not full and alike and last.is_read_by(x):
                return Position(group.index + 1, group.streams, n, layout, last)
        return Position(0, _Streams(), n, layout, None)

    @untraced
    def run_expand(self, position: Position | None, *args) -> torch.Tensor:
        """Run the linked mhc_expand_combine of a site; note y for the site that reads it.

        Raises:
            ArgumentValueError: the sublayer wrote into the streams.  Where autograd keeps them, it
                refuses the backward.
        """
        self._last = None
        if position is not None and position.before is not None:
            checks.unwritten(args[3], position.version)
        y = op.expand_combine(*args)
        node = y.grad_fn
        # A node of another kind: something intercepted the call, and keeps what it likes.
        if position is not None and getattr(node, "linked", False) and self.sites > 1:
            bias = None if args[1] is None else args[1].detach().clone()
            self._last = _Result(y, node, position, bias)
        return y

    def close(self) -> None:
        """Forget the last site, which holds a graph."""
        self._last = None


def _groupable(x: torch.Tensor) -> bool:
    """Whether autograd would save a plain tensor, as it is.

    Other saved-tensor hooks (activation checkpointing, offloading) decide what is kept of the sites
    within them.
    """
    return (
        torch.is_grad_enabled()
        and type(x) is torch.Tensor
        and not x.is_inference()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


class _Local(threading.local):
    def __init__(self) -> None:
        self.groups: list[Groups] = []
        self.position: Position | None = None


_local = _Local()
#: Contexts that are open in any thread: graphs of torch.compile are guarded by it.
_open = 0
_count_lock = threading.Lock()


def current() -> Groups | None:
    """Return the groups of the innermost `recompute_streams` of this thread."""
    if torch.compiler.is_compiling():
        if _open:
            raise UnsupportedTransformError(
                "cute_kernels.mhc.recompute_streams: a site inside of torch.compile is not "
                "supported; compile the sublayers"
            )
        return None
    return _local.groups[-1] if _local.groups else None


def saved_position() -> Position | None:
    """Return what mhc_mix saves in place of its streams, if it is run by a group."""
    return _local.position


def _count(change: int) -> None:
    global _open
    with _count_lock:
        _open += change


def recompute_streams(sites: int) -> contextlib.AbstractContextManager[None]:
    """Keep the streams of every ``sites``-th site, and make the others again in the backward.

    ``with ck.mhc.recompute_streams(4):`` around the forward of a stack of `connect` or
    `HyperConnection`, in this thread; or as a decorator of a function.  A context may be entered
    again, also within itself.  Consecutive sites form groups.  Of each group autograd keeps the
    streams before its first site.  In the backward, one `multilayer_recompute` makes the streams
    before the others; each is dropped when its site has read it.  Results and gradients have the
    bytes that they have without the context.

    A site joins a group if its x is the y of the site before, unwritten; else it starts one, and
    its streams are kept.  Sites under ``torch.no_grad()`` or within other saved-tensor hooks
    (``torch.utils.checkpoint``, ``save_on_cpu``) are left to those, and `post_pre`,
    `mix_and_aggregate`, `expand_combine` and `head` keep their streams.  The innermost of several
    contexts counts; with ``sites=1`` nothing is made again.

    Args:
        sites: The sites of a group, 1 or more.  Of L sites, about √(nL / (n + 2)) keeps least.

    Raises:
        ArgumentTypeError, ArgumentValueError: ``sites`` is not a positive int.
            A sublayer writes into the streams of its site.
        UnsupportedTransformError: ``torch.compile`` traces the context, or a site in it.  With
            ``fullgraph=True`` torch shows it as the reason; without, that code runs uncompiled.
            Compiled sublayers are fine.

    Example:
        >>> with ck.mhc.recompute_streams(2):
        ...     pass  # calls of `connect` or `HyperConnection`, two between kept streams
    """
    checks.sites(sites)
    _not_compiling()
    return _Recomputing(sites)


def _not_compiling() -> None:
    if torch.compiler.is_compiling():
        raise UnsupportedTransformError(
            "cute_kernels.mhc.recompute_streams: torch.compile around it is not supported; "
            "compile the sublayers"
        )


class _Recomputing(contextlib.ContextDecorator):
    """Context of `recompute_streams`: each entry has groups of its own."""

    def __init__(self, sites: int) -> None:
        self.sites = sites

    def __enter__(self) -> None:
        _not_compiling()
        _local.groups.append(Groups(self.sites, self))
        _count(1)

    def __exit__(self, *error: object) -> None:
        _count(-1)
        groups = next(g for g in reversed(_local.groups) if g.context is self)
        groups.close()
        _local.groups.remove(groups)
