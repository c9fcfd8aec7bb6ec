"""Tensor-parallel ranks: their order of sums, and exchanges that move bytes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import options


def current_order() -> str:
    """The order of the engine whose model is being built."""
    from vllm.config import get_current_vllm_config

    return options.order_of(get_current_vllm_config())


def group() -> dist.ProcessGroup:
    """The tensor-parallel group."""
    from vllm.distributed import get_tp_group

    return get_tp_group().device_group


def add_bits(rows: torch.Tensor) -> torch.Tensor:
    """Sum over ranks of rows that are zeros on all ranks but one: their bytes, as integers."""
    bits = rows.contiguous().view(torch.int32)
    dist.all_reduce(bits, group=group())
    return bits.view(rows.dtype)
