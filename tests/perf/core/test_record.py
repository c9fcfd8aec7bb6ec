"""Records: one JSON object per line, errors that name the line, and no machine's paths."""

from __future__ import annotations

import json
import re

import pytest

from perf.core import record

#: A path from a root or a home; a slash alone is also in names of cases.
PATH = re.compile(r"(^|[\s=])[/~]")


def good(**more) -> dict:
    return {"schema": record.SCHEMA, "kind": "bench", **more}


def test_round_trip(tmp_path):
    path = tmp_path / "new" / "a.jsonl"
    items = [good(x=1), good(kind="probe", y=[1, 2])]
    for item in items:
        record.append(path, item)
    assert record.read(path) == items
    record.append(tmp_path / "new" / "b.jsonl", good(x=3))
    assert [r.get("x") for r in record.read_all(tmp_path / "new")] == [1, None, 3]
    assert record.read_all(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("", "holds no record"),
        (json.dumps(good()) + "\n{oops\n", "a.jsonl:2: not JSON"),
        ("[1]\n", "a.jsonl:1: expected an object"),
        (json.dumps({"schema": record.SCHEMA, "kind": "poem"}), "expected an object whose kind"),
        (json.dumps({"schema": 99, "kind": "bench"}), "expected schema 1, got 99"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path, text, message):
    path = tmp_path / "a.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(record.RecordError, match=message):
        record.read(path)


def test_a_record_names_source_and_versions_and_no_machines_paths(monkeypatch):
    monkeypatch.setattr("sys.argv", ["perf", "bench", "gemm", "-o", "/root/out/b.jsonl", "a/b"])
    out = record.environment("abc123")
    assert (out["commit"], out["dirty"], len(out["source"])) == ("abc123", None, 16)
    assert set(record.DISTRIBUTIONS) < set(out["versions"]) and out["date"].endswith("+00:00")
    assert json.dumps(out) and out["command"] == "python -m perf bench gemm -o b.jsonl a/b"
    assert PATH.search("perf bench -o /root/b") and PATH.search("perf --output=~/b")
    for path in record.RESULTS.glob("*.jsonl"):
        assert not any(PATH.search(r["command"]) for r in record.read(path)), path
