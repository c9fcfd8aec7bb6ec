"""Forward of an attention module that rotates q and k by ck.apply_rotary_pos_emb.

It is the author's code, in which one global name is ours: other modules of the class, and of the
author's file, are as they were.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType

import torch

from ....rowwise import op
from ..scan.authors import POS_EMB, PosEmb, pos_emb


class _Globals(dict):
    """Names of our own in front of the globals of a function, which stay live."""

    def __init__(self, names: dict[str, object], author: dict[str, object]) -> None:
        # The interpreter reads dunder names past `__missing__`.
        super().__init__({k: v for k, v in author.items() if k.startswith("__")} | names)
        self._author = author

    def __missing__(self, name: str) -> object:
        return self._author[name]


def forward_of(cls: type) -> Callable:
    """Return the author's forward, in which q and k are rotated in one launch.

    It is the author's own where the formula is not known: a pickle may come from another version of
    transformers.
    """
    author, known = cls.forward, pos_emb(cls)
    if known is None:
        return author
    names, rotation = author.__globals__, _rotation(known)
    rotating = _with_globals(author, _Globals({POS_EMB: rotation}, names))
    # Dynamo reads no missing names: those that the forward has are looked up once.
    used = {n: names[n] for n in ("__builtins__", *author.__code__.co_names) if n in names}
    traced = _with_globals(author, used | {POS_EMB: rotation})

    def is_current() -> bool:
        return all(names.get(name) is value for name, value in used.items())

    # Asked while a graph is traced; `POS_EMB` itself is guarded below.
    is_current._dynamo_marked_constant = True

    def forward(self, *args, **kwargs):
        if names.get(POS_EMB) is not known.function:
            return author(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            return rotating(self, *args, **kwargs)
        return (traced if is_current() else author)(self, *args, **kwargs)

    forward.__doc__ = author.__doc__
    forward.__signature__ = inspect.signature(author)
    return forward


def _with_globals(author: FunctionType, names: dict[str, object]) -> FunctionType:
    """Return a function of the author's code with other globals."""
    function = FunctionType(
        author.__code__, names, author.__name__, author.__defaults__, author.__closure__
    )
    function.__kwdefaults__ = author.__kwdefaults__
    return function


def _rotation(known: PosEmb) -> Callable:
    """Return what a model calls in place of the author's function: the same bytes in one launch."""
    author, partial, keeps_dtype = known

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        if partial or cos.shape[-1] == q.shape[-1] == k.shape[-1]:
            dtype = q.dtype if keeps_dtype else None
            result = op.rotate_if_taken(q, k, cos, sin, unsqueeze_dim, dtype)
            if result is not None:
                return result
        return author(q, k, cos, sin, unsqueeze_dim)

    return apply_rotary_pos_emb
