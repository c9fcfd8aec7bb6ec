"""torch CPU tensors shown as CUDA tensors, and the memory that a call may touch."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
from collections.abc import Iterator
from typing import Any

_KDL_CUDA = 2
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _DLTensorHead(ctypes.Structure):
    """The first fields of a DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Memory that a launch may touch; `keep` holds its owner alive."""

    base: int
    nbytes: int
    writable: bool
    label: str
    keep: Any


extra_regions: list[Region] = []  # of `region`
addressed: dict[int, Region] = {}  # storages whose address was taken inside `patch`, by address
_ADDRESSED_LIMIT = 512


@contextlib.contextmanager
def region(tensor, writable: bool = True, label: str | None = None) -> Iterator[None]:
    """Memory that kernels reach through addresses the call does not pass as tensors."""
    storage = tensor.untyped_storage()
    item = Region(storage.data_ptr(), storage.nbytes(), writable, label or "region", tensor)
    extra_regions.append(item)
    try:
        yield
    finally:
        extra_regions.remove(item)


def note_address(tensor) -> None:
    """Registers the storage of a tensor whose address someone asked for."""
    storage = tensor.untyped_storage()
    base = storage.data_ptr()
    addressed.pop(base, None)  # the latest comes last
    addressed[base] = Region(base, storage.nbytes(), True, "passed by address", storage)
    while len(addressed) > _ADDRESSED_LIMIT:
        addressed.pop(next(iter(addressed)))


def _cuda_capsule(tensor):
    """A DLPack capsule over a torch CPU tensor's memory whose device reads cuda:0."""
    import torch

    if tensor.device.type != "cpu":
        raise TypeError(f"ptxsim takes torch CPU tensors, not {tensor.device}")
    capsule = torch.utils.dlpack.to_dlpack(tensor.detach())
    head = _DLTensorHead.from_address(_get_pointer(capsule, b"dltensor"))
    head.device_type, head.device_id = _KDL_CUDA, 0
    return capsule


def wrap(tensor):
    """A tvm_ffi tensor over a torch CPU tensor's memory that says it is on cuda:0."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(_cuda_capsule(tensor))


class CudaView:
    """A DLPack producer for cutlass.cute.runtime.from_dlpack: host memory shown as CUDA memory."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return (_KDL_CUDA, 0)

    def __dlpack__(self, **_):
        return _cuda_capsule(self.tensor)


def from_dlpack(tensor, *args, **kwargs):
    """cutlass.cute.runtime.from_dlpack for a torch CPU tensor that stands for a CUDA one."""
    from cutlass.cute import runtime

    kwargs.setdefault("enable_tvm_ffi", True)
    return runtime.from_dlpack(CudaView(tensor), *args, **kwargs)


def _tvm_ffi_tensor_bytes(tensor) -> int:
    """Bytes from data_ptr that a tvm_ffi tensor spans."""
    shape, strides = tuple(tensor.shape), tuple(tensor.strides)
    if 0 in shape:
        return 0
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s > 0)
    bits = tensor.dtype.bits * tensor.dtype.lanes
    return ((last + 1) * bits + 7) // 8


class Arguments:
    """Turns call arguments into what a compiled function takes, and collects their memory."""

    def __init__(self):
        import torch
        import tvm_ffi

        self._torch_tensor, self._ffi_tensor = torch.Tensor, tvm_ffi.Tensor
        self.regions: dict[tuple[int, int], Region] = {}

    def convert(self, value, label: str):
        if isinstance(value, self._torch_tensor):
            storage = value.untyped_storage()
            self._note(storage.data_ptr(), storage.nbytes(), label, value)
            return wrap(value)
        if isinstance(value, self._ffi_tensor):
            self._note(value.data_ptr(), _tvm_ffi_tensor_bytes(value), label, value)
            return value
        if isinstance(value, tuple):
            items = [self.convert(v, f"{label}[{i}]") for i, v in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, list):
            return [self.convert(v, f"{label}[{i}]") for i, v in enumerate(value)]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._convert_dataclass(value, label)
        if hasattr(type(value), "__tvm_ffi_object__"):
            with contextlib.suppress(Exception):
                held = value.__tvm_ffi_object__()
                if isinstance(held, self._ffi_tensor):
                    return self.convert(held, label)
        module, name = type(value).__module__, type(value).__name__
        if module.split(".")[0] == "cuda" and "tream" in name:
            return ctypes.c_void_p(0)  # a driver stream: the simulator has one queue
        return value

    def _note(self, base, nbytes, label, keep):
        if nbytes and (base, nbytes) not in self.regions:
            self.regions[base, nbytes] = Region(base, nbytes, True, label, keep)

    def _convert_dataclass(self, value, label):
        changed = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name, None)
            new = self.convert(old, f"{label}.{field.name}")
            if new is not old:
                changed[field.name] = new
        if not changed:
            return value
        clone = copy.copy(value)
        for name, new in changed.items():
            object.__setattr__(clone, name, new)  # frozen ones too
        return clone
