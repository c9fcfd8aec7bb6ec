"""f(gate) up in one launch with the bytes of two ops: f(gate), rounded, and torch's product.

    gated_in_steps            f(gate) up                        f: one of config.GATES
    gated_in_steps_backward   (f'(gate) (dy up), f(gate) dy), dy up and f(gate) rounded
    gated_rows                the first, of rows [gate, up], as layers of inference engines have

Of the two ops a graph keeps one tensor more: f(gate), which is computed again here.
"""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from ..arch import CPU, TRITON
from ..runtime import dispatch
from ..runtime.dispatch import Implementation
from ..runtime.plan_cache import Plan, PlanCache
from ..runtime.torch_ops import define_op
from . import checks
from .op import _DTYPES, _OP_OF, _like, _rows_only, _setup_gated

#: Kind -> entry of `dispatch`.  A backward's ends differently.
_ENTRIES = {kind: f"{op}_mul_in_steps" for kind, op in _OP_OF.items() if op in ("silu", "gelu")}

for _kind, _entry in _ENTRIES.items():
    for _end in ("", "_backward"):
        _function = f"gated_in_steps{_end}"
        dispatch.register(
            f"{_entry}{_end}",
            {
                TRITON: Implementation(
                    f"{__package__}.triton.launch:{_function}",
                    _DTYPES,
                    planner=f"{__package__}.triton.launch:plan_{_function}",
                ),
                CPU: Implementation(f"{__package__}.cpu:{_function}", _DTYPES),
            },
            # That of the activation: the product is torch's.
            contract=_OP_OF[_kind],
        )
    dispatch.register(
        f"{_entry}_rows",
        {
            TRITON: Implementation(f"{__package__}.triton.launch:gated_rows", _DTYPES),
            CPU: Implementation(f"{__package__}.cpu:gated_rows", _DTYPES),
        },
        contract=_OP_OF[_kind],
    )


def _plan(gate, up, kind):
    """Plan of `gated_in_steps`."""
    if not gate.numel():
        return Plan(lambda gate, up, kind: _like(gate), cacheable=False)
    return dispatch.plan(_ENTRIES[kind], gate.device, gate.dtype, gate, up, kind)


def _plan_backward(dy, gate, up, kind):
    """Plan of `gated_in_steps_backward`."""
    if not gate.numel():
        return Plan(lambda dy, gate, up, kind: (_like(gate), _like(up)), cacheable=False)
    entry = f"{_ENTRIES[kind]}_backward"
    return dispatch.plan(entry, gate.device, gate.dtype, dy, gate, up, kind)


def _backward(ctx, dy):
    gradients = gated_in_steps_backward(dy, *ctx.saved_tensors, ctx.kind)
    wanted = zip(gradients, ctx.needs_input_grad, strict=False)
    return *(g if need else None for g, need in wanted), None


gated_in_steps = define_op(
    "gated_in_steps(Tensor gate, Tensor up, str kind) -> Tensor",
    plan=_plan,
    fake=lambda gate, up, kind: _like(gate),
    setup=_setup_gated,
    backward=_backward,
    vmap=_rows_only(lambda *args: gated_in_steps(*args)),
)
gated_in_steps_backward = define_op(
    "gated_in_steps_backward(Tensor dy, Tensor gate, Tensor up, str kind) -> (Tensor, Tensor)",
    plan=_plan_backward,
    fake=lambda dy, gate, up, kind: (_like(gate), _like(up)),
    vmap=_rows_only(lambda *args: gated_in_steps_backward(*args)),
)

#: Calls that passed their checks, by kind.
checked = PlanCache()


def gate_in_steps(kind: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute f(gate) up with the bytes of the public activation and torch's product."""
    cached_run = not is_dynamo_compiling() and checked.find(kind, gate, up)
    if cached_run:
        return cached_run(gate, up, kind)
    checks.gated(f"{_OP_OF[kind]}_mul", gate, up)
    if cached_run is None:
        checked.add(kind, (gate, up), gated_in_steps.bind(gate, up, kind))
    return gated_in_steps(gate, up, kind)


def gated_rows(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute f(x[..., :N]) x[..., N:], contiguous, with the bytes of two ops; no gradient.

    Halves of a row are views with gaps, which the ops above would copy.
    """
    if not x.numel():
        return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    return dispatch.launcher(f"{_ENTRIES[kind]}_rows", x.device, x.dtype)(x, kind)
