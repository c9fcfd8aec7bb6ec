"""The options that launches get: a stack of named values over the library's defaults."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from .native import LOCK, Options, library

_NAMES = tuple(name for name, _ in Options._fields_)
_WORDS = {
    "warp_order": {"round_robin": 0, "random": 1},
    "cta_order": {"ascending": 0, "random": 1, "descending": 2},
    "async_mode": {"now": 0, "late": 1, "random": 2},
    "wgmma_mode": {"now": 0, "late": 1, "random": 2},
    "wgmma_math": {"exact": 0, "fma": 1, "hopper": 2},
}
_layers: list[dict[str, int]] = [{}]


def set_options(**names: int | str) -> None:
    """Sets options until changed; `options` sets them for a with block."""
    layer = _checked(names)
    with LOCK:
        _layers[0].update(layer)
        _apply()


@contextlib.contextmanager
def options(**names: int | str) -> Iterator[None]:
    """with ptxsim.options(seed=3, resident_ctas=2, warp_order="random"): ...

    Errors: TypeError for an unknown name, ValueError for an unknown word.
    """
    layer = _checked(names)
    with LOCK:
        _layers.append(layer)
        _apply()
    try:
        yield
    finally:
        with LOCK:
            position = max(i for i, other in enumerate(_layers) if other is layer)
            del _layers[position]
            _apply()


def current_options() -> dict[str, int]:
    """The options a launch would get now, as a dict."""
    values = _values()
    return {name: getattr(values, name) for name in _NAMES}


def _values() -> Options:
    values = Options()
    library().ptxsim_default_options(ctypes.byref(values))
    for layer in _layers:
        for name, value in layer.items():
            setattr(values, name, value)
    return values


def _apply() -> None:
    library().ptxsim_set_options(ctypes.byref(_values()))


def _checked(names: dict[str, int | str]) -> dict[str, int]:
    out = {}
    for name, value in names.items():
        if name not in _NAMES:
            raise TypeError(f"ptxsim has no option {name!r}; options: {', '.join(sorted(_NAMES))}")
        if isinstance(value, str):
            words = _WORDS.get(name, {})
            if value not in words:
                raise ValueError(f"option {name}: unknown value {value!r}; known: {sorted(words)}")
            value = words[value]
        out[name] = int(value)
    return out
