"""The torch ops of a scan over rows, forward and backward: schemas, fakes, autograd.

    forward   (out, final [S, ...], and what is saved)
    backward  gradients of the operands, in the order of `StateSpace`

What nobody asks for is empty: final, a gradient or one that goes to its main_grad, what a backend
does not save.  ``lag``, of -1 or more, says where final is taken: `tensors.Last`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import arch
from ..arch import CPU, TRITON
from ..runtime import dispatch
from ..runtime import main_grad as destination
from ..runtime.dispatch import Implementation
from ..runtime.plan_cache import Plan
from ..runtime.torch_ops import define_op, refuse_double, refuse_vmap
from . import config
from .op import sequences_of, sum_of
from .tensors import Last, StateSpace, StateSpaceGradients, StateSpaceSaved, StepOptions

#: Operands with rows, and those whose gradients are summed over rows, which have a main_grad.
_OF_ROWS, _SUMMED = ("x", "dt", "B", "C", "z"), ("A", "D", "dt_bias")
_POSITIONS = tuple(map(StateSpace._fields.index, _SUMMED))
_OPERANDS = len(StateSpace._fields)
_OPTIONAL = frozenset({"D", "z", "dt_bias", "initial"})


class Scan:
    """A scan: its names, layouts, and what its backends save; a subclass for each.

    entry: Of `dispatch`; that of the backward has ``_backward`` behind it.
    public: The public function, whose contract covers it.
    names: Of the operands in the schema, in the order of `StateSpace`.
    chunk: Rows between the states that are saved.
    triton, dtypes: Modules of its Triton launchers, of both passes, and what they take.
    facts: Of the contract.
    check: (operands, offsets, main_grads by name, options) -> nothing, or an exception.
    state: operands -> sizes of a state.
    saved: (operands, number of chunks, whether on a CPU) -> tensors for what the forward saves.
    """

    entry: str
    public: str
    names: tuple[str, ...] = StateSpace._fields
    chunk: int
    triton: tuple[str, str]
    dtypes: frozenset[torch.dtype] = dispatch.FLOATS
    facts: Callable[[str, arch.Device], dict[str, object]]
    check: Callable[..., None]
    state: Callable[[StateSpace], tuple[int, ...]]
    saved: Callable[[StateSpace, int, bool], StateSpaceSaved]

    # ---- layouts ---------------------------------------------------------------------------------

    def sizes(self, x: torch.Tensor) -> tuple[int, int]:
        """(B, T) of x."""
        return x.shape[0], x.shape[1]

    def rows(self, t: torch.Tensor) -> torch.Tensor:
        """Rows [N, ...] of [B, T, ...]: a view, or a copy where strides allow none."""
        return t.flatten(0, 1)

    def empty(self, t: torch.Tensor) -> torch.Tensor:
        """Allocate a result like t, whose `rows` are a view."""
        return t.new_empty(t.shape)

    def rows_of(self, tensors):
        """Return operands or gradients whose rows are [N, ...]."""
        pairs = ((name, getattr(tensors, name)) for name in _OF_ROWS)
        return tensors._replace(**{n: self.rows(t) for n, t in pairs if t is not None})

    # ---- the ops ---------------------------------------------------------------------------------

    def define(self) -> tuple[Callable, Callable]:
        """Register both ops; return their entries."""
        for end, module in zip(("", "_backward"), self.triton, strict=True):
            name = f"{self.entry}{end}"
            implementations = {
                TRITON: Implementation(f"{__package__}.triton.{module}:{name}", self.dtypes),
                CPU: Implementation(f"{__package__}.cpu_ssd:{name}", dispatch.FLOATS),
            }
            dispatch.register(name, implementations, contract=self.public)
        dispatch.register_contracts((self.public,), config.KEPT, self.facts, self.entry)
        read = ", ".join(
            f"Tensor{'?' * (field in _OPTIONAL)} {name}"
            for field, name in zip(StateSpace._fields, self.names, strict=True)
        )
        mains = [f"{self.names[i]}_main_grad" for i in _POSITIONS]
        options = "bool softplus, float low, float high"
        why = f"is not supported; the batch dimension of {self.names[0]} does the same"
        vmap = refuse_vmap(self.public, why)
        forward = define_op(
            f"{self.entry}({read}, Tensor? offsets, "
            f"{', '.join(f'Tensor? {name}' for name in mains)}, {options}, bool with_final, "
            "int lag) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
            check=self._check,
            check_each=_check_each,
            plan=self._plan,
            fake=self._fake,
            setup=_setup,
            backward=self._backward,
            vmap=vmap,
        )
        written = ", ".join(
            f"Tensor({mark}!)? {name}" for mark, name in zip("abc", mains, strict=True)
        )
        self._backward_op = define_op(
            f"{self.entry}_backward(Tensor d_out, Tensor? d_final, {read}, Tensor? offsets, "
            f"{written}, Tensor states, Tensor step, Tensor decay, Tensor ungated, {options}, "
            f"bool[] needs) -> ({', '.join(['Tensor'] * _OPERANDS)})",
            plan=self._plan_backward,
            fake=self._fake_backward,
            vmap=vmap,
        )
        return forward, self._backward_op

    def _check(self, *args):
        operands, (offsets, *main_grads), options = args[:9], args[9:13], args[13:16]
        named = dict(zip((self.names[i] for i in _POSITIONS), main_grads, strict=True))
        self.check(StateSpace(*operands), offsets, named, StepOptions(*options))

    def _results(self, operands, offsets, with_final: bool, on_cpu: bool):
        operands = StateSpace(*operands)
        x, (batch, length) = operands.x, self.sizes(operands.x)
        count = batch if offsets is None else offsets.shape[0] - 1
        final = (count, *self.state(operands)) if with_final else 0
        # Not Size.numel(), which fixes what torch.compile varies.
        slots = sequences_of(batch, length, offsets).slots(self.chunk) if batch * length else 0
        return (
            self.empty(x),
            x.new_empty(final, dtype=torch.float32),
            *self.saved(operands, slots, on_cpu),
        )

    def _fake(self, *args):
        return self._results(args[:9], args[9], args[-2], args[0].device.type == "cpu")

    def _plan(self, x, *args):
        if not x.numel():
            return Plan(self._run_nothing, cacheable=False)
        launch = dispatch.launcher(self.entry, x.device, x.dtype)
        on_cpu = dispatch.backend(self.entry, x.device, x.dtype) == CPU

        def run(*args):
            operands, (offsets, *main_grads), options = args[:9], args[9:13], args[13:16]
            self._check_no_aliases(main_grads, **dict(zip(self.names, operands, strict=True)))
            out, final, *saved = self._results(operands, offsets, args[16], on_cpu)
            launch(
                self.rows_of(StateSpace(*operands)),
                sequences_of(*self.sizes(operands[0]), offsets), StepOptions(*options),
                self.rows(out), Last(final, args[17]) if args[16] else None,
                StateSpaceSaved(*saved),
            )  # fmt: skip
            return out, final, *saved

        return Plan(run)

    def _check_no_aliases(self, main_grads, **read: torch.Tensor | None) -> None:
        """Check that each main_grad shares memory with no other and with nothing that is read."""
        names = [f"{self.names[i]}_main_grad" for i in _POSITIONS]
        for i, main_grad in enumerate(main_grads):
            if main_grad is not None:
                later = dict(zip(names[i + 1 :], main_grads[i + 1 :], strict=True))
                destination.check_no_alias(main_grad, names[i], **later, **read)

    def _run_nothing(self, *args):
        out, final, *saved = self._fake(*args)
        if args[16]:
            final.zero_() if args[8] is None else final.copy_(args[8])
        return out, final, *saved

    def _fake_backward(self, d_out, d_final, *args):
        operands, main_grads, needs = args[:_OPERANDS], args[10:13], args[-1]
        elsewhere = dict(zip(_POSITIONS, main_grads, strict=True))
        of_rows = [StateSpace._fields.index(name) for name in _OF_ROWS]
        return tuple(
            d_out.new_empty(0)
            if t is None or not need or elsewhere.get(i) is not None
            else self.empty(t)
            if i in of_rows
            else t.new_empty(t.shape)
            for i, (t, need) in enumerate(zip(operands, needs, strict=True))
        )

    def _plan_backward(self, d_out, d_final, x, *args):
        if not x.numel():
            return Plan(self._run_backward_of_nothing, cacheable=False)
        launch = dispatch.launcher(f"{self.entry}_backward", x.device, x.dtype)

        def run(d_out, d_final, *args):
            operands, (offsets, *main_grads), saved = args[:9], args[9:13], args[13:17]
            needs = args[-1]
            self._check_no_aliases(main_grads, d_out=d_out, d_final=d_final)
            results = list(self._fake_backward(d_out, d_final, *args))
            into = [t if need else None for t, need in zip(results, needs, strict=True)]
            for i, main_grad in zip(_POSITIONS, main_grads, strict=True):
                if needs[i]:
                    into[i] = sum_of(operands[i], main_grad)
            launch(
                self.rows(d_out), d_final, self.rows_of(StateSpace(*operands)),
                sequences_of(*self.sizes(operands[0]), offsets), StepOptions(*args[17:20]),
                StateSpaceSaved(*saved), self.rows_of(StateSpaceGradients(*into)),
            )  # fmt: skip
            for i, main_grad in zip(_POSITIONS, main_grads, strict=True):
                if needs[i] and main_grad is None:
                    results[i].copy_(into[i])
            return tuple(results)

        return Plan(run)

    def _run_backward_of_nothing(self, d_out, d_final, *args):
        *others, d_initial = self._fake_backward(d_out, d_final, *args)
        if d_initial.numel():
            d_initial.zero_() if d_final is None else d_initial.copy_(d_final)
        return *(t.zero_() for t in others), d_initial

    def _backward(self, ctx, d_out, d_final, *_):
        refuse_double(self.public)
        tensors = ctx.saved_tensors
        operands, offsets, saved = tensors[:_OPERANDS], tensors[_OPERANDS], tensors[_OPERANDS + 1 :]
        d_out = torch.zeros_like(operands[0]) if d_out is None else d_out
        targets = destination.targets(ctx, operands, ctx.main_grads, (d_out, d_final))
        needs = list(ctx.needs_input_grad[:9])
        for i, target in targets.items():
            needs[i] = target.wanted
        results = self._backward_op(
            d_out, d_final, *operands, offsets, *(t.into for t in targets.values()),
            *saved, *ctx.options, needs,
        )  # fmt: skip
        returned = list(needs)
        for i, target in targets.items():
            returned[i] = target.returned
            if target.wanted:
                target.written()
        gradients = (t if want else None for t, want in zip(results, returned, strict=True))
        return *gradients, *[None] * 9


def _check_each(*args):
    # Memory of main_grads, and what reduces their parameters, is in no signature.
    return any(t is not None for t in args[10:13])


def _setup(ctx, inputs, output):
    operands, (offsets, *main_grads) = inputs[:9], inputs[9:13]
    ctx.options, (with_final, lag) = inputs[13:16], inputs[16:]
    _, final, *saved = output
    ctx.save_for_backward(*operands, offsets, *saved)
    # Not saved tensors: backward of an earlier micro-batch may write them before ours reads them.
    ctx.main_grads = dict(zip(_POSITIONS, main_grads, strict=True))
    ctx.mark_non_differentiable(*saved, *(() if with_final and lag < 0 else (final,)))
    ctx.set_materialize_grads(False)
