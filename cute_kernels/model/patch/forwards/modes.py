"""Forwards of authors inside modes, in which functions of torch are ours; compiled graphs break."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ....errors import ArgumentValueError, expected
from ....integrations import transformers as interface
from ...batch_invariant.api import batch_invariant
from .elements import Elements

# ---- attention that a module spells out ----------------------------------------------------------
# Attention that a module spells out, softmax(c q kᵀ + mask) v, computed by our op.
#
# Inside, a product of two tensors of four dimensions makes no scores: it gives `Scores`, which
# takes the steps of that formula and no others, and attends when it is multiplied by v.

_MATMULS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
_SOFTMAXES = (F.softmax, torch.softmax)


def _refuse(step: object) -> None:
    want = "softmax(c q kᵀ + mask) v of our mask"
    raise ArgumentValueError(expected("attention", want, getattr(step, "__name__", step)))


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of an attention that are not made: scale q kᵀ, plus a mask, and their softmax."""

    q: torch.Tensor
    k: torch.Tensor
    scale: float = 1.0
    mask: torch.Tensor | None = None
    is_softmax: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that scores would have had before any cast."""
        return self.q.dtype

    @property
    def device(self) -> torch.device:
        """The device of q."""
        return self.q.device

    @property
    def shape(self) -> torch.Size:
        """The shape that scores would have."""
        return torch.Size((*self.q.shape[:3], self.k.shape[2]))

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the shape, or one dimension of it."""
        return self.shape if dim is None else self.shape[dim]

    def to(self, dtype: torch.dtype) -> Scores:
        """Return these scores: only the result of `attend` has a dtype."""
        return self

    type = to

    def _scaled(self, factor: object) -> Scores:
        if self.is_softmax or not isinstance(factor, int | float) or factor <= 0:
            _refuse("a factor that is no positive number")
        return replace(self, scale=self.scale * factor)

    def __mul__(self, factor: object) -> Scores:
        return self._scaled(factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> Scores:
        return self._scaled(1 / divisor if isinstance(divisor, int | float) else divisor)

    def __add__(self, mask: object) -> Scores:
        is_mask = isinstance(mask, torch.Tensor) and mask.dtype == torch.int32
        if self.is_softmax or self.mask is not None or not is_mask:
            _refuse("a sum with another tensor")
        return replace(self, mask=mask)

    def __matmul__(self, v: torch.Tensor) -> torch.Tensor:
        return self.attend(v)

    def attend(self, v: torch.Tensor) -> torch.Tensor:
        """Compute softmax(c q kᵀ + mask) v: [B, H, T, D]."""
        if not self.is_softmax or self.mask is None:
            _refuse("a product without softmax or mask")
        q, k = self.q.to(v.dtype), self.k.to(v.dtype)
        out, _ = interface.attention(None, q, k, v, self.mask, scaling=self.scale)
        return out.transpose(1, 2)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Take the steps that torch's functions make of these scores."""
        kwargs = dict(kwargs or {})
        scores, others = args[0], args[1:]
        if not isinstance(scores, Scores):
            _refuse(func)
        if func in _SOFTMAXES:
            dim = kwargs.get("dim", others[0] if others else None)
            if scores.is_softmax or dim not in (-1, 3):
                _refuse(func)
            return replace(scores, is_softmax=True)
        if func is F.dropout:
            p = kwargs.get("p", others[0] if others else 0.5)
            training = kwargs.get("training", others[1] if len(others) > 1 else True)
            if p and training:
                _refuse("dropout in training")
            return scores
        if func in _MATMULS:
            return scores.attend(others[0])
        return _refuse(func)


class Attention(TorchFunctionMode):
    """Inside, products of two tensors of four dimensions are `Scores`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _MATMULS and len(args) == 2 and not kwargs:
            q, k = args
            tensors = all(isinstance(t, torch.Tensor) and t.dim() == 4 for t in args)
            if (
                tensors
                and len(q) == len(k)
                and k.shape[1] in (1, q.shape[1])
                and q.shape[3] == k.shape[2]
            ):
                return Scores(q, k.transpose(2, 3))
        return func(*args, **(kwargs or {}))


# ---- forwards in modes ---------------------------------------------------------------------------


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

    return forward


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

    return forward
