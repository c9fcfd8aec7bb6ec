"""The headline: one run of one commit a card makes the tables of speed, and nothing else does."""

from __future__ import annotations

import json

import pytest

from perf import headline, report
from perf.core import record
from perf.core.systems import modules


@pytest.fixture(scope="module")
def run():
    (found,) = headline.runs().values()
    return found


def written(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_the_pages_have_the_tables_of_the_run(run):
    tables = "\n".join(report.speed_tables({"H200": run}))
    for page in ("README.md", "docs/costs.md"):
        assert tables in (record.ROOT / page).read_text()
    text = (record.ROOT / "README.md").read_text()
    assert report.readme(text, {"H200": run}) == text
    assert headline.origin(run).startswith(f"NVIDIA H200, `{run[0]['commit'][:10]}`, 20")


def test_a_run_of_two_commits_is_refused(tmp_path, run):
    path = written(tmp_path / "run.jsonl", run)
    assert list(headline.runs(path)) == ["H200"]
    for field in ("commit", "source"):
        with pytest.raises(record.RecordError, match="more than one commit"):
            headline.runs(written(path, [*run, run[0] | {field: "another"}]))


def test_a_new_run_replaces_that_of_its_card(tmp_path, run):
    other = [r | {"gpu": "NVIDIA H100 80GB HBM3"} for r in run[:3]]
    path = written(tmp_path / "run.jsonl", [*run, *other])
    headline.begin(path, "H200")
    assert record.read(path) == other
    headline.begin(path, "H100")
    assert headline.runs(path) == {} and report.speed_tables({}) == []


def test_a_time_that_changed_changes_the_table(run):
    changed = [
        r | {"ratio": {"torch": 9.87}} if (r["kernel"], r["system"]) == ("model", "ours") else r
        for r in run
    ]
    assert "| 9.87 (9.87 to 9.87) |" in "\n".join(report.speed_tables({"H200": changed}))


def test_every_command_measures_a_row(run):
    """A row without a record says so; no command is there for nothing."""
    rows = [row for page in modules("page") for row in page.SPEED]
    reached = {row.kernel for row in rows if row.ratios(report.latest(run, row.kernel))}
    assert {row.kernel for row in rows} == reached
    assert [c.split()[0] for c, _, _ in headline.COMMANDS] == list(
        dict.fromkeys(r["kernel"] for r in sorted(run, key=lambda r: r["date"]))
    )
    assert all(why for *_, why in headline.COMMANDS)
