"""Call a compiled kernel on the inputs' device, and allocate what it writes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch

from . import extension

#: By device: what graphs of torch.compile allocate by, which parses no arguments and asks no
#: dispatcher.  No promise of torch's: where it is missing, `torch.empty` does it.
_EMPTY = {
    device: getattr(torch._C._dynamo.guards, f"_empty_strided_{device}", None)
    for device in ("cuda", "cpu")
}

#: What a launch by calls.c takes, besides subclasses of torch.Tensor, and how many.
_TAKEN = frozenset((type(None), float, int, torch.Tensor))
_MOST_ARGUMENTS = 24


def call(device: torch.device, kernel: Callable, *args: object) -> None:
    """Launches on ``device``, which need not be the current one, on its current stream."""
    # A CPU tensor, which only a simulator's kernel takes, has no index.
    if device.index is not None and device.index != torch.accelerator.current_device_index():
        with torch.cuda.device(device):
            kernel(*args)
    else:
        kernel(*args)


def bind(
    device: torch.device, kernel: Callable, flatten: Iterable[int] = (), tuples: bool = False
) -> Callable:
    """``launch(*args)`` is ``call(device, kernel, *args)`` with less host time, for a plan.

    flatten: Positions of contiguous tensors [..., D] that the kernel takes as [rows, D].
    tuples: Whether arguments are tuples, which calls.c does not pass.
    """
    flatten = tuple(flatten)
    calls = extension.calls() if hasattr(kernel, "__chandle__") and not tuples else None
    if calls is None:

        def launch_in_python(*args):
            if not tuples:
                _check_arguments(args)
            call(device, kernel, *flattened(args, flatten))

        return launch_in_python
    launch, bits, index = calls.launch, sum(1 << i for i in flatten), device.index
    if torch.accelerator.device_count() <= 1:
        return functools.partial(launch, kernel, bits)  # no other device can be current

    def run(*args):
        if index != torch.accelerator.current_device_index():
            with torch.cuda.device(device):
                launch(kernel, bits, *args)
        else:
            launch(kernel, bits, *args)

    return run


def _check_arguments(args: tuple) -> None:
    """Refuse what calls.c refuses, so that a launch without it finds the same mistakes."""
    if not _TAKEN.issuperset(map(type, args)):
        for value in args:
            if type(value) not in _TAKEN and not isinstance(value, torch.Tensor):
                raise TypeError(f"a kernel takes no {type(value).__name__}")
    if len(args) > _MOST_ARGUMENTS:
        raise TypeError(f"a kernel takes at most {_MOST_ARGUMENTS} arguments")


def allocator(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    """``make()`` is ``torch.empty`` of these in a third of the host's time, for a plan.

    Kernels write every element, so ``torch.use_deterministic_algorithms`` fills nothing before.
    """
    size = tuple(map(int, shape))
    strides = torch.empty(size, dtype=dtype, device="meta").stride()

    def make_by_torch() -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    if _EMPTY[device.type] is None:
        return make_by_torch
    make = functools.partial(_EMPTY[device.type], size, strides, dtype)
    if device.index is None or torch.accelerator.device_count() <= 1:
        return make  # no other device can be current

    def make_there() -> torch.Tensor:
        is_current = device.index == torch.accelerator.current_device_index()
        return make() if is_current else make_by_torch()

    return make_there


def flattened(args: Sequence[object], flatten: Sequence[int]) -> list[object]:
    """Arguments with the contiguous [..., D] at these positions as [rows, D]."""
    args = list(args)
    for i in flatten:
        if args[i] is not None:
            args[i] = args[i].view(-1, args[i].shape[-1])
    return args
