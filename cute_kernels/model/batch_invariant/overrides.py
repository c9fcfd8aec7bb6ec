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
from ..aten import COVERED, REFUSED, Cause, Covered, Refused
from . import checks, mode

_KEY = "DeferredInit"
_AUTOCAST = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_no_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
_lock = threading.Lock()
_installed: dict[str, torch.library.Library] = {}


def install(*, strict: bool) -> None:
    """Register the covered ops, and with ``strict`` the refused ones, once."""
    wanted = {"covered": _covered, "refused": _refused} if strict else {"covered": _covered}
    if wanted.keys() <= _installed.keys():
        return
    with _lock:
        if "covered" not in _installed:
            _pass_others()
        for table, kernels in wanted.items():
            if table not in _installed:
                library = torch.library.Library("aten", "IMPL")
                for op, kernel in kernels().items():
                    library.impl(op, untraced(kernel), _KEY, with_keyset=True)
                _installed[table] = library


def overloads(name: str) -> list[torch._ops.OpOverload]:
    """Return the overloads of an op of this build of torch, in-place and out variants included.

    Those that torch composes of the others are left out, unless there are no others.  Of a name
    with an overload, that one and what computes the same.
    """
    if "." in name:
        return [overload(name), *variants(overload(name))]
    ops = []
    for packet in (name, f"{name}_"):
        op = getattr(torch.ops.aten, packet, None)
        ops += [] if op is None else [getattr(op, each) for each in op.overloads()]
    # Some exist in TorchScript only.
    ops = [op for op in ops if torch._C._dispatch_has_kernel(op.name())]
    implemented = [op for op in ops if not _has_kernel(op, "CompositeImplicitAutograd")]
    return implemented or ops


def variants(op: torch._ops.OpOverload) -> list[torch._ops.OpOverload]:
    """Return the in-place and one-result ``out=`` overloads that compute what ``op`` does."""
    own_arguments = [(a.name, str(a.type)) for a in op._schema.arguments]
    matches = []
    for candidate in overloads(op._schema.name.removeprefix("aten::")):
        arguments = candidate._schema.arguments
        outs = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        inputs = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if candidate is not op and len(outs) == 1 and inputs == own_arguments:
            matches.append(candidate)
    return matches


def _pass_others() -> None:
    """Make all other ops fall through; higher-order ones look at every key, now and later."""
    _installed["others"] = library = torch.library.Library("_", "IMPL", _KEY)
    library.fallback(torch.library.fallthrough_kernel)
    passed = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    if MODE not in passed:
        passed.append(MODE)
    for op in list(torch._ops._higher_order_ops.values()):
        op.fallthrough(MODE)


def _covered() -> dict[torch._ops.OpOverload, Callable]:
    """Return the kernels of all overloads of the covered ops."""
    kernels: dict[torch._ops.OpOverload, Callable] = {}
    for row in COVERED:
        op = overload(row.op)
        kernels[op] = _covering(op, row)
        kernels |= {variant: _writing(variant, row) for variant in variants(op)}
    for name in {row.op.split(".")[0] for row in COVERED}:
        others = set(overloads(name)) - kernels.keys()
        kernels |= {op: _refusing(op, _OTHER) for op in others}
    return kernels


def _refused() -> dict[torch._ops.OpOverload, Callable]:
    """Return the kernels of the ops that are refused."""
    rows = ((row, name) for row in REFUSED for name in row.ops)
    return {op: _refusing(op, row) for row, name in rows for op in overloads(name)}


#: Overloads of covered ops that are not covered.
_OTHER = Refused(
    (), ("cpu", "cuda"), Cause("this overload is not covered"), "call the function without it", ""
)


def overload(name: str) -> torch._ops.OpOverload:
    """Return the overload of aten with the name of a row."""
    packet, _, overload_name = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload_name or "default")


def _has_kernel(op: torch._ops.OpOverload, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def _covering(op: torch._ops.OpOverload, row: Covered) -> Callable:
    kernel, why_not, composed = row.kernel, row.why_not, row.composed
    any_autocast = torch._C._is_any_autocast_enabled
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    casts = frozenset(kind for kind, key in _AUTOCAST.items() if _has_kernel(op, key))

    def run(keyset, *args, **kwargs):
        reason = why_not(*args, **kwargs)
        if reason is None and not any_autocast():
            if composed:
                return kernel(*args, **kwargs)
            # A guard of torch's does this too, and takes three times as long.
            exclude(MODE, True)
            try:
                return kernel(*args, **kwargs)
            finally:
                exclude(MODE, False)
        # The op's autocast kernel may have to cast first, and calls it again.
        device = args[0].device
        if reason is None and not (device.type in casts and checking.autocast(device)):
            with torch._C._ExcludeDispatchKeyGuard(_no_keys if composed else MODE_KEYS):
                return kernel(*args, **kwargs)
        if reason and mode.strict():
            checks.refuse(op, device, reason, "convert to a dtype or form that is")
        return op.redispatch(keyset & BELOW_MODE, *args, **kwargs)

    return run


def _writing(op: torch._ops.OpOverload, row: Covered) -> Callable:
    """Make the kernel of an ``out=`` or in-place overload, which copies the result."""
    arguments = op._schema.arguments
    outs = [a.name for a in arguments if a.is_out]
    takes_dtype = "dtype" in [a.name for a in arguments]

    def run(keyset, *args, **kwargs):
        into = kwargs[outs[0]] if outs else args[0]
        options = {name: value for name, value in kwargs.items() if name not in outs}
        if outs and takes_dtype and options.get("dtype") is None:
            options["dtype"] = into.dtype
        reason = row.why_not(*args, **options)
        tracked = torch.is_grad_enabled() and torch._C._any_requires_grad(*args, into)
        if reason and mode.strict():
            checks.refuse(op, args[0].device, reason, "convert to a dtype or form that is")
        if reason is not None or (outs and tracked):
            # torch raises the error for an out= that requires a gradient.
            return op.redispatch(keyset & BELOW_MODE, *args, **kwargs)
        if not outs:
            # What is saved for a gradient must not be what is written.
            args = (args[0].clone(), *args[1:])
        with torch._C._ExcludeDispatchKeyGuard(MODE_KEYS):
            result = row.kernel(*args, **options)
        if outs and result.dtype != into.dtype:
            return op.redispatch(keyset & BELOW_MODE, *args, **kwargs)
        if outs and into.shape != result.shape:
            into.resize_(result.shape)
        return into.copy_(result)

    return run


def _refusing(op: torch._ops.OpOverload, row: Refused) -> Callable:
    names = [a.name for a in op._schema.arguments]

    def run(keyset, *args, **kwargs):
        if mode.strict():
            arguments = dict(zip(names, args, strict=False)) | kwargs
            device = _rounding_device(arguments.values(), row.devices)
            if device is not None and (row.when is None or row.when(arguments)):
                checks.refuse(op, device, row.why, row.instead)
        return op.redispatch(keyset & BELOW_MODE, *args, **kwargs)

    return run


def _rounding_device(values, devices: tuple[str, ...]) -> torch.device | None:
    """Return the device of the first floating tensor if it is one of ``devices``."""
    tensors = (t for value in values for t in (value if type(value) is list else (value,)))
    for value in tensors:
        if isinstance(value, torch.Tensor) and value.is_floating_point() | value.is_complex():
            return value.device if value.device.type in devices else None
    return None
