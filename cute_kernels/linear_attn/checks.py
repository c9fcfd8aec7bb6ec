"""Tensors -> nothing, or one exception that names the argument.  Works on meta tensors."""

from __future__ import annotations

import torch

from ..errors import ArgumentValueError, ShapeError, expected
from ..runtime import checking
from ..runtime import main_grad as destination
from .config import CONV_WIDTHS, MAX_CHANNELS

ACTIVATIONS = (None, "silu", "swish")


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    main_grad: torch.Tensor | None,
    bias_main_grad: torch.Tensor | None,
    silu: bool,
) -> None:
    """Check the arguments of `op.causal_conv`."""
    checking.operand("x", x, "[B, D, T]")
    checking.supported("causal_conv1d_fn", x.device)
    checking.operand("weight", weight, "[D, W]")
    batch, channels, _ = x.shape
    if channels > MAX_CHANNELS:
        raise ShapeError(expected("x", f"a D of at most {MAX_CHANNELS}", channels))
    if weight.shape[0] != channels or weight.shape[1] not in CONV_WIDTHS:
        widths = ", ".join(map(str, CONV_WIDTHS))
        want = f"shape [{channels}, W], D of x, W one of {widths}"
        raise ShapeError(expected("weight", want, list(weight.shape)))
    checking.same_device("weight", weight, "x", x)
    if bias is not None:
        checking.operand("bias", bias, "[D]")
        if bias.shape[0] != channels:
            raise ShapeError(expected("bias", f"shape [{channels}], D of x", list(bias.shape)))
        checking.same_device("bias", bias, "x", x)
    sequences = batch
    if cu_seqlens is not None:
        offsets(cu_seqlens, x)
        if batch != 1:
            want = "batch 1 of x (a pack of sequences along T)"
            raise ShapeError(expected("cu_seqlens", want, f"batch {batch}"))
        sequences = cu_seqlens.shape[0] - 1
    if initial_states is not None:
        want = [sequences, channels, weight.shape[1] - 1]
        checking.tensor("initial_states", initial_states)
        if list(initial_states.shape) != want:
            got = list(initial_states.shape)
            raise ShapeError(
                expected("initial_states", f"shape {want}: [sequences, D, W - 1]", got)
            )
        checking.dtype("initial_states", initial_states.dtype, (x.dtype,))
        checking.same_device("initial_states", initial_states, "x", x)
    destination.check_of("main_grad", main_grad, "weight", weight, x)
    destination.check_of("bias_main_grad", bias_main_grad, "bias", bias, x)


def offsets(cu_seqlens: object, x: torch.Tensor) -> None:
    """Check the dtype, dimensions and device of cu_seqlens; its values stay on the device."""
    checking.operand("cu_seqlens", cu_seqlens, "[S + 1]", (torch.int32, torch.int64))
    if cu_seqlens.shape[0] < 2:
        got = list(cu_seqlens.shape)
        raise ShapeError(expected("cu_seqlens", "shape [S + 1] of at least one sequence", got))
    checking.same_device("cu_seqlens", cu_seqlens, "x", x)


def activation(name: object) -> bool:
    """Whether an ``activation`` is SiLU."""
    if name not in ACTIVATIONS:
        raise ArgumentValueError(expected("activation", "None, 'silu' or 'swish'", repr(name)))
    return name is not None


def conv_state(conv_state: torch.Tensor, x: torch.Tensor, width: int) -> None:
    """Check the state that `causal_conv1d_update` reads and writes."""
    checking.operand("conv_state", conv_state, "[slots, D, L]")
    _, channels, length = conv_state.shape
    if channels != x.shape[1] or length < width - 1:
        want = f"shape [slots, {x.shape[1]}, at least {width - 1}]"
        raise ShapeError(expected("conv_state", want, list(conv_state.shape)))
    checking.dtype("conv_state", conv_state.dtype, (x.dtype,))
    checking.same_device("conv_state", conv_state, "x", x)
