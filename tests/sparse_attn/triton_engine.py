"""Runners of the Triton attention, dense and paged, and what runs on their launchers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import cute_kernels.sparse_attn.triton as package
from cute_kernels import arch
from cute_kernels.runtime import dispatch
from cute_kernels.sparse_attn.triton import launch as dense_launch
from cute_kernels.sparse_attn.triton import paged as paged_launch
from tests.triton_runner import Runner

from .paged_cases import Engine

_DESCRIBE = arch.describe


DENSE = Runner(
    package,
    {
        "forward_kernel": ("out_ptr", "lse_ptr"),
        "delta_kernel": ("delta_ptr",),
        "writers_kernel": ("writer_ptr", "writer_tile_ptr"),
        "dkdv_kernel": ("dk_ptr", "dv_ptr"),
        "dq_kernel": ("dq_ptr",),
    },
    files=("kernel_softmax", "kernel", "launch"),
    arithmetic=(),
)
PAGED = Runner(
    package,
    {"paged_forward_kernel": ("out_ptr", "lse_ptr"), "write_kv_kernel": ("k_ptr", "v_ptr")},
    files=("kernel_softmax", "kernel_paged", "paged"),
    arithmetic=(),
)
RUNNERS = (DENSE, PAGED)


@contextlib.contextmanager
def through(launch: ModuleType = dense_launch) -> Iterator[None]:
    """While it lasts, ``block_sparse_attention`` runs on ``launch``, on what is a CPU to it."""

    def launcher(op, device, dtype):
        return launch.backward if op.endswith("_backward") else launch.forward

    with (
        mock.patch.object(dispatch, "launcher", launcher),
        mock.patch.object(arch, "describe", _DESCRIBE),
    ):
        yield


def engine(paged: ModuleType = paged_launch, dense: ModuleType = dense_launch) -> Engine:
    """The launchers of paged caches, and of the dense forward."""
    return Engine(paged.paged_attention, dense.forward, paged.write_kv_cache)


@contextlib.contextmanager
def running(name: str, *edits: tuple[str, str], **options: int) -> Iterator[Engine]:
    """While it lasts, the launchers that it yields, of a mutant of the paged ones, run."""
    with DENSE.running(name, **options) as dense, PAGED.running(name, *edits, **options) as paged:
        yield engine(paged, dense)


@contextlib.contextmanager
def simulated(launch: ModuleType = dense_launch, **options: int) -> Iterator[list]:
    """While it lasts, both run in ptxsim; yields the dense kernels launched."""
    with PAGED.simulated(**options), DENSE.simulated(launch, **options) as kernels:
        yield kernels
