"""Calling a compiled kernel on the inputs' device."""

from __future__ import annotations

from collections.abc import Callable

import torch


def call(device: torch.device, kernel: Callable, *args: object) -> None:
    """Launches on ``device``, which need not be the current one, on its current stream."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel(*args)
    else:
        kernel(*args)
