"""Experts whose weights are cut over ranks, with the bits of one rank: 1, 2, 4 or 8 of them.

    row_parallel_grouped_linear     y[t] = x[t] W[e]ᵀ + b[e]    a rank holds columns of every W[e]
    column_parallel_grouped_linear  y[t] = x[t] W[e]ᵀ + b[e]    a rank holds rows of W[e] and b[e]

Every rank has the rows of all tokens, sorted by expert alike.  The order is ``tree``, whose leaves
ranks exchange as those of linears (tensor_parallel.py).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import contracts
from ..cpu.ieee import ieee_on
from ..errors import ArgumentTypeError, ArgumentValueError, UnsupportedTransformError, expected
from ..moe import checks, config, op
from ..runtime import checking, digests, dispatch, process_groups
from ..runtime import main_grad as destination
from ..runtime.dynamo import untraced
from ..runtime.torch_ops import detach_view
from . import tensor_parallel

ROW, COLUMN = "row_parallel_grouped_linear", "column_parallel_grouped_linear"
#: Fields of a call that ranks compare, and the tensors of which they compare digests.
_FIELDS = (
    "function",
    "rows of x",
    "E of weight",
    "N of weight",
    "K of weight",
    "dtype",
    "bias",
    "x.requires_grad",
)
_VALUES = ("expert_offsets", "x", "bias")


def _backend(device: torch.device, dtype: torch.dtype) -> str:
    return dispatch.backend("grouped_leaf_sums", device, dtype)


for _name in (ROW, COLUMN):
    _guarantees = {
        name: guarantees | {contracts.TP_INVARIANT} for name, guarantees in config.KEPT.items()
    }
    contracts.register(contracts.Contract(_name, _guarantees, config.contract_facts, _backend))


@untraced
def row_parallel_grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    mesh: DeviceMesh | dist.ProcessGroup,
    order: str = config.TREE,
    main_grad: torch.Tensor | None = None,
    verify: bool | Literal["all"] = True,
) -> torch.Tensor:
    """y[t] = x[t] weight[e]ᵀ + bias[e], K cut over the ranks of ``mesh``; every rank gets all of y.

    Args:
        x: [T, K / ranks]: this rank's columns, in the order of the mesh's ranks.
        weight: [E, N, K / ranks]: the same columns of every expert.
        expert_offsets: int32 [E + 1], as in ``ck.grouped_linear``; the same on every rank.
        bias: [E, N] or None: the same on every rank.
        mesh, order, verify: As in `tensor_parallel.row_parallel_linear`; ``verify="all"`` compares
            x where every rank has all of it.
        main_grad: fp32, the shape of ``weight``; as in ``ck.grouped_linear``.

    Returns:
        [T, N] with the bytes of ``ck.grouped_linear(order="tree")`` of the whole tensors, also in
        dx, dW, dbias and main_grad, of which each rank gets its part (dbias: all).

    Raises:
        ShapeError: K / ranks is not a multiple of K's leaf; the message says which degrees work.
        RankError: ranks have arguments that differ, or one of them refused its own.
        ArgumentTypeError, ArgumentValueError: ``mesh`` is no such mesh, or of another degree;
            ``order`` is another one.
        UnsupportedTransformError: torch.compile(fullgraph=True), a transform of torch.func, or a
            double backward.
        Others: as ``ck.grouped_linear``.
    """
    return _parallel(ROW, (x, weight, expert_offsets, bias, main_grad), mesh, order, verify)


@untraced
def column_parallel_grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    mesh: DeviceMesh | dist.ProcessGroup,
    order: str = config.TREE,
    main_grad: torch.Tensor | None = None,
    verify: bool | Literal["all"] = True,
) -> torch.Tensor:
    """y[t] = x[t] weight[e]ᵀ + bias[e], N cut over the ranks of ``mesh``; each gets its columns.

    Args:
        x: [T, K]; the same on every rank.
        weight: [E, N / ranks, K]: this rank's rows of every expert, in the order of the ranks.
        expert_offsets: As in `row_parallel_grouped_linear`.
        bias: [E, N / ranks] or None: the same rows.
        mesh, order, main_grad, verify: As in `row_parallel_grouped_linear`.

    Returns:
        [T, N / ranks]: those columns of ``ck.grouped_linear(order="tree")`` of the whole tensors.
        Every rank gets all of dx, whose sum over N is exchanged in backward.

    Raises:
        ShapeError: N / ranks is not a multiple of N's leaf; the message says which degrees work.
        Others: as `row_parallel_grouped_linear`.
    """
    return _parallel(COLUMN, (x, weight, expert_offsets, bias, main_grad), mesh, order, verify)


# ---- checks; ranks raise together ---------------------------------------------------------------


def _parallel(name: str, tensors: tuple, mesh, order: str, verify: bool | str) -> torch.Tensor:
    """Call either function; ``tensors``: x, weight, expert_offsets, bias, main_grad."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        raise UnsupportedTransformError(
            f"{name}: a graph of torch.compile and transforms of torch.func are not supported; "
            "compile around it: torch.compiler.disable(function)"
        )
    group, refusal = tensor_parallel.group_of_mesh(mesh), None
    try:
        process_groups.check_verify(verify)
        _check(tensors, order)
    except Exception as error:
        refusal = error
    if verify and group.size() > 1:
        _agree(_describe(name, tensors, refusal, verify), refusal, group)
    if refusal is not None:
        raise refusal
    x, weight, offsets, bias, main_grad = tensors
    _, n, k = weight.shape
    size, degree = (k if name == ROW else n), group.size()
    tensor_parallel.cut_at_leaves("K" if name == ROW else "N", size * degree, degree)
    if degree == 1 or 0 in (x.numel(), n):
        return op.grouped_linear(x, weight, offsets, bias, main_grad, config.TREE)
    if checking.autocast(x.device):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    function = _RowParallel if name == ROW else _ColumnParallel
    return function.apply(x, weight, offsets, bias, main_grad, group)


def _check(tensors: tuple, order: str) -> None:
    """Check the arguments of one rank by themselves."""
    if order != config.TREE:
        want = f"{config.TREE!r}, the only one that ranks can cut"
        raise ArgumentValueError(expected("order", want, repr(order)))
    x, weight, offsets, bias, main_grad = tensors
    named = {"x": x, "weight": weight, "bias": bias, "main_grad": main_grad}
    for argument, t in named.items():
        if hasattr(t, "to_local"):
            want = "this rank's own tensor (dtensor.to_local())"
            raise ArgumentTypeError(expected(argument, want, type(t).__name__))
    checks.grouped_linear(x, weight, offsets, bias, main_grad, order)
    checks.offset_values("expert_offsets", offsets, x.shape[0])


def _describe(name: str, tensors: tuple, refusal: Exception | None, verify) -> list[int]:
    """Describe this rank's call, compared between ranks: `_FIELDS`, then `_VALUES`."""
    if refusal is not None:
        return [0] * (len(_FIELDS) + len(_VALUES))
    x, weight, offsets, bias, _ = tensors
    # The exchange of dx is entered by those ranks only whose x needs it.
    asks = name == COLUMN and x.requires_grad and torch.is_grad_enabled()
    dtype = checks.DTYPES.index(x.dtype)
    fields = [name == COLUMN, len(x), *weight.shape, dtype, bias is not None, asks]
    same_x = name == COLUMN and verify == "all"
    values = [offsets, x if same_x else None, bias if name == ROW else None]
    return fields + digests.digests(values)


def _agree(description: list[int], refusal: Exception | None, group: dist.ProcessGroup) -> None:
    """Raise on every rank if one refuses its arguments, or if they differ."""
    columns = list(zip(*process_groups.agree(description, refusal, group, "mesh"), strict=True))
    for name, values in zip(_FIELDS, columns, strict=False):
        process_groups.alike(name, values, "mesh")
    for name, values in zip(_VALUES, columns[len(_FIELDS) :], strict=True):
        process_groups.alike_values(name, values, "mesh")


# ---- forward and backward -----------------------------------------------------------------------


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, offsets, bias, main_grad, group):
        _save(ctx, x, weight, offsets, main_grad, group)
        if main_grad is not None:
            destination.apart(main_grad, x=x, weight=weight, bias=bias)
        if bias is None:
            return detach_view(_sum(x, weight, offsets, x, group))
        # Each row has the bias of its expert: added to the sum before its one rounding.
        total = _sum(x, weight, offsets, x.new_empty(0, dtype=torch.float32), group)
        with ieee_on(total):
            total += bias[op.expert_of_rows(offsets, len(x))].to(torch.float32)
            return total.to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        return _gradients(ctx, ROW, dy)


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, offsets, bias, main_grad, group):
        _save(ctx, x, weight, offsets, main_grad, group)
        return op.grouped_linear(x, weight, offsets, bias, main_grad, config.TREE)

    @staticmethod
    def backward(ctx, dy):
        return _gradients(ctx, COLUMN, dy)


def _save(ctx, x, weight, offsets, main_grad, group) -> None:
    """Save what backward reads; the attributes are those of `op.weight_gradient`."""
    needs_weight = ctx.needs_input_grad[1]
    ctx.save_for_backward(x if needs_weight else None, weight, offsets)
    # Not a saved tensor: backward of an earlier micro-batch may write it before ours reads it.
    ctx.main_grad = main_grad if needs_weight else None
    ctx.order, ctx.group = config.TREE, group


def _gradients(ctx, name: str, dy: torch.Tensor) -> tuple:
    if torch.is_grad_enabled():
        # A part of the second gradient would have to be added over ranks, in silence.
        raise UnsupportedTransformError(
            f"{name}: double backward (create_graph=True) is not supported"
        )
    x, weight, offsets = ctx.saved_tensors
    needs_x, needs_weight, _, needs_bias, *_ = ctx.needs_input_grad
    dx = None
    if needs_x and name == ROW:
        dx = op.grouped_dx(dy, weight, offsets, config.TREE)
    elif needs_x:
        dx = _sum(dy, weight.mT, offsets, dy, ctx.group)
    dw = op.weight_gradient(ctx, dy, x, offsets) if needs_weight else None
    db = op.grouped_dbias(dy, offsets) if needs_bias else None
    return dx, dw, None, db, None, None


def _sum(x, weight, offsets, like, group: dist.ProcessGroup) -> torch.Tensor:
    """x [T, S / ranks] · weight[e] [N, S / ranks]ᵀ of each row, summed over S of all ranks."""

    def leaves_of(rows: slice, length: int) -> torch.Tensor:
        some = offsets
        if rows.stop - rows.start < len(x):
            some = offsets.clamp(rows.start, rows.stop) - rows.start
        return op.grouped_leaf_sums(x[rows], weight, some, length)

    shape = len(x), weight.shape[1], weight.shape[2]
    return tensor_parallel.sum_over_ranks(leaves_of, shape, None, like, group)
