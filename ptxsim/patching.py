"""Runs a library's own launch path on the simulator: `patch` and what it changes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from . import run
from .native import library
from .tensors import CudaView, addressed, note_address

_SMS = 132
_L2_BYTES = 52428800
_ENVIRONMENT = {
    "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_ARCH": "sm_90",
    "FLASH_ATTENTION_NUM_SMS": str(_SMS),
    "QUACK_ARCH": "sm_90",
    "QUACK_CACHE_ENABLED": "0",  # its objects on disk are built for another runtime
}


@contextlib.contextmanager
def patch(environment: dict[str, str] | None = None) -> Iterator[None]:
    """Runs a library's own launch path on the simulator: cute.compile goes to `compile`,
    from_dlpack shows CPU tensors as CUDA ones, torch.cuda answers as one sm_90 device, torch CPU
    tensors say is_cuda, and memory whose data_ptr is asked for counts as registered.

    environment: variables set inside the block, over those that rivals' libraries need.
    """
    library()
    run.require_arch()
    changes = _Changes()
    outer = run._unpatched_compile
    try:
        for key, value in {**_ENVIRONMENT, **(environment or {})}.items():
            changes.item(os.environ, key, value)
        _patch_compile(changes)
        _patch_from_dlpack(changes)
        _patch_torch_cuda(changes)
        _patch_hardware_info(changes)
        _patch_tensors(changes)
        _patch_custom_operators(changes)
        if "quack.cache" in sys.modules:  # it read its environment when it was imported
            changes.attribute(sys.modules["quack.cache"], "CACHE_ENABLED", False)
        with _cuda_means_cpu():
            yield
    finally:
        changes.undo()
        if outer is None:
            addressed.clear()


_ABSENT = object()


class _Changes:
    """Attributes and items set, to be undone in reverse order."""

    def __init__(self):
        self._steps = contextlib.ExitStack()
        self.undo = self._steps.close

    def attribute(self, owner, name, value):
        old = vars(owner).get(name, _ABSENT)  # not what it inherits
        setattr(owner, name, value)
        if old is _ABSENT:
            self._steps.callback(delattr, owner, name)
        else:
            self._steps.callback(setattr, owner, name, old)

    def item(self, mapping, key, value):
        old = mapping.get(key, _ABSENT)
        mapping[key] = value
        if old is _ABSENT:
            self._steps.callback(mapping.pop, key, None)
        else:
            self._steps.callback(mapping.__setitem__, key, old)


def _replace_everywhere(changes, old, new):
    """Rebinds module globals that hold `old` (from x import y) in modules already imported."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict) or names is globals() or module is run:
            continue
        for key, value in list(names.items()):
            if value is old:
                with contextlib.suppress(Exception):  # a module that refuses assignments
                    changes.attribute(module, key, new)


class _PatchedCompile:
    """Stands for cute.compile while `patch` lasts."""

    def __init__(self, compiler):
        self._compiler = compiler

    def __call__(self, function, *args, **kwargs):
        return run.compile_with(self._compiler, function, *args, **kwargs)

    def __getitem__(self, chosen):
        return _PatchedCompile(self._compiler[chosen])

    def __getattr__(self, name):
        return getattr(self._compiler, name)


def _patch_compile(changes):
    import cutlass.cute as cute

    compiler = cute.compile
    if isinstance(compiler, _PatchedCompile):  # an outer patch
        return
    patched = _PatchedCompile(compiler)
    changes.attribute(run, "_unpatched_compile", compiler)
    changes.attribute(cute, "compile", patched)
    _replace_everywhere(changes, compiler, patched)


def _patch_from_dlpack(changes):
    import torch
    from cutlass.cute import runtime

    from_dlpack = runtime.from_dlpack

    def from_dlpack_as_cuda(tensor, *args, **kwargs):
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            tensor = CudaView(tensor)
            kwargs["enable_tvm_ffi"] = True
        return from_dlpack(tensor, *args, **kwargs)

    changes.attribute(runtime, "from_dlpack", from_dlpack_as_cuda)
    _replace_everywhere(changes, from_dlpack, from_dlpack_as_cuda)


class _Stream:
    cuda_stream = 0
    device_index = 0
    stream_id = 0

    def __init__(self, *_, **__):
        pass

    def synchronize(self):
        pass

    def wait_stream(self, other):
        pass

    wait_event = record_event = wait_stream

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


class _Event:
    def __init__(self, *_, **__):
        pass

    def record(self, stream=None):
        pass

    wait = record

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


class _Properties:
    name = "ptxsim"
    major, minor = 9, 0
    multi_processor_count = _SMS
    total_memory = 80 << 30
    warp_size = 32
    max_threads_per_multi_processor = 2048
    regs_per_multiprocessor = 65536
    shared_memory_per_block = 49152
    shared_memory_per_block_optin = 232448
    shared_memory_per_multiprocessor = 233472
    L2_cache_size = _L2_BYTES


def _patch_torch_cuda(changes):
    import torch

    stream = _Stream()
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device=None: None,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda s=None: contextlib.nullcontext(),
        "device": lambda device=None: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "ptxsim",
        "get_device_properties": lambda device=None: _Properties(),
        "is_current_stream_capturing": lambda: False,
        "empty_cache": lambda: None,
        "Stream": _Stream,
        "Event": _Event,
    }.items():
        if hasattr(torch.cuda, name):
            changes.attribute(torch.cuda, name, value)


def _patch_hardware_info(changes):
    import cutlass.utils as cutlass_utils

    hardware = getattr(cutlass_utils, "HardwareInfo", None)
    for name, value in {
        "__init__": lambda self, device_id=0: None,
        "get_max_active_clusters": lambda self, cluster_size, stream=None: _SMS // cluster_size,
        "get_device_multiprocessor_count": lambda self: _SMS,
        "get_l2_cache_size_in_bytes": lambda self: _L2_BYTES,
    }.items():
        if hasattr(hardware, name):
            changes.attribute(hardware, name, value)


def _patch_tensors(changes):
    import torch

    data_ptr = torch.Tensor.data_ptr

    def data_ptr_noted(self):
        if self.device.type == "cpu":
            note_address(self)
        return data_ptr(self)

    changes.attribute(torch.Tensor, "data_ptr", data_ptr_noted)
    changes.attribute(torch.Tensor, "is_cuda", property(lambda self: True))
    changes.attribute(torch.Tensor, "cuda", lambda self, *_, **__: self)
    if hasattr(torch._C, "_cuda_getCurrentRawStream"):
        changes.attribute(torch._C, "_cuda_getCurrentRawStream", lambda index=0: 0)


def _patch_custom_operators(changes):
    """Custom operators for CUDA take CPU tensors: those defined already, and those defined inside.

    The former keep their CPU kernel after the block.
    """
    import torch

    with contextlib.suppress(ImportError, AttributeError):
        from torch._library.custom_ops import OPDEFS

        for op in list(OPDEFS.values()):
            if "cuda" in op._backend_fns and "cpu" not in op._backend_fns:
                op.register_kernel("cpu", op._init_fn)
    custom_op = torch.library.custom_op

    def custom_op_anywhere(*args, **kwargs):
        if kwargs.get("device_types") == "cuda":
            kwargs["device_types"] = None
        return custom_op(*args, **kwargs)

    changes.attribute(torch.library, "custom_op", custom_op_anywhere)


def _cuda_means_cpu():
    """A torch mode in which device="cuda" is the CPU."""
    import torch
    from torch.overrides import TorchFunctionMode

    def on_cpu(value):
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == "cuda" else value
        if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
            return "cpu"
        return value

    class CudaMeansCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if "device" in kwargs:
                kwargs["device"] = on_cpu(kwargs["device"])
            if function is not torch.device:
                args = tuple(on_cpu(a) if isinstance(a, (str, torch.device)) else a for a in args)
            return function(*args, **kwargs)

    return CudaMeansCpu()
