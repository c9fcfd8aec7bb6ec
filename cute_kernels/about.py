"""``ck.info``, ``ck.guarantees``, ``ck.contract_id``: what runs where, and what it promises."""

from __future__ import annotations

import importlib
import platform

import torch

from . import arch, settings, systems
from .compile import extension
from .contracts import contract_id, guarantees, ops
from .errors import ArgumentValueError, nearest
from .runtime import caching, dispatch, reduction
from .systems import SYSTEMS

__all__ = ["ARCHES", "catalogue", "contract_id", "guarantees", "info", "matching"]

#: What the catalogue's kernels are compiled for; no other device is given one.
ARCHES = ("sm_90a",)

#: Tested versions, the pins of constraints.txt first.  docs/support.md says which tests.
TESTED = {
    "python": ("3.11",),
    "torch": ("2.13.0", "2.11.0", "2.15.0"),
    "nvidia-cutlass-dsl": ("4.8.1", "4.8.0"),
    "apache-tvm-ffi": ("0.1.15.post2", "0.1.11"),
    "triton": ("3.7.1", "3.6.0", "3.9.0"),
    "transformers": ("5.23.0", "5.17.0", "5.4.0"),
}

_KERNEL_OF = {op: kernel for system in SYSTEMS for op, kernel in system.ops.items()}

systems.load()


def info() -> dict[str, object]:
    """Versions, devices, the backend each op gets on each of them and why others were refused.

    Returns:
        A dictionary that JSON can hold: ``versions``, ``settings``, ``reduction`` (see
        `set_reduction`), ``cache_dir``, ``extension`` (None, or why launch plans are looked up
        in Python; with a GPU, C is compiled now if it was not), ``devices`` (facts); ``ops``: per
        op and device the ``backends`` (None or the reason), the ``guarantees`` kept and the
        ``contract_id``, for bf16 inputs; and ``ran``, which is no prediction: what was launched in
        this process so far, in the order of first launches, each with ``op``, ``kernel`` (the part
        of it), ``backend``, ``device``, ``dtype``, the ``contract_id`` then and the time ``first``
        (UTC).  ``matmul`` is the op ``linear`` there.

    Raises:
        SettingError: an environment variable of the library has a value that it does not take.

    Example:
        >>> 'torch' in str(ck.info())
        True
    """
    devices = _devices()
    return {
        "versions": _versions(),
        "settings": {s.name: settings.get(s.name) for s in settings.TABLE},
        "reduction": reduction.now(),
        "cache_dir": str(settings.cache_dir()),
        "extension": extension.missing() if devices != ["cpu"] else "there is no CUDA device",
        "devices": {name: vars(arch.describe(name)) for name in devices},
        "ops": {
            op: {name: _support(op, name) for name in devices} for op in ops() if op in _KERNEL_OF
        },
        "caches": caching.sizes(),
        "ran": [dict(vars(run)) for run in dispatch.ran()],
    }


def _devices() -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{i}" for i in range(count))]


def _versions() -> dict[str, str]:
    names = ["cute-kernels", *(name for name in TESTED if name != "python")]
    versions = {name: arch.version(name) for name in names}
    return versions | {"python": platform.python_version(), "cuda": str(torch.version.cuda)}


def _support(op: str, device: str) -> dict[str, object]:
    reasons = dispatch.reasons(_KERNEL_OF[op], device, torch.bfloat16)
    runs = any(why is None for why in reasons.values())
    return {
        "backends": reasons,
        "guarantees": sorted(guarantees(op, device)) if runs else [],
        "contract_id": contract_id(op, device) if runs else None,
    }


def catalogue() -> list[tuple]:
    """Every SM90 kernel of every system: (`compile.cache.Kernel`, certificate class, `Expect`).

    The class is None where no certificate is claimed: kernels that add in arrival order.
    """
    entries = []
    for system in SYSTEMS:
        if system.launcher is not None:
            name = f"{__package__}.{system.package}.{system.launcher}"
            entries += importlib.import_module(name).catalogue()
    return entries


def matching(only: str) -> list[tuple]:
    """The entries of `catalogue` whose kernel's name contains ``only``.

    Raises:
        ArgumentValueError: there is none; the message lists the names that are near.
    """
    entries = catalogue()
    chosen = [entry for entry in entries if only in entry[0].name]
    if not chosen:
        names = dict.fromkeys(entry[0].name for entry in entries)
        raise ArgumentValueError(nearest("--only", list(names), only))
    return chosen
