"""ptxsim: runs CuTe DSL kernels for sm_90a on a CPU, from their PTX.

    import ptxsim
    kernel = ptxsim.compile(host_function, *fake_tensors, stream)   # like cute.compile
    kernel(a, b, c)                                                 # torch CPU tensors

See README.md.  It needs a C++17 compiler, torch, apache-tvm-ffi and nvidia-cutlass-dsl; no GPU, no
driver.  Importing it imports none of them; `available.py` says whether they are there.
"""

import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # the DSL reads it when it is imported

from .errors import PtxsimError
from .launch_options import current_options, options, set_options
from .native import library
from .patching import patch
from .reports import (
    capture_params,
    clear_launches,
    describe_tensormap,
    launches,
    report,
    set_device_attribute,
)
from .run import SimulatedFunction, compile, run_object
from .tensors import from_dlpack, region, wrap

__all__ = [
    "PtxsimError",
    "SimulatedFunction",
    "capture_params",
    "clear_launches",
    "compile",
    "current_options",
    "describe_tensormap",
    "from_dlpack",
    "launches",
    "library",
    "options",
    "patch",
    "region",
    "report",
    "run_object",
    "set_device_attribute",
    "set_options",
    "wrap",
]
