"""``ck.set_reduction``: what an op does whose caller leaves open whether its sums are ordered.

Ordered, unless the process says otherwise: by `set_reduction`, or before by the environment
variable CUTE_KERNELS_SKINNY.
"""

from __future__ import annotations

from .. import settings
from ..errors import ArgumentTypeError, ArgumentValueError, expected, one_of

DETERMINISTIC, FAST = "deterministic", "fast"
CHOICES = (DETERMINISTIC, FAST)

_chosen: dict[str, str] = {}


class set_reduction:
    """Sets the process's default, at once; as a context manager, until its end.

    Args:
        skinny: Of `skinny_linear` where ``deterministic`` is None: ``"deterministic"``, or
            ``"fast"``, which adds in arrival order.  None: what the environment says.

    Raises:
        ArgumentValueError: another value.

    ``ck.info()["reduction"]`` says what holds now.  An argument of a call has the last word.

    Example:
        >>> with ck.set_reduction(skinny='fast'):
        ...     y = ck.skinny_linear(torch.randn(2, 64), torch.randn(32, 64))
    """

    def __init__(self, *, skinny: str | None):
        if skinny not in (*CHOICES, None):
            raise ArgumentValueError(one_of("skinny", CHOICES, skinny))
        self._before = _chosen.get("skinny")
        _set(skinny)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        _set(self._before)


def now() -> dict[str, str]:
    """The default of each op that has one."""
    return {"skinny": _chosen.get("skinny") or settings.get("SKINNY")}


def skinny_is_ordered(deterministic: bool | None) -> bool:
    """Resolve ``deterministic`` of `skinny_linear`, whose default is None.

    Raises:
        ArgumentTypeError: another value.
    """
    if deterministic is not None and not isinstance(deterministic, bool):
        got = type(deterministic).__name__
        raise ArgumentTypeError(expected("deterministic", "True, False or None", got))
    return now()["skinny"] == DETERMINISTIC if deterministic is None else deterministic


def _set(skinny: str | None) -> None:
    if skinny is None:
        _chosen.pop("skinny", None)
    else:
        _chosen["skinny"] = skinny
