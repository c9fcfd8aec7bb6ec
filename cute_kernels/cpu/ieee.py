"""IEEE fp32 on the CPU, whatever the process asked torch, OpenMP or the processor for.

No setting of the process is changed for it, so nothing has to be put back and any number of
threads may compute at once:

- ``mm`` is the BLAS's sgemm.  ``torch.mm`` asks ``torch.set_float32_matmul_precision`` and
  ``fp32_precision`` first, which any thread may change at any time, and may multiply in bf16.
- ``ieee`` gives every thread of the caller's team one floating-point environment.  Flushing of
  subnormals (``torch.set_flush_denormal``) and the rounding mode are a thread's own; a thread of
  the team has them from the moment it was started at.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import torch

from .c_library import functions, team

#: 2^f on [-1/2, 1/2], by Horner's rule.
EXP2 = (
    1.0,
    0.6931471824645996,
    0.24022650718688965,
    0.05550410971045494,
    0.00961802527308464,
    0.0013333478709682822,
    0.00015469729260075837,
    1.5303699910873547e-05,
)

_ENVIRONMENT_BYTES = 64  # fenv_t is 32 bytes on x86-64, 8 on AArch64
_TO_NEAREST = 0
_SUBNORMAL = 5e-324
_NO_TRANSPOSE, _TRANSPOSE = (ctypes.c_char(letter) for letter in (b"N", b"T"))
_ZERO, _ONE = ctypes.c_float(0), ctypes.c_float(1)
_N, _T, _0, _1 = (ctypes.addressof(c) for c in (_NO_TRANSPOSE, _TRANSPOSE, _ZERO, _ONE))


@contextlib.contextmanager
def ieee() -> Iterator[tuple[int, int]]:
    """Inside, the calling thread's team computes in IEEE arithmetic; yields its ``team``.

    Afterwards the caller's environment is what it was, and its team has the caller's.
    """
    c, size = functions(), team()
    before = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    c.fegetenv(before)
    # OpenMP may make a team smaller while the machine is busy: a thread's own switch, too.
    dynamic = c.omp_get_dynamic()
    flushes = _flushes()
    if dynamic:
        c.omp_set_dynamic(0)
    _everywhere(_default_environment(), size[0])
    try:
        yield size
    finally:
        if flushes:
            _everywhere(before, size[0])
        else:
            c.fesetenv(before)
        if dynamic:
            c.omp_set_dynamic(dynamic)


def ieee_on(t: torch.Tensor) -> contextlib.AbstractContextManager:
    """`ieee` for work on the CPU; a GPU's is IEEE's anyway."""
    return ieee() if t.device.type == "cpu" else contextlib.nullcontext()


def exp2(y: torch.Tensor) -> torch.Tensor:
    """2^y; 0 below -126, inf above 127, NaN for NaN.

    A polynomial, element by element: no bits depend on where a vector register begins.
    """
    finite = torch.nan_to_num(y, nan=0.0).clamp(-126.0, 127.0)
    whole = finite.round()
    f = finite - whole
    series = torch.full_like(f, EXP2[-1])
    for c in EXP2[-2::-1]:
        series = series * f + c
    value = series * ((whole.to(torch.int32) + 127) << 23).view(torch.float32)
    value = torch.where(y < -126.0, 0.0, value)
    value = torch.where(y > 127.0, torch.inf, value)
    return torch.where(y.isnan(), torch.nan, value)


def halves(t: torch.Tensor, dim: int) -> torch.Tensor:
    """Σ over a dimension, each half onto half; zeros fill it up to a power of two.

    Elementwise adds have one result; torch's ``sum`` has another order for other shapes.
    """
    missing = (1 << max(0, t.shape[dim] - 1).bit_length()) - t.shape[dim]
    if missing:
        t = torch.nn.functional.pad(t.movedim(dim, -1), (0, missing)).movedim(-1, dim)
    while (size := t.shape[dim]) > 1:
        t = t.narrow(dim, 0, size // 2) + t.narrow(dim, size // 2, size // 2)
    return t.squeeze(dim)


def mm(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, *, add: bool = False
) -> torch.Tensor:
    """out [M, N] = a [M, K] · b [K, N], or += with ``add``; fp32.

    a and b are row- or column-major, out is contiguous.
    """
    (m, k), n = a.shape, b.shape[1]
    if out is None:
        out = torch.empty(m, n, dtype=torch.float32, device="cpu")
    # BLAS is column-major, so it is given outᵀ = bᵀ aᵀ.
    (of_b, ld_b), (of_a, ld_a) = _layout(b), _layout(a)
    sizes = (ctypes.c_int * 6)(n, m, k, ld_b, ld_a, n)
    address = ctypes.addressof(sizes)
    functions().sgemm_(
        of_b, of_a, address, address + 4, address + 8, _1, b.data_ptr(), address + 12,
        a.data_ptr(), address + 16, _1 if add else _0, out.data_ptr(), address + 20,
    )  # fmt: skip
    return out


def _layout(t: torch.Tensor) -> tuple[int, int]:
    """(the letter, the leading dimension) of a matrix that BLAS is to read transposed."""
    (rows, columns), (down, across) = t.shape, t.stride()
    if across == 1 and (down >= columns or rows == 1):
        return _N, max(down, columns)
    return _T, max(across, rows)


def _everywhere(environment: ctypes.Array, threads: int) -> None:
    """Gives an environment to every thread of a team, the caller among them."""
    c = functions()
    if threads == 1:
        c.fesetenv(environment)
    else:
        c.GOMP_parallel(c.address_of_fesetenv, ctypes.addressof(environment), threads, 0)


@functools.cache
def _default_environment() -> ctypes.Array:
    """Default floating-point environment: round to nearest, nothing flushed, nothing trapped."""
    c = functions()
    before, environment = (ctypes.create_string_buffer(_ENVIRONMENT_BYTES) for _ in range(2))
    c.fegetenv(before)
    torch.set_flush_denormal(False)
    c.fesetround(_TO_NEAREST)
    c.fegetenv(environment)
    c.fesetenv(before)
    return environment


def _flushes() -> bool:
    """Whether the calling thread takes subnormals for zero."""
    return _SUBNORMAL * float(1) == 0.0
