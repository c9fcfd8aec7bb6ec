"""Calls that are like an earlier one: what was checked and chosen for that one is not asked again.

Checks, and the choice of a backend, a kernel and a grid, read the shapes, strides, dtypes, devices
and options of a call, whether memory begins at multiples of 16 bytes, and settings; never values.
`Calls` keeps, by exactly these, a function that launches the same kernel with the same arguments as
the way through all of them would: there is one set of bits, and no second path to it.

A call on which anything else has a say is never remembered and goes the whole way: a mode, a
transform, a trace, a profile, autocast, a subclass of torch.Tensor, a main_grad, an operand that
has to be copied.  Nothing is remembered of tensors on a CPU, where a call's own work takes longer.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Hashable

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from . import data_parallel, settings
from .compile import extension

_C = torch._C
_ALIGN = 16
#: Capacity for `number_bits`; compile/calls.c has the same.
_NUMBER_BYTES = 512
_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
#: Kinds of calls that an op remembers.
MOST = 4096

#: The dispatch key of `model.batch_invariant`, included in a thread where that mode is on.
MODE = _C._parse_dispatch_key("DeferredInit")
#: Included where `torch.autograd.grad(is_grads_batched=True)` runs a backward: its batched tensors
#: have torch.Tensor's type, and functorch does not know of them.
LEGACY_VMAP = _C._parse_dispatch_key("VmapMode")

_all: weakref.WeakSet[Calls] = weakref.WeakSet()


def watched() -> bool:
    """Whether a mode, a transform, a trace or a profile has a say in calls of this thread."""
    return bool(_C._len_torch_function_stack()) or _watched_below()


def _asked(modes: int) -> bool:
    """Whether one of so many modes wants to see calls; ``torch.set_default_device`` does not."""
    return any(type(_C._get_function_stack_at(i)) is not DeviceContext for i in range(modes))


def _watched_below() -> bool:
    # So does `is_watched` in compile/calls.c, and what asks one more here has to be asked there.
    return bool(
        _C._len_torch_dispatch_stack()
        or _C._is_any_autocast_enabled()
        or _C._are_functorch_transforms_active()
        or _C._dispatch_tls_is_dispatch_key_included(LEGACY_VMAP)
        or _C._autograd._profiler_enabled()
        or (_C._dispatch_tls_is_dispatch_key_included(MODE) and _in_mode())
        or forward_ad._current_level >= 0
        or _C._get_tracing_state() is not None
    )


def _in_mode() -> bool:
    """Whether an op of torch that is called here comes to `model.batch_invariant`, which is on."""
    return not _C._dispatch_tls_is_dispatch_key_excluded(MODE)


class Calls:
    """What one op remembers.

    prepare: is given the tensors of a call that checks let pass, and what else `keep` was given;
        returns what does the work of all calls like it, or None: each has to be looked at.
    most: Calls that are remembered; then it starts anew.

    Where Dynamo may trace a caller of `find`, it asks ``is_dynamo_compiling()`` before: C, which
    stands for `find` where it can be had, cannot be traced.
    """

    def __init__(self, prepare: Callable, most: int = MOST):
        self._prepare, self._most = prepare, most
        self._known: dict[Hashable, object] = {}
        _all.add(self)

    def find(self, options: Hashable, *tensors: torch.Tensor | None):
        """What does the work; False: such calls go the whole way; None: the first of its kind.

        ``options``: what else is decided by.  Once a call is known, `find` of compile/calls.c
        stands for this one.
        """
        modes = _C._len_torch_function_stack()
        if torch.compiler.is_compiling() or (modes and _asked(modes)) or _watched_below():
            return False
        key = _key(options, tensors)
        try:
            return False if key is None else self._known.get(key)
        except TypeError:  # what has no hash is refused by checks
            return False

    def keep(self, options: Hashable, tensors: tuple[torch.Tensor | None, ...], *given: object):
        """Prepares for calls like this one, of which `find` returned None, once checked."""
        if len(self._known) >= self._most:
            self._known.clear()
        self._known[_key(options, tensors)] = self._prepare(*tensors, *given) or False
        # Not before: nobody's first import compiles C for calls on a CPU.
        if (in_c := extension.calls()) is not None:
            modules = globals(), vars(data_parallel), vars(settings)
            self.find = in_c.finder(self._known, *modules)

    def forget(self) -> None:
        self._known.clear()
        vars(self).pop("find", None)


def forget() -> None:
    """Forgets every call of every op."""
    for calls in _all:
        calls.forget()


def remembers(t: torch.Tensor) -> bool:
    """Whether calls on the device of ``t`` are remembered."""
    return t.is_cuda


def _key(options: Hashable, tensors: tuple) -> tuple | None:
    """All that checks and choices read, or None if they may read more."""
    # The others of a call that checks let pass are on the device of the first, which is no None.
    # An owner of parameters has a say in each of them.
    first = tensors[0]
    if type(first) not in _TYPES or not remembers(first) or data_parallel.sharding():
        return None
    in_c = extension.calls()
    seen = described(*tensors) if in_c is None else in_c.describe(*tensors)
    if seen is None:
        return None
    bits = number_bits(options)
    if len(bits) > _NUMBER_BYTES:
        return None
    return options, bits, settings.get("BACKEND"), settings.get("MAX_CTAS"), seen


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


def _allocated(t: torch.Tensor) -> bool:
    """Whether ``t`` has memory: a view of freed storage is at its offset from address 0."""
    return bool(t.data_ptr()) and bool(t.untyped_storage().data_ptr())


def described(*tensors: torch.Tensor | None) -> tuple | None:
    """What a call's tensors are known by, or None if they may have more of a say in it."""
    seen = ()
    try:
        for t in tensors:
            if t is None:
                seen += (None,)
            elif type(t) not in _TYPES or t.is_neg() or t.data_ptr() % _ALIGN or not _allocated(t):
                return None
            else:
                seen += t.shape, t.stride(), t.dtype, t.device
    except RuntimeError:  # sparse and nested tensors have no strides
        return None
    return seen
