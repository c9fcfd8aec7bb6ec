"""What ``additional_config={"cute_kernels": ...}`` of an engine says."""

from __future__ import annotations

from ...errors import ArgumentValueError, expected, one_of

#: Key of vLLM's ``additional_config``; its value: whether to take part, or options by name.
KEY = "cute_kernels"
#: Names of options.
OPTIONS = ("order",)
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


def asked_for(additional_config: object, is_on: bool) -> bool:
    """Whether an engine is to run the plug-in.

    Args:
        additional_config: The engine's.
        is_on: Whether the plug-in is on in this process, which it then is for every engine.

    Raises:
        ArgumentValueError: a key that is almost `KEY`, a value that is neither a bool nor options,
            an option that there is not, or False where the plug-in is on.
    """
    if not isinstance(additional_config, dict):
        return is_on
    for key in additional_config:
        if key != KEY and _plain(key) == _plain(KEY):
            raise ArgumentValueError(expected("additional_config", f"the key {KEY!r}", repr(key)))
    if KEY not in additional_config:
        return is_on
    name, value = f"additional_config[{KEY!r}]", additional_config[KEY]
    if isinstance(value, dict) and value:
        for option in value:
            if option not in OPTIONS:
                raise ArgumentValueError(one_of(f"option of {name}", OPTIONS, option))
        return True
    if not isinstance(value, bool):
        want = "True, False or options by name, such as {'order': 'tree'}"
        raise ArgumentValueError(expected(name, want, repr(value)))
    if is_on and not value:
        want = "no False: the plug-in is on in this process, for all of its engines"
        raise ArgumentValueError(expected(name, want, value))
    return value


def _plain(key: object) -> str:
    """A key without case, separators and plural."""
    return str(key).lower().replace("-", "").replace("_", "").replace(" ", "").rstrip("s")
