"""Tests of the record of compute-sanitizer: its verdict, its path, what is recorded without it."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from perf.__main__ import app
from perf.core import record, sanitize

HEAD = "========= COMPUTE-SANITIZER\n"
CLEAN = HEAD + "sanitize target: ok\n========= ERROR SUMMARY: 0 errors\n"
FOUND = (
    HEAD
    + "========= Invalid __global__ write of size 1 bytes\n"
    + "sanitize target: ok\n========= ERROR SUMMARY: 1 error\n"
)


@pytest.mark.parametrize(
    ("case", "code", "text", "status", "count"),
    [
        ("memcheck", 0, CLEAN, "ok", 0),
        ("memcheck", 99, FOUND, "failed", 1),
        ("memcheck", 1, CLEAN, "failed", 0),
        ("memcheck", 0, CLEAN.replace("target: ok", ""), "failed", 0),
        ("synccheck", 0, CLEAN, "ok", 0),
        ("synccheck", 1, HEAD + "Device not supported\n", "failed", None),
        (sanitize.PLANTED, 99, FOUND, "ok", 1),
        (sanitize.PLANTED, 0, CLEAN, "failed", 0),
        (sanitize.PLANTED, 1, "Traceback", "failed", None),
    ],
)
def test_the_verdict(case, code, text, status, count):
    body = sanitize.verdict(case, code, text)
    assert (body["status"], body["errors"], body["exit_code"]) == (status, count, code)
    assert ("why" in body) == (status == "failed")
    line = sanitize.line(body | {"case": case, "seconds": 2.0})
    assert status in line and line.startswith("compute-sanitizer " + case)


def test_the_command_names_the_tool_and_this_program():
    line = " ".join(sanitize.command("cs", "synccheck", "target", False))
    assert line.startswith("cs --tool synccheck") and "--error-exitcode 99" in line
    assert line.endswith("-m perf sanitize target")
    assert sanitize.command("cs", "memcheck", "target", True)[-1] == "--plant"


def test_it_is_found_under_cuda_home(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    before = sanitize.find()
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.touch()
    assert before != sanitize.find() == str(tool)


def test_where_it_is_absent_the_records_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "environment", lambda commit: {"schema": record.SCHEMA})
    monkeypatch.setattr(sanitize, "find", lambda: None)
    path = tmp_path / "x.jsonl"
    cli_result = CliRunner().invoke(app, ["sanitize", "attention", "-o", str(path)])
    assert cli_result.exit_code == 1 and "absent" in cli_result.output
    records = record.read(path)
    assert [r["case"] for r in records] == [*sanitize.TOOLS, sanitize.PLANTED]
    assert {(r["status"], r["kind"]) for r in records} == {("absent", "sanitize")}


def test_each_tool_is_run_and_recorded(monkeypatch, tmp_path):
    script = tmp_path / "tool"
    script.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--plant) n=1;; *) n=0; echo "sanitize target: ok";; esac\n'
        'echo "cache $PYTORCH_NO_CUDA_MEMORY_CACHING"\n'
        'echo "========= ERROR SUMMARY: $n errors"\n'
    )
    script.chmod(0o700)
    monkeypatch.setattr(sanitize, "find", lambda: str(script))
    out = list(sanitize.measure("attention", "target", ["memcheck"], "abc"))
    assert [(r["case"], r["status"], r["errors"]) for r in out] == [
        ("memcheck", "ok", 0),
        (sanitize.PLANTED, "ok", 1),
    ]
    script.write_text("#!/bin/sh\necho cache $PYTORCH_NO_CUDA_MEMORY_CACHING\nexit 3\n")
    (body,) = sanitize.measure("attention", "target", ["synccheck"], "abc")
    assert body["why"] == "no summary, exit code 3" and body["tail"] == "cache 1"
