"""Masks and the transforms of ``torch.func``: masks are made, hashed and lowered outside of them.

A transform wraps every tensor that is made inside it, and its wrappers are empty once it ends.  A
mask and the lists made of it outlive the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch._C import _functorch

from cute_kernels.errors import UnsupportedTransformError


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Run a block as if no transform of ``torch.func`` were active."""
    if torch.compiler.is_compiling() or _functorch.peek_interpreter_stack() is None:
        yield
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield


def refuse_wrapped(tensors: Iterable[Tensor]) -> None:
    """Refuse a mask's tensors that a transform of ``torch.func`` computed."""
    if any(map(_functorch.is_functorch_wrapped_tensor, tensors)):
        raise UnsupportedTransformError(
            "BlockMask: tensors computed inside a transform of torch.func are not supported; "
            "make the mask outside of it"
        )
