"""The torch ops of gated_rms_norm; saved: rstd [..., D / group_size], fp32."""

from __future__ import annotations

import torch

from ..runtime import dispatch
from ..runtime.operands import flat_rows
from . import checks, config
from .op import RowsOp, launched_by
from .tensors import Gated, GatedRule


class _GatedNorm(RowsOp):
    entry, public = "gated_norm", "gated_rms_norm"
    launchers = launched_by("gated_norm:gated_norm*", "cpu_gated_norm:gated_norm*")
    operands = Gated
    optional, of_rows, summed = ("weight",), ("x", "gate"), ("weight",)
    main_grads, saved, packs = ("main_grad",), ("rstd",), False
    options = ("str activation", "float eps", "bool norm_before_gate", "int? group_size")
    instead_of_vmap = "leading dimensions of {} do"

    def check(self, operands: Gated, offsets: None, *options) -> None:
        checks.gated_norm(operands, *options)

    def rows(self, t: torch.Tensor) -> torch.Tensor:
        return flat_rows(t, "gated_norm")

    def allocate(self, operands: Gated, offsets, options, on_cpu: bool) -> tuple[torch.Tensor, ...]:
        x, (*_, group_size) = operands.x, options
        groups = 1 if group_size is None else x.shape[-1] // group_size
        rstd = x.new_empty((*x.shape[:-1], groups), dtype=torch.float32)
        return self.empty(x), rstd

    def inputs(self, operands: Gated, offsets, options) -> tuple[Gated, GatedRule]:
        activation, eps, norm_before_gate, group_size = options
        width = operands.x.shape[-1] if group_size is None else group_size
        return self.rows_of(operands), GatedRule(activation, float(eps), norm_before_gate, width)

    def outputs(self, results, options) -> tuple[torch.Tensor, torch.Tensor]:
        y, rstd = results
        return self.rows(y), *self.saved_rows((rstd,))

    def saved_rows(self, saved) -> tuple[torch.Tensor]:
        return (saved[0].view(-1, saved[0].shape[-1]),)


gated_norm, gated_norm_backward = _GatedNorm().define()
dispatch.register_contracts(("gated_rms_norm",), config.KEPT, config.gated_norm_facts, "gated_norm")
