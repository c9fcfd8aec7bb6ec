"""The torch ops of recurrences over rows, whose states go on, and those of scans.

    forward   (out, final [S, ...], and what is saved)
    backward  gradients of the operands, in the order of their tuple

``final`` that is not asked for is empty, as is what a backend does not save.  ``lag``, of -1 or
more, says where final is taken: `tensors.Last`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import arch
from ..runtime import dispatch
from . import config
from .op import RowsOp, launched_by, sequences_of
from .tensors import Last, StateSpace, StateSpaceSaved, StepOptions


class Recurrence(RowsOp):
    """A recurrence: its states, and what its backends save; the last operand is ``initial``.

    chunk: Rows between the states that are saved.
    saved_type: Tuple of what the forward saves.
    state: operands -> sizes of a state.
    saved_tensors: (operands, number of chunks, whether on a CPU) -> tensors for what is saved.
    """

    chunk: int
    saved_type: type
    state: Callable[..., tuple[int, ...]]
    saved_tensors: Callable[..., tuple[torch.Tensor, ...]]
    upstream = ("d_out", "d_final")
    options_of_forward = ("bool with_final", "int lag")

    def allocate(self, operands, offsets, options, on_cpu: bool) -> tuple[torch.Tensor, ...]:
        like, (*_, with_final, _) = self.like(operands), options
        batch, length = self.sizes(like)
        count = batch if offsets is None else offsets.shape[0] - 1
        final = (count, *self.state(operands)) if with_final else 0
        # Not Size.numel(), which fixes what torch.compile varies.
        slots = sequences_of(batch, length, offsets).slots(self.chunk) if batch * length else 0
        return (
            self.empty(like),
            like.new_empty(final, dtype=torch.float32),
            *self.saved_tensors(operands, slots, on_cpu),
        )

    def outputs(self, results, options) -> tuple:
        (out, final, *saved), (*_, with_final, lag) = results, options
        last = Last(final, lag) if with_final else None
        return self.rows(out), last, self.saved_type(*saved)

    def saved_rows(self, saved) -> tuple:
        return (self.saved_type(*saved),)

    def with_gradients(self, options) -> int:
        *_, with_final, lag = options
        return 2 if with_final and lag < 0 else 1

    def _run_nothing(self, *args):
        operands, _, _, (*_, with_final, _) = self._split(args)
        out, final, *saved = self._fake(*args)
        if with_final:
            final.zero_() if operands.initial is None else final.copy_(operands.initial)
        return out, final, *saved

    def _run_backward_of_nothing(self, d_out, d_final, *args):
        *others, d_initial = super()._run_backward_of_nothing(d_out, d_final, *args)
        if d_initial.numel() and d_final is not None:
            d_initial.copy_(d_final)
        return *others, d_initial


class Scan(Recurrence):
    """A state space scan; ``triton``: its modules' name, ``dtypes``: what they take."""

    triton: str
    dtypes: frozenset[torch.dtype] = dispatch.FLOATS
    facts: Callable[[str, arch.Device], dict[str, object]]
    operands, saved_type = StateSpace, StateSpaceSaved
    optional, of_rows = ("D", "z", "dt_bias", "initial"), ("x", "dt", "B", "C", "z")
    summed = ("A", "D", "dt_bias")
    options = ("bool softplus", "float low", "float high")
    saved = StateSpaceSaved._fields

    def define(self) -> tuple[Callable, Callable]:
        name = f"{self.entry}*"
        self.launchers = launched_by(f"{self.triton}:{name}", f"cpu_ssd:{name}", self.dtypes)
        dispatch.register_contracts((self.public,), config.KEPT, self.facts, self.entry)
        return super().define()

    def inputs(self, operands, offsets, options) -> tuple:
        rows, sequences, *options = super().inputs(operands, offsets, options)
        return rows, sequences, StepOptions(*options)
