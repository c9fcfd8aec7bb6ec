"""The torch ops of the gated delta rule: schemas, fakes, autograd.

Gates [B, T, HV, K] make it Kimi delta attention, which has entries of `dispatch` of its own.

    gated_delta_rule           (out [B, T, HV, V], final [S, HV, K, V], and what is saved)
    gated_delta_rule_backward  gradients of q, k, v, g, beta, initial

What nobody asks for is empty: final, a gradient, what a backend does not save.  ``lag``, of -1 or
more, says where final is taken: `tensors.Last`.
"""

from __future__ import annotations

import torch

from ..arch import CPU, CUTE_SM90, TRITON
from ..errors import UnsupportedTransformError
from ..runtime import checking, dispatch
from ..runtime.dispatch import Implementation
from ..runtime.plan_cache import Plan
from ..runtime.torch_ops import define_op, refuse_vmap
from . import checks, config, op_gate
from .op import sequences_of
from .tensors import DeltaGradients, DeltaRule, DeltaSaved, Last

_ENTRY, _OF_CHANNELS = "gated_delta_rule", "kda"
#: Entry -> its public function.
_PUBLIC = {_ENTRY: "chunk_gated_delta_rule", _OF_CHANNELS: "chunk_kda"}
_ON_GPUS = frozenset({torch.bfloat16})

for _end, _function in (("", "delta_rule"), ("_backward", "delta_rule_backward")):
    _on_cpu = Implementation(f"{__package__}.cpu_delta:{_function}", dispatch.FLOATS)
    _backends = {
        TRITON: Implementation(f"{__package__}.triton.delta{_end}:{_function}", _ON_GPUS),
        CPU: _on_cpu,
    }
    _on_sm90 = {CUTE_SM90: Implementation(f"{__package__}.launch:{_function}", _ON_GPUS)}
    dispatch.register(f"{_ENTRY}{_end}", _on_sm90 | _backends, contract=_PUBLIC[_ENTRY])
    dispatch.register(f"{_OF_CHANNELS}{_end}", _backends, contract=_PUBLIC[_OF_CHANNELS])

dispatch.register(
    "gated_delta_step",
    {TRITON: Implementation(f"{__package__}.triton.delta_step:delta_step", _ON_GPUS)},
    contract="chunk_gated_delta_rule",
)


def backend(device: torch.device, dtype: torch.dtype, entry: str = _ENTRY) -> str:
    """Return the backend of the rule."""
    return dispatch.backend(entry, device, dtype)


for _names, _kept, _facts, _entry in (
    (
        ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        config.DELTA_KEPT,
        config.delta_facts,
        _ENTRY,
    ),
    (("chunk_kda", "fused_recurrent_kda"), config.KEPT, config.kda_facts, _OF_CHANNELS),
):
    # What lies inside of chunks, and most of the backward, is Triton's on SM90 too.
    dispatch.register_contracts(_names, _kept, _facts, _entry, {CUTE_SM90: (TRITON,)})


def entry_of(g: torch.Tensor) -> str:
    """Return the entry of `dispatch` for gates [B, T, HV] or [B, T, HV, K]."""
    return _ENTRY if g.dim() == 3 else _OF_CHANNELS


def _check(*args):
    checks.delta_rule(DeltaRule(*args[:6]), *args[6:8])


def _operands(q, k, v, g, beta, initial) -> DeltaRule:
    """Rows [N, ...] of [B, T, ...]: views, or copies where strides allow none."""
    return DeltaRule(*(t.flatten(0, 1) for t in (q, k, v, g, beta)), initial)


def scale_of(q: torch.Tensor, scale: float | None) -> float:
    """Return the factor of q [B, T, H, K]."""
    return q.shape[3] ** -0.5 if scale is None else scale


def _states(k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor | None) -> tuple[int, ...]:
    """Shape of a state of each sequence."""
    count = v.shape[0] if offsets is None else offsets.shape[0] - 1
    return count, v.shape[2], k.shape[3], v.shape[3]


def _saved(
    k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, offsets: torch.Tensor | None, on_cpu: bool
) -> DeltaSaved:
    rows = v.shape[0] * v.shape[1]  # not Size.numel(), which fixes what torch.compile varies
    slots = sequences_of(*v.shape[:2], offsets).slots(config.DELTA_CHUNK) if rows else 0
    states = (slots, *_states(k, v, offsets)[1:])
    if on_cpu:
        return DeltaSaved(
            v.new_empty(states, dtype=torch.float32), *(v.new_empty(0) for _ in "diup")
        )
    square = rows, v.shape[2], config.DELTA_CHUNK
    return DeltaSaved(
        v.new_empty(states),
        v.new_empty((rows, *g.shape[2:]), dtype=torch.float32),
        v.new_empty(square),
        v.new_empty((rows, *v.shape[2:])),
        v.new_empty(square if entry_of(g) == _OF_CHANNELS else 0),
    )


def _results(k, v, g, offsets, with_final: bool, on_cpu: bool) -> tuple[torch.Tensor, ...]:
    final = v.new_empty(_states(k, v, offsets) if with_final else 0, dtype=torch.float32)
    return v.new_empty(v.shape), final, *_saved(k, v, g, offsets, on_cpu)


def _fake(q, k, v, g, beta, initial, offsets, scale, with_final, lag):
    return _results(k, v, g, offsets, with_final, v.device.type == "cpu")


def _plan(q, k, v, g, beta, initial, offsets, scale, with_final, lag):
    if not v.numel():
        return Plan(_run_nothing, cacheable=False)
    launch = dispatch.launcher(entry_of(g), v.device, v.dtype)
    on_cpu = backend(v.device, v.dtype, entry_of(g)) == CPU

    def run(q, k, v, g, beta, initial, offsets, scale, with_final, lag):
        out, final, *saved = _results(k, v, g, offsets, with_final, on_cpu)
        operands, sequences = (
            _operands(q, k, v, g, beta, initial),
            sequences_of(*v.shape[:2], offsets),
        )
        last = Last(final, lag) if with_final else None
        launch(operands, sequences, scale_of(q, scale), out.flatten(0, 1), last, DeltaSaved(*saved))
        return out, final, *saved

    return Plan(run)


def _run_nothing(q, k, v, g, beta, initial, offsets, scale, with_final, lag):
    out, final, *saved = _fake(q, k, v, g, beta, initial, offsets, scale, with_final, lag)
    if with_final:
        final.zero_() if initial is None else final.copy_(initial)
    return out, final, *saved


def _fake_backward(d_out, d_final, q, k, v, g, beta, initial, offsets, *saved_scale_needs):
    needs = saved_scale_needs[-1]
    return tuple(
        t.new_empty(t.shape if need else 0) if t is not None else q.new_empty(0)
        for t, need in zip((q, k, v, g, beta, initial), needs, strict=True)
    )


def _plan_backward(d_out, d_final, q, k, v, g, *others):
    if not v.numel():
        return Plan(_run_backward_of_nothing, cacheable=False)
    launch = dispatch.launcher(f"{entry_of(g)}_backward", v.device, v.dtype)

    def run(d_out, d_final, q, k, v, g, beta, initial, offsets, *others):
        inputs, (*saved, scale, needs) = (q, k, v, g, beta, initial), others
        results = _fake_backward(d_out, d_final, *inputs, offsets, *saved, scale, needs)
        *rows, d_initial = (t if need else None for t, need in zip(results, needs, strict=True))
        rows = [None if t is None else t.flatten(0, 1) for t in rows]
        launch(
            d_out.flatten(0, 1), d_final, _operands(*inputs), sequences_of(*v.shape[:2], offsets),
            scale_of(q, scale), DeltaSaved(*saved), DeltaGradients(*rows, d_initial),
        )  # fmt: skip
        return results

    return Plan(run)


def _run_backward_of_nothing(d_out, d_final, *args):
    *rows, d_initial = _fake_backward(d_out, d_final, *args)
    if d_initial.numel():
        d_initial.zero_() if d_final is None else d_initial.copy_(d_final)
    return *rows, d_initial


def _setup(ctx, inputs, output):
    *tensors, ctx.scale, with_final, lag = inputs
    _, final, *saved = output
    ctx.save_for_backward(*tensors, *saved)
    ctx.mark_non_differentiable(*saved, *(() if with_final and lag < 0 else (final,)))
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, d_final, *_):
    tensors = ctx.saved_tensors
    if torch.is_grad_enabled():
        raise UnsupportedTransformError(
            f"cute_kernels.{_PUBLIC[entry_of(tensors[3])]}: double backward (create_graph=True) "
            "is not available"
        )
    d_out = torch.zeros_like(tensors[2]) if d_out is None else d_out
    needs = list(ctx.needs_input_grad[:6])
    results = gated_delta_rule_backward(d_out, d_final, *tensors, ctx.scale, needs)
    gradients = (t if need else None for t, need in zip(results, needs, strict=True))
    return *gradients, None, None, None, None


_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial, Tensor? offsets"
_vmap = refuse_vmap(
    "chunk_gated_delta_rule", "is not supported; the batch dimension of q does the same"
)
gated_delta_rule = define_op(
    f"gated_delta_rule({_OPERANDS}, float? scale, bool with_final, int lag) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check,
    plan=_plan,
    fake=_fake,
    setup=_setup,
    backward=_backward,
    vmap=_vmap,
)
gated_delta_rule_backward = define_op(
    f"gated_delta_rule_backward(Tensor d_out, Tensor? d_final, {_OPERANDS}, Tensor states, "
    "Tensor decay, Tensor inner, Tensor u, Tensor scores, float? scale, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    plan=_plan_backward,
    fake=_fake_backward,
    vmap=_vmap,
)


def normed_and_gated(
    operands: DeltaRule,
    channels: bool,
    cu_seqlens: torch.Tensor | None,
    scale: float | None,
    flags: tuple[bool, bool, bool],
    gate: tuple[torch.Tensor | None, ...],
    lower_bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Results of `api.chunk_gated_delta_rule`, or with gates by channel of `api.chunk_kda`.

    flags: output_final_state, use_qk_l2norm_in_kernel and use_gate_in_kernel.  gate: A_log,
    dt_bias, and their main_grads.
    """
    (q, k, v, g, beta, initial), (with_final, norm, in_kernel) = operands, flags
    checking.flag("output_final_state", with_final)
    checking.flag("use_qk_l2norm_in_kernel", norm)
    checks.gate(in_kernel, q, g, channels, *gate, lower_bound)
    if norm:
        checks.queries_and_keys(q, k)
        q, k = (op_gate.l2norm(t, config.L2NORM_EPS) for t in (q, k))
    if in_kernel:
        A_log, dt_bias, *mains = gate
        g = op_gate.decay_gate(g, A_log, dt_bias, cu_seqlens, *mains, lower_bound)
    out, final, *_ = gated_delta_rule(q, k, v, g, beta, initial, cu_seqlens, scale, with_final, -1)
    return out, final if with_final else None
