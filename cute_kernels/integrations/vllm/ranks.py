"""Tensor-parallel ranks: the order of sums that they share, and exchanges that move bytes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...errors import ArgumentValueError, expected, one_of
from . import KEY

#: Orders of `ck.linear`; ranks can share the second one.
CHAIN, TREE = ORDERS = "chain", "tree"


def order_of(config: object) -> str:
    """Order of an engine's linears: ``additional_config={"cute_kernels": {"order": ...}}``.

    Open, it is "chain" for one rank and "tree" for several.

    Raises:
        ArgumentValueError: no such order, or one that ranks cannot share.
    """
    ranks = getattr(config.parallel_config, "tensor_parallel_size", 1)
    options = (getattr(config, "additional_config", None) or {}).get(KEY)
    order = options.get("order") if isinstance(options, dict) else None
    if order is None:
        return CHAIN if ranks == 1 else TREE
    if order not in ORDERS:
        raise ArgumentValueError(one_of("order", ORDERS, order))
    if ranks > 1 and order != TREE:
        raise ArgumentValueError(expected("order", f"{TREE!r} for {ranks} ranks", repr(order)))
    return order


def current_order() -> str:
    """The order of the engine whose model is being built."""
    from vllm.config import get_current_vllm_config

    return order_of(get_current_vllm_config())


def group() -> dist.ProcessGroup:
    """The tensor-parallel group."""
    from vllm.distributed import get_tp_group

    return get_tp_group().device_group


def add_bits(rows: torch.Tensor) -> torch.Tensor:
    """Sum over ranks of rows that are zeros on all ranks but one: their bytes, as integers."""
    bits = rows.contiguous().view(torch.int32)
    dist.all_reduce(bits, group=group())
    return bits.view(rows.dtype)
