"""The soak part of the status page, from records alone."""

from __future__ import annotations

from perf.attention import soak_cases, soak_page
from perf.core import record, sanitize
from tests.perf.pages import made, row

_SOAK = "bits beside other work"


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


def rendered(*records: dict) -> str:
    return made("attention", *records)


def ours(dim: int, dtype: str, ordered: bool = True) -> list[soak_cases.Case]:
    key = dim, dtype, ordered
    out = [c for c in soak_cases.suite() if (c.dim, c.dtype, c.ordered) == key]
    return [case for case in out if case.mask != soak_cases.PACK]


def test_without_records_every_row_says_not_run():
    text = rendered()
    for case in soak_cases.suite():
        out = [x for x in text.splitlines() if x.startswith(f"| D = {case.dim}, {case.dtype}")]
        assert out and all(x.count("not run") == 4 and "| 0 of " in x for x in out)
    for case in (*sanitize.TOOLS, sanitize.PLANTED):
        assert row(text, case)[1:] == ["not run"]
    assert text.count("Every row: ran on: not run.") == 2


def test_records_of_a_row_are_added_up():
    cases = ours(64, "fp16")
    text = rendered(*map(soaked, cases))
    assert row(text, "D = 64, fp16")[1:] == [
        "10 of 10",
        "10,000",
        "0",
        "10,000",
        "0",
        "NVIDIA H200, 0123456789, 2026-11-20",
    ]
    assert row(text, "D = 64, bf16")[1] == "0 of 10"


def test_the_last_record_of_a_case_counts_and_the_oldest_says_where():
    first, *others = ours(64, "fp16")
    bad = soaked(first, 7, status="failed", why="7 bytes", date="2026-11-18T10:00:00+00:00")
    new = [soaked(case, **head("soak", "f" * 16, 21)) for case in others]
    cells = row(rendered(bad, *new), "D = 64, fp16")
    assert cells[1] == f"10 of 10; failed: {first.label}" and cells[3] == "7"
    assert cells[-1] == "NVIDIA H200, 0123456789, 2026-11-18"
    cells = row(rendered(bad, soaked(first), *new), "D = 64, fp16")
    assert cells[1] == "10 of 10" and cells[3] == "0"


def test_the_totals_leave_the_controls_out():
    ordered, control = ours(64, "fp16"), ours(128, "bf16", ordered=False)
    records = [*map(soaked, ordered), *(soaked(case, 5) for case in control)]
    assert soak_page.totals(records) == (10_000, 10_000, 0)
    bad = soaked(ordered[0], 7)
    assert soak_page.totals([*records[1:], bad]) == (10_000, 10_000, 14)  # calls and replays
    message = row(rendered(*records, bad), _SOAK)[2]
    assert message == "14 differing bytes in 10,000 calls and 10,000 graph replays"
    assert row(rendered(), _SOAK)[1:] == ["not run"] * 2


def test_a_control_shows_what_it_saw():
    cases = ours(128, "bf16", ordered=False)
    text = rendered(*(soaked(case, 5) for case in cases))
    name = "D = 128, bf16, without order (control: dQ is expected to differ)"
    assert row(text, name)[1:6] == ["4 of 4", "4,000", "20", "4,000", "20"]


def test_a_case_that_failed_before_it_was_repeated_is_named():
    case = ours(64, "fp16")[0]
    item = head("soak") | case.items() | {"status": "failed", "why": "no tile"}
    cells = row(rendered(item | {"expected_to_differ": False}), "D = 64, fp16")
    assert cells[1:4] == [f"1 of 10; failed: {case.label}", "0", "0"] and cells[4] == "not run"


def test_the_sanitizers_verdicts():
    facts = {"exit_code": 0, "seconds": 3.0}
    items = [
        {"case": "memcheck", "errors": 0, "status": "ok"},
        {"case": "synccheck", "status": "absent", "why": "no such tool"},
        {"case": sanitize.PLANTED, "errors": 1, "status": "ok"},
    ]
    text = rendered(*(head("sanitize") | facts | item for item in items))
    place = "NVIDIA H200, 0123456789, 2026-11-20"
    assert row(text, "memcheck")[1:] == ["0 errors", place]
    assert row(text, "synccheck")[1:] == ["no such tool", "not run"]
    assert row(text, sanitize.PLANTED)[1:] == ["1 errors (expected)", place]
    bad = {"case": "memcheck", "errors": None, "status": "failed", "why": "no summary"}
    cells = row(rendered(head("sanitize") | facts | bad), "memcheck")
    assert cells[1:] == ["no summary: no summary", f"failed {place}"]
