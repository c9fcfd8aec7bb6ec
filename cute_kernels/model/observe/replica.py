"""Copy of a model on the CPU whose parameters take no memory: one element each, expanded."""

from __future__ import annotations

import copy

import torch
from torch import nn

#: Buffers up to this size keep their values: frequencies, masks, biases.
_VALUES = 1 << 20


def replica(model: nn.Module) -> nn.Module:
    """Return a copy of a model without its weights, and without its hooks.

    Raises whatever copying the model's attributes raises.
    """
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_expanded(parameter), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = _buffer(buffer)
    hooks = {id(module): _take_hooks(module) for module in model.modules()}
    try:
        copied = copy.deepcopy(model, memo)
    finally:
        for module in model.modules():
            for name, value in hooks[id(module)].items():
                vars(module)[name] = value
    return copied


def _take_hooks(module: nn.Module) -> dict[str, object]:
    """Put empty dictionaries in place of a module's hooks; return the hooks."""
    hooks = {n: v for n, v in vars(module).items() if n.endswith("_hooks") and isinstance(v, dict)}
    for name, value in hooks.items():
        vars(module)[name] = type(value)()
    return hooks


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    # ZeRO-3 leaves an empty tensor in place of the parameter.
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    return torch.full((), 0.02, dtype=torch.float32, device="cpu").to(tensor.dtype).expand(shape)


def _buffer(buffer: torch.Tensor) -> torch.Tensor:
    if buffer.is_meta or (buffer.is_floating_point() and buffer.numel() > _VALUES):
        return _expanded(buffer)
    return buffer.detach().to("cpu", copy=True)
