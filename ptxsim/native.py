"""Loads libptxsim.so and declares the functions that Python calls."""

from __future__ import annotations

import ctypes
import threading
from ctypes import c_char_p, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

from .build import Built, build

LOCK = threading.RLock()  # one launch at a time in a process

_built: Built | None = None
_library: ctypes.CDLL | None = None


class Options(ctypes.Structure):
    """PtxsimOptions of csrc/ptxsim.h."""

    _fields_ = (
        ("seed", c_uint64),
        ("resident_ctas", c_int32),
        ("warp_order", c_int32),
        ("cta_order", c_int32),
        ("async_mode", c_int32),
        ("wgmma_mode", c_int32),
        ("wgmma_math", c_int32),
        ("check_memory", c_int32),
        ("poison_shared", c_int32),
        ("check_races", c_int32),
        ("max_steps", c_int64),
        ("stall_steps", c_int64),
        ("check_fences", c_int32),
    )


_DIMS = ctypes.POINTER(c_uint32)
_OPTIONS = ctypes.POINTER(Options)
_SIGNATURES = {
    # the core: PTX modules, memory, launches
    "ptxsim_load": (c_int64, [c_char_p, c_char_p]),
    "ptxsim_unload": (None, [c_int64]),
    "ptxsim_entry_count": (c_int32, [c_int64]),
    "ptxsim_entry_name": (c_char_p, [c_int64, c_int32]),
    "ptxsim_param_count": (c_int32, [c_int64, c_char_p]),
    "ptxsim_param_size": (c_int32, [c_int64, c_char_p, c_int32]),
    "ptxsim_register_region": (None, [c_void_p, c_size_t, c_int32, c_char_p]),
    "ptxsim_clear_regions": (None, []),
    "ptxsim_default_options": (None, [_OPTIONS]),
    "ptxsim_launch": (
        c_int32,
        [c_int64, c_char_p, _DIMS, _DIMS, _DIMS, c_uint32, c_void_p, _OPTIONS],
    ),
    "ptxsim_report": (c_char_p, []),
    "ptxsim_error": (c_char_p, []),
    # the runtime of compiled host functions
    "ptxsim_set_options": (None, [_OPTIONS]),
    "ptxsim_set_device_attribute": (None, [c_int32, c_int32]),
    "ptxsim_rt_new_group": (c_int64, []),
    "ptxsim_rt_group_load": (c_int32, [c_int64, c_char_p, c_char_p]),
    "ptxsim_rt_drop_group": (None, [c_int64]),
    "ptxsim_rt_select_group": (None, [c_int64]),
    "ptxsim_rt_last_error": (c_char_p, []),
    "ptxsim_rt_clear_error": (None, []),
    "ptxsim_rt_clear_launches": (None, []),
    "ptxsim_rt_capture_params": (None, [c_int32]),
    "ptxsim_rt_launches": (c_char_p, []),
    "ptxsim_rt_describe_tensormap": (c_char_p, [c_void_p]),
}


def built() -> Built:
    """The files of the build that this process uses."""
    global _built
    with LOCK:
        if _built is None:
            _built = build()
        return _built


def library() -> ctypes.CDLL:
    """libptxsim.so, built on first use."""
    global _library
    with LOCK:
        if _library is None:
            loaded = ctypes.CDLL(str(built().library), mode=ctypes.RTLD_GLOBAL)
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(loaded, name)
                function.restype, function.argtypes = result, arguments
            _library = loaded
        return _library
