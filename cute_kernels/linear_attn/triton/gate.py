"""Launch the Triton kernels of `op_gate`: each function has the name and result of one in
cpu_gate.py, runs on the device of its first tensor and its current stream."""

from __future__ import annotations

import torch

from ...log import contiguous
from ...runtime.triton_products import cdiv, next_power_of_2
from ..config import CONV_CHUNK
from ..tensors import Gate, GateGradients, Sequences
from . import kernel_gate as kernels
from .launch import FUSION, add_sums, adjacent, loadable
from .plan import TRITON

_OPTIONS = {"num_warps": TRITON.num_warps, **FUSION}


def l2norm(x: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Triton implementation of `cpu_gate.l2norm`."""
    x = adjacent("l2norm", "x", x)
    with torch.cuda.device(x.device):
        kernels.l2norm_kernel[_row_grid(x)](x, out, *_row_sizes(x), eps, **_row_options(x))


def l2norm_backward(dy: torch.Tensor, x: torch.Tensor, eps: float, dx: torch.Tensor) -> None:
    """Triton implementation of `cpu_gate.l2norm_backward`."""
    dy, x = contiguous("l2norm", "dy", dy, "no gaps"), adjacent("l2norm", "x", x)
    with torch.cuda.device(x.device):
        kernels.l2norm_gradient_kernel[_row_grid(x)](
            dy, x, dx, *_row_sizes(x), eps, **_row_options(x)
        )


def _row_grid(x: torch.Tensor) -> tuple[int]:
    return (cdiv(x.shape[0] * x.shape[1], TRITON.norm_rows),)


def _row_sizes(x: torch.Tensor) -> tuple[int, ...]:
    return x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1)


def _row_options(x: torch.Tensor) -> dict[str, int | bool]:
    width = x.shape[2]
    return {"K": width, "BLOCK_K": next_power_of_2(width), "ROWS": TRITON.norm_rows, **_OPTIONS}


def decay_gate(
    gate: Gate, sequences: Sequences, lower_bound: float | None, out: torch.Tensor
) -> None:
    """Triton implementation of `cpu_gate.decay_gate`."""
    gate, (rows, _, *sizes) = _loadable(gate, sequences)
    with torch.cuda.device(out.device):
        kernels.decay_kernel[(cdiv(out.numel(), TRITON.gate_elements),)](
            *gate, sequences.offsets, out, rows, *sizes,
            ELEMENTS=TRITON.gate_elements, **_options(gate, lower_bound),
        )  # fmt: skip


def decay_gate_backward(
    dg: torch.Tensor,
    gate: Gate,
    sequences: Sequences,
    lower_bound: float | None,
    gradients: GateGradients,
) -> None:
    """Triton implementation of `cpu_gate.decay_gate_backward`."""
    dg, options = contiguous("decay_gate", "dg", dg, "no gaps"), _options(gate, lower_bound)
    gate, (rows, length, *sizes) = _loadable(gate, sequences)
    tensors = dg, *gate, sequences.offsets
    with torch.cuda.device(dg.device):
        if gradients.a is not None:
            kernels.decay_gradient_kernel[(cdiv(dg.numel(), TRITON.gate_elements),)](
                *tensors, gradients.a, rows, *sizes, ELEMENTS=TRITON.gate_elements, **options
            )
        if gradients.A_log is None and gradients.dt_bias is None:
            return
        slots, heads, each = sequences.slots(CONV_CHUNK), len(gate.A_log), options["EACH"]
        of_A_log, of_bias = (dg.new_empty(slots, 1, size) for size in (heads, heads * each))
        blocks = cdiv(heads, TRITON.sum_channels) if each == 1 else heads
        kernels.decay_sums_kernel[(slots, blocks)](
            *tensors, of_A_log, of_bias, rows, length, *sizes, ROWS=CONV_CHUNK,
            CHANNELS=TRITON.sum_channels if each == 1 else next_power_of_2(each), **options,
        )  # fmt: skip
        add_sums(kernels, of_A_log, gradients.A_log, 0)
        add_sums(kernels, of_bias, gradients.dt_bias, 0)


def _loadable(gate: Gate, sequences: Sequences) -> tuple[Gate, tuple[int, ...]]:
    """(The operands, (N, LENGTH, SEQUENCES, C, stride of rows of a))."""
    gate = loadable("decay_gate", gate, "a")
    return gate, (*sequences.sizes, gate.a.shape[1], gate.a.stride(0))


def _options(gate: Gate, lower_bound: float | None) -> dict[str, int | float | None]:
    each = gate.a.shape[1] // len(gate.A_log)
    return {"EACH": each, "BOUND": lower_bound, **_OPTIONS}
