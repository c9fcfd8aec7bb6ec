"""Checks of tensors that systems share.  Each raises one error that names the argument."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensor

from .. import arch
from ..errors import (
    ArgumentTypeError,
    ArgumentValueError,
    BackendUnavailable,
    DeviceError,
    DtypeError,
    ShapeError,
    expected,
    no_backend,
)

#: Those with a backend, and the one whose tensors have shapes only.
DEVICE_TYPES = ("cpu", "cuda", "meta")
#: Dtypes of floats and of indices that ops take.
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int64, torch.int32)
#: Subclasses may keep their elements elsewhere.
_OWN_STORAGE = (torch.Tensor, torch.nn.Parameter)


def tensor(name: str, value: object) -> None:
    """Check that ``value`` is a strided tensor whose elements are in memory."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentTypeError(expected(name, "a torch.Tensor", type(value).__name__))
    if hasattr(value, "placements"):  # torch's own error names no argument
        advice = "of a DTensor: full_tensor(), or to_local()"
        if isinstance(value, torch.nn.Parameter):
            axes = len(value.placements)
            each = f"[Partial('avg')]{f' * {axes}' * (axes > 1)}"
            # Of full_tensor() alone a shard gets the gradient of its own rank's tokens.
            advice = (
                "of a parameter under data parallelism: make the call inside its module's forward, "
                f"or give full_tensor(grad_placements={each})"
            )
        want = f"a tensor of this rank alone ({advice})"
        raise ArgumentTypeError(expected(name, want, f"a DTensor of {tuple(value.placements)}"))
    if value.is_nested:
        raise ArgumentTypeError(expected(name, "a dense (strided) tensor", "a nested tensor"))
    if value.layout is not torch.strided:
        raise ArgumentTypeError(expected(name, "a dense (strided) tensor", value.layout))
    if not torch.compiler.is_compiling():
        storage(name, value)


#: Arguments of torch's functions -> what the function of the same name has here.
_TORCH_NAMES = {
    "input": "x= (ids= of embedding)",
    "inplace": "no inplace (the result is a new tensor)",
    "out": "no out (the result is a new tensor)",
    "normalized_shape": "no normalized_shape (the last dimension is normalised)",
    "foreach": "no foreach (gradients are on one device)",
    "sparse": "no sparse (a gradient is dense)",
    **{name: f"no {name}" for name in ("max_norm", "norm_type", "scale_grad_by_freq")},
}


def no_other_arguments(
    function: str, others: Mapping[str, object], names: Mapping[str, str] = _TORCH_NAMES
) -> None:
    """Refuse arguments that ``function`` does not have; ``names``: what it has in their place."""
    for name, value in others.items():
        want = names.get(name, "an argument")
        shown = repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__
        raise ArgumentTypeError(expected(name, f"{want} in {function}", f"{name}={shown}"))


def storage(name: str, t: torch.Tensor) -> None:
    """Check that the storage of a strided ``t`` holds its elements: fully_shard frees it."""
    t = in_memory(t)
    if type(t) not in _OWN_STORAGE or t.is_meta or not t.numel() or t._is_zerotensor():
        return
    last = t.storage_offset() + sum(
        (n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)
    )
    want, got = (last + 1) * t.itemsize, t.untyped_storage().nbytes()
    if got < want:
        actual = f"{got} bytes" + ("" if got else " (freed, as of a resharded parameter)")
        raise ArgumentValueError(expected(name, f"a storage of at least {want} bytes", actual))


def rank(name: str, t: torch.Tensor, rank: int, shape: str) -> None:
    """Check that ``t`` has ``rank`` dimensions; ``shape`` names them: ``"[N, K]"``."""
    if t.dim() != rank:
        got = f"{t.dim()} (shape {list(t.shape)})"
        raise ShapeError(expected(name, f"{rank} dimension{'s' * (rank > 1)} {shape}", got))


def dtype(name: str, given: torch.dtype, allowed: Collection[torch.dtype]) -> None:
    """Check that a dtype is one of those allowed."""
    if given not in allowed:
        raise DtypeError(expected(name, "one of " + ", ".join(map(str, allowed)), given))


def operand(name: str, value: object, shape: str, dtypes: Collection[torch.dtype] = FLOATS) -> None:
    """Check that ``value`` is a tensor of a shape such as ``"[T, k]"`` and of one of the dtypes."""
    tensor(name, value)
    rank(name, value, shape.count(",") + 1, shape)
    dtype(name, value.dtype, dtypes)


def same_device(name: str, t: torch.Tensor, of: str, like: torch.Tensor) -> None:
    """Check that ``t`` is on the device of ``like``, the argument ``of``."""
    if t.device != like.device:
        raise DeviceError(expected(name, f"device {like.device} of {of}", t.device))


def same_kind(name: str, t: torch.Tensor, of: str, like: torch.Tensor) -> None:
    """Check that both are floating, on one device and, unless autocast casts them, of one dtype."""
    dtype(of, like.dtype, FLOATS)
    dtype(name, t.dtype, FLOATS)
    same_device(name, t, of, like)
    if t.dtype is not like.dtype and not autocast(like.device):
        raise DtypeError(expected(name, f"{like.dtype}, the dtype of {of}", t.dtype))


def shape(name: str, t: torch.Tensor, sizes: Sequence[int], which: str) -> None:
    """Check that ``t`` has these sizes; ``which``: whose they are."""
    if list(t.shape) != list(sizes):
        raise ShapeError(expected(name, f"shape {list(sizes)}, {which}", list(t.shape)))


def integers(name: str, t: torch.Tensor) -> None:
    """Check that ``t`` is a tensor of int64 or int32."""
    tensor(name, t)
    if t.dtype not in INTEGERS:
        raise DtypeError(expected(name, "int64 or int32", t.dtype))


def no_gradient(name: str, t: torch.Tensor, advice: str = "") -> None:
    """Check that ``t``, which gets no gradient, asks for none."""
    if t.requires_grad:
        want = f"requires_grad=False (it has no gradient{advice})"
        raise ArgumentValueError(expected(name, want, "requires_grad=True"))


def readable(t: torch.Tensor) -> torch.Tensor | None:
    """Values that can be read: all that torch.func.vmap maps.

    None in a graph, and on a GPU, where a look at them would wait.
    """
    if torch.compiler.is_compiling() or t.device.type != "cpu":
        return None
    return in_memory(t)


def values(name: str, t: torch.Tensor, allow: Callable[..., torch.Tensor], want: str) -> None:
    """Check that ``allow(values)`` is true for all values that can be read."""
    known = readable(t)
    if known is not None and not bool((allowed := allow(known)).all()):
        got = known[~allowed].flatten()[0].item()
        raise ArgumentValueError(expected(name, want, got))


def flag(name: str, value: object) -> None:
    """Check that ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(expected(name, "True or False", type(value).__name__))


def integer(name: str, value: object, want: str = "an int") -> int:
    """Check that ``value`` is an int, and return it."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise ArgumentTypeError(expected(name, want, type(value).__name__))
    return value


def number(name: str, value: object, want: str = "a number") -> float:
    """Check that ``value`` is a number, and return it as a float: inf of a larger int."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(expected(name, want, type(value).__name__))
    try:
        return float(value)
    except OverflowError:
        return math.inf


def autocast(device: torch.device) -> bool:
    """Whether autocast casts tensors there: torch raises for a device that it casts none on."""
    return device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)


def cast_dtype(t: torch.Tensor) -> torch.dtype:
    """The dtype in which an op takes ``t``: autocast's, or its own."""
    return torch.get_autocast_dtype(t.device.type) if autocast(t.device) else t.dtype


def in_memory(t: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor that has the memory of ``t``: inside torch.func.vmap, that of all mapped parts.

    None has none, and neither has a fake tensor.
    """
    while t is not None and _functorch.is_functorch_wrapped_tensor(t):
        t = _functorch.get_unwrapped(t)
    return None if isinstance(t, FakeTensor) else t


def supported(op: str, device: torch.device) -> None:
    """Check that some backend may run ``op`` on this device; the error names each and why not.

    Which one does, `dispatch` finds, where the op runs.
    """
    if device.type not in DEVICE_TYPES:
        reasons = dict.fromkeys((arch.CUTE_SM90, arch.TRITON), "needs a CUDA or ROCm device")
        reasons[arch.CPU] = "runs on cpu tensors only"
        raise BackendUnavailable(no_backend(op, device, reasons))
