"""Calls that the overrides of aten accept, and every refusal of `batch_invariant`.

A reason is None (covered), EXACT (torch's own, whose bits no batch changes or whose parts come here
again), or why the call is not covered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ...errors import (
    ArgumentTypeError,
    BatchVariantError,
    DtypeError,
    ShapeError,
    UnsupportedTransformError,
    expected,
)
from ...norm.config import MAX_WIDTH
from ...runtime import checking

DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
EXACT = ""


def entering(strict: object) -> None:
    """Check that the mode can be entered or left here."""
    if not isinstance(strict, bool):
        raise ArgumentTypeError(expected("strict", "True or False", type(strict).__name__))
    if torch.compiler.is_compiling():
        raise UnsupportedTransformError(
            "batch_invariant: cannot be entered or left inside a graph of torch.compile; enter it "
            "around the call of the compiled function, which is then compiled for the mode"
        )


def refuse(op: object, device: object, reason: str, instead: str) -> None:
    """Refuse an op that ``strict`` does not allow."""
    raise BatchVariantError(
        f"{_name(op)} on {device}: refused by batch_invariant(strict=True): {reason}; {instead}"
    )


def tensors(*operands: torch.Tensor | None) -> str | None:
    """Return the reason of a call with these tensors; the first is not None."""
    for t in operands:
        if t is None:
            continue
        if t.dtype not in DTYPES:
            return dtype(t.dtype)
        # Sparse and nested ones, and subclasses that compute in a way of their own: their parts,
        # if they are made of dense ones, come here again.
        if t.is_nested or t.layout is not torch.strided or _dispatches(type(t)):
            return EXACT
    first = operands[0]
    if first.is_cpu or first.is_cuda or first.is_meta:
        return None
    return f"no backend for {first.device.type}"


def of(*places: int) -> Callable:
    """Return a function of a call's arguments: the reason of the tensors at these places."""

    def why_not(*args: object, **options: object) -> str | None:
        return tensors(*[args[place] for place in places if place < len(args)])

    return why_not


def of_rows(shape: int, *places: int) -> Callable:
    """Return `of` for norms of rows, whose shape is at a place; the rows are at the first one."""
    why_tensors = of(*places)

    def why_not(*args: object) -> str | None:
        reason = why_tensors(*args)
        return rows(args[places[0]], args[shape], MAX_WIDTH) if reason is None else reason

    return why_not


def dtype(operand_dtype: torch.dtype) -> str:
    """Return the reason of a dtype that is not covered."""
    if operand_dtype.is_floating_point or operand_dtype.is_complex:
        return f"{operand_dtype} is not covered, only {', '.join(sorted(map(str, DTYPES)))}"
    return EXACT


def summed(x: torch.Tensor, dims: Sequence[int] | None, result: torch.dtype | None) -> str | None:
    """Return the reason of a sum or mean of ``x``."""
    result_dtype = result or x.dtype
    if result_dtype not in DTYPES:
        return dtype(result_dtype)
    if x.dtype.is_floating_point or x.dtype.is_complex:
        reason = tensors(x)
    else:
        reason = EXACT if _dispatches(type(x)) else None
    if reason is not None or not dims:
        return reason
    places = _places(x.dim(), dims)
    return None if len(set(places)) == len(dims) else EXACT


def rows(x: torch.Tensor, shape: Sequence[int], most: int) -> str | None:
    """Return the reason of a norm over the last dimensions of ``x``; torch refuses wrong shapes."""
    if len(shape) == 1 and x.dim():
        width = x.shape[-1]
        if width != shape[0]:
            return EXACT
    else:
        last = x.shape[-len(shape) :] if len(shape) else ()
        if not last or list(last) != list(shape):
            return EXACT
        width = last.numel()
    return None if 1 <= width <= most else f"rows of {width} elements, {most} is the most"


def batch(a: torch.Tensor, b: torch.Tensor) -> None:
    """Check that ``a`` [B, M, K] and ``b`` [B, K, N] are batches of matrices."""
    checking.rank("a", a, 3, "[B, M, K]")
    checking.rank("b", b, 3, "[B, K, N]")
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        want = f"[{a.shape[0]}, {a.shape[2]}, N] beside a {list(a.shape)}"
        raise ShapeError(expected("b", want, list(b.shape)))
    checking.same_device("b", b, "a", a)
    if a.dtype != b.dtype:
        raise DtypeError(expected("b", f"{a.dtype}, the dtype of a", b.dtype))


def expand_base(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Expand ``base`` to the shape of the product of ``a`` and ``b``, which it is added to."""
    checking.same_device("input", base, "a", a)
    if base.dtype != a.dtype:
        raise DtypeError(expected("input", f"{a.dtype}, the dtype of a", base.dtype))
    shape = (*a.shape[:-1], b.shape[-1])
    tail = shape[len(shape) - base.dim() :]
    fits = base.dim() <= len(shape) and all(
        size in (1, extent) for size, extent in zip(base.shape, tail, strict=True)
    )
    if not fits:
        raise ShapeError(
            expected("input", f"a shape that goes with {list(shape)}", list(base.shape))
        )
    return base.expand(shape)


def _places(rank: int, dims: Iterable[int]) -> list[int]:
    """Return dimensions counted from 0, without those out of range."""
    rank = max(rank, 1)
    return [d % rank for d in dims if -rank <= d < rank]


def _name(op: object) -> str:
    return str(op).removesuffix(".default")


@functools.cache
def _dispatches(kind: type) -> bool:
    """Whether a class of tensors has its own ``__torch_dispatch__``."""
    if issubclass(kind, FakeTensor | FunctionalTensor):
        return False
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
