"""Forwards of authors inside modes, in which functions of torch are ours; compiled graphs break."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator

import torch

from ...batch_invariant.api import batch_invariant
from .elements import Elements
from .scores import Attention, Scores


@contextlib.contextmanager
def by_ours() -> Iterator[None]:
    """Context in which functions of torch are ours: ``ck.batch_invariant`` and `elements`."""
    with batch_invariant(), Elements():
        yield


def invariant(cls: type) -> Callable:
    """Return the author's forward inside `by_ours`."""
    author = cls.forward

    @torch.compiler.disable
    def forward(self, *args, **kwargs):
        with by_ours():
            return author(self, *args, **kwargs)

    return _described(forward, author)


def attending(cls: type) -> Callable:
    """Return `invariant` with the attention that the author spells out by our op."""
    author = cls.forward

    @torch.compiler.disable
    def forward(self, *args, **kwargs):
        with by_ours(), Attention():
            result = author(self, *args, **kwargs)
        if isinstance(result, tuple):
            # The weights are never formed.
            result = tuple(None if isinstance(part, Scores) else part for part in result)
        return result

    return _described(forward, author)


def _described(forward: Callable, author: Callable) -> Callable:
    forward.__doc__ = author.__doc__
    forward.__signature__ = inspect.signature(author)
    return forward
