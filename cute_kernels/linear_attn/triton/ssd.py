"""Launch the Triton kernels of the state space scan: operands in their layout, grids.

Each function has the name and the result of one in cpu_ssd.py, runs on the device of its first
tensor and its current stream, and compiles at its first launch.
"""

from __future__ import annotations

import math

import torch

from ...runtime.triton_products import cdiv
from ..config import SSD_CHUNK
from ..tensors import Last, Sequences, StateSpace, StateSpaceSaved, StepOptions
from . import kernel_ssd as kernels
from .launch import FUSION, loadable, strides_of
from .plan import TRITON

NAME = "mamba_chunk_scan_combined"
#: Operands that have rows.
ROWS = ("x", "dt", "B", "C", "z")


def ssd_scan(
    operands: StateSpace,
    sequences: Sequences,
    options: StepOptions,
    out: torch.Tensor,
    last: Last | None,
    saved: StateSpaceSaved,
    *,
    interpret: bool = False,
) -> None:
    """Triton implementation of `cpu_ssd.ssd_scan`."""
    x, dt, A, B, C, D, z, dt_bias, initial = loadable(NAME, operands, ROWS)
    heads, state = x.shape[1], B.shape[2]
    sizes, slots = sequences.sizes, sequences.slots(SSD_CHUNK)
    common = common_of(operands, interpret)
    columns = min(state, TRITON.ssd_columns)
    blocks = blocks_of(operands)
    with torch.cuda.device(x.device):
        kernels.steps_kernel[(slots, cdiv(heads, TRITON.step_heads))](
            dt, A, dt_bias, sequences.offsets, saved.step, saved.decay,
            *sizes, heads, dt.stride(0), options.low, options.high,
            SOFTPLUS=options.softplus, HEADS=TRITON.step_heads,
            num_warps=1, **FUSION,
        )  # fmt: skip
        kernels.state_kernel[(sequences.count, heads, state // columns)](
            x, B, saved.step, saved.decay, initial, sequences.offsets, saved.states,
            None if last is None else last.states,
            *sizes[:2], -1 if last is None else last.lag, *strides_of(x, B),
            COLUMNS=columns, **common,
        )  # fmt: skip
        kernels.scan_kernel[(slots, heads // blocks, SSD_CHUNK // TRITON.ssd_rows)](
            x, B, C, D, z, saved.step, saved.decay, saved.states, sequences.offsets,
            out, None if z is None else saved.ungated,
            *sizes, *strides_of(x, B, C, z), *D_strides(D),
            ROWS=TRITON.ssd_rows, HEADS=blocks, **common,
        )  # fmt: skip


def D_strides(D: torch.Tensor | None) -> tuple[int, int]:
    """(of heads, of channels): 0 of channels that share a D."""
    if D is None:
        return 0, 0
    return D.stride(0), D.stride(1) if D.dim() > 1 else 0


def blocks_of(operands: StateSpace) -> int:
    """Heads of a group in a program: a divisor of those that there are."""
    return math.gcd(operands.x.shape[1] // operands.B.shape[1], TRITON.ssd_heads)


def common_of(operands: StateSpace, interpret: bool) -> dict[str, int | bool]:
    """Constants of the kernels that multiply."""
    (heads, size), (groups, state) = operands.x.shape[1:], operands.B.shape[1:]
    return {
        "H": heads, "GROUP": heads // groups, "P": size, "STATE": state, "UPCAST": interpret,
        "num_warps": TRITON.ssd_warps, "num_stages": TRITON.ssd_stages,
        **FUSION,
    }  # fmt: skip
