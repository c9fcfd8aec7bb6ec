"""Texts of mutants: a piece of a source is replaced, or the test stops."""

from __future__ import annotations

from collections.abc import Mapping


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
