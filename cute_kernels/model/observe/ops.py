"""Classes of torch's ops: exact ones, elementwise functions, and those that ours can stand in for.

exact      copies, views, look-ups, and functions that IEEE rounds correctly, element by element
elements   functions of one element whose vectors and scalar tails round differently on a CPU
covered    ops that ``ck.batch_invariant`` computes by ops of ours
others     their bits follow the batch, or nobody knows that they do not
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from ..batch_invariant.ops.covered import COVERED

EXACT = frozenset({
    "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "neg", "neg_", "rsub", "abs",
    "sqrt", "reciprocal", "square", "sign", "floor", "ceil", "round", "trunc", "relu", "relu_",
    "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "minimum", "maximum",
    "threshold_backward", "hardtanh", "leaky_relu", "leaky_relu_backward", "lerp", "fmod",
    "remainder", "floor_divide", "isinf", "isnan", "isfinite", "nan_to_num", "sgn",
    "where", "eq", "ne", "ge", "gt", "le", "lt", "equal", "isin", "bucketize", "searchsorted",
    "bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor", "bitwise_and_", "bitwise_or_",
    "logical_and", "logical_or", "logical_not", "logical_xor",
    "logical_and_", "logical_or_", "logical_not_",
    "masked_fill", "masked_fill_", "masked_select", "masked_scatter", "nonzero", "one_hot",
    "view", "_unsafe_view", "reshape", "transpose", "transpose_", "t", "permute", "expand",
    "slice", "select", "unsqueeze", "unsqueeze_", "squeeze", "squeeze_", "split",
    "split_with_sizes", "cat", "stack", "clone", "copy_", "detach", "detach_", "alias", "_to_copy",
    "_conj", "complex", "view_as_real", "view_as_complex", "diagonal", "unfold", "movedim", "chunk",
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "new_zeros", "zeros",
    "zeros_like", "ones", "ones_like", "full", "full_like", "fill", "fill_", "zero_", "arange",
    "linspace", "scalar_tensor", "lift_fresh", "lift_fresh_copy", "_local_scalar_dense",
    "_assert_async", "_assert_scalar", "constant_pad_nd", "index", "gather", "index_select",
    "slice_backward", "select_backward", "split_backward", "unfold_backward", "as_strided",
    "new_full", "new_ones", "index_copy_", "index_copy", "index_fill", "index_fill_", "scatter",
    "scatter_", "unbind", "flip", "roll", "repeat", "tril", "triu", "tril_", "triu_", "eye", "any",
    "all", "is_same_size", "_reshape_alias", "slice_scatter", "select_scatter", "diag", "resize_",
    "set_", "is_nonzero", "max", "min", "amax", "amin", "argmax", "argmin", "aminmax",
    "repeat_interleave", "view_dtype", "set_data", "is_pinned", "unsafe_split", "narrow",
    "positive", "native_dropout_backward", "pixel_shuffle", "embedding",
})  # fmt: skip
#: Those of them that compute: the steps of a formula, where others move what is there.
ARITHMETIC = frozenset({
    "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "neg", "neg_", "rsub", "abs",
    "sqrt", "reciprocal", "square", "sign", "floor", "ceil", "round", "trunc", "relu", "relu_",
    "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "minimum", "maximum",
    "hardtanh", "leaky_relu", "lerp", "fmod", "remainder", "sgn", "max", "min", "amax", "amin",
})  # fmt: skip
#: Functions of one element that round by its place on a CPU.
ELEMENTS = frozenset({
    "exp", "exp_", "exp2", "expm1", "log", "log_", "log1p", "log2", "log10", "sin", "cos", "tan",
    "sinh", "cosh", "asin", "acos", "atan", "atan2", "tanh", "tanh_", "sigmoid", "sigmoid_",
    "silu", "silu_", "gelu", "mish", "softplus", "log_sigmoid_forward", "elu", "elu_", "celu",
    "selu", "erf", "erfc", "erfinv", "logit", "pow", "pow_", "rsqrt", "rsqrt_", "xlogy",
    "sigmoid_backward", "tanh_backward", "silu_backward", "gelu_backward", "softplus_backward",
    "elu_backward", "mish_backward", "log_sigmoid_backward", "hardsigmoid", "hardswish", "glu",
    "addcmul", "addcdiv", "polar", "logaddexp", "glu_backward",
})  # fmt: skip
#: Names of the ops that an override stands in for, as a dispatch mode sees them.
COVERED_NAMES = frozenset(row.op.split(".")[0] for row in COVERED) - {"embedding"}
#: Products and convolutions, whose results are not computed in an observation.
PRODUCTS = frozenset({
    "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "convolution",
    "convolution_backward", "_grouped_mm", "_scaled_mm", "embedding_dense_backward",
})  # fmt: skip
#: Ops of torch and of ours that reduce the last dimension of their first argument.
_LAST = frozenset({
    "mm", "bmm", "mv", "dot", "linear", "matmul", "batched_product", "row_sum", "softmax",
    "log_softmax", "norm", "topk", "sort", "moe_select",
})  # fmt: skip
#: Functions of elements that are rounded more than once where the numbers are complex.
_COMPLEX = frozenset({"mul", "mul_", "div", "div_", "reciprocal", "square", "abs", "sgn"})
_POWERS = (-2, -1, 0, 1, 2, 3)


def name_of(op: torch._ops.OpOverload) -> tuple[str, str]:
    """Return (namespace, name) of an op."""
    space, _, name = op._schema.name.partition("::")
    return space, name


def tensors(values: object) -> list[torch.Tensor]:
    """Return the tensors in arguments or results."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, Sequence) and not isinstance(values, str):
        return [t for value in values for t in tensors(value)]
    return []


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, uint8 [n]."""
    return t.contiguous().flatten().view(torch.uint8)


def is_exact(name: str, args: tuple, operands: list[torch.Tensor], devices: set[str]) -> bool:
    """Whether an op has the same bits in every batch, on these types of device.

    operands: tensors among arguments and results.
    """
    floats = [t for t in operands if t.is_floating_point() or t.is_complex()]
    if not floats or not any(t.numel() for t in floats):
        return True
    if name in _COMPLEX and any(t.is_complex() for t in floats):
        # Two products and a sum, which a CPU contracts in vectors and not behind them.
        return devices == {"cuda"}
    if name in EXACT or (name in ("sum", "mean") and _adds_at_most_two(args)):
        return True
    if name in ("cumsum", "sum") and _counts(args[0]):
        return True
    if name in ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"):
        # A mask, or one index, names each place once, so that accumulation adds two numbers.
        once = all(t is None or t.dtype == torch.bool or t.numel() == 1 for t in args[1])
        return once or len(args) < 4 or not args[3]
    if name in ELEMENTS:
        if devices == {"cuda"}:
            return True
        if name in ("rsqrt", "rsqrt_"):
            return all(t.element_size() > 2 for t in floats)
        if name in ("pow", "pow_"):
            return len(args) > 1 and not isinstance(args[1], torch.Tensor) and args[1] in _POWERS
    return False


def computes(name: str, result: object) -> bool:
    """Whether an op is a step of a formula: not a copy, a view, a look-up or a new tensor."""
    floats = any(t.is_floating_point() for t in tensors(result))
    return floats and (name in ARITHMETIC or name not in EXACT)


def _counts(t: torch.Tensor) -> bool:
    """Whether a tensor [B, T], or smaller, holds whole numbers, as a mask of floats does."""
    small = t.dim() <= 2 and 0 < t.numel() < 1 << 12
    return small and not t.requires_grad and bool(((t == 0) | (t == 1)).all() & t.any())


def _adds_at_most_two(args: tuple) -> bool:
    """Whether each result of a sum has at most two addends."""
    return isinstance(args[0], torch.Tensor) and reduced_width("sum", args) <= 2


def reduced_width(name: str, args: tuple) -> int:
    """Return how many elements one result of a covered reduction reads; 1: elementwise."""
    first = args[0]
    if name in ("sum", "mean"):
        dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple | int) else None
        dims = [dims] if isinstance(dims, int) else dims
        sizes = first.shape if not dims else [first.shape[d] for d in dims] if first.dim() else []
        return math.prod(sizes)
    if name in ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"):
        dim = args[2] if name.endswith("_data") else args[1]
        return first.shape[dim] if first.dim() else 1
    if name in ("addmm", "baddbmm", "addmv"):
        return args[1].shape[-1]
    if name == "moe_weights_backward":
        return args[2].shape[-1]
    if name in _LAST and isinstance(first, torch.Tensor) and first.dim():
        return first.shape[-1]
    return 1
