"""`python -m perf profile gemm`: counters of one launch of one product."""

from __future__ import annotations

from collections.abc import Iterator

from ..core import ncu, record, timing
from . import targets
from .cases import cases
from .rivals import RIVALS


def gemm(shape: str, product: str, rival: str, commit: str | None = None) -> dict:
    """Profiles one call of one rival; the record."""
    case = cases([shape], [], [product])[0]
    launches, unknown = ncu.launches_of()
    body = ncu.summary(launches, case.work, timing.ceilings())
    head = record.environment(commit) | {"kind": "profile", "kernel": "gemm", "system": rival}
    return head | case.items() | body | {"unknown_metrics": unknown}


def target(shape: str, product: str, rival: str) -> None:
    """Run the calls that ncu profiles."""
    case = cases([shape], [], [product])[0]
    call, t = RIVALS[rival].start[product](case), case.inputs(0, "cuda")
    ncu.bracketed(lambda: call(t))


def lines(body: dict) -> Iterator[str]:
    """Lines of the terminal for one record."""
    return ncu.lines(body, targets.PRODUCT_FORMULAS[body["product"]])
