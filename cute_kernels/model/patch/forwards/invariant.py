"""Forward of a module whose functions of torch are ours: ``ck.batch_invariant`` and `elements`."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from ...batch_invariant.api import batch_invariant
from .elements import Elements


def forward_of(cls: type) -> Callable:
    """Return the author's forward inside the mode; a compiled graph breaks there."""
    author = cls.forward

    @torch.compiler.disable
    def forward(self, *args, **kwargs):
        with batch_invariant(), Elements():
            return author(self, *args, **kwargs)

    forward.__doc__ = author.__doc__
    forward.__signature__ = inspect.signature(author)
    return forward
