"""How often attention gave the same bytes beside other work, and what the sanitizer found."""

from __future__ import annotations

from ..core.sanitize import TOOLS
from ..core.tables import NOT_RUN
from .soak_cases import suite


def _latest(records: list[dict], kind: str, name: str) -> dict[str, dict]:
    """The last attention record of each value of the field `name`."""
    rows = [r for r in records if r["kind"] == kind and r["kernel"] == "attention"]
    return {r[name]: r for r in sorted(rows, key=lambda r: r["date"])}


def totals(records: list[dict]) -> tuple[int, int, int]:
    """(calls, graph replays, differing bytes of both) of the ordered cases' last records."""
    latest = _latest(records, "soak", "shape")
    ordered = [latest[case.label] for case in suite() if case.ordered and case.label in latest]
    graphs = [item["graph"] for item in ordered if "graph" in item]
    differing = sum(sum(run.get("differing_bytes", {}).values()) for run in [*ordered, *graphs])
    calls = sum(item.get("repeats", 0) for item in ordered)
    return calls, sum(graph.get("replays", 0) for graph in graphs), differing


def verdict(records: list[dict]) -> str:
    """How many bytes differed in how many calls."""
    calls, replays, differing = totals(records)
    if not calls:
        return NOT_RUN
    return f"{differing:,} differing bytes in {calls:,} calls and {replays:,} graph replays"


def sanitized(records: list[dict]) -> str:
    """Errors that compute-sanitizer's tools found; that of a planted one does not count."""
    latest = _latest(records, "sanitize", "case")
    errors = [latest.get(tool, {}).get("errors") for tool in TOOLS]
    ran = [count for count in errors if count is not None]
    return f"{sum(ran)} errors by {len(ran)} of {len(TOOLS)} tools" if ran else NOT_RUN
