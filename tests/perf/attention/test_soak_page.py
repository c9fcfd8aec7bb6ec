"""The soak part of the status page, from records alone."""

from __future__ import annotations

from perf.attention import soak_cases, soak_page
from perf.core import record, sanitize


def head(kind: str, commit: str = "0123456789abcdef", day: int = 20) -> dict:
    out = {"schema": record.SCHEMA, "kind": kind, "kernel": "attention", "commit": commit}
    out |= {"dirty": False, "gpu": "NVIDIA H200", "date": f"2026-11-{day}T10:00:00+00:00"}
    return out


def soaked(case: soak_cases.Case, dq: int = 0, **more) -> dict:
    counts = dict.fromkeys(case.outputs, 0) | {"dq": dq}
    graph = {"replays": 1000, "differing_bytes": counts, "differing_results": dq and 1}
    item = head("soak") | case.items() | {"status": "ok", "expected_to_differ": not case.ordered}
    item |= {"repeats": case.repeats, "differing_bytes": counts, "graph": graph}
    return item | more


def ours(dim: int, dtype: str, ordered: bool = True) -> list[soak_cases.Case]:
    key = dim, dtype, ordered
    out = [c for c in soak_cases.suite() if (c.dim, c.dtype, c.ordered) == key]
    return [case for case in out if case.mask != soak_cases.PACK]


def test_the_totals_leave_the_controls_out():
    ordered, control = ours(64, "fp16"), ours(128, "bf16", ordered=False)
    records = [*map(soaked, ordered), *(soaked(case, 5) for case in control)]
    assert soak_page.totals(records) == (10_000, 10_000, 0)
    bad = soaked(ordered[0], 7)
    assert soak_page.totals([*records[1:], bad]) == (10_000, 10_000, 14)  # calls and replays
    message = soak_page.verdict([*records, bad])
    assert message == "14 differing bytes in 10,000 calls and 10,000 graph replays"
    assert soak_page.verdict([]) == soak_page.sanitized([]) == "not run"


def test_the_sanitizers_verdict_leaves_the_planted_error_out():
    items = [
        {"case": "memcheck", "errors": 0, "status": "ok"},
        {"case": "synccheck", "status": "absent", "why": "no such tool"},
        {"case": sanitize.PLANTED, "errors": 1, "status": "ok"},
    ]
    records = [head("sanitize") | item for item in items]
    assert soak_page.sanitized(records) == f"0 errors by 1 of {len(sanitize.TOOLS)} tools"
    bad = head("sanitize", day=21) | {"case": "memcheck", "errors": 3, "status": "failed"}
    assert soak_page.sanitized([*records, bad]).startswith("3 errors")
