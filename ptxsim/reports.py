"""What launches did, device attributes, and decoded tensor maps."""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Iterator

from .errors import PtxsimError
from .native import library

_TENSORMAP_BYTES = 128


def set_device_attribute(attribute: int, value: int) -> None:
    """Sets a cudaDeviceAttr (by number) that compiled host code may ask for; 16 is the SM count."""
    library().ptxsim_set_device_attribute(int(attribute), int(value))


def report() -> dict:
    """Counts of the last launch: instructions, TMA, WGMMA, barriers, atomics; its warnings."""
    text = library().ptxsim_report().decode()
    return json.loads(text) if text else {}


def launches(clear: bool = False) -> list[dict]:
    """The latest launches, oldest first (256 at most): entry, grid, block, cluster, dynamic shared
    bytes, status, report, and parameter bytes if they were captured."""
    found = json.loads(library().ptxsim_rt_launches().decode())
    for item in found:
        item["report"] = json.loads(item["report"]) if item["report"] else {}
    if clear:
        clear_launches()
    return found


def clear_launches() -> None:
    """Empties the list that `launches` returns."""
    library().ptxsim_rt_clear_launches()


@contextlib.contextmanager
def capture_params() -> Iterator[None]:
    """Launches made inside keep their parameter bytes; see `launches`."""
    library().ptxsim_rt_capture_params(1)
    try:
        yield
    finally:
        library().ptxsim_rt_capture_params(0)


def describe_tensormap(descriptor: str | bytes | bytearray) -> dict:
    """Decodes the 128 bytes of a tensor map (or their hex text).

    Errors: ValueError for another length, PtxsimError for a field that is not known.
    """
    data = bytes.fromhex(descriptor) if isinstance(descriptor, str) else bytes(descriptor)
    if len(data) != _TENSORMAP_BYTES:
        raise ValueError(f"descriptor: a tensor map has {_TENSORMAP_BYTES} bytes, not {len(data)}")
    buffer = ctypes.create_string_buffer(_TENSORMAP_BYTES + 64)
    address = (ctypes.addressof(buffer) + 63) // 64 * 64
    ctypes.memmove(address, data, _TENSORMAP_BYTES)
    found = json.loads(library().ptxsim_rt_describe_tensormap(address).decode())
    if "error" in found:
        raise PtxsimError("tensor map: " + found["error"])
    return found
