"""Cache of launch plans: calls with a known signature skip checks and kernel selection.

Checks and the choice of backend, kernel and grid read the shapes, strides, dtypes, devices and
options of a call, whether its memory begins at multiples of 16 bytes, and settings; never values.
A `Plan` is what they come to: a function that allocates outputs and launches kernels.  A first call
plans and runs; a later call with the same signature runs.  There is no other way to a kernel.

Plans are cached for CUDA tensors only.  A call that something can intercept (`INTERCEPTORS`) is
planned anew and goes through the dispatcher.
"""

from __future__ import annotations

import functools
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from .. import settings
from ..compile import extension
from ..compile.call import Program
from . import data_parallel

_C = torch._C
_ALIGN = 16
#: Capacity for `number_bits`; compile/calls.c has the same.
_NUMBER_BYTES = 512
_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
#: Default capacity of a cache.
MAX_PLANS = 4096

#: The dispatch key of `model.batch_invariant`, included in a thread where that mode is on.
MODE = _C._parse_dispatch_key("DeferredInit")
#: Included where `torch.autograd.grad(is_grads_batched=True)` runs a backward: its batched tensors
#: have torch.Tensor's type, and functorch does not know of them.
LEGACY_VMAP = _C._parse_dispatch_key("VmapMode")

_caches: weakref.WeakSet[PlanCache] = weakref.WeakSet()
#: Held where a thread adds a cache or a plan, or lists the caches.
_registry = threading.RLock()


@dataclass(frozen=True, slots=True)
class Plan:
    """Launch plan of one call signature.

    run: ``run(*args)`` allocates outputs and launches kernels, for all calls of this signature.  It
        keeps no tensor of a call.
    fresh: Each result is a tensor of its own; False: results may be views of padded memory.
    cacheable: False if ``run`` depends on more than the call's signature.
    program: C equivalent of ``run``, or None.
    holds: Tensors that ``run`` reads besides its tensor arguments: the lists of a mask, a table,
        those in a ``Tensor[]``, without which a call that has one is not cached.  Cached
        plans that hold some are dropped together (`let_go`), and are planned anew while a CUDA
        graph is captured, so that a `ByteCache` which made the tensors keeps them for replays.
    """

    run: Callable[..., object]
    fresh: bool = True
    cacheable: bool = True
    program: Program | None = None
    holds: tuple[torch.Tensor, ...] = ()

    def bound(self) -> Callable[..., object]:
        """Return ``run``, in C where it can be, with results of ``run``."""
        if self.program is None or self.program.run is not self.run:
            return self.run
        return self.program.bind() or self.run


def launcher(planner: Callable[..., Plan]) -> Callable:
    """The launcher of a planner: ``launch(*operands)`` plans and runs."""

    @functools.wraps(planner)
    def launch(*operands):
        return planner(*operands).run(*operands)

    return launch


# ---- what can intercept a call -------------------------------------------------------------------


def _function_mode() -> bool:
    """Whether a TorchFunctionMode other than ``torch.set_default_device`` is active."""
    depth = _C._len_torch_function_stack()
    return depth > 0 and any(
        type(_C._get_function_stack_at(i)) is not DeviceContext for i in range(depth)
    )


def _batch_invariant_mode() -> bool:
    """Whether torch's ops that are called here reach `model.batch_invariant`."""
    included, excluded = (
        _C._dispatch_tls_is_dispatch_key_included,
        _C._dispatch_tls_is_dispatch_key_excluded,
    )
    return included(MODE) and not excluded(MODE)


def _forward_differentiation() -> bool:
    return forward_ad._current_level >= 0


def _profiled() -> bool:
    """Whether a profiler runs, in any thread: it may record the others."""
    return torch.autograd.profiler._is_profiler_enabled


#: What can intercept a call of this thread.  Each is asked in every call, by Python or by
#: compile/calls.c; one that answers with a true value sends the call to the dispatcher.
INTERCEPTORS: tuple[Callable[[], object], ...] = (
    torch.compiler.is_compiling,
    _function_mode,
    _C._len_torch_dispatch_stack,
    _C._is_any_autocast_enabled,
    _C._are_functorch_transforms_active,
    functools.partial(_C._dispatch_tls_is_dispatch_key_included, LEGACY_VMAP),
    _profiled,
    _batch_invariant_mode,
    _forward_differentiation,
    _C._is_tracing,
)


#: Interceptor -> its quick form for compile/calls.c: a function of C's that answers with a false
#: value where nothing intercepts, or (dict, name, the object there where nothing does).  The
#: interceptor, a Python function, is asked where that is not so.
_QUICK: dict[Callable, object] = {
    torch.compiler.is_compiling: (vars(torch.compiler), "_is_compiling_flag", False),
    _function_mode: _C._len_torch_function_stack,
    _batch_invariant_mode: functools.partial(_C._dispatch_tls_is_dispatch_key_included, MODE),
    _forward_differentiation: (vars(forward_ad), "_current_level", -1),
    _profiled: (vars(torch.autograd.profiler), "_is_profiler_enabled", False),
}


def _parts() -> tuple[tuple, tuple, tuple]:
    """Interceptors, settings and `is_cacheable`, as a ``finder`` of compile/calls.c takes them."""
    asked = tuple([(_QUICK[ask], ask) if ask in _QUICK else ask for ask in INTERCEPTORS])
    by_name = settings.plan_settings, vars(settings), settings.CACHED_GET, "KNOWN_PLAN_SETTINGS"
    cacheable = is_cacheable, globals(), _ON_GPU, sys.modules, data_parallel.FSDP2_STATES
    return asked, by_name, cacheable


def intercepted() -> bool:
    """Whether a mode, a transform, a trace, a profiler or autocast can intercept calls here."""
    return any(ask() for ask in INTERCEPTORS)


# ---- the cache -----------------------------------------------------------------------------------


class PlanCache:
    """Plans of one op by the signature of a call.

    capacity: Number of plans; a full cache starts over.

    Where Dynamo may trace a caller of `find`, it asks ``is_dynamo_compiling()`` before: `find` may
    be C, which cannot be traced.
    """

    def __init__(self, capacity: int = MAX_PLANS):
        self._capacity = capacity
        self._plans: dict[Hashable, object] = {}
        #: Keys of plans that hold tensors.
        self._holders: set[Hashable] = set()
        self._callers: list[tuple[tuple, Callable[[Callable | None], None]]] = []
        with _registry:
            _caches.add(self)

    def find(self, options: Hashable, *tensors: torch.Tensor | None):
        """The cached entry; None: no entry yet; False: the call cannot be cached.

        ``options``: all that a plan depends on besides the tensors.  After the first `add`, `find`
        of compile/calls.c replaces this one.
        """
        if intercepted():
            return False
        key = _key(options, tensors)
        try:
            return False if key is None else self._plans.get(key)
        except TypeError:  # unhashable options are refused by checks
            return False

    def add(
        self,
        options: Hashable,
        tensors: tuple[torch.Tensor | None, ...],
        entry: object,
        holds: Collection[torch.Tensor] = (),
    ) -> None:
        """Caches ``entry`` for calls of this signature, unless they cannot be cached.

        entry: None and False: such calls are not cached.
        holds: The tensors that ``entry`` holds; one that holds too much is not cached.
        """
        key = _key(options, tensors)
        if key is None:
            return
        with _registry:
            # Before `_hold`: a cache that starts over lets go of all that plans hold.
            if len(self._plans) >= self._capacity and key not in self._plans:
                self._drop()
            if holds and not _hold(holds):
                return
            if holds:
                self._holders.add(key)
            self._plans[key] = entry or False
        # Only now: the first import of a CPU user compiles no C.
        if "find" not in vars(self) and (in_c := extension.calls()) is not None:
            self.find = in_c.finder(self._plans, *_parts())
            for arguments, install in self._callers:
                install(in_c.caller(self._plans, *_parts(), *arguments))

    def on_caller(self, arguments: tuple, install: Callable[[Callable | None], None]) -> None:
        """Have ``install(call)`` called once C can run cached plans, ``install(None)`` when not.

        ``call(*args)`` finds and runs the plan of a call; ``arguments``: those of calls.c's
        ``caller`` after the parts of a ``finder``.
        """
        self._callers.append((arguments, install))

    def let_go(self) -> None:
        """Drop the entries that hold tensors."""
        for key in self._holders:
            self._plans.pop(key, None)
        self._holders.clear()

    def _drop(self) -> None:
        if self._holders:
            let_go()
        self._plans.clear()

    def clear(self) -> None:
        self._drop()
        vars(self).pop("find", None)
        for _, install in self._callers:
            install(None)


def clear() -> None:
    """Clears the plan caches of all ops."""
    with _registry:
        caches = list(_caches)
    for cache in caches:
        cache.clear()


# ---- tensors that plans hold ---------------------------------------------------------------------

#: Most bytes of tensors that plans of all ops hold together.
HELD_BYTES = 256 << 20
_held: dict[int, torch.Tensor] = {}


def _hold(tensors: Collection[torch.Tensor]) -> bool:
    """Whether a plan may hold these tensors; all others are let go of if they are too many."""
    added = {id(t): t for t in tensors}
    if _bytes(added) > HELD_BYTES:
        return False
    if _bytes(_held | added) > HELD_BYTES:
        let_go()
    _held.update(added)
    return True


def _bytes(tensors: dict[int, torch.Tensor]) -> int:
    return sum([t.nbytes for t in tensors.values()])


def let_go() -> None:
    """Drop the plans that hold tensors.

    A `ByteCache` calls it before tensors leave: it waits for the streams that may read them, and a
    plan could not.
    """
    with _registry:
        _held.clear()
        for cache in _caches:
            cache.let_go()


def on_gpu(t: torch.Tensor) -> bool:
    """Whether ``t`` is in GPU memory."""
    return t.is_cuda


#: calls.c answers for this function.
_ON_GPU = on_gpu


def is_cacheable(*tensors: torch.Tensor | None) -> bool:
    """Whether plans for calls of these tensors are cached; the first one is not None."""
    # A main_grad under fully_shard is refused in each call: it may be set at any time.
    return on_gpu(tensors[0]) and not (
        data_parallel.sharding() and any(map(data_parallel.has_sharded_main_grad, tensors))
    )


def _key(options: Hashable, tensors: tuple) -> tuple | None:
    """The signature of a call, or None if it cannot be cached."""
    first = tensors[0]
    # Checks put all tensors on the device of the first one, which is never None.
    if type(first) not in _TYPES or not is_cacheable(*tensors):
        return None
    in_c = extension.calls()
    described = describe(*tensors) if in_c is None else in_c.describe(*tensors)
    if described is None:
        return None
    bits = number_bits(options)
    if len(bits) > _NUMBER_BYTES:
        return None
    return options, bits, settings.plan_settings(), described


def number_bits(options: Hashable) -> bytes:
    """Types and bit patterns of the numbers in ``options``, which compare by value alone.

    0.0 equals -0.0 and 1 equals True, yet kernels and checks tell them apart.
    """
    if type(options) is tuple:
        return b"".join(map(number_bits, options))
    if isinstance(options, float):
        return b"f" + struct.pack("d", options)
    if isinstance(options, int):
        return b"b" if isinstance(options, bool) else b"i"
    return b""


def _has_storage(t: torch.Tensor) -> bool:
    """Whether ``t`` has memory: a view of freed storage is at its offset from address 0."""
    return bool(t.data_ptr()) and bool(t.untyped_storage().data_ptr())


def describe(*tensors: torch.Tensor | None) -> tuple | None:
    """Shapes, strides, dtypes and devices, or None if a tensor cannot be part of a signature."""
    described = ()
    try:
        for t in tensors:
            if t is None:
                described += (None,)
            elif (
                type(t) not in _TYPES or t.is_neg() or t.data_ptr() % _ALIGN or not _has_storage(t)
            ):
                return None
            else:
                described += t.shape, t.stride(), t.dtype, t.device
    except RuntimeError:  # sparse and nested tensors have no strides
        return None
    return described
