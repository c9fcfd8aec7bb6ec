"""``ck.info``, ``ck.guarantees``, ``ck.contract_id``: what runs where, and what it promises."""

from __future__ import annotations

import importlib
import platform

import torch

from . import arch, dispatch, settings
from .contracts import contract_id, guarantees, ops

__all__ = ["SYSTEMS", "catalogue", "contract_id", "guarantees", "info"]

#: The systems in this build; importing ``<system>.op`` registers its ops and contracts.
SYSTEMS = ("gemm", "sparse_attn")
#: Those with an SM90 launcher, and with it a catalogue of kernels.
LAUNCHED = ("gemm", "sparse_attn")

for _system in SYSTEMS:
    importlib.import_module(f"{__package__}.{_system}.op")


def info() -> dict[str, object]:
    """Versions, devices, the backend each op gets on each of them and why others were refused.

    Returns:
        A dictionary that JSON can hold: ``versions``, ``settings``, ``cache_dir``, ``devices``
        (facts), and ``ops``: per op and device the ``backends`` (None or the reason), the
        ``guarantees`` kept and the ``contract_id``, for bf16 inputs.
    """
    devices = _devices()
    return {
        "versions": _versions(),
        "settings": {s.name: settings.get(s.name) for s in settings.TABLE},
        "cache_dir": str(settings.cache_dir()),
        "devices": {name: vars(arch.describe(name)) for name in devices},
        "ops": {op: {name: _support(op, name) for name in devices} for op in ops()},
    }


def _devices() -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{i}" for i in range(count))]


def _versions() -> dict[str, str]:
    names = ("cute-kernels", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "triton")
    found = {name: arch.version(name) for name in names}
    return found | {"python": platform.python_version(), "cuda": str(torch.version.cuda)}


def _support(op: str, device: str) -> dict[str, object]:
    reasons = dispatch.reasons(_kernel_of(op), device, torch.bfloat16)
    runs = any(why is None for why in reasons.values())
    return {
        "backends": reasons,
        "guarantees": sorted(guarantees(op, device)) if runs else [],
        "contract_id": contract_id(op, device) if runs else None,
    }


def _kernel_of(op: str) -> str:
    """The dispatch entry behind a public op: linear and matmul are both gemm."""
    return {"linear": "gemm", "matmul": "gemm"}.get(op, op)


def catalogue() -> list[tuple]:
    """Every SM90 kernel of every system: (`compile.cache.Kernel`, certificate class, `Expect`).

    The class is None where no certificate is claimed: kernels that add in arrival order.
    """
    found = []
    for system in LAUNCHED:
        launch = importlib.import_module(f"{__package__}.{system}.launch")
        found += launch.catalogue()
    return found
