"""Tensors -> a frozen Problem, or one exception that names the argument.  Works on meta tensors.

Nothing below this file checks again: the op, the launcher and the kernels trust a Problem.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import checking, contracts, data_parallel
from ..errors import (
    AliasError,
    ArgumentTypeError,
    ArgumentValueError,
    DtypeError,
    ShapeError,
    expected,
    one_of,
)
from .config import ORDERS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: TMA coordinates are int32.
MAX_SIZE = 2**31 - 1

#: Of skinny_linear: a few more would fit, and `linear` is as fast from there on.
MAX_ROWS = 128

#: For `contracts.refuse_if_deterministic`.
FAST = ("skinny_linear(deterministic=False)", "deterministic=True")

_RECIPE = "docs/gemm.md, 'main_grad with data parallel'"
_DDP = (
    "none inside DistributedDataParallel, which reduces weight.grad and would leave main_grad as "
    "each rank has it (run forward and backward inside ddp.no_sync() and reduce main_grad "
    f"yourself: {_RECIPE})"
)
_FSDP2 = (
    "none under fully_shard, which reduces weight.grad and gathers a parameter that has no "
    f"attributes of yours (leave main_grad out and remove weight.main_grad: {_RECIPE})"
)


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
    order: str,
    main_grad: torch.Tensor | None,
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
    _same_kind("x", x, "weight", weight)
    _common(problem, order)
    if bias is not None:
        _bias(bias, x, n)
    if main_grad is not None:
        _main_grad(main_grad, n, k, x)
    if not torch.compiler.is_compiling():
        _eager_only(x, weight, bias, main_grad)
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
    _same_kind("a", a, "b", b)
    _common(problem, order)
    return problem


def skinny(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, deterministic: bool | None
) -> Problem:
    """The problem of ``skinny_linear(x[..., K], weight[N, K], bias[N] or [rows, N])``."""
    per_row = isinstance(bias, torch.Tensor) and bias.dim() == 2
    problem = linear(x, weight, None if per_row else bias, "tree", None)
    if problem.m > MAX_ROWS:
        want = f"at most {MAX_ROWS} rows (for more, linear(order='tree') gives the same bytes)"
        raise ShapeError(expected("x", want, problem.m))
    if per_row:
        checking.tensor("bias", bias)
        if list(bias.shape) != [problem.m, problem.n]:
            want = f"shape [{problem.n}] or [{problem.m}, {problem.n}], the rows of x by N"
            raise ShapeError(expected("bias", want, list(bias.shape)))
        _same_kind("x", x, "bias", bias)
    if deterministic is not None and not isinstance(deterministic, bool):
        got = type(deterministic).__name__
        raise ArgumentTypeError(expected("deterministic", "True, False or None", got))
    if deterministic is False:
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


def _same_kind(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Both floating, on one device and, unless autocast casts them, of one dtype."""
    checking.dtype(name, tensor.dtype, DTYPES)
    checking.dtype(other_name, other.dtype, DTYPES)
    checking.same_device(other_name, other, name, tensor)
    if other.dtype is not tensor.dtype and not checking.autocast(tensor.device):
        raise DtypeError(expected(other_name, f"{tensor.dtype}, the dtype of {name}", other.dtype))


def _bias(bias: torch.Tensor, x: torch.Tensor, n: int) -> None:
    checking.tensor("bias", bias)
    checking.rank("bias", bias, 1, "[N]")
    if bias.shape[0] != n:
        raise ShapeError(expected("bias", f"shape [{n}], the N of weight", list(bias.shape)))
    _same_kind("x", x, "bias", bias)


def _main_grad(main_grad: torch.Tensor, n: int, k: int, x: torch.Tensor) -> None:
    checking.tensor("main_grad", main_grad)
    if list(main_grad.shape) != [n, k]:
        want = f"shape [{n}, {k}], that of weight"
        raise ShapeError(expected("main_grad", want, list(main_grad.shape)))
    if main_grad.dtype != torch.float32:
        raise DtypeError(expected("main_grad", "torch.float32", main_grad.dtype))
    checking.same_device("main_grad", main_grad, "x", x)
    if main_grad.requires_grad:
        want = "requires_grad=False (backward adds into it)"
        raise ArgumentValueError(expected("main_grad", want, "requires_grad=True"))
    if not main_grad.is_contiguous() and _overlaps_itself(main_grad):
        want = "elements at distinct addresses (it is updated in place)"
        raise AliasError(expected("main_grad", want, f"strides {main_grad.stride()}"))


def _eager_only(x, weight, bias, main_grad) -> None:
    """What can be seen of true tensors only, and costs nothing where there is no main_grad."""
    if main_grad is None:
        sharded = data_parallel.sharded(weight)
        if sharded is not None and getattr(sharded, "main_grad", None) is not None:
            raise ArgumentValueError(expected("main_grad", _FSDP2, "weight.main_grad"))
        return
    if main_grad.is_neg():
        want = "memory that holds its values (it is updated in place)"
        raise ArgumentValueError(expected("main_grad", want, "a negated view"))
    if checking.autocast(x.device) and (written := checking.in_memory(main_grad)) is not None:
        # The op sees what autocast makes of them.
        read = {"x": x, "weight": weight, "bias": bias}
        apart(written, **{name: checking.in_memory(t) for name, t in read.items()})
    if weight.requires_grad and torch.is_grad_enabled():
        name = data_parallel.reducer(leaf_of(weight))
        if name is not None:
            want = _DDP if name == data_parallel.DDP else _FSDP2
            raise ArgumentValueError(expected("main_grad", want, "a tensor"))


def apart(main_grad: torch.Tensor, **read: torch.Tensor | None) -> None:
    """That no byte of main_grad is one of a tensor that backward reads, whoever allocated it."""
    start, stop = _addresses(main_grad)
    for name, tensor in read.items():
        if tensor is None:
            continue
        first, end = _addresses(tensor)
        if first < stop and start < end:
            want = f"memory of its own (backward writes it while it reads {name})"
            raise AliasError(expected("main_grad", want, f"an alias of {name}"))


def leaf_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The leaf that a tensor is made of by casts, views and the like; None if of several."""
    node = None if tensor.is_leaf else accumulator_of(tensor.grad_fn)
    return tensor if tensor.is_leaf else node and node.variable


def accumulator_of(node: object) -> object | None:
    """The AccumulateGrad node at the end of an autograd graph; None if it has several ends."""
    while node is not None and node.name() != "torch::autograd::AccumulateGrad":
        after = [other for other, _ in node.next_functions if other is not None]
        node = after[0] if len(after) == 1 else None
    return node


def _overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements of a 2-D tensor can share an address."""
    sized = sorted(
        (stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1
    )
    reach = 1
    for stride, size in sized:
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False


def _addresses(t: torch.Tensor) -> tuple[int, int]:
    """Of its first byte and behind its last; storages say less, as each library makes its own."""
    first = t.data_ptr()
    if t.is_contiguous():
        return first, first + t.numel() * t.element_size()
    span = sum(stride * (size - 1) for stride, size in zip(t.stride(), t.shape, strict=True))
    return first, first + (span + 1) * t.element_size() * bool(t.numel())
