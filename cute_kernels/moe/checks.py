"""Tensors -> a frozen Problem, or one exception that names the argument.  Works on meta tensors.

Values are read on the CPU alone: a check of offsets on a GPU would make the host wait for it.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch

from ..errors import ArgumentTypeError, ArgumentValueError, DtypeError, ShapeError, expected, one_of
from ..runtime import checking
from ..runtime import main_grad as destination
from .config import MAX_EXPERTS, ORDERS, SCORES
from .tensors import Permutation

DTYPES = checking.FLOATS
MAX_SIZE = 2**31 - 1


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None,
    main_grad: torch.Tensor | None,
    order: str,
) -> None:
    """Check ``grouped_linear(x[T, K], weight[E, N, K], expert_offsets[E + 1])``."""
    checking.tensor("x", x)
    checking.tensor("weight", weight)
    checking.rank("x", x, 2, "[T, K]")
    checking.rank("weight", weight, 3, "[E, N, K]")
    experts, n, k = weight.shape
    if x.shape[1] != k:
        want = f"last dimension {k}, the K of weight {list(weight.shape)}"
        raise ShapeError(expected("x", want, list(x.shape)))
    checking.same_kind("weight", weight, "x", x)
    _experts("weight", experts)
    offsets("expert_offsets", expert_offsets, experts, "x", x)
    if order not in ORDERS:
        raise ArgumentValueError(one_of("order", ORDERS, order))
    checking.supported("grouped_linear", x.device)
    for name, size in (("T", x.shape[0]), ("N", n), ("K", k)):
        if size > MAX_SIZE:
            raise ShapeError(expected(name, f"at most {MAX_SIZE}", size))
    if bias is not None:
        checking.tensor("bias", bias)
        checking.rank("bias", bias, 2, "[E, N]")
        checking.shape("bias", bias, [experts, n], "the E and N of weight")
        checking.same_kind("bias", bias, "x", x)
    if main_grad is not None:
        destination.check(main_grad, weight, x)
    if not torch.compiler.is_compiling():
        destination.check_values(x, weight, bias, main_grad)


def offsets(name: str, t: torch.Tensor, experts: int, other: str, like: torch.Tensor) -> None:
    """Check the shape, dtype and device of offsets [E + 1]; ``other``: the argument ``like``."""
    checking.operand(name, t, "[E + 1]", (torch.int32,))
    checking.shape(name, t, [experts + 1], "E + 1")
    checking.same_device(name, t, other, like)


def offset_values(name: str, t: torch.Tensor, tokens: int) -> None:
    """Check on a CPU that offsets ascend from 0, at most to ``tokens``; GPUs' are not read."""
    if t.device.type != "cpu":
        return
    values = t.tolist()
    if values[0] != 0:
        raise ArgumentValueError(expected(name, "a first offset of 0", values[0]))
    for i, (first, end) in enumerate(itertools.pairwise(values)):
        if end < first:
            want = "offsets that do not descend"
            raise ArgumentValueError(expected(name, want, f"{first}, {end} at {i} and {i + 1}"))
    if values[-1] > tokens:
        raise ArgumentValueError(
            expected(name, f"a last offset of at most {tokens}, T", values[-1])
        )


# ---- routing -------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """How experts are chosen: k of them, in ``topk_groups`` of ``groups`` groups."""

    k: int
    groups: int
    topk_groups: int


def route(
    logits: torch.Tensor,
    k: int,
    score: str,
    bias: torch.Tensor | None,
    groups: int | None,
    topk_groups: int | None,
    indices: torch.Tensor | None,
) -> Choice:
    """The choice of ``route(logits[T, E], k)``."""
    experts = _logits(logits, "logits")
    if score not in SCORES:
        raise ArgumentValueError(one_of("score", SCORES, score))
    choice = _choice(experts, k, groups, topk_groups)
    if bias is not None:
        checking.operand("bias", bias, "[E]")
        checking.same_device("bias", bias, "logits", logits)
        checking.shape("bias", bias, [experts], "the E of logits")
    if indices is not None:
        index_tensor(indices, "logits", logits)
        checking.shape("indices", indices, [logits.shape[0], k], "[T, k]")
    return choice


def weight_options(normalize: bool, scale: float) -> None:
    """Check how `route` makes weights of scores."""
    checking.flag("normalize", normalize)
    # Compared, as a call of math breaks a graph whose scale is dynamic.
    if not -math.inf < checking.number("scale", scale) < math.inf:
        raise ArgumentValueError(expected("scale", "a finite number", scale))


def _logits(t: torch.Tensor, name: str) -> int:
    """Check router outputs [T, E]; returns E."""
    checking.operand(name, t, "[T, E]")
    _experts(name, t.shape[1])
    checking.supported("moe", t.device)
    return t.shape[1]


def _choice(experts: int, k: int, groups: int | None, topk_groups: int | None) -> Choice:
    _count("k", k, experts, "E")
    if (groups is None) != (topk_groups is None):
        name, other = ("topk_groups", "groups") if groups is not None else ("groups", "topk_groups")
        raise ArgumentValueError(expected(name, f"a number, as {other} is one", None))
    if groups is None:
        return Choice(k, 1, 1)
    _count("groups", groups, experts, "E")
    if experts % groups:
        raise ArgumentValueError(expected("groups", f"a divisor of E = {experts}", groups))
    _count("topk_groups", topk_groups, groups, "groups")
    if topk_groups * (experts // groups) < k:
        want = f"groups of {experts // groups} experts that hold k = {k}"
        raise ArgumentValueError(expected("topk_groups", want, topk_groups))
    return Choice(k, groups, topk_groups)


def _count(name: str, value: object, most: int, of: str) -> None:
    if not 1 <= checking.integer(name, value) <= most:
        raise ArgumentValueError(expected(name, f"1 to {most} ({of})", value))


def _experts(name: str, experts: int) -> None:
    if not 1 <= experts <= MAX_EXPERTS:
        raise ShapeError(expected(name, f"1 to {MAX_EXPERTS} experts", experts))


def index_tensor(indices: torch.Tensor, other: str, like: torch.Tensor) -> None:
    """Check indices of experts [T, k], on the device of ``like``, the argument ``other``."""
    checking.operand("indices", indices, "[T, k]", checking.INTEGERS[::-1])
    checking.same_device("indices", indices, other, like)
    if not indices.shape[1]:
        raise ShapeError(expected("indices", "at least 1 expert a token", list(indices.shape)))
    if indices.numel() > MAX_SIZE:
        raise ShapeError(expected("indices", f"at most {MAX_SIZE} elements", indices.numel()))


def index_values(indices: torch.Tensor, experts: int) -> None:
    """Check on a CPU that indices are those of experts; those on a GPU are not read."""
    if indices.device.type != "cpu" or not indices.numel():
        return
    low, high = indices.min().item(), indices.max().item()
    if low < 0 or high >= experts:
        bad = low if low < 0 else high
        raise ArgumentValueError(expected("indices", f"0 to {experts - 1}, experts", bad))


def permute(x: torch.Tensor, indices: torch.Tensor, experts: int) -> None:
    """Check ``permute(x[T, D], indices[T, k], experts)``."""
    checking.operand("x", x, "[T, D]")
    checking.supported("moe", x.device)
    index_tensor(indices, "x", x)
    if indices.shape[0] != x.shape[0]:
        raise ShapeError(expected("indices", f"{x.shape[0]} rows, those of x", indices.shape[0]))
    _count("experts", experts, MAX_EXPERTS, "the most")


def permutation(value: object) -> None:
    """Check that a value is a `Permutation`."""
    if not isinstance(value, Permutation):
        want = "the Permutation of permute, or the Dispatch of dispatch"
        raise ArgumentTypeError(expected("permutation", want, type(value).__name__))


def combine(rows: torch.Tensor, weights: torch.Tensor | None, permutation: Permutation) -> None:
    """Check ``combine(rows[T k, D], weights[T, k], permutation)``."""
    _rows(rows)
    offsets, order, positions = permutation
    for name, t, shape in zip(
        Permutation._fields, permutation, ("[E + 1]", "[T k]", "[T, k]"), strict=True
    ):
        checking.operand(f"permutation.{name}", t, shape, (torch.int32,))
        checking.same_device(f"permutation.{name}", t, "rows", rows)
    if not offsets.numel():
        raise ShapeError(expected("permutation.offsets", "at least 1 offset", 0))
    if rows.shape[0] != positions.numel() or order.numel() != positions.numel():
        want = f"{positions.numel()} rows, T k of the permutation"
        raise ShapeError(expected("rows", want, rows.shape[0]))
    _combine_weights(weights, positions, rows)


def _rows(rows: torch.Tensor) -> None:
    checking.operand("rows", rows, "[T k, D]")
    checking.supported("moe", rows.device)


def _combine_weights(
    weights: torch.Tensor | None, positions: torch.Tensor, rows: torch.Tensor
) -> None:
    if weights is None:
        return
    checking.tensor("weights", weights)
    checking.dtype("weights", weights.dtype, DTYPES)
    checking.same_device("weights", weights, "rows", rows)
    checking.shape("weights", weights, positions.shape, "[T, k]")


def ranks(experts: int, count: int) -> None:
    """Check that so many ranks have equal parts of the experts."""
    if experts % count:
        want = f"a multiple of {count}, the ranks of group"
        raise ArgumentValueError(expected("experts", want, experts))


def collect(
    rows: torch.Tensor, weights: torch.Tensor | None, permutation: Permutation, received: int
) -> None:
    """Check ``combine(rows[R, D], weights[T, k], dispatch)``; R: rows that this rank received."""
    _rows(rows)
    if rows.shape[0] != received:
        want = f"{received} rows, those of the dispatch"
        raise ShapeError(expected("rows", want, rows.shape[0]))
    checking.same_device("permutation.positions", permutation.positions, "rows", rows)
    _combine_weights(weights, permutation.positions, rows)


def balance(scores: torch.Tensor, indices: torch.Tensor) -> None:
    """Check ``load_balance_loss(scores[T, E], indices[T, k])``."""
    _logits(scores, "scores")
    if scores.dtype != torch.float32:
        raise DtypeError(expected("scores", "torch.float32", scores.dtype))
    index_tensor(indices, "scores", scores)
    if indices.shape[0] != scores.shape[0]:
        want = f"{scores.shape[0]} rows, those of scores"
        raise ShapeError(expected("indices", want, indices.shape[0]))
    _not_empty("scores", scores)


def z_loss(logits: torch.Tensor) -> None:
    """Check ``z_loss(logits[T, E])``."""
    _logits(logits, "logits")
    _not_empty("logits", logits)


def _not_empty(name: str, t: torch.Tensor) -> None:
    if not t.shape[0]:
        raise ShapeError(expected(name, "at least 1 row, of which this is a mean", 0))
