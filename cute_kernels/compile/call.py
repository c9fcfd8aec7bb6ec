"""Call a compiled kernel on the inputs' device, and allocate what it writes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

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
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    strides: Sequence[int] | None = None,
) -> Callable[[], torch.Tensor]:
    """``make()`` is ``torch.empty`` of these in a third of the host's time, for a plan.

    strides: Of a dense tensor; None: contiguous.  Kernels write every element, so
    ``torch.use_deterministic_algorithms`` fills nothing before.
    """
    size = tuple(map(int, shape))
    contiguous = strides is None
    if contiguous:
        strides = torch.empty(size, dtype=dtype, device="meta").stride()
    strides = tuple(map(int, strides))

    def make_by_torch() -> torch.Tensor:
        if contiguous:
            return torch.empty(size, dtype=dtype, device=device)
        return torch.empty_strided(size, strides, dtype=dtype, device=device)

    if _EMPTY[device.type] is None:
        return make_by_torch
    make = functools.partial(_EMPTY[device.type], size, strides, dtype)
    if device.index is None or torch.accelerator.device_count() <= 1:
        return make  # no other device can be current

    def make_there() -> torch.Tensor:
        is_current = device.index == torch.accelerator.current_device_index()
        return make() if is_current else make_by_torch()

    make_there.on_current_device = make
    return make_there


# ---- programs ------------------------------------------------------------------------------------

#: Layouts in which a launch takes a tensor: contiguous [..., D] as [rows, D]; a matrix transposed.
ROWS, TRANSPOSED = 1, 2

#: An operand of a launch: a number, None, or (source, layout): argument ``source`` of the program,
#: or output ``-1 - source``.
ProgramOperand = int | float | None | tuple[int, int]


class Program(NamedTuple):
    """Allocations and launches of a plan as data, which calls.c runs without a frame of Python.

    run: The Python function that does the same, for which a program stands; None: there is none
        with these arguments, as some are in tuples there.
    device: Where it launches.
    outputs: Allocators, as `allocator` returns them.
    launches: A compiled kernel and its operands each, in order.
    results: Positions of the outputs that are returned as a tuple, None for a None; or the position
        of the only one.
    """

    run: Callable | None
    device: torch.device
    outputs: tuple[Callable, ...]
    launches: tuple[tuple[Callable, tuple[ProgramOperand, ...]], ...]
    results: int | tuple[int | None, ...]

    def then(self, other: Program, *sources: tuple[int, int]) -> Program | None:
        """Program of this one's launches, then of those of another.

        sources: (source, layout) of the other one's arguments, among arguments and outputs of this
        one.  Outputs of the other one come after those of this one; results are left as they are.
        None where a launch flattens an operand that is transposed before.
        """
        offset, launches = len(self.outputs), list(self.launches)
        for kernel, operands in other.launches:
            remapped = [_remapped(operand, sources, offset) for operand in operands]
            if _IMPOSSIBLE in remapped:
                return None
            launches.append((kernel, tuple(remapped)))
        return self._replace(outputs=self.outputs + other.outputs, launches=tuple(launches))

    def with_arguments(self, run: Callable, *sources: tuple[int, int]) -> Program | None:
        """This program as one of ``run``; sources: as in `then`, among the arguments of ``run``."""
        program = Program(run, self.device, (), (), self.results)
        return program.then(self, *sources)

    def with_outputs(self, *outputs: Callable) -> Program:
        """This program with more outputs, that no launch writes."""
        return self._replace(outputs=self.outputs + outputs)

    def bind(self) -> Callable | None:
        """``run(*args)`` by calls.c; None where it cannot launch these kernels."""
        calls = extension.calls()
        if calls is None or not all(hasattr(k, "__chandle__") for k, _ in self.launches):
            return None
        allocators = tuple([getattr(new, "on_current_device", new) for new in self.outputs])
        operands = [o for _, each in self.launches for o in each if type(o) is tuple]
        count = 1 + max(source for source, _ in operands)
        in_c = calls.program(count, allocators, self.launches, self.results)
        if self.device.index is None or torch.accelerator.device_count() <= 1:
            return in_c
        in_python, index = self.run, self.device.index

        def run(*args):
            if index != torch.accelerator.current_device_index():
                return in_python(*args)
            return in_c(*args)

        return run


_IMPOSSIBLE = object()


def _remapped(
    operand: ProgramOperand, sources: Sequence[tuple[int, int]], offset: int
) -> ProgramOperand | object:
    """Operand of a program whose arguments are ``sources``, and whose outputs come after so many
    others; `_IMPOSSIBLE` where there is none."""
    if type(operand) is not tuple:
        return operand
    position, layout = operand
    if position < 0:
        return position - offset, layout
    source, before = sources[position]
    if layout & ROWS and before & TRANSPOSED:
        return _IMPOSSIBLE
    return source, (before | layout & ROWS) ^ layout & TRANSPOSED


def rows_layout(t: torch.Tensor) -> int | None:
    """Layout in which a program takes ``t`` [..., D] as [rows, D]; None if it would need a copy."""
    if t.dim() == 2:
        return 0
    return ROWS if t.is_contiguous() else None


def flattened(args: Sequence[object], flatten: Sequence[int]) -> list[object]:
    """Arguments with the contiguous [..., D] at these positions as [rows, D]."""
    args = list(args)
    for i in flatten:
        if args[i] is not None:
            args[i] = args[i].view(-1, args[i].shape[-1])
    return args
