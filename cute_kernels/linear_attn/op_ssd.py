"""The torch ops of the state space scan: schemas, fakes, autograd.

    ssd_scan           (out [B, T, H, P], final [S, H, P, N], and what is saved)
    ssd_scan_backward  gradients of x, dt, A, B, C, D, z, dt_bias, initial

What nobody asks for is empty: final, a gradient or one that goes to its main_grad, what a backend
does not save.  ``lag``, of -1 or more, says where final is taken: `tensors.Last`.
"""

from __future__ import annotations

import torch

from .. import contracts
from ..arch import CPU, TRITON
from ..errors import UnsupportedTransformError
from ..runtime import dispatch
from ..runtime import main_grad as destination
from ..runtime.dispatch import Implementation
from ..runtime.plan_cache import Plan
from ..runtime.torch_ops import define_op, refuse_vmap
from . import checks, config
from .op import sequences_of, sum_of
from .tensors import Last, StateSpace, StateSpaceGradients, StateSpaceSaved, StepOptions

_ENTRY = "ssd_scan"
#: Operands whose gradients are summed over rows, and have a main_grad.
_SUMMED = ("A", "D", "dt_bias")
_POSITIONS = tuple(StateSpace._fields.index(name) for name in _SUMMED)
_OPERANDS = len(StateSpace._fields)

for _end in ("", "_backward"):
    dispatch.register(
        f"{_ENTRY}{_end}",
        {
            TRITON: Implementation(
                f"{__package__}.triton.ssd{_end}:{_ENTRY}{_end}", frozenset({torch.bfloat16})
            ),
            CPU: Implementation(
                f"{__package__}.cpu_ssd:{_ENTRY}{_end}", frozenset(config.DTYPE_NAMES)
            ),
        },
        contract="mamba_chunk_scan_combined",
    )


def _backend(device: torch.device, dtype: torch.dtype) -> str:
    return dispatch.backend(_ENTRY, device, dtype)


contracts.register(
    contracts.Contract("mamba_chunk_scan_combined", config.KEPT, config.ssd_facts, _backend)
)


def _check(*args):
    operands, (offsets, *main_grads), options = args[:9], args[9:13], args[13:16]
    named = dict(zip(_SUMMED, main_grads, strict=True))
    checks.state_space(StateSpace(*operands), offsets, named, StepOptions(*options))


def _check_each(*args):
    # Memory of main_grads, and what reduces their parameters, is in no signature.
    return any(t is not None for t in args[10:13])


def _rows(operands: tuple[torch.Tensor | None, ...]) -> StateSpace:
    """Rows [N, ...] of [B, T, ...]: views, or copies where strides allow none."""
    rows = StateSpace(*operands)
    return rows._replace(
        **{name: getattr(rows, name).flatten(0, 1) for name in ("x", "dt", "B", "C")},
        z=None if rows.z is None else rows.z.flatten(0, 1),
    )


def _state(x: torch.Tensor, B: torch.Tensor) -> tuple[int, int, int]:
    """(H, P, N) of a state."""
    return x.shape[2], x.shape[3], B.shape[3]


def _final(x, B, offsets, with_final: bool) -> torch.Tensor:
    count = x.shape[0] if offsets is None else offsets.shape[0] - 1
    return x.new_empty((count, *_state(x, B)) if with_final else 0, dtype=torch.float32)


def _saved(x, B, z, offsets, on_cpu: bool) -> StateSpaceSaved:
    rows = x.shape[0] * x.shape[1]  # not Size.numel(), which fixes what torch.compile varies
    slots = sequences_of(*x.shape[:2], offsets).slots(config.SSD_CHUNK) if rows else 0
    states = (slots, *_state(x, B))
    if on_cpu:
        return StateSpaceSaved(
            x.new_empty(states, dtype=torch.float32), *(x.new_empty(0) for _ in "sdu")
        )
    return StateSpaceSaved(
        x.new_empty(states),
        *(x.new_empty((x.shape[2], rows), dtype=torch.float32) for _ in "sd"),
        x.new_empty(0 if z is None else (rows, *x.shape[2:])),
    )


def _results(x, B, z, offsets, with_final: bool, on_cpu: bool) -> tuple[torch.Tensor, ...]:
    final = _final(x, B, offsets, with_final)
    return x.new_empty(x.shape), final, *_saved(x, B, z, offsets, on_cpu)


def _fake(x, dt, A, B, C, D, z, dt_bias, initial, offsets, *others):
    return _results(x, B, z, offsets, others[-2], x.device.type == "cpu")


def _plan(x, *args):
    if not x.numel():
        return Plan(_run_nothing, cacheable=False)
    launch = dispatch.launcher(_ENTRY, x.device, x.dtype)
    on_cpu = _backend(x.device, x.dtype) == CPU

    def run(*args):
        operands, (offsets, *main_grads), options = args[:9], args[9:13], args[13:16]
        read = dict(zip(StateSpace._fields, operands, strict=True))
        _check_no_aliases(main_grads, **read)
        x, B, z = operands[0], operands[3], operands[6]
        out, final, *saved = _results(x, B, z, offsets, args[16], on_cpu)
        launch(
            _rows(operands), sequences_of(*x.shape[:2], offsets), StepOptions(*options),
            out.flatten(0, 1), Last(final, args[17]) if args[16] else None, StateSpaceSaved(*saved),
        )  # fmt: skip
        return out, final, *saved

    return Plan(run)


def _check_no_aliases(main_grads, **read: torch.Tensor | None) -> None:
    """Check that each main_grad shares memory with no other and with nothing that is read."""
    names = [f"{name}_main_grad" for name in _SUMMED]
    for i, main_grad in enumerate(main_grads):
        if main_grad is not None:
            later = dict(zip(names[i + 1 :], main_grads[i + 1 :], strict=True))
            destination.check_no_alias(main_grad, names[i], **later, **read)


def _run_nothing(*args):
    out, final, *saved = _fake(*args)
    if args[16]:
        final.zero_() if args[8] is None else final.copy_(args[8])
    return out, final, *saved


def _fake_backward(d_out, d_final, *args):
    operands, main_grads, needs = args[:_OPERANDS], args[10:13], args[-1]
    elsewhere = dict(zip(_POSITIONS, main_grads, strict=True))
    return tuple(
        t.new_empty(t.shape)
        if t is not None and need and elsewhere.get(i) is None
        else d_out.new_empty(0)
        for i, (t, need) in enumerate(zip(operands, needs, strict=True))
    )


def _plan_backward(d_out, d_final, x, *args):
    if not x.numel():
        return Plan(_run_backward_of_nothing, cacheable=False)
    launch = dispatch.launcher(f"{_ENTRY}_backward", x.device, x.dtype)

    def run(d_out, d_final, *args):
        operands, (offsets, *main_grads), saved = args[:9], args[9:13], args[13:17]
        needs = args[-1]
        _check_no_aliases(main_grads, d_out=d_out, d_final=d_final)
        results = list(_fake_backward(d_out, d_final, *args))
        into = [t if need else None for t, need in zip(results, needs, strict=True)]
        for i, main_grad in zip(_POSITIONS, main_grads, strict=True):
            if needs[i]:
                into[i] = sum_of(operands[i], main_grad)
        gradients = _gradient_rows(into)
        launch(
            d_out.flatten(0, 1), d_final, _rows(operands),
            sequences_of(*operands[0].shape[:2], offsets), StepOptions(*args[17:20]),
            StateSpaceSaved(*saved), gradients,
        )  # fmt: skip
        for i, main_grad in zip(_POSITIONS, main_grads, strict=True):
            if needs[i] and main_grad is None:
                results[i].copy_(into[i])
        return tuple(results)

    return Plan(run)


def _gradient_rows(into: list[torch.Tensor | None]) -> StateSpaceGradients:
    gradients = StateSpaceGradients(*into)
    rows = {
        name: t.flatten(0, 1)
        for name in ("x", "dt", "B", "C", "z")
        if (t := getattr(gradients, name)) is not None
    }
    return gradients._replace(**rows)


def _run_backward_of_nothing(d_out, d_final, *args):
    *others, d_initial = _fake_backward(d_out, d_final, *args)
    if d_initial.numel():
        d_initial.zero_() if d_final is None else d_initial.copy_(d_final)
    return *(t.zero_() for t in others), d_initial


def _setup(ctx, inputs, output):
    operands, (offsets, *main_grads) = inputs[:9], inputs[9:13]
    ctx.options, (with_final, lag) = inputs[13:16], inputs[16:]
    _, final, *saved = output
    ctx.save_for_backward(*operands, offsets, *saved)
    # Not saved tensors: backward of an earlier micro-batch may write them before ours reads them.
    ctx.main_grads = dict(zip(_POSITIONS, main_grads, strict=True))
    ctx.mark_non_differentiable(*saved, *(() if with_final and lag < 0 else (final,)))
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, d_final, *_):
    if torch.is_grad_enabled():
        raise UnsupportedTransformError(
            "cute_kernels.mamba_chunk_scan_combined: double backward (create_graph=True) is not "
            "available"
        )
    tensors = ctx.saved_tensors
    operands, offsets, saved = tensors[:_OPERANDS], tensors[_OPERANDS], tensors[_OPERANDS + 1 :]
    d_out = torch.zeros_like(operands[0]) if d_out is None else d_out
    targets = destination.targets(ctx, operands, ctx.main_grads, (d_out, d_final))
    needs = list(ctx.needs_input_grad[:9])
    for i, target in targets.items():
        needs[i] = target.wanted
    results = ssd_scan_backward(
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


_READ = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "Tensor? initial, Tensor? offsets"
)
_OPTIONS = "bool softplus, float low, float high"
_vmap = refuse_vmap(
    "mamba_chunk_scan_combined", "is not supported; the batch dimension of x does the same"
)
ssd_scan = define_op(
    f"ssd_scan({_READ}, Tensor? A_main_grad, Tensor? D_main_grad, Tensor? dt_bias_main_grad, "
    f"{_OPTIONS}, bool with_final, int lag) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check,
    check_each=_check_each,
    plan=_plan,
    fake=_fake,
    setup=_setup,
    backward=_backward,
    vmap=_vmap,
)
ssd_scan_backward = define_op(
    f"ssd_scan_backward(Tensor d_out, Tensor? d_final, {_READ}, Tensor(a!)? A_main_grad, "
    "Tensor(b!)? D_main_grad, Tensor(c!)? dt_bias_main_grad, Tensor states, Tensor step, "
    f"Tensor decay, Tensor ungated, {_OPTIONS}, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, "
    "Tensor, Tensor, Tensor, Tensor, Tensor)",
    plan=_plan_backward,
    fake=_fake_backward,
    vmap=_vmap,
)
