"""The torch ops of the gated delta rule, and their calls after norms and a gate.

Gates [B, T, HV, K] make it Kimi delta attention, which has entries of `dispatch` of its own.
"""

from __future__ import annotations

import torch

from ..arch import CUTE_SM90, TRITON
from ..runtime import checking, dispatch
from ..runtime.dispatch import Implementation
from . import checks, config, op_gate
from .op import launched_by, register
from .op_scan import Recurrence
from .tensors import DeltaRule, DeltaSaved

_ENTRY, _OF_CHANNELS = "gated_delta_rule", "kda"
_ON_GPUS = frozenset({torch.bfloat16})
_LAUNCHERS = "delta*:delta_rule*", "cpu_delta:delta_rule*", _ON_GPUS


def scale_of(q: torch.Tensor, scale: float | None) -> float:
    """Return the factor of q [B, T, H, K]."""
    return q.shape[3] ** -0.5 if scale is None else scale


def backend(device: torch.device, dtype: torch.dtype) -> str:
    """Return the backend of the rule."""
    return dispatch.backend(_ENTRY, device, dtype)


class _DeltaRule(Recurrence):
    entry, public, chunk = _ENTRY, "chunk_gated_delta_rule", config.DELTA_CHUNK
    launchers = launched_by(*_LAUNCHERS, sm90="launch:delta_rule*")
    operands, saved_type = DeltaRule, DeltaSaved
    optional, of_rows = ("initial",), ("q", "k", "v", "g", "beta")
    options, saved = ("float? scale",), DeltaSaved._fields
    check = staticmethod(checks.delta_rule)

    def entry_of(self, operands: DeltaRule) -> str:
        return _ENTRY if operands.g.dim() == 3 else _OF_CHANNELS

    def public_of(self, operands: DeltaRule) -> str:
        return self.public if operands.g.dim() == 3 else "chunk_kda"

    def like(self, operands: DeltaRule) -> torch.Tensor:
        return operands.v

    def inputs(self, operands: DeltaRule, offsets: torch.Tensor | None, options) -> tuple:
        rows, sequences, scale = super().inputs(operands, offsets, options)
        return rows, sequences, scale_of(operands.q, scale)

    def state(self, operands: DeltaRule) -> tuple[int, int, int]:
        return operands.v.shape[2], operands.k.shape[3], operands.v.shape[3]

    def saved_tensors(self, operands: DeltaRule, slots: int, on_cpu: bool) -> DeltaSaved:
        v, g = operands.v, operands.g
        rows, states = v.shape[0] * v.shape[1], (slots, *self.state(operands))
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
            v.new_empty(square if g.dim() == 4 else 0),
        )


RULE = _DeltaRule()
gated_delta_rule, gated_delta_rule_backward = RULE.define()
register(_OF_CHANNELS, "chunk_kda", launched_by(*_LAUNCHERS))
dispatch.register(
    "gated_delta_step",
    {
        CUTE_SM90: Implementation(f"{__package__}.launch:delta_step", _ON_GPUS),
        TRITON: Implementation(f"{__package__}.triton.delta_step:delta_step", _ON_GPUS),
    },
    contract="chunk_gated_delta_rule",
)
# What lies inside of chunks, and most of the backward, is Triton's on SM90 too.
_HELPERS = {CUTE_SM90: (TRITON,)}
dispatch.register_contracts(
    ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    config.DELTA_KEPT, config.delta_facts, _ENTRY, _HELPERS,
)  # fmt: skip
dispatch.register_contracts(
    ("chunk_kda", "fused_recurrent_kda"), config.KEPT, config.kda_facts, _OF_CHANNELS, _HELPERS
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
