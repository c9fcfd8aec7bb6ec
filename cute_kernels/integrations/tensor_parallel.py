"""Linears whose weight is cut over ranks, with the bits of one rank: 1, 2, 4 or 8 of them.

    row_parallel_linear     y = x Wᵀ + b    a rank holds columns of W, and those of x
    column_parallel_linear  y = x Wᵀ + b    a rank holds rows of W and b, and gets columns of y

The order is ``tree`` (docs/gemm.md): a sum over K is cut into at most eight leaves, by K alone.
Ranks cut it at the edges of leaves, so each computes whole ones.  They exchange leaves in fp32.  An
element is the sum of all leaves, ascending, then the bias, rounded once: its bits do not depend on
the number of ranks.  A sum that ranks do not cut is that of ``ck.linear(order="tree")``.

Collectives and messages only move bytes: none of them adds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import contracts
from ..errors import ArgumentTypeError, ArgumentValueError, ShapeError, expected
from ..gemm import checks, config, op
from ..runtime import checking, digests, dispatch, process_groups
from ..runtime import main_grad as destination
from ..runtime.dynamo import untraced
from ..runtime.operands import flat_rows
from ..runtime.torch_ops import detach_view, refuse_double
from ..schedulers.tiles import leaves
from . import leaf_exchange
from .leaf_exchange import Sizes

#: Degrees that can cut eight leaves at their edges.
DEGREES = tuple(d for d in range(1, leaves.LEAVES + 1) if leaves.LEAVES % d == 0)
#: Up to so many bytes of all ranks' leaves, every rank gets and adds all of them (one collective).
#: Beyond, the path of fewer bytes is taken that the sizes favour: `leaf_exchange.choose`.
GATHER_BYTES = 1 << 20
#: Rows are multiplied and exchanged in blocks of at most so many bytes of a rank's leaves.
BLOCK_BYTES = 1 << 28

ROW, COLUMN = "row_parallel_linear", "column_parallel_linear"
_ORDER = "tree"


class Product:
    """A product whose weight ranks cut: of linears here, of experts in grouped_tensor_parallel.

    Its operands are x, weight, *offsets, bias and main_grad: ``offsets`` is empty, or has those of
    experts.
    """

    #: Functions that cut K and N, and the op of their leaves.
    names, leaves = (ROW, COLUMN), "leaf_sums"
    #: Dimensions of a weight, and tensors of which ranks compare digests.
    sizes, compared = ("N", "K"), ("x", "bias")
    #: Ops, whose last argument is the order; ``whole`` is the product without an exchange.
    whole, dx = staticmethod(op.linear), staticmethod(op.linear_dx)
    #: The gradient of this rank's weight, or None where it went into main_grad.
    dweight = staticmethod(op.weight_gradient)

    def check(self, x, weight, offsets, bias, main_grad) -> None:
        """Check the operands of one rank by themselves."""
        checks.linear(x, weight, bias, main_grad, _ORDER)

    def dbias(self, dy, offsets) -> torch.Tensor:
        """The gradient of this rank's bias."""
        return op.linear_dbias(dy, _ORDER)

    def summed(self, x, weight, offsets, bias, group: dist.ProcessGroup) -> torch.Tensor:
        """x [..., S / ranks] · weight [N, S / ranks]ᵀ + bias, summed over S of all ranks."""
        rows = flat_rows(x, self.leaves)

        def leaves_of(span: slice, length: int) -> torch.Tensor:
            return op.leaf_sums(rows[span], weight, length)

        y = sum_over_ranks(leaves_of, (len(rows), *weight.shape), bias, x, group)
        return y.view(*x.shape[:-1], weight.shape[0])


def register(product: Product, kept: Mapping[str, frozenset[str]], facts: Callable) -> None:
    """Register the contracts of both functions of a product, which keep ``tp_invariant`` too."""
    guarantees = {name: kept_by | {contracts.TP_INVARIANT} for name, kept_by in kept.items()}
    backend = functools.partial(dispatch.backend, product.leaves)
    for name in product.names:
        contracts.register(contracts.Contract(name, guarantees, facts, backend))


_LINEAR = Product()
register(_LINEAR, config.KEPT, config.contract_facts)


@untraced
def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    mesh: DeviceMesh | dist.ProcessGroup,
    order: str = "tree",
    main_grad: torch.Tensor | None = None,
    verify: bool | Literal["all"] = True,
) -> torch.Tensor:
    """y = x weightᵀ + bias, K cut over the ranks of ``mesh``; every rank gets all of y.

    Args:
        x: [..., K / ranks]: this rank's columns, in the order of the mesh's ranks.
        weight: [N, K / ranks]: the same columns.
        bias: [N] or None; the same on every rank.  It is added once.
        mesh: One dimension of a device mesh, or a process group, of 1, 2, 4 or 8 ranks.
        order: ``"tree"``; a chain cannot be cut.
        main_grad: fp32 [N, K / ranks] or None; as in ``ck.linear``.
        verify: Whether ranks first tell each other their sizes and dtypes and a digest of ``bias``,
            so that all of them raise if one would (80 bytes; on a GPU the host waits for the
            digest, and over a group without a CPU backend, such as NCCL alone, for the exchange).
            ``"all"``: and a digest of the x of `column_parallel_linear`, which reads all of it.
            False: arguments that differ hang or give wrong results.

    Returns:
        [..., N], the bytes of ``ck.linear(order="tree")`` of the whole tensors, on every rank.

    Gradients need no exchange: dy is the same on every rank, which gets dx and dW of its columns
    and all of dbias, with the bytes of one rank.

    Raises:
        ShapeError: K / ranks is not a multiple of K's leaf; the message says which degrees work.
        RankError: ranks have arguments that differ, or one of them refused its own.
        ArgumentTypeError, ArgumentValueError: ``mesh`` is no such mesh, or of another degree.
        UnsupportedTransformError: torch.compile(fullgraph=True), a transform of torch.func, or a
            double backward.
        Others: as ``ck.linear``.
    """
    return parallel(_LINEAR, ROW, (x, weight, bias, main_grad), mesh, order, verify)


@untraced
def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    mesh: DeviceMesh | dist.ProcessGroup,
    order: str = "tree",
    main_grad: torch.Tensor | None = None,
    verify: bool | Literal["all"] = True,
) -> torch.Tensor:
    """y = x weightᵀ + bias, N cut over the ranks of ``mesh``; each gets its columns of y.

    Args:
        x: [..., K]; the same on every rank.
        weight: [N / ranks, K]: this rank's rows, in the order of the mesh's ranks.
        bias: [N / ranks] or None: the same rows.
        mesh, order, main_grad, verify: As in `row_parallel_linear`.

    Returns:
        [..., N / ranks]: those columns of ``ck.linear(order="tree")`` of the whole tensors.

    The forward pass needs no exchange, nor do dW and dbias.  dx sums over N: its leaves are
    exchanged, and every rank gets all of dx, with the bytes of one rank.

    Raises:
        ShapeError: N / ranks is not a multiple of N's leaf; the message says which degrees work.
        Others: as `row_parallel_linear`.
    """
    return parallel(_LINEAR, COLUMN, (x, weight, bias, main_grad), mesh, order, verify)


class _ParallelLinear(torch.nn.Module):
    """Base of a linear of which this rank has a part."""

    function = staticmethod(row_parallel_linear)
    cut, axis, cuts_bias = "in_features", 1, False

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        mesh: DeviceMesh | dist.ProcessGroup,
        verify: bool | Literal["all"] = True,
    ):
        super().__init__()
        self.weight = _parameter(weight)
        self.register_parameter("bias", None if bias is None else _parameter(bias))
        self.mesh, self.verify = mesh, verify

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        mesh: DeviceMesh | dist.ProcessGroup,
        *,
        verify: bool | Literal["all"] = True,
    ):
        """Make this rank's part of a linear that every rank has whole; parameters are copied.

        Raises:
            ArgumentTypeError: ``linear`` is no torch.nn.Linear.
            ShapeError: the mesh's degree does not cut it at the edges of leaves.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise ArgumentTypeError(expected("linear", "a torch.nn.Linear", type(linear).__name__))
        group = group_of_mesh(mesh)
        degree, rank = group.size(), group.rank()
        cut_at_leaves(cls.cut, getattr(linear, cls.cut), degree)
        weight, bias = linear.weight, linear.bias
        weight = _copy(weight.chunk(degree, cls.axis)[rank], weight)
        if bias is not None:
            bias = _copy(bias.chunk(degree)[rank] if cls.cuts_bias else bias, bias)
        return cls(weight, bias, mesh=mesh, verify=verify)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the function of the same name."""
        return self.function(x, self.weight, self.bias, mesh=self.mesh, verify=self.verify)

    def extra_repr(self) -> str:
        """Sizes of this rank's part, for ``repr``."""
        n, k = self.weight.shape
        return f"weight=[{n}, {k}], bias={self.bias is not None}"


class RowParallelLinear(_ParallelLinear):
    """`row_parallel_linear` with a rank's: weight [N, K / ranks], bias [N]."""


class ColumnParallelLinear(_ParallelLinear):
    """`column_parallel_linear` with a rank's: weight [N / ranks, K], bias [N / ranks]."""

    function = staticmethod(column_parallel_linear)
    cut, axis, cuts_bias = "out_features", 0, True


def _parameter(t: torch.Tensor) -> torch.nn.Parameter:
    return t if isinstance(t, torch.nn.Parameter) else torch.nn.Parameter(t)


def _copy(part: torch.Tensor, source: torch.Tensor) -> torch.nn.Parameter:
    values = part.detach().clone(memory_format=torch.contiguous_format)
    return torch.nn.Parameter(values, requires_grad=source.requires_grad)


# ---- checks; ranks raise together ---------------------------------------------------------------


def parallel(
    product: Product, name: str, operands: tuple, mesh, order: str, verify: bool | str
) -> torch.Tensor:
    """Call either function of a product with its operands."""
    process_groups.refuse_graphs(name)
    group, cuts_k = group_of_mesh(mesh), name == product.names[0]
    refusal = None
    try:
        process_groups.check_verify(verify)
        check(product, operands, order, group)
    except Exception as error:
        refusal = error
    if verify and group.size() > 1:
        _agree(product, operands, refusal, verify, cuts_k, group)
    if refusal is not None:
        raise refusal
    x, weight, *offsets, bias, main_grad = operands
    n, k = weight.shape[-2:]
    size, degree = (k if cuts_k else n), group.size()
    cut_at_leaves("K" if cuts_k else "N", size * degree, degree)
    if degree == 1 or 0 in (x.numel(), n):
        return product.whole(*operands, _ORDER)
    dtype = checking.cast_dtype(x)
    x, weight, bias = (t if t is None else t.to(dtype) for t in (x, weight, bias))
    return _Parallel.apply(x, weight, bias, main_grad, product, cuts_k, group, *offsets)


def group_of_mesh(mesh) -> dist.ProcessGroup:
    """Return the process group of a mesh, of a degree that cuts leaves at their edges."""
    group = process_groups.group_of(mesh, "mesh")
    if group.size() not in DEGREES:
        want = ", ".join(map(str, DEGREES)) + " ranks, which cut eight leaves at their edges"
        raise ArgumentValueError(expected("mesh", want, group.size()))
    return group


def check(product: Product, operands: tuple, order: str, group: dist.ProcessGroup) -> None:
    """Check the arguments of one rank by themselves."""
    check_order(order)
    x, weight, *offsets, bias, main_grad = operands
    for argument, t in (("x", x), ("weight", weight), ("bias", bias), ("main_grad", main_grad)):
        if hasattr(t, "to_local"):
            want = "this rank's own tensor (dtensor.to_local())"
            raise ArgumentTypeError(expected(argument, want, type(t).__name__))
    product.check(x, weight, offsets, bias, main_grad)
    dispatch.backend(product.leaves, x.device, checking.cast_dtype(x))
    process_groups.check_exchangeable("x", x, group)


def check_order(order: str) -> None:
    """Check that the order of sums is one that ranks can cut."""
    if order != _ORDER:
        want = f"{_ORDER!r}, the only one that ranks can cut"
        raise ArgumentValueError(expected("order", want, repr(order)))


def _agree(
    product: Product,
    operands: tuple,
    refusal: Exception | None,
    verify: bool | str,
    cuts_k: bool,
    group: dist.ProcessGroup,
) -> None:
    """Raise on every rank if one refuses its arguments, or if they differ."""
    fields = ("function", "rows of x", *(f"{size} of weight" for size in product.sizes))
    fields += ("dtype", "bias", "x.requires_grad")
    numbers = [0] * (len(fields) + len(product.compared))
    if refusal is None:
        x, weight, *offsets, bias, _ = operands
        # The exchange of dx is entered by those ranks only whose x needs it.
        asks = not cuts_k and x.requires_grad and torch.is_grad_enabled()
        dtype = checks.DTYPES.index(checking.cast_dtype(x))
        numbers = [not cuts_k, x.shape[:-1].numel(), *weight.shape, dtype, bias is not None, asks]
        same_x = not cuts_k and verify == "all"
        compared = (*offsets, x if same_x else None, bias if cuts_k else None)
        numbers += digests.digests(compared)  # 0 where one is not compared
    heard = process_groups.agree(numbers, refusal, group, "mesh")
    columns = list(zip(*heard, strict=True))
    for name, values in zip(fields, columns, strict=False):
        names = {"function": product.names, "dtype": checks.DTYPES}.get(name)
        process_groups.alike(name, [names[v] if names else v for v in values], "mesh")
    for name, values in zip(product.compared, columns[len(fields) :], strict=True):
        process_groups.alike_values(name, values, "mesh")


def cutting(size: int) -> list[int]:
    """Return the degrees that cut a sum over ``size`` elements where leaves of it begin."""
    length = leaves.length(size)
    return [d for d in DEGREES if d == 1 or (size % d == 0 and size // d % length == 0)]


def cut_at_leaves(name: str, size: int, degree: int) -> None:
    """Check that so many ranks cut a sum over ``size`` elements where leaves of it begin."""
    if size == 0:
        return
    length, works = leaves.length(size), cutting(size)
    if degree not in works:
        want = (
            f"a size that {degree} ranks cut at the edges of its leaves (a multiple of 128 always "
            f"is; leaves of {size} are {length} long, and can be cut by "
            f"{' or '.join(map(str, works))} {'rank only' if works == [1] else 'ranks'})"
        )
        raise ShapeError(expected(name, want, size))


# ---- forward and backward -----------------------------------------------------------------------


class _Parallel(torch.autograd.Function):
    """A product of this rank's part of a weight; its node is one for ``op.weight_gradient``."""

    @staticmethod
    def forward(ctx, x, weight, bias, main_grad, product, cuts_k, group, *offsets):
        needs_weight = ctx.needs_input_grad[1]
        ctx.save_for_backward(x if needs_weight else None, weight, *offsets)
        # Not a saved tensor: backward of an earlier micro-batch may write it before ours reads it.
        ctx.main_grad = main_grad if needs_weight else None
        ctx.order, ctx.product, ctx.cuts_k, ctx.group = _ORDER, product, cuts_k, group
        if not cuts_k:
            return product.whole(x, weight, *offsets, bias, main_grad, _ORDER)
        if main_grad is not None:
            destination.check_no_alias(main_grad, x=x, weight=weight, bias=bias)
        return detach_view(product.summed(x, weight, offsets, bias, group))

    @staticmethod
    def backward(ctx, dy):
        product = ctx.product
        refuse_double(product.names[0 if ctx.cuts_k else 1])
        x, weight, *offsets = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *others = ctx.needs_input_grad
        dx = None
        if needs_x and ctx.cuts_k:
            dx = product.dx(dy, weight, *offsets, _ORDER)
        elif needs_x:
            dx = product.summed(dy, weight.mT, offsets, None, ctx.group)
        dw = product.dweight(ctx, dy, x, *offsets) if needs_weight else None
        db = product.dbias(dy, offsets) if needs_bias else None
        return dx, dw, db, *(None for _ in others)


def sum_over_ranks(
    leaves_of: Callable[[slice, int], torch.Tensor],
    shape: tuple[int, int, int],
    bias: torch.Tensor | None,
    like: torch.Tensor,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Add the leaves of all ranks, ascending, and the bias: [rows, columns] on every rank.

    Args:
        leaves_of: ``leaves_of(rows, length)`` computes this rank's leaves of some rows, each over
            ``length`` elements of the sum: fp32 [leaves, rows, columns].
        shape: (rows, columns, elements of the sum that this rank has).
        bias: [columns] or None.
        like: A tensor of the dtype and device of the result.
    """
    rows, n, size = shape
    length = leaves.length(size * group.size())
    sizes = Sizes(rows, n, size // length, group.size())
    total = leaf_exchange.Sum(
        lambda span: leaves_of(span, length), sizes, bias, like.dtype, like.device, group
    )
    block = max(1, BLOCK_BYTES // (sizes.leaves * n * torch.float32.itemsize))
    return total.run(leaf_exchange.choose(sizes, GATHER_BYTES), block)
