"""The torch ops of the causal depthwise convolution of x [B, D, T]: convolution, bias, SiLU."""

from __future__ import annotations

import torch

from ..runtime import dispatch
from . import checks, config
from .op import ChannelLast, RowsOp, launched_by
from .tensors import Conv


class _Conv(ChannelLast, RowsOp):
    entry, public = "causal_conv", "causal_conv1d_fn"
    launchers = launched_by("launch:conv*", "cpu:conv*")
    operands = Conv
    names = ("x", "weight", "bias", "initial_states")
    optional, of_rows, summed = ("bias", "initial"), ("x",), ("weight", "bias")
    main_grads = ("main_grad", "bias_main_grad")
    options = ("bool silu",)
    check = staticmethod(checks.conv)


causal_conv, causal_conv_backward = _Conv().define()
_PUBLIC = ("causal_conv1d_fn", "causal_conv1d_update")
dispatch.register_contracts(_PUBLIC, config.KEPT, config.conv_facts, "causal_conv")


def final_states(
    x: torch.Tensor,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    tail: int,
) -> torch.Tensor:
    """The last ``tail`` inputs of each sequence [S, D, tail], older ones from ``initial`` or 0."""
    batch, channels, length = x.shape
    count = batch if offsets is None else offsets.shape[0] - 1
    before = x.new_zeros(count, channels, tail) if initial is None else initial
    if offsets is None or not length:
        return torch.cat([before, x[:count] if length else before], 2)[:, :, -tail:]
    first, end = offsets[:-1, None], offsets[1:, None]
    row = end - tail + torch.arange(tail, device=x.device)
    inside = row >= first
    last = x[0].index_select(1, row.clamp(min=0).flatten()).view(channels, -1, tail).transpose(0, 1)
    older = (row - first + tail).clamp(0, tail - 1)[:, None].expand_as(before)
    return torch.where(inside[:, None], last, before.gather(2, older))
