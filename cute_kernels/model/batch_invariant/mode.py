"""Whether a thread is in `batch_invariant`, and how ops of torch are intercepted.

The mode is a dispatch key that a thread includes in its calls.  Overrides are kernels of that key,
registered once a process and never taken back.  Why a key, and not

- kernels of "CPU" and "CUDA": those are for every thread, a call that is under way while they are
  taken back has nowhere to go, and ops that torch composes of others have none;
- a TorchDispatchMode: Python runs for every op, overridden or not, and `torch.compile` leaves
  functions alone where one is active;
- a TorchFunctionMode: it does not see what C++ calls (einsum, cross_entropy, gradients).

A key costs nothing in a thread that does not include it, and nothing at an op without an override.
It is above autograd and autocast, so an override is differentiated by its own backward.  Autograd
hands the keys of a thread to those that run its backward, gradients of ops called outside the mode
among them.  Guards of `torch.compile` look at the keys of a thread: a graph is made anew for the
mode, with our ops in it.  ``DeferredInit`` is a key that torch keeps for a package outside it
(torchdistx, archived) and does not use.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.compiler.config

from ...runtime.torch_ops import MODE

_NAME = "cute_kernels.batch_invariant"


class State(NamedTuple):
    """State of one thread."""

    on: bool
    strict: bool


def state() -> State:
    """Return the calling thread's state."""
    on = torch._C._dispatch_tls_is_dispatch_key_included(MODE)
    return State(on, on and strict())


def strict() -> bool:
    """Whether ops that are not covered are refused, in a thread that is in the mode."""
    # Not threading.local: autograd's threads have what the thread that called backward had.
    return torch._C._is_key_in_tls(_NAME) and torch._C._get_obj_in_tls(_NAME)


def set_state(new: State) -> None:
    """Set the calling thread's state, from the next call of an op on."""
    torch._C._stash_obj_in_tls(_NAME, new.strict)
    torch._C._dispatch_tls_set_dispatch_key_included(MODE, new.on)
    # What torch.compile stores on disk is found by the graph that it was made of, which is the
    # same one in and out of the mode.
    config = torch.compiler.config
    tag = config.cache_key_tag.removesuffix(_NAME)
    config.cache_key_tag = tag + _NAME if new.on else tag
