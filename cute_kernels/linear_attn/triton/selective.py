"""Launch the Triton kernels of the selective scan: operands in their layout, grids.

Each function has the name and the result of one in cpu_ssd.py, runs on the device of its first
tensor and its current stream, and compiles at its first launch.
"""

from __future__ import annotations

import torch

from ...runtime.triton_products import cdiv
from ..config import SELECTIVE_CHUNK
from ..tensors import Last, Sequences, StateSpace, StateSpaceGradients, StateSpaceSaved, StepOptions
from . import kernel_selective as kernels
from .launch import add_sums, loadable, strides_of, upstream, written
from .plan import SELECTIVE
from .ssd import ROWS

NAME = "selective_scan"


def selective_scan(
    operands: StateSpace,
    sequences: Sequences,
    options: StepOptions,
    out: torch.Tensor,
    last: Last | None,
    saved: StateSpaceSaved,
) -> None:
    """Triton implementation of `cpu_ssd.selective_scan`."""
    operands = loadable(NAME, operands, ROWS)
    x, dt, _, B, C, _, z, *_ = operands
    programs = sequences.count + (sequences.offsets is not None)
    lag = -1 if last is None else last.lag
    with torch.cuda.device(x.device):
        kernels.scan_kernel[(programs, *_blocks(operands))](
            *operands, sequences.offsets, out, saved.step, saved.states,
            None if last is None else last.states,
            *sequences.sizes, sequences.slots(SELECTIVE_CHUNK), lag, x.shape[1],
            x.stride(0), dt.stride(0), _row(z), *strides_of(B, C),
            SOFTPLUS=options.softplus, LAGS=lag > 0, AHEAD=SELECTIVE.ahead, **_common(operands),
        )  # fmt: skip


def selective_scan_backward(
    d_out: torch.Tensor,
    d_final: torch.Tensor | None,
    operands: StateSpace,
    sequences: Sequences,
    options: StepOptions,
    saved: StateSpaceSaved,
    gradients: StateSpaceGradients,
) -> None:
    """Triton implementation of `cpu_ssd.selective_scan_backward`."""
    operands = loadable(NAME, operands, ROWS)
    x, dt, A, B, C, D, z, dt_bias, _ = operands
    dy, d_final = upstream(NAME, d_out, d_final)
    slots, (channels, state) = sequences.slots(SELECTIVE_CHUNK), A.shape
    groups, blocks = _blocks(operands)
    dx, d_dt, dz = written((x, dt, z), (gradients.x, gradients.dt, gradients.z))
    d_states = torch.empty_like(saved.states)
    parts = saved.states.new_empty(blocks, 2, x.shape[0] * groups * state)
    sums = saved.states.new_empty(slots, state + 2, channels)
    common = _common(operands)
    with torch.cuda.device(x.device):
        kernels.state_gradient_kernel[(sequences.count, groups, blocks)](
            dy, A, C, z, saved.step, d_final, sequences.offsets, d_states, gradients.initial,
            sequences.length, channels, dy.stride(0), _row(z), *strides_of(C),
            AHEAD=SELECTIVE.ahead, **common,
        )  # fmt: skip
        kernels.gradient_kernel[(slots, groups, blocks)](
            dy, x, dt, A, B, C, D, z, dt_bias, sequences.offsets, saved.step, saved.states,
            d_states, dx, d_dt, dz, parts, sums, *sequences.sizes, channels,
            dy.stride(0), x.stride(0), dt.stride(0), _row(z), *strides_of(B, C),
            SOFTPLUS=options.softplus, ROWS=SELECTIVE.rows(state), **common,
        )  # fmt: skip
        for which, into in enumerate((gradients.B, gradients.C)):
            if into is not None:
                total = torch.zeros_like(parts[0, 0])
                add_sums(kernels, parts, total, which)
                into.copy_(total.view(into.shape))
        add_sums(kernels, sums, gradients.A, 0)
        add_sums(kernels, sums, gradients.D, state)
        add_sums(kernels, sums, gradients.dt_bias, state + 1)


def _row(rows: torch.Tensor | None) -> int:
    """Stride of rows."""
    return 0 if rows is None else rows.stride(0)


def _blocks(operands: StateSpace) -> tuple[int, int]:
    """(groups, programs for the channels of each)."""
    groups = operands.B.shape[1]
    return groups, cdiv(operands.x.shape[1] // groups, SELECTIVE.channels)


def _common(operands: StateSpace) -> dict[str, int | bool]:
    """Constants of all kernels."""
    return {
        "GROUPS": operands.B.shape[1], "STATE": operands.A.shape[1],
        "CHANNELS": SELECTIVE.channels, "num_warps": 1, "enable_fp_fusion": SELECTIVE.fp_fusion,
    }  # fmt: skip
