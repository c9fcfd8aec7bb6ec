"""Tensors -> a frozen Problem, or one exception that names the argument.  Works on meta tensors.

Nothing below this file checks again: the op, the launcher and the kernels trust a Problem.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import contracts
from ..errors import ArgumentValueError, ShapeError, expected, one_of
from ..runtime import checking
from ..runtime import main_grad as destination
from .config import ORDERS

DTYPES = checking.FLOATS

#: TMA coordinates are int32.
MAX_SIZE = 2**31 - 1

#: Of skinny_linear: a few more would fit, and `linear` is as fast from there on.
MAX_ROWS = 128

#: For `contracts.refuse_if_deterministic`.
FAST = ("skinny_linear(deterministic=False)", "deterministic=True")


class Problem(NamedTuple):
    """One product: [m, k] times [n, k] transposed, in one dtype on one device."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    device: torch.device


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    main_grad: torch.Tensor | None,
    order: str,
) -> Problem:
    """The problem of ``linear(x[..., K], weight[N, K], bias[N], main_grad[N, K])``."""
    checking.tensor("x", x)
    checking.tensor("weight", weight)
    shape, of_weight = x.shape, weight.shape
    if not shape:
        raise ShapeError(expected("x", "at least 1 dimension [..., K]", "a scalar tensor"))
    if len(of_weight) != 2:
        checking.rank("weight", weight, 2, "[N, K]")
    n, k = of_weight
    if shape[-1] != k:
        want = f"last dimension {k}, the K of weight {list(of_weight)}"
        raise ShapeError(expected("x", want, list(shape)))
    rows = shape[0] if len(shape) == 2 else shape[:-1].numel()
    problem = Problem(rows, n, k, x.dtype, x.device)
    checking.same_kind("weight", weight, "x", x)
    _common(problem, order)
    if bias is not None:
        _bias(bias, x, n)
    if main_grad is not None:
        destination.check(main_grad, weight, x)
    if not torch.compiler.is_compiling():
        destination.check_values(x, weight, bias, main_grad)
    return problem


def matmul(a: torch.Tensor, b: torch.Tensor, order: str) -> Problem:
    """The problem of ``matmul(a[M, K], b[K, N])``."""
    checking.tensor("a", a)
    checking.tensor("b", b)
    checking.rank("a", a, 2, "[M, K]")
    checking.rank("b", b, 2, "[K, N]")
    if a.shape[1] != b.shape[0]:
        want = f"{a.shape[1]} rows, the K of a {list(a.shape)}"
        raise ShapeError(expected("b", want, list(b.shape)))
    problem = Problem(a.shape[0], b.shape[1], a.shape[1], a.dtype, a.device)
    checking.same_kind("b", b, "a", a)
    _common(problem, order)
    return problem


def skinny(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, deterministic: bool
) -> Problem:
    """The problem of ``skinny_linear(x[..., K], weight[N, K], bias[N] or [rows, N])``."""
    per_row = isinstance(bias, torch.Tensor) and bias.dim() == 2
    problem = linear(x, weight, None if per_row else bias, None, "tree")
    if problem.m > MAX_ROWS:
        want = f"at most {MAX_ROWS} rows (for more, linear(order='tree') gives the same bytes)"
        raise ShapeError(expected("x", want, problem.m))
    if per_row:
        checking.tensor("bias", bias)
        if list(bias.shape) != [problem.m, problem.n]:
            want = f"shape [{problem.n}] or [{problem.m}, {problem.n}], the rows of x by N"
            raise ShapeError(expected("bias", want, list(bias.shape)))
        checking.same_kind("bias", bias, "x", x)
    if not deterministic:
        contracts.refuse_if_deterministic(*FAST)
    return problem


def _common(problem: Problem, order: str) -> None:
    if order not in ORDERS:
        raise ArgumentValueError(one_of("order", ORDERS, order))
    checking.supported("gemm", problem.device)
    m, n, k, _, _ = problem
    if m > MAX_SIZE or n > MAX_SIZE or k > MAX_SIZE:
        name = "m" if m > MAX_SIZE else "n" if n > MAX_SIZE else "k"
        raise ShapeError(expected(name, f"at most {MAX_SIZE}", getattr(problem, name)))


def _bias(bias: torch.Tensor, x: torch.Tensor, n: int) -> None:
    checking.tensor("bias", bias)
    checking.rank("bias", bias, 1, "[N]")
    if bias.shape[0] != n:
        raise ShapeError(expected("bias", f"shape [{n}], the N of weight", list(bias.shape)))
    checking.same_kind("bias", bias, "x", x)
