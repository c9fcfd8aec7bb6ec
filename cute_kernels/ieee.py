"""fp32 on the CPU as IEEE fp32, whatever the process asked torch for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def ieee_fp32() -> Iterator[None]:
    """Inside, CPU products of fp32 are in fp32, whatever ``set_float32_matmul_precision`` says."""
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    if before in ("ieee", "none"):
        yield
        return
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
