"""Calls that the overrides of aten accept, and every refusal of `batch_invariant`.

A reason is None (covered), EXACT (torch's own, whose bits no batch changes or whose parts come here
again), or why the call is not covered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

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
    name = str(op).removesuffix(".default")
    raise BatchVariantError(
        f"{name} on {device}: refused by batch_invariant(strict=True): {reason}; {instead}"
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
        if t.is_nested or t.layout is not torch.strided or dispatches(type(t)):
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
        if reason is not None:
            return reason
        sizes = list(args[shape])
        last = args[places[0]].shape[-len(sizes) :] if sizes else ()
        if not sizes or list(last) != sizes:  # torch refuses wrong shapes
            return EXACT
        width = last.numel()
        fits = 1 <= width <= MAX_WIDTH
        return None if fits else f"rows of {width} elements, {MAX_WIDTH} is the most"

    return why_not


def dtype(operand_dtype: torch.dtype) -> str:
    """Return the reason of a dtype that is not covered."""
    if operand_dtype.is_floating_point or operand_dtype.is_complex:
        return f"{operand_dtype} is not covered, only {', '.join(sorted(map(str, DTYPES)))}"
    return EXACT


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
    pairs = zip(base.shape[::-1], shape[::-1], strict=False)
    if base.dim() > len(shape) or any(size not in (1, extent) for size, extent in pairs):
        want = f"a shape that goes with {list(shape)}"
        raise ShapeError(expected("input", want, list(base.shape)))
    return base.expand(shape)


@functools.cache
def dispatches(kind: type) -> bool:
    """Whether a class of tensors has its own ``__torch_dispatch__``."""
    if issubclass(kind, FakeTensor | FunctionalTensor):
        return False
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
