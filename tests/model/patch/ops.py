"""Which aten ops run, and which of them compute each element from elements at its own place."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Copies, views, look-ups, and functions that IEEE rounds correctly, element by element.
EXACT = {
    "add", "add_", "sub", "mul", "mul_", "div", "neg", "where", "eq", "ne", "ge", "gt", "le", "lt",
    "bitwise_and", "bitwise_or", "bitwise_not", "logical_and", "logical_or", "logical_not",
    "clamp", "minimum", "maximum", "abs", "rsub", "bitwise_and_", "masked_fill", "masked_fill_",
    "view", "_unsafe_view", "reshape", "transpose", "t", "permute", "expand", "slice", "select",
    "unsqueeze", "squeeze", "split", "split_with_sizes", "cat", "stack", "clone", "copy_", "detach",
    "alias", "_to_copy", "empty", "empty_like", "new_empty", "new_zeros", "zeros", "zeros_like",
    "ones", "ones_like", "full", "full_like", "fill_", "zero_", "arange", "scalar_tensor",
    "lift_fresh", "_local_scalar_dense", "constant_pad_nd", "index", "gather", "slice_backward",
    "select_backward", "split_backward", "as_strided", "new_full", "new_ones", "index_select",
    "index_copy_",
    "unbind", "flip", "roll", "any", "all", "is_same_size", "_reshape_alias", "slice_scatter",
    "resize_", "set_", "is_nonzero", "max", "min", "amax", "amin", "argmax", "aminmax",
}  # fmt: skip
#: Of whole numbers, which add exactly in every order.
EXACT_OF_INTEGERS = {"sum", "cumsum"}


class Watch(TorchDispatchMode):
    """Inside, collects the names of torch's ops that are not exact, ours left out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.ours: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, _, name = func._schema.name.partition("::")
        result = func(*args, **(kwargs or {}))
        if space == "cute_kernels":
            self.ours.add(name)
        elif name not in EXACT and not self._of_integers(name, result):
            self.found.add(name)
        return result

    @staticmethod
    def _of_integers(name: str, result: object) -> bool:
        whole = isinstance(result, torch.Tensor) and not result.dtype.is_floating_point
        return name in EXACT_OF_INTEGERS and whole
