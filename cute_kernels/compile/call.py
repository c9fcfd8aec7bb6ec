"""Calling a compiled kernel on the inputs' device."""

from __future__ import annotations

from collections.abc import Callable

import torch


def call(device: torch.device, kernel: Callable, *args: object) -> None:
    """Launches on ``device``, which need not be the current one, on its current stream."""
    # A CPU tensor, which only a simulator's kernel takes, has no index.
    if device.index is not None and device.index != torch.accelerator.current_device_index():
        with torch.cuda.device(device):
            kernel(*args)
    else:
        kernel(*args)
