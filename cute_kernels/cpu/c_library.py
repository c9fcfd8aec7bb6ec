"""The C functions under torch's CPU products: BLAS, OpenMP and the floating-point environment.

They are taken from the libraries that torch itself has loaded, so a product made with them is the
product torch makes.  What torch puts on top of them reads settings that belong to the whole
process; these functions read none.
"""

from __future__ import annotations

import ctypes
import functools

import torch

_INT, _POINTER = ctypes.c_int, ctypes.c_void_p

#: name -> (result, arguments, whether other Python threads may run meanwhile).
_SIGNATURES = {
    # C = alpha op(A) op(B) + beta C on column-major fp32, every argument by address.
    "sgemm_": (None, (_POINTER,) * 13, True),
    # Runs function(data) in every thread of a team: function, data, threads, flags.
    "GOMP_parallel": (None, (_POINTER, _POINTER, ctypes.c_uint, ctypes.c_uint), True),
    "omp_get_thread_limit": (_INT, (), False),
    "omp_get_dynamic": (_INT, (), False),
    "omp_set_dynamic": (None, (_INT,), False),
    "fegetenv": (_INT, (_POINTER,), False),
    "fesetenv": (_INT, (_POINTER,), False),
    "fesetround": (_INT, (_INT,), False),
}


class Functions:
    """Every function of ``_SIGNATURES`` as an attribute; AttributeError if one is not there."""

    def __init__(self) -> None:
        # dlsym looks through a library and all that it is linked with.
        unlocked, locked = ctypes.CDLL(torch._C.__file__), ctypes.PyDLL(torch._C.__file__)
        for name, (result, arguments, releases) in _SIGNATURES.items():
            function = getattr(unlocked if releases else locked, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.address_of_fesetenv = ctypes.cast(self.fesetenv, _POINTER).value


@functools.cache
def functions() -> Functions:
    """The functions, looked up once."""
    return Functions()


@functools.cache
def missing() -> str | None:
    """Why this build of torch has no CPU backend; None if it has everything."""
    try:
        functions()
    except (AttributeError, OSError) as error:
        return f"torch {torch.__version__} here is built without a C function it needs: {error}"
    return None


def team() -> tuple[int, int]:
    """(threads asked for, threads given) when the calling thread starts a parallel region.

    OMP_THREAD_LIMIT may allow fewer than ``torch.get_num_threads()`` counts.
    """
    threads = torch.get_num_threads()
    return threads, threads if missing() else min(threads, functions().omp_get_thread_limit())
