"""The torch ops of a function of rows, forward and backward: schemas, fakes, autograd.

    forward   (operands, offsets, main_grads, options) -> out, and what is saved
    backward  (d_out, operands, offsets, main_grads, saved, options, needs) -> gradients of operands

A gradient that goes to its main_grad, or that is not needed, is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from ..arch import CPU, CUTE_SM90, TRITON
from ..runtime import dispatch
from ..runtime import main_grad as destination
from ..runtime.dispatch import Implementation
from ..runtime.plan_cache import Plan
from ..runtime.torch_ops import define_op, refuse_double, refuse_vmap
from .tensors import Sequences


class RowsOp:
    """A function of rows: its names, layouts and launchers; a subclass for each.

    entry: Of `dispatch`; that of the backward ends with ``_backward``.
    public: The public function, whose contract covers it.
    launchers: As `launched_by` returns them.
    operands: Tuple of them, and of their gradients, that launchers take.
    optional, of_rows, summed: Fields of operands that may be None, that have rows, and whose
        gradients are sums over rows, which have a main_grad.
    names, main_grads: Of operands and main_grads in the schema.
    packs: Whether rows are those of sequences.
    upstream: Gradients of results; that of out is always there.
    saved: Tensors that the forward leaves to its backward.
    options, options_of_forward: Other arguments, with types: of both passes, and of one.
    instead_of_vmap: What does the same.
    check: (operands, offsets, *options) -> nothing, or an exception.
    """

    entry: str
    public: str
    launchers: Mapping[str, Implementation]
    operands: type
    optional: tuple[str, ...] = ()
    of_rows: tuple[str, ...]
    summed: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    main_grads: tuple[str, ...] = ()
    packs = True
    upstream: tuple[str, ...] = ("dy",)
    saved: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    options_of_forward: tuple[str, ...] = ()
    instead_of_vmap = "the batch dimension of {} does"
    check: Callable[..., None]

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
        return tensors._make(
            [
                self.rows(t) if has_rows and t is not None else t
                for has_rows, t in zip(self._has_rows, tensors, strict=True)
            ]
        )

    # ---- launches --------------------------------------------------------------------------------

    def entry_of(self, operands) -> str:
        return self.entry

    def public_of(self, operands) -> str:
        return self.public

    def like(self, operands) -> torch.Tensor:
        """The operand that out is like."""
        return operands[0]

    def allocate(self, operands, offsets, options, on_cpu: bool) -> tuple[torch.Tensor, ...]:
        """Allocate the results: out, others with gradients, what is saved."""
        return (self.empty(self.like(operands)),)

    def inputs(self, operands, offsets, options) -> tuple:
        """Arguments of the launchers of both passes."""
        sequences = sequences_of(*self.sizes(operands[0]), offsets)
        return self.rows_of(operands), sequences, *options

    def outputs(self, results, options) -> tuple:
        """Results, as the launcher of a forward takes them."""
        return (self.rows(results[0]),)

    def saved_rows(self, saved) -> tuple:
        """Saved tensors, as the launcher of a backward takes them."""
        return ()

    # ---- the ops ---------------------------------------------------------------------------------

    def define(self) -> tuple[Callable, Callable]:
        """Register both ops and their launchers; return the ops' entries."""
        register(self.entry, self.public, self.launchers)
        fields = self.operands._fields
        self.names = self.names or fields
        self._positions = [fields.index(name) for name in self.summed]
        mains = self.main_grads = self.main_grads or tuple(
            f"{self.names[i]}_main_grad" for i in self._positions
        )
        read = [
            f"Tensor{'?' * (field in self.optional)} {name}"
            for field, name in zip(fields, self.names, strict=True)
        ]
        read += ["Tensor? offsets"] * self.packs
        options = [*self.options, *self.options_of_forward]
        self._has_rows = [field in self.of_rows for field in fields]
        # Hosts pay for every call: where arguments lie is known before.
        self._count, self._mains = len(fields), slice(len(read), len(read) + len(mains))
        self._arguments = len(read) + len(mains) + len(options)
        instead = self.instead_of_vmap.format(self.names[0])
        vmap = refuse_vmap(self.public, f"is not supported; {instead} the same")
        forward = define_op(
            _schema(
                self.entry,
                [*read, *(f"Tensor? {name}" for name in mains), *options],
                len(self.upstream) + len(self.saved),
            ),
            check=self._check,
            # Memory of main_grads, and what reduces their parameters, is in no signature.
            check_each=self._has_main_grads if mains else None,
            plan=self._plan,
            fake=self._fake,
            setup=self._setup,
            backward=self._backward,
            vmap=vmap,
        )
        d_out, *others = self.upstream
        upstream = [f"Tensor {d_out}", *(f"Tensor? {name}" for name in others)]
        written = [f"Tensor({mark}!)? {name}" for mark, name in zip("abc", mains, strict=False)]
        saved = [f"Tensor {name}" for name in self.saved]
        self._backward_op = define_op(
            _schema(
                f"{self.entry}_backward",
                [*upstream, *read, *written, *saved, *self.options, "bool[] needs"],
                len(fields),
            ),
            plan=self._plan_backward,
            fake=self._fake_backward,
            vmap=vmap,
        )
        return forward, self._backward_op

    def _split(self, args: Sequence) -> tuple:
        """(operands, offsets, main_grads, other arguments)."""
        count, mains = self._count, self._mains
        offsets = args[count] if self.packs else None
        return self.operands._make(args[:count]), offsets, args[mains], args[mains.stop :]

    def _has_main_grads(self, *args) -> bool:
        return any(t is not None for t in args[self._mains])

    def _check(self, *args):
        operands, offsets, main_grads, options = self._split(args)
        self.check(operands, offsets, *options[: len(self.options)])
        for i, name, main_grad in zip(self._positions, self.main_grads, main_grads, strict=True):
            destination.check_of(name, main_grad, self.names[i], operands[i], operands[0])

    def _check_no_aliases(self, main_grads: Sequence, names: Iterable, read: Iterable) -> None:
        """Check that each main_grad shares memory with no other and with nothing that is read."""
        for i, main_grad in enumerate(main_grads):
            if main_grad is not None:
                later = dict(zip(self.main_grads[i + 1 :], main_grads[i + 1 :], strict=True))
                others = dict(zip(names, read, strict=True))
                destination.check_no_alias(main_grad, self.main_grads[i], **later, **others)

    def _fake(self, *args):
        operands, offsets, _, options = self._split(args)
        return _alone(self.allocate(operands, offsets, options, args[0].device.type == "cpu"))

    def _plan(self, *args):
        x, (operands, *_) = args[0], self._split(args)
        if not x.numel():
            return Plan(self._run_nothing, cacheable=False)
        entry = self.entry_of(operands)
        launch = dispatch.launcher(entry, x.device, x.dtype)
        on_cpu = dispatch.backend(entry, x.device, x.dtype) == CPU

        def run(*args):
            operands, offsets, main_grads, options = self._split(args)
            self._check_no_aliases(main_grads, self.names, operands)
            results = self.allocate(operands, offsets, options, on_cpu)
            inputs = self.inputs(operands, offsets, options[: len(self.options)])
            launch(*inputs, *self.outputs(results, options))
            return _alone(results)

        return Plan(run)

    def _run_nothing(self, *args):
        return self._fake(*args)

    def _split_backward(self, args: Sequence) -> tuple:
        """(upstream, operands, offsets, main_grads, saved, options, needs)."""
        count, saved = len(self.upstream), len(self.saved)
        *before, others = self._split(args[count:])
        return args[:count], *before, others[:saved], others[saved:-1], others[-1]

    def _fake_backward(self, *args):
        _, operands, _, main_grads, *_, needs = self._split_backward(args)
        elsewhere = dict(zip(self._positions, main_grads, strict=True))
        return tuple(
            args[0].new_empty(0)
            if not need or elsewhere.get(i) is not None
            else self._empty_gradient(i, t)
            for i, (t, need) in enumerate(zip(operands, needs, strict=True))
        )

    def _empty_gradient(self, i: int, t: torch.Tensor) -> torch.Tensor:
        return self.empty(t) if self._has_rows[i] else t.new_empty(t.shape)

    def _plan_backward(self, *args):
        operands = self._split_backward(args)[1]
        x = operands[0]
        if not x.numel():
            return Plan(self._run_backward_of_nothing, cacheable=False)
        launch = dispatch.launcher(f"{self.entry_of(operands)}_backward", x.device, x.dtype)

        def run(*args):
            upstream, operands, offsets, mains, saved, options, needs = self._split_backward(args)
            self._check_no_aliases(mains, self.upstream, upstream)
            main_grads = dict(zip(self._positions, mains, strict=True))
            into = [
                None
                if not need
                else sum_of(t, main_grads[i])
                if i in main_grads
                else self._empty_gradient(i, t)
                for i, (t, need) in enumerate(zip(operands, needs, strict=True))
            ]
            launch(
                self.rows(upstream[0]), *upstream[1:], *self.inputs(operands, offsets, options),
                *self.saved_rows(saved), self.rows_of(self.operands._make(into)),
            )  # fmt: skip
            for i, main_grad in main_grads.items():
                if into[i] is not None:
                    into[i] = into[i].to(operands[i].dtype) if main_grad is None else None
            return tuple([args[0].new_empty(0) if t is None else t for t in into])

        return Plan(run)

    def _run_backward_of_nothing(self, *args):
        return tuple([t.zero_() for t in self._fake_backward(*args)])

    def with_gradients(self, options) -> int:
        """Number of results that have gradients."""
        return len(self.upstream)

    def _setup(self, ctx, inputs, output):
        operands, offsets, main_grads, options = self._split(inputs)
        results = output if isinstance(output, tuple) else (output,)
        ctx.save_for_backward(*operands, offsets, *results[len(self.upstream) :])
        ctx.options = options[: len(self.options)]
        # Not saved tensors: an earlier micro-batch may write them before this backward reads them.
        ctx.main_grads = dict(zip(self._positions, main_grads, strict=True))
        if len(results) > 1:
            ctx.mark_non_differentiable(*results[self.with_gradients(options) :])
            ctx.set_materialize_grads(False)

    def _backward(self, ctx, d_out, *others):
        count = self._count
        tensors = ctx.saved_tensors  # once: an activation checkpoint hands them out no second time
        operands = self.operands(*tensors[:count])
        offsets, *saved = tensors[count:]
        refuse_double(self.public_of(operands))
        if d_out is None:
            d_out = torch.zeros_like(self.like(operands))
        upstream = d_out, *others[: len(self.upstream) - 1]
        targets = destination.targets(ctx, operands, ctx.main_grads, upstream)
        needs = list(ctx.needs_input_grad[:count])
        for i, target in targets.items():
            needs[i] = target.wanted
        results = self._backward_op(
            *upstream, *operands, *[offsets] * self.packs, *(t.into for t in targets.values()),
            *saved, *ctx.options, needs,
        )  # fmt: skip
        for i, target in targets.items():
            needs[i] = target.returned
            if target.wanted:
                target.written()
        gradients = [t if need else None for t, need in zip(results, needs, strict=True)]
        return *gradients, *[None] * (self._arguments - count)


class ChannelLast:
    """Layout of operands [B, ..., T] whose rows are channel-last memory."""

    def sizes(self, x: torch.Tensor) -> tuple[int, int]:
        return x.shape[0], x.shape[2]

    def rows(self, t: torch.Tensor) -> torch.Tensor:
        """Rows [N, ...] of [B, ..., T]: a view of channel-last memory, else a copy."""
        return t.movedim(-1, 1).flatten(0, 1)

    def empty(self, t: torch.Tensor) -> torch.Tensor:
        """Allocate [B, ..., T] like t, as rows [B, T, ...]: no view, to be written in place."""
        _, *sizes, length = t.shape
        strides = [1]
        for size in reversed(sizes):
            strides.insert(0, strides[0] * size)
        row, *others = strides
        return t.new_empty_strided(t.shape, (length * row, *others, row))


def launched_by(
    triton: str, cpu: str, on_gpus: frozenset[torch.dtype] = dispatch.FLOATS, sm90: str = ""
) -> dict[str, Implementation]:
    """Backend -> launcher, as "module:function"; ``*``: where the backward has ``_backward``."""
    on_sm90 = {CUTE_SM90: Implementation(f"{__package__}.{sm90}", on_gpus)} if sm90 else {}
    return {
        **on_sm90,
        TRITON: Implementation(f"{__package__}.triton.{triton}", on_gpus),
        CPU: Implementation(f"{__package__}.{cpu}", dispatch.FLOATS),
    }


def register(entry: str, public: str, launchers: Mapping[str, Implementation]) -> None:
    """Register an entry of `dispatch` and that of its backward."""
    for end in ("", "_backward"):
        implementations = {
            backend: replace(each, launcher=each.launcher.replace("*", end))
            for backend, each in launchers.items()
        }
        dispatch.register(f"{entry}{end}", implementations, contract=public)


def sequences_of(batch: int, length: int, offsets: torch.Tensor | None) -> Sequences:
    """Sequences of B x T rows, a batch or a pack."""
    if offsets is None:
        return Sequences(batch * length, length, None)
    return Sequences(batch * length, 0, offsets.contiguous())


def sum_of(parameter: torch.Tensor, main_grad: torch.Tensor | None) -> torch.Tensor:
    """The fp32 tensor that a gradient is added to."""
    if main_grad is not None:
        return main_grad
    return parameter.new_zeros(parameter.shape, dtype=torch.float32)


def _alone(results: tuple[torch.Tensor, ...]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """A tuple of several results, or the only one."""
    return results if len(results) > 1 else results[0]


def _schema(name: str, arguments: Sequence[str], results: int) -> str:
    returned = f"({', '.join(['Tensor'] * results)})" if results > 1 else "Tensor"
    return f"{name}({', '.join(arguments)}) -> {returned}"
