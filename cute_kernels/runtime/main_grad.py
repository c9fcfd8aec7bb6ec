"""``main_grad``: an fp32 tensor that backward adds a weight's gradient into, in place of ``grad``.

Its checks, and where a gradient goes when a backward runs.  Megatron and TransformerEngine have
the convention; systems whose ops have a weight share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import (
    AliasError,
    ArgumentTypeError,
    ArgumentValueError,
    DtypeError,
    ShapeError,
    expected,
)
from . import checking, data_parallel

MAIN_GRAD, GRAD, NOWHERE = "main_grad", "grad", "nowhere"

_RECIPE = "docs/gemm.md, 'main_grad with data parallel'"
_DDP = (
    "none inside DistributedDataParallel, which reduces weight.grad and would leave main_grad as "
    "each rank has it (run forward and backward inside ddp.no_sync(), then reduce_main_grads of "
    f"cute_kernels.integrations.main_grad: {_RECIPE})"
)
_FSDP2 = (
    "none under fully_shard, which reduces weight.grad and gathers a parameter that has no "
    f"attributes of yours (leave main_grad out and remove weight.main_grad: {_RECIPE})"
)
#: What follows a refusal to differentiate a gradient again beside a main_grad.
NO_SECOND_GRADIENT = (
    " with main_grad, as a gradient's part of it would go to weight.grad; leave main_grad out"
)


def check(
    main_grad: torch.Tensor,
    weight: torch.Tensor,
    x: torch.Tensor,
    name: str = "x",
    names: tuple[str, str] = ("main_grad", "weight"),
) -> None:
    """Check that ``main_grad`` is fp32, of the weight's shape, on x's device, and writable.

    ``name``: of the argument x; ``names``: of main_grad and of the weight.
    """
    argument, of_weight = names
    checking.tensor(argument, main_grad)
    if main_grad.shape != weight.shape:
        want = f"shape {list(weight.shape)}, that of {of_weight}"
        raise ShapeError(expected(argument, want, list(main_grad.shape)))
    if main_grad.dtype != torch.float32:
        raise DtypeError(expected(argument, "torch.float32", main_grad.dtype))
    checking.same_device(argument, main_grad, name, x)
    if main_grad.requires_grad:
        want = "requires_grad=False (backward adds into it)"
        raise ArgumentValueError(expected(argument, want, "requires_grad=True"))
    if not main_grad.is_contiguous() and overlaps_itself(main_grad):
        want = "elements at distinct addresses (it is updated in place)"
        raise AliasError(expected(argument, want, f"strides {main_grad.stride()}"))


def check_values(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    main_grad: torch.Tensor | None,
    name: str = "x",
    argument: str = "main_grad",
) -> None:
    """Check values that only true tensors have; costs nothing without a main_grad."""
    if main_grad is None:
        if data_parallel.has_sharded_main_grad(weight):
            raise ArgumentValueError(expected("main_grad", _FSDP2, "weight.main_grad"))
        return
    if main_grad.is_neg():
        want = "memory that holds its values (it is updated in place)"
        raise ArgumentValueError(expected(argument, want, "a negated view"))
    if checking.autocast(x.device) and (written := checking.in_memory(main_grad)) is not None:
        # The op sees what autocast makes of them.
        read = {name: x, "weight": weight, "bias": bias}
        check_no_alias(written, **{name: checking.in_memory(t) for name, t in read.items()})
    if weight.requires_grad and torch.is_grad_enabled():
        name = data_parallel.reducer(leaf_of(weight))
        if name is not None:
            want = _DDP if name == data_parallel.DDP else _FSDP2
            raise ArgumentValueError(expected("main_grad", want, "a tensor"))


def check_of(
    name: str, main_grad: object, of: str, weight: torch.Tensor | None, x: torch.Tensor
) -> None:
    """Check the main_grad ``name`` of the argument ``of``, either of which may be None."""
    if weight is None:
        if main_grad is not None:
            raise ArgumentTypeError(expected(name, f"None, as there is no {of}", "a tensor"))
        return
    if main_grad is not None:
        check(main_grad, weight, x, names=(name, of))
    if not torch.compiler.is_compiling():
        check_values(x, weight, None, main_grad, argument=name)


def check_no_aliases(
    main_grad: torch.Tensor | None,
    bias_main_grad: torch.Tensor | None,
    **read: torch.Tensor | None,
) -> None:
    """Check that backward can add into both: neither aliases a tensor in use or the other."""
    if main_grad is not None:
        check_no_alias(main_grad, bias_main_grad=bias_main_grad, **read)
    if bias_main_grad is not None:
        check_no_alias(bias_main_grad, "bias_main_grad", **read)


def check_no_alias(
    main_grad: torch.Tensor, argument: str = "main_grad", /, **read: torch.Tensor | None
) -> None:
    """Check that no byte of main_grad is one of a tensor in use, whoever allocated it."""
    start, stop = addresses(main_grad)
    for name, tensor in read.items():
        if tensor is None:
            continue
        first, end = addresses(tensor)
        if first < stop and start < end:
            want = f"memory of its own (backward writes it while it reads {name})"
            raise AliasError(expected(argument, want, f"an alias of {name}"))


def of(edge: object) -> str:
    """Destination of a weight's gradient, inside a backward: MAIN_GRAD, GRAD or NOWHERE.

    ``edge``: the autograd node behind the weight.  main_grad is written where ``grad`` would be:
    not by ``autograd.grad``, which returns dW, and not by ``backward(inputs=...)`` without the
    parameter.
    """
    # The weight may be a cast or a view of the parameter, saved and unpacked by hooks.
    runs = _traced() or _engine_runs(accumulator_of(edge) or edge)
    if runs:
        return MAIN_GRAD
    return GRAD if runs is None or _engine_runs(edge) else NOWHERE


@dataclass(frozen=True)
class Target:
    """Destination of one weight's gradient in a running backward.

    wanted: whether to make it.  into: the main_grad to add it to; None: to a tensor of its own.
    """

    wanted: bool
    into: torch.Tensor | None
    edge: object = None

    @property
    def returned(self) -> bool:
        """Whether the gradient is one that the backward returns."""
        return self.wanted and self.into is None

    def written(self) -> None:
        """Mark the gradient as added."""
        if self.into is not None:
            mark(self.edge)


def targets(
    ctx,
    inputs: Sequence[object],
    main_grads: dict[int, torch.Tensor | None],
    upstream: Sequence[torch.Tensor | None],
) -> dict[int, Target]:
    """The `Target` of each position of a node's inputs that ``main_grads`` names.

    ``inputs``: those of the forward, or what says which of them were tensors: None where none was.
    ``upstream``: the gradients that the backward reads.

    Raises:
        AliasError: a main_grad that is written shares memory with one of them, or with another.
    """
    edges, out = iter(ctx.next_functions), {}
    for position, value in enumerate(inputs):
        # A node has an edge for each input that is a tensor.
        edge = next(edges)[0] if value is not None else None
        if position not in main_grads:
            continue
        main_grad = main_grads[position]
        if not ctx.needs_input_grad[position] or main_grad is None:
            out[position] = Target(ctx.needs_input_grad[position], None)
            continue
        destination = of(edge)
        into = main_grad if destination == MAIN_GRAD else None
        out[position] = Target(destination != NOWHERE, into, edge)
    _check_written([t.into for t in out.values() if t.into is not None], upstream)
    return out


def _check_written(written: list[torch.Tensor], upstream: Sequence[torch.Tensor | None]) -> None:
    """Refuse main_grads that share memory with an upstream gradient or with each other."""
    if not written or _traced():
        return
    written, upstream = (
        [checking.in_memory(t) for t in tensors] for tensors in (written, upstream)
    )
    for i, main_grad in enumerate(written):
        if main_grad is not None:
            earlier = {f"main_grad {j}": t for j, t in enumerate(written[:i])}
            check_no_alias(
                main_grad, **{f"upstream gradient {j}": t for j, t in enumerate(upstream)}
            )
            check_no_alias(main_grad, **earlier)


def mark(edge: object) -> None:
    """Sets the parameter's ``grad_added_to_main_grad``, if it has one."""
    end = accumulator_of(edge)
    if end is not None and hasattr(getattr(end, "variable", None), "grad_added_to_main_grad"):
        end.variable.grad_added_to_main_grad = True


def leaf_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The leaf that a tensor is made of by casts, views and the like; None if of several."""
    node = None if tensor.is_leaf else accumulator_of(tensor.grad_fn)
    return tensor if tensor.is_leaf else node and node.variable


def accumulator_of(node: object) -> object | None:
    """The AccumulateGrad node at the end of an autograd graph; None if it has several ends."""
    while node is not None and node.name() != "torch::autograd::AccumulateGrad":
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        node = parents[0] if len(parents) == 1 else None
    return node


def _traced() -> bool:
    """Whether this backward is being made into a graph, by way of autograd.grad."""
    # torch.compiler.is_compiling() does not say so on torch 2.11.
    mode = torch._C._TorchDispatchModeKey.PROXY
    return torch._C._get_dispatch_mode(mode) is not None


def _engine_runs(node) -> bool | None:
    """Whether this backward pass runs ``node``; None: it is a leaf, given to ``autograd.grad``."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        if "leaf node" not in str(error):
            raise
        return None


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements of a tensor can share an address."""
    sized = sorted(
        (stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1
    )
    reach = 1
    for stride, size in sized:
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False


def shares_elements(t: torch.Tensor, other: torch.Tensor | None = None) -> bool:
    """Whether two elements of a tensor, or one of each of two, lie at the same address.

    Counts them, element by element, unless the layout alone tells.
    """
    tensors = [t] if other is None else [t, other]
    if other is None and (t.is_contiguous() or not overlaps_itself(t)):
        return False
    if all(tensor.is_contiguous() for tensor in tensors):
        (first, stop), (start, end) = map(addresses, tensors)
        return first < end and start < stop
    begin = min(addresses(tensor)[0] for tensor in tensors)
    size = max(addresses(tensor)[1] for tensor in tensors) - begin
    count = torch.zeros(size, dtype=torch.int32, device="cpu")
    for tensor in tensors:
        steps = [step * tensor.itemsize for step in tensor.stride()]
        offset = addresses(tensor)[0] - begin
        offsets = torch.zeros(tensor.shape, dtype=torch.int64, device="cpu")
        for dim, (length, step) in enumerate(zip(tensor.shape, steps, strict=True)):
            index = torch.arange(length, device="cpu") * step
            offsets += index.view(-1, *(1,) * (tensor.dim() - dim - 1))
        for byte in range(tensor.itemsize):
            flat = offsets.view(-1) + (offset + byte)
            count.index_add_(0, flat, torch.ones(len(flat), dtype=torch.int32, device="cpu"))
    return bool((count > 1).any())


def addresses(t: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and after the last; each library makes its own storages."""
    first = t.data_ptr()
    if t.is_contiguous():
        return first, first + t.numel() * t.element_size()
    span = sum(stride * (size - 1) for stride, size in zip(t.stride(), t.shape, strict=True))
    return first, first + (span + 1) * t.element_size() * bool(t.numel())
