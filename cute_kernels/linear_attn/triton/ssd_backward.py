"""Launch the Triton kernels of the state space scan's backward; see ssd.py."""

from __future__ import annotations

import torch

from ...runtime.triton_products import cdiv
from ..config import SSD_CHUNK
from ..tensors import Sequences, StateSpace, StateSpaceGradients, StateSpaceSaved, StepOptions
from . import kernel_ssd_backward as kernels
from .launch import FUSION, add_sums, loadable, strides_of, upstream, written
from .plan import TRITON
from .ssd import NAME, ROWS, D_strides, common_of


def ssd_scan_backward(
    d_out: torch.Tensor,
    d_final: torch.Tensor | None,
    operands: StateSpace,
    sequences: Sequences,
    options: StepOptions,
    saved: StateSpaceSaved,
    gradients: StateSpaceGradients,
    *,
    interpret: bool = False,
) -> None:
    """Triton implementation of `cpu_ssd.ssd_scan_backward`."""
    operands = loadable(NAME, operands, ROWS)
    x, dt, A, B, C, D, z, dt_bias, _ = operands
    (heads, size), (groups, state) = x.shape[1:], B.shape[1:]
    dy, d_final = upstream(NAME, d_out, d_final)
    sizes, slots, offsets = sequences.sizes, sequences.slots(SSD_CHUNK), sequences.offsets
    common = common_of(operands, interpret)
    group = common | {"num_stages": 1}
    columns, parts = min(state, TRITON.ssd_columns), SSD_CHUNK // TRITON.ssd_rows
    skips = 1 if D is None or D.dim() == 1 else size
    dx, d_dt, dB, dC = written((x, dt, B, C), (getattr(gradients, n) for n in ROWS[:4]))
    d_states = torch.empty_like(saved.states)
    d_scores = x.new_empty(slots, groups, SSD_CHUNK, SSD_CHUNK)
    of_rows, of_steps = (torch.empty_like(saved.step) for _ in "rs")
    of_ends = saved.step.new_empty(slots, parts, heads)
    of_states = saved.step.new_empty(slots, state // columns, heads)
    of_skips = saved.step.new_empty(slots * parts, skips, heads)
    sums = saved.step.new_empty(slots, 2, heads)
    with torch.cuda.device(x.device):
        if z is not None:
            dz = torch.empty_like(saved.ungated) if gradients.z is None else gradients.z
            dy = torch.empty_like(saved.ungated)
            kernels.gate_gradient_kernel[(cdiv(dy.numel(), TRITON.gate_elements),)](
                d_out, z, saved.ungated, offsets, dy, dz, sequences.rows, sequences.count,
                *strides_of(d_out, z), H=heads, P=size,
                ELEMENTS=TRITON.gate_elements, num_warps=TRITON.num_warps, **FUSION,
            )  # fmt: skip
        rows = strides_of(dy, x, B, C)
        kernels.state_gradient_kernel[(sequences.count, heads, state // columns)](
            dy, C, saved.decay, saved.states, d_final, offsets,
            d_states, of_states, gradients.initial, *sizes[:2],
            *strides_of(dy, C), COLUMNS=columns, **common,
        )  # fmt: skip
        kernels.row_gradient_kernel[(slots, groups, parts)](
            dy, x, B, C, saved.step, saved.decay, saved.states, offsets, dC, d_scores, of_rows,
            *sizes, *rows, ROWS=TRITON.ssd_rows, **group,
        )  # fmt: skip
        kernels.column_gradient_kernel[(slots, groups, parts)](
            dy, x, B, C, D, saved.step, saved.decay, d_states, d_scores, offsets,
            dx, dB, of_steps, of_ends, of_skips,
            *sizes, *rows, *D_strides(D), ROWS=TRITON.ssd_rows, SKIPS=skips, **group,
        )  # fmt: skip
        kernels.steps_gradient_kernel[(slots, cdiv(heads, TRITON.step_heads))](
            dt, A, dt_bias, saved.step, saved.decay, of_rows, of_steps, of_ends, of_states, offsets,
            d_dt, sums, *sizes, heads, dt.stride(0), options.low, options.high,
            SOFTPLUS=options.softplus, PARTS=parts, BLOCKS=state // columns,
            HEADS=TRITON.step_heads, num_warps=1, **FUSION,
        )  # fmt: skip
        add_sums(kernels, sums, gradients.A, 0)
        add_sums(kernels, sums, gradients.dt_bias, 1)
        add_sums(kernels, of_skips, gradients.D, 0)
