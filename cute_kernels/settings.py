"""Every environment variable of the library, in one table, read once, at first use.

No variable here can change the bits of what is ordered: they choose folders, refuse work, say what
happens or force one backend by name (each backend keeps its own bits and its own contract id).  One
lets an op add in arrival order whose caller does not say: SKINNY.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import SettingError, SettingWarning, expected, nearest, one_of

PREFIX = "CUTE_KERNELS_"
#: What a name that was meant for a setting starts with, the plural forgotten or not.
_STEM = "CUTE_KERNEL"
_DIGITS = 9


def _whole(name: str, value: str) -> int:
    # str.isdigit also takes "²" and the digits of every script, and int() not all of them.
    if not (value.isascii() and value.isdigit() and len(value) <= _DIGITS):
        want = f"a whole number from 0 to {'9' * _DIGITS}"
        raise SettingError(expected(name, want, repr(value)))
    return int(value)


def _folder(name: str, value: str) -> Path | None:
    """The folder that ``value`` names, ``~`` resolved; None for the empty text."""
    try:
        return Path(value).expanduser() if value else None
    except RuntimeError as error:
        want = "a folder whose ~ is the home of a user"
        raise SettingError(f"{expected(name, want, repr(value))} ({error})") from None


_KINDS: dict[str, Callable[[str, str], object]] = {"whole number": _whole, "folder": _folder}


@dataclass(frozen=True)
class Setting:
    """One environment variable: its name without the prefix, default, accepted values, meaning.

    ``choices`` are all the values there are; where they are empty, ``kind`` says what is taken.
    """

    name: str
    default: str
    choices: tuple[str, ...]
    help: str
    kind: str = ""

    def read(self) -> str:
        """The value in the environment of now, or the default; SettingError for one not taken."""
        name = PREFIX + self.name
        value = os.environ.get(name, self.default)
        if self.choices and value not in self.choices:
            raise SettingError(one_of(name, self.choices, value))
        if self.kind:
            _KINDS[self.kind](name, value)
        return value


TABLE = (
    Setting("CACHE", "1", ("0", "1"), "0 keeps compiled kernels in memory only"),
    Setting(
        "CACHE_DIR",
        "",
        (),
        "folder of the kernel cache (default: XDG cache, cute_kernels)",
        "folder",
    ),
    Setting(
        "AOT_DIR",
        "",
        (),
        "folder written by `cute_kernels aot`, loaded before any compile",
        "folder",
    ),
    Setting("BACKEND", "", ("", "cute_sm90", "triton", "cpu"), "force one backend, or fail"),
    Setting("EXTENSION", "1", ("0", "1"), "0 looks launch plans up in Python and compiles no C"),
    Setting("LOG", "0", ("0", "1"), "1 says what runs, is copied and is compiled, each once"),
    Setting(
        "SKINNY",
        "deterministic",
        ("deterministic", "fast"),
        "skinny_linear without deterministic=: ordered, or fast in arrival order",
    ),
    Setting(
        "LOGITS_MEMORY_MIB",
        "0",
        (),
        "MiB of logits that linear_logp keeps and linear_policy_loss has at a time by default",
        "whole number",
    ),
    Setting(
        "MAX_CTAS",
        "0",
        (),
        "cap of a persistent grid, for tests; 0 is the SM count",
        "whole number",
    ),
    Setting("SGLANG", "0", ("0", "1"), "1 runs SGLang's layers on our ops (integrations.sglang)"),
    Setting("VLLM", "0", ("0", "1"), "1 runs vLLM's models on our ops (integrations.vllm)"),
)

_BY_NAME = {setting.name: setting for setting in TABLE}


@functools.cache
def get(name: str) -> str:
    """The value of ``CUTE_KERNELS_<name>``, or its default; SettingError for one not taken.

    Kept after the first call, which a launch cannot wait for; `reload` reads again.  The first use
    of any setting warns of names in the environment that are none.
    """
    _warn_of_unknown_names()
    return _BY_NAME[name].read()


#: `get` as the process has it, and what `plan_settings` answered by it, for compile/calls.c.
CACHED_GET = get
KNOWN_PLAN_SETTINGS: tuple[str, ...] | None = None
#: Of who writes it; `get` may warn, and a handler of warnings may read settings.
_publishing = threading.RLock()


def plan_settings() -> tuple[str, ...]:
    """The settings that launch plans depend on."""
    global KNOWN_PLAN_SETTINGS
    with _publishing:
        values = get("BACKEND"), get("MAX_CTAS")
        if get is CACHED_GET:
            KNOWN_PLAN_SETTINGS = values
    return values


def reload() -> None:
    """Forgets what was read: the next use of a setting sees the environment of now."""
    global KNOWN_PLAN_SETTINGS
    with _publishing:
        KNOWN_PLAN_SETTINGS = None
        get.cache_clear()
    _warn_of_unknown_names.cache_clear()


def check() -> None:
    """Reads every setting; SettingError for a value that is not taken or a name that is none."""
    for setting in TABLE:
        setting.read()
    if unknown := _unknown_names():
        raise SettingError(unknown[0])


@functools.cache
def _warn_of_unknown_names() -> None:
    for message in _unknown_names():
        warnings.warn(f"{message}; it is ignored", SettingWarning, stacklevel=1)


def _unknown_names() -> list[str]:
    """Problems of the environment variables that look like a setting and are none."""
    known = [PREFIX + setting.name for setting in TABLE]
    unknown = [name for name in os.environ if name.startswith(_STEM) and name not in known]
    return [nearest("environment variable", known, name) for name in sorted(unknown)]


def log() -> bool:
    """Whether what runs is logged."""
    return get("LOG") == "1"


def cache_enabled() -> bool:
    """Whether compiled kernels may be kept on disk."""
    return get("CACHE") == "1"


def cache_dir() -> Path:
    """Folder of compiled kernels: never under the shared temporary folder by default.

    Raises:
        SettingError: no folder is named, and this user has no home folder.
    """
    name = PREFIX + "CACHE_DIR"
    if chosen := _folder(name, get("CACHE_DIR")):
        return chosen
    base = os.environ.get("XDG_CACHE_HOME") or _folder(name, "~/.cache")
    return Path(base) / "cute_kernels"


def aot_dir() -> Path | None:
    """The folder of ahead-of-time compiled kernels, if one is named."""
    return _folder(PREFIX + "AOT_DIR", get("AOT_DIR"))


def forced_backend() -> str:
    """The backend that every op must take, or the empty string."""
    return get("BACKEND")


def extension() -> bool:
    """Whether launch plans are looked up and launched in C, where that can be compiled."""
    return get("EXTENSION") == "1"


def logits_memory() -> int:
    """Bytes of logits that a forward of linear_logp may keep for its backward."""
    return int(get("LOGITS_MEMORY_MIB")) << 20


# A constant of a compiled graph, which would guard every name in the environment.
logits_memory._dynamo_marked_constant = True


def max_ctas() -> int:
    """The cap of a persistent grid; 0 means the device's SM count."""
    return int(get("MAX_CTAS"))


def vllm() -> bool:
    """Whether vLLM's models run on our ops."""
    return get("VLLM") == "1"
