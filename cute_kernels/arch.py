"""Device facts, and the backends that a device can run; no kernel is chosen here."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from . import settings
from .cpu import c_library
from .errors import AotError

CUTE_SM90 = "cute_sm90"
TRITON = "triton"
CPU = "cpu"

#: In order of preference: the first one that takes the device and the dtype is used.
BACKENDS = (CUTE_SM90, TRITON, CPU)

#: The distributions whose versions can change the machine code, and with it the bits, of a backend.
_TOOLCHAIN = {
    CUTE_SM90: (
        "nvidia-cutlass-dsl",
        "nvidia-cutlass-dsl-libs-base",
        "nvidia-cutlass-dsl-libs-core",
        "nvidia-cutlass-dsl-libs-cu13",
    ),
    TRITON: ("triton",),
    CPU: ("torch",),
}


@dataclass(frozen=True)
class Device:
    """One device: its torch name, its architecture and how many SMs (or threads) it has."""

    name: str
    kind: str  # "cuda", "hip", "cpu", or the torch device type of one without a backend
    arch: str  # "sm_90a", "gfx942", "AVX512", ...
    units: int  # streaming multiprocessors, compute units, or CPU threads
    given: int | None = None  # of the CPU threads, those that OpenMP gives; None if all

    @property
    def threads(self) -> int | str:
        """The CPU threads that bits depend on: the number, or how many of it are given."""
        return self.units if self.given is None else f"{self.given} of {self.units}"


def describe(device: torch.device | str) -> Device:
    """Facts about ``device``.  The CPU's are read at every call: its thread count may change."""
    device = torch.device(device)
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        threads, given = c_library.team()
        return Device("cpu", "cpu", capability, threads, given if given < threads else None)
    if device.type == "cuda" and torch.cuda.is_available():
        index = torch.cuda.current_device() if device.index is None else device.index
        return _describe_gpu(index)
    return Device(str(device), device.type, "unknown", 0)


@functools.cache
def _describe_gpu(index: int) -> Device:
    props = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        arch = props.gcnArchName.split(":")[0]
        return Device(f"cuda:{index}", "hip", arch, props.multi_processor_count)
    arch = f"sm_{props.major}{props.minor}"
    # The "a" names the architecture-specific features (WGMMA) that only this chip has.
    arch = "sm_90a" if arch == "sm_90" else arch
    return Device(f"cuda:{index}", "cuda", arch, props.multi_processor_count)


def refusal(backend: str, device: Device) -> str | None:
    """Why ``backend`` cannot run on ``device``; None if it can."""
    forced = settings.forced_backend()
    if forced and forced != backend:
        return f"CUTE_KERNELS_BACKEND={forced} forces another backend"
    if backend == CPU:
        return c_library.missing() if device.kind == "cpu" else "runs on cpu tensors only"
    if backend == TRITON:
        if device.kind not in ("cuda", "hip") or not device.units:
            return f"needs a CUDA or ROCm device, {device.name} is none here"
        return None if _installed("triton") else "the package triton is not installed"
    if device.kind != "cuda" or device.arch != "sm_90a":
        return f"needs an SM90 GPU (H100, H200), this is {device.kind} {device.arch}"
    if _installed("tvm_ffi") and (_installed("cutlass") or settings.aot_dir()):
        return None
    return "the packages nvidia-cutlass-dsl and apache-tvm-ffi are not installed (extra cu13)"


def toolchain(backend: str) -> dict[str, str]:
    """The versions of everything that turns this backend's source into machine code."""
    versions = {name: version(name) for name in _TOOLCHAIN[backend]}
    if backend == CUTE_SM90 and (folder := settings.aot_dir()):
        # Kernels compiled elsewhere: their compiler counts, not the one that may be here.
        manifest = _facts(folder / "manifest.json")
        versions = {name: manifest.get(f"dsl {name}", "none") for name in versions}
    if backend == CPU:
        versions["build"] = _torch_build()
    return versions


def _facts(manifest: Path) -> dict[str, str]:
    """Toolchain facts of a folder of compiled kernels; `compile.aot` checks the others."""
    try:
        return dict(json.loads(manifest.read_text())["facts"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise AotError(f"{manifest}: no facts can be read from it: {error}") from error


@functools.cache
def version(distribution: str) -> str:
    """The installed version of a distribution, or ``"none"``."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def _torch_build() -> str:
    """The lines of torch's build that name the libraries its CPU products come from."""
    lines = torch.__config__.show().splitlines()
    names = ("Math Kernel Library", "MKL-DNN", "OpenMP", "BLAS_INFO")
    return "; ".join(line.strip(" -") for line in lines if any(name in line for name in names))


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
