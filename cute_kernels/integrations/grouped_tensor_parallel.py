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

from ..cpu.ieee import ieee_on
from ..moe import checks, config, op
from ..runtime.dynamo import untraced
from . import tensor_parallel

ROW, COLUMN = "row_parallel_grouped_linear", "column_parallel_grouped_linear"


class _Experts(tensor_parallel.Product):
    """The product of each row with its expert's weight [E, N, K]."""

    names, leaves = (ROW, COLUMN), "grouped_leaf_sums"
    sizes, compared = ("E", "N", "K"), ("expert_offsets", "x", "bias")
    whole, dx = staticmethod(op.grouped_linear), staticmethod(op.grouped_dx)
    dweight = staticmethod(op.weight_gradient)

    def check(self, x, weight, offsets, bias, main_grad) -> None:
        checks.grouped_linear(x, weight, *offsets, bias, main_grad, config.TREE)
        checks.offset_values("expert_offsets", *offsets, x.shape[0])

    def dbias(self, dy, offsets) -> torch.Tensor:
        return op.grouped_dbias(dy, *offsets)

    def summed(self, x, weight, offsets, bias, group: dist.ProcessGroup) -> torch.Tensor:
        (offsets,) = offsets

        def leaves_of(rows: slice, length: int) -> torch.Tensor:
            of_rows = offsets
            if rows.stop - rows.start < len(x):
                of_rows = offsets.clamp(rows.start, rows.stop) - rows.start
            return op.grouped_leaf_sums(x[rows], weight, of_rows, length)

        shape = len(x), weight.shape[1], weight.shape[2]
        # Each row has the bias of its expert: added to the sum before its one rounding.
        like = x if bias is None else x.new_empty(0, dtype=torch.float32)
        total = tensor_parallel.sum_over_ranks(leaves_of, shape, None, like, group)
        if bias is None:
            return total
        with ieee_on(total):
            total += bias[op.expert_of_rows(offsets, len(x))].to(torch.float32)
            return total.to(x.dtype)


_EXPERTS = _Experts()
tensor_parallel.register(_EXPERTS, config.KEPT, config.contract_facts)


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
    operands = x, weight, expert_offsets, bias, main_grad
    return tensor_parallel.parallel(_EXPERTS, ROW, operands, mesh, order, verify)


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
    operands = x, weight, expert_offsets, bias, main_grad
    return tensor_parallel.parallel(_EXPERTS, COLUMN, operands, mesh, order, verify)
