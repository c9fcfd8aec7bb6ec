"""What ``additional_config={"cute_kernels": ...}`` of an engine says."""

from __future__ import annotations

from ...errors import ArgumentValueError, expected, one_of

#: Key of vLLM's ``additional_config``; its value: whether to take part, or options by name.
KEY = "cute_kernels"
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


def asked_for(additional_config: object) -> bool:
    """Whether the engine's ``additional_config`` asks for the plug-in."""
    return isinstance(additional_config, dict) and bool(additional_config.get(KEY))
