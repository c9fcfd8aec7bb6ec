"""Kernels of the mode's dispatch key for the ops of both tables; mode.py says why a key.

    covered   ours, if the call is covered and autocast has done its part; else torch's
    refused   an error in strict; else torch's.  Registered when strict is first asked for: until
              then these ops cost nothing

torch's is what follows the mode's key: the call goes on where it would be without the mode.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ...runtime import checking
from ...runtime.dynamo import untraced
from ...runtime.torch_ops import BELOW_MODE, MODE, MODE_KEYS
from . import checks, mode
from .covered import COVERED, Covered
from .refused import REFUSED, Refused

_KEY = "DeferredInit"
_AUTOCAST = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_no_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
_lock = threading.Lock()
_installed: dict[str, list[torch.library.Library]] = {}


def install(*, strict: bool) -> None:
    """Registers what is not registered yet: the covered ops, with ``strict`` the refused ones."""
    if "covered" in _installed and (not strict or "refused" in _installed):
        return
    with _lock:
        if "covered" not in _installed:
            _install_covered()
        if strict and "refused" not in _installed:
            _install_refused()


def overloads(name: str) -> list[torch._ops.OpOverload]:
    """The overloads of an op of this build of torch, in-place and out variants included.

    Those that torch composes of the others are left out, unless there are no others.  Of a name
    with an overload, that one and what computes the same.
    """
    if "." in name:
        return [overload(name), *variants(overload(name))]
    found = []
    for packet in (name, f"{name}_"):
        op = getattr(torch.ops.aten, packet, None)
        found += [] if op is None else [getattr(op, each) for each in op.overloads()]
    # Some are of TorchScript alone.
    found = [op for op in found if torch._C._dispatch_has_kernel(op.name())]
    made = [op for op in found if not _has_kernel(op, "CompositeImplicitAutograd")]
    return made or found


def variants(op: torch._ops.OpOverload) -> list[torch._ops.OpOverload]:
    """The in-place and one-result ``out=`` overloads that compute what ``op`` does."""
    own = [(a.name, str(a.type)) for a in op._schema.arguments]
    found = []
    for other in overloads(op._schema.name.removeprefix("aten::")):
        arguments = other._schema.arguments
        outs = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        rest = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if other is not op and len(outs) == 1 and rest == own:
            found.append(other)
    return found


def _install_covered() -> None:
    fall_through = torch.library.Library("_", "IMPL", _KEY)
    fall_through.fallback(torch.library.fallthrough_kernel)
    _pass_higher_order()
    library = torch.library.Library("aten", "IMPL")
    done = set()
    for row in COVERED:
        op = overload(row.op)
        _register(library, op, _covering(op, row))
        done.add(op)
        for other in variants(op):
            _register(library, other, _writing(other, row))
            done.add(other)
    for name in {row.op.split(".")[0] for row in COVERED}:
        for op in set(overloads(name)) - done:
            _register(library, op, _refusing(op, _OTHER))
            done.add(op)
    _installed["covered"] = [fall_through, library]


def _pass_higher_order() -> None:
    """Ops that take functions look at every key: those there are, and those to come, pass it."""
    passed = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    if MODE not in passed:
        passed.append(MODE)
    for op in list(torch._ops._higher_order_ops.values()):
        op.fallthrough(MODE)


def _install_refused() -> None:
    library = torch.library.Library("aten", "IMPL")
    for row in REFUSED:
        for name in row.ops:
            for op in overloads(name):
                _register(library, op, _refusing(op, row))
    _installed["refused"] = [library]


#: Overloads of covered ops that are not covered.
_OTHER = Refused(
    (),
    ("cpu", "cuda"),
    "this overload is not covered",
    "call the function without it",
    "",
)


def overload(name: str) -> torch._ops.OpOverload:
    """The overload of aten with the name of a row."""
    packet, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), which or "default")


def _register(library: torch.library.Library, op: torch._ops.OpOverload, run: Callable) -> None:
    library.impl(op, untraced(run), _KEY, with_keyset=True)


def _has_kernel(op: torch._ops.OpOverload, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def _covering(op: torch._ops.OpOverload, row: Covered) -> Callable:
    kernel, why_not, composed = row.kernel, row.why_not, row.composed
    any_autocast = torch._C._is_any_autocast_enabled
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    casts = frozenset(kind for kind, key in _AUTOCAST.items() if _has_kernel(op, key))

    def run(keyset, *args, **kwargs):
        why = why_not(*args, **kwargs)
        if why is None and not any_autocast():
            if composed:
                return kernel(*args, **kwargs)
            # A guard of torch's does this too, and takes three times as long.
            exclude(MODE, True)
            try:
                return kernel(*args, **kwargs)
            finally:
                exclude(MODE, False)
        if why is None and not _autocast_first(casts, args[0]):
            with torch._C._ExcludeDispatchKeyGuard(_no_keys if composed else MODE_KEYS):
                return kernel(*args, **kwargs)
        if why and mode.strict():
            checks.refuse(op, args[0].device, why, "convert to a dtype or form that is")
        return op.redispatch(keyset & BELOW_MODE, *args, **kwargs)

    return run


def _autocast_first(casts: frozenset[str], t: torch.Tensor) -> bool:
    """Whether the op's autocast kernel has to cast, and call it again."""
    return t.device.type in casts and checking.autocast(t.device)


def _writing(op: torch._ops.OpOverload, row: Covered) -> Callable:
    """An ``out=`` or in-place overload: the result of the kernel, copied."""
    arguments = op._schema.arguments
    outs = [a.name for a in arguments if a.is_out]
    takes_dtype = "dtype" in [a.name for a in arguments]

    def run(keyset, *args, **kwargs):
        into = kwargs[outs[0]] if outs else args[0]
        rest = {name: value for name, value in kwargs.items() if name not in outs}
        if outs and takes_dtype and rest.get("dtype") is None:
            rest["dtype"] = into.dtype
        why = row.why_not(*args, **rest)
        tracked = torch.is_grad_enabled() and torch._C._any_requires_grad(*args, into)
        if why and mode.strict():
            checks.refuse(op, args[0].device, why, "convert to a dtype or form that is")
        if why is not None or (outs and tracked):
            # Of an out= that should be differentiated torch says why it cannot be.
            return op.redispatch(keyset & BELOW_MODE, *args, **kwargs)
        if not outs:
            # What is saved for a gradient must not be what is written.
            args = (args[0].clone(), *args[1:])
        with torch._C._ExcludeDispatchKeyGuard(MODE_KEYS):
            made = row.kernel(*args, **rest)
        if outs and made.dtype != into.dtype:
            return op.redispatch(keyset & BELOW_MODE, *args, **kwargs)
        if outs and into.shape != made.shape:
            into.resize_(made.shape)
        return into.copy_(made)

    return run


def _refusing(op: torch._ops.OpOverload, row: Refused) -> Callable:
    names = [a.name for a in op._schema.arguments]

    def run(keyset, *args, **kwargs):
        if mode.strict():
            given = dict(zip(names, args, strict=False)) | kwargs
            where = _known(given.values(), row.devices)
            if where is not None and (row.when is None or row.when(given)):
                checks.refuse(op, where, row.why, row.instead)
        return op.redispatch(keyset & BELOW_MODE, *args, **kwargs)

    return run


def _known(given, devices: tuple[str, ...]) -> torch.device | None:
    """The device of the first tensor that rounds, if it is one of those."""
    tensors = (t for value in given for t in (value if type(value) is list else (value,)))
    for value in tensors:
        if isinstance(value, torch.Tensor) and value.is_floating_point() | value.is_complex():
            return value.device if value.device.type in devices else None
    return None
