"""Digests: what each GPU model gave in a case, and whether models agree."""

from __future__ import annotations

from ..core.models import model, models
from ..core.tables import NOT_RUN
from .cases import CASES
from .run import comparable

_SHOWN = 12  # hex digits of a digest
EQUAL, DIFFERS = "equal", "differs"
ONE_MODEL, OTHER_ID = "one model", "other contract ids"


def _kept(records: list[dict]) -> dict[str, list[dict]]:
    """Case -> its records taken on a GPU, oldest first."""
    digests = [r for r in records if r["kind"] == "digest" and r["gpu"] != "none"]
    digests.sort(key=lambda r: (r["date"], r["digest"]))
    return {case.name: [r for r in digests if r["case"] == case.name] for case in CASES}


def verdict(own: list[dict]) -> str:
    """Verdict on one case: whether records of equal contract ids have equal digests."""
    if not own:
        return NOT_RUN
    met = False
    for i, newer in enumerate(own):
        for older in own[:i]:
            if comparable(newer, older) and newer["digest"] != older["digest"]:
                return DIFFERS
            met |= comparable(newer, older) and model(newer["gpu"]) != model(older["gpu"])
    if met:
        return EQUAL
    return ONE_MODEL if len({model(r["gpu"]) for r in own}) == 1 else OTHER_ID


def verdicts(records: list[dict]) -> list[str]:
    """The verdict of every case."""
    return [verdict(digests) for digests in _kept(records).values()]


def rows(records: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of `perf show digests`: what each GPU model gave, and whether they agree."""
    names = models([r for r in records if r["kind"] == "digest"])
    out = []
    for case, kept in _kept(records).items():
        last = {model(r["gpu"]): r for r in kept}
        cells = [last[n]["digest"][:_SHOWN] if n in last else NOT_RUN for n in names]
        out.append([case, *cells, verdict(kept)])
    return ["case", *names, "verdict"], out
