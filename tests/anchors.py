"""Texts of mutants: a piece of a source is replaced, or the test stops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType


class AnchorError(Exception):
    """The text that a mutant replaces is not there, or is there more than once.

    No AssertionError: tests take that for a mutant that was noticed.
    """


def replaced(texts: Mapping[str, str], old: str, new: str) -> dict[str, str]:
    """``texts`` by name with ``old``, which occurs once in all of them, replaced by ``new``."""
    counts = {name: text.count(old) for name, text in texts.items()}
    if sum(counts.values()) != 1 or old == new:
        raise AnchorError(f"expected 1 place with another text, got {counts}: {old!r} -> {new!r}")
    return {name: text.replace(old, new) for name, text in texts.items()}


@contextlib.contextmanager
def planted(module: ModuleType, *edits: tuple[str, str]) -> Iterator[None]:
    """While it lasts, a module runs its source with each (old, new) replaced."""
    own, texts = dict(vars(module)), {module.__name__: Path(module.__file__).read_text()}
    for old, new in edits:
        texts = replaced(texts, old, new)
    try:
        exec(compile(texts[module.__name__], module.__file__, "exec"), vars(module))
        yield
    finally:
        vars(module).clear()
        vars(module).update(own)
