"""Every environment variable of the library, in one table, read once, at first use.

No variable here can change the bits of a backend: they choose folders, refuse work or force one
backend by name (each backend keeps its own bits and its own contract id).
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from .errors import SettingError, one_of

PREFIX = "CUTE_KERNELS_"


@dataclass(frozen=True)
class Setting:
    """One environment variable: its name without the prefix, default, accepted values, meaning."""

    name: str
    default: str
    choices: tuple[str, ...]
    help: str


TABLE = (
    Setting("CACHE", "1", ("0", "1"), "0 keeps compiled kernels in memory only"),
    Setting("CACHE_DIR", "", (), "folder of the kernel cache (default: XDG cache, cute_kernels)"),
    Setting("AOT_DIR", "", (), "folder written by `cute_kernels aot`, loaded before any compile"),
    Setting("BACKEND", "", ("", "cute_sm90", "triton", "cpu"), "force one backend, or fail"),
    Setting("MAX_CTAS", "0", (), "cap of a persistent grid, for tests; 0 is the SM count"),
    Setting(
        "WATCHDOG_MS",
        "0",
        (),
        "debug: an SM90 attention backward gives up a turn after this; 0: never",
    ),
)

_BY_NAME = {setting.name: setting for setting in TABLE}


@functools.cache
def get(name: str) -> str:
    """The value of ``CUTE_KERNELS_<name>``, or its default; SettingError for one not taken.

    Kept after the first call, which a launch cannot wait for; `reload` reads again.
    """
    setting = _BY_NAME[name]
    value = os.environ.get(PREFIX + name, setting.default)
    if setting.choices and value not in setting.choices:
        raise SettingError(one_of(PREFIX + name, setting.choices, value))
    return value


def reload() -> None:
    """Forgets what was read: the next use of a setting sees the environment of now."""
    get.cache_clear()


def cache_enabled() -> bool:
    """Whether compiled kernels may be kept on disk."""
    return get("CACHE") == "1"


def cache_dir() -> Path:
    """Where compiled kernels are kept: never under the shared temporary folder by default."""
    if chosen := get("CACHE_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "cute_kernels"


def aot_dir() -> Path | None:
    """The folder of ahead-of-time compiled kernels, if one is named."""
    chosen = get("AOT_DIR")
    return Path(chosen).expanduser() if chosen else None


def forced_backend() -> str:
    """The backend that every op must take, or the empty string."""
    return get("BACKEND")


def max_ctas() -> int:
    """The cap of a persistent grid; 0 means the device's SM count."""
    return _whole("MAX_CTAS")


def watchdog_ms() -> int:
    """Milliseconds after which an ordered backward gives up waiting for a turn; 0 means never."""
    return _whole("WATCHDOG_MS")


def _whole(name: str) -> int:
    value = get(name)
    if not value.isdigit():
        raise SettingError(f"{PREFIX}{name}: expected a whole number >= 0, got {value!r}")
    return int(value)
