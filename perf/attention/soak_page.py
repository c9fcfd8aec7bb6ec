"""The soak on attention's status page: how often the same bytes came, and what was seen."""

from __future__ import annotations

from collections.abc import Callable

from ..core.sanitize import PLANTED, TOOLS
from ..core.section import Section
from ..core.tables import NOT_RUN, folded, where
from .soak_cases import PACK, Case, suite

_HEAD = ["configurations", "cases", "calls", "differing bytes"]
_HEAD += ["graph replays", "differing bytes of replays", "ran on"]


def _latest(records: list[dict], kind: str, name: str) -> dict[str, dict]:
    """The last attention record of each value of the field `name`."""
    rows = [r for r in records if r["kind"] == kind and r["kernel"] == "attention"]
    return {r[name]: r for r in sorted(rows, key=lambda r: r["date"])}


def _row(text: str, cases: list[Case], latest: dict[str, dict]) -> list[str]:
    """One row of some cases; a failed one is named."""
    records_of_row = [latest[case.label] for case in cases if case.label in latest]
    if not records_of_row:
        return [text, f"0 of {len(cases)}", *[NOT_RUN] * 5]
    runs = records_of_row, [r["graph"] for r in records_of_row if "graph" in r]
    cells = []
    for run, counter in zip(runs, ("repeats", "replays"), strict=True):
        bad = sum(sum(r.get("differing_bytes", {}).values()) for r in run)
        cells += [f"{sum(r.get(counter, 0) for r in run):,}", f"{bad:,}"] if run else [NOT_RUN] * 2
    failed = [r["shape"] for r in records_of_row if r["status"] != "ok"]
    verdict = f"; failed: {', '.join(failed)}" if failed else ""
    oldest = min(records_of_row, key=lambda r: r["date"]) | {"status": "ok"}
    return [text, f"{len(records_of_row)} of {len(cases)}{verdict}", *cells, where(oldest)]


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


def _rows(records: list[dict]) -> list[list[str]]:
    latest, groups = _latest(records, "soak", "shape"), {}
    for case in suite():
        order = "" if case.ordered else ", without order (control: dQ is expected to differ)"
        packs = ", packs" if case.mask == PACK else ""
        groups.setdefault((case.dim, f"{case.dtype}{packs}{order}"), []).append(case)
    return [
        _row(f"D = {dim}, {text}", cases, latest) for (dim, text), cases in sorted(groups.items())
    ]


def _tool_rows(records: list[dict]) -> list[list[str]]:
    latest, rows = _latest(records, "sanitize", "case"), []
    for case in (*TOOLS, PLANTED):
        item = latest.get(case)
        if item is None or item["status"] == "absent":
            rows.append([case, NOT_RUN if item is None else item["why"], NOT_RUN])
            continue
        result = f"{item['errors']} errors" if item["errors"] is not None else "no summary"
        why = f": {item['why']}" if item["status"] != "ok" else ""
        expected = " (expected)" if case == PLANTED and item["status"] == "ok" else ""
        rows.append([case, result + expected + why, where(item)])
    return rows


def _of_attention(kind: str) -> Callable[[dict], bool]:
    return lambda item: (item["kind"], item.get("kernel")) == (kind, "attention")


SECTIONS = (
    Section(
        "The same bytes, again and again",
        """
        `python -m perf soak attention`: a forward and a backward beside other work, on 16 caps of
        the grid, into memory that holds junk; then a CUDA graph of both. Each call is compared
        with the first, byte for byte. The oldest record of a row says where it ran.
        """,
        lambda records: folded(_HEAD, _rows(records), ("ran on",)),
        _of_attention("soak"),
    ),
    Section(
        "compute-sanitizer",
        "`python -m perf sanitize attention`: small cases.",
        lambda records: folded(["tool", "found", "ran on"], _tool_rows(records), ("ran on",)),
        _of_attention("sanitize"),
    ),
)
