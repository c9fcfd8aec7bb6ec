"""Records of compute-sanitizer: the verdict, and what is recorded with and without the tool."""

from __future__ import annotations

import pytest

from perf.core import sanitize

CLEAN = "sanitize target: ok\n========= ERROR SUMMARY: 0 errors\n"
FOUND = CLEAN.replace("0 errors", "1 error")


@pytest.mark.parametrize(
    ("case", "code", "text", "status", "count"),
    [
        ("memcheck", 0, CLEAN, "ok", 0),
        ("memcheck", 99, FOUND, "failed", 1),
        ("memcheck", 1, CLEAN, "failed", 0),
        ("memcheck", 0, CLEAN.replace("target: ok", ""), "failed", 0),
        ("synccheck", 1, "Device not supported\n", "failed", None),
        (sanitize.PLANTED, 99, FOUND, "ok", 1),
        (sanitize.PLANTED, 0, CLEAN, "failed", 0),
        (sanitize.PLANTED, 1, "Traceback", "failed", None),
    ],
)
def test_the_verdict(case, code, text, status, count):
    body = sanitize.verdict(case, code, text)
    assert (body["status"], body["errors"], body["exit_code"]) == (status, count, code)
    assert ("why" in body) == (status == "failed")


def test_the_tool_is_found_under_cuda_home(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    before = sanitize.find()
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.touch()
    assert before != sanitize.find() == str(tool)


def test_each_tool_is_run_and_recorded_and_an_absent_one_too(monkeypatch, tmp_path):
    script = tmp_path / "tool"
    script.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--plant) n=1;; *) n=0; echo "sanitize target: ok";; esac\n'
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
    monkeypatch.setattr(sanitize, "find", lambda: None)
    (body,) = sanitize.measure("attention", "target", ["synccheck"], "abc")
    assert (body["status"], body["kind"]) == ("absent", "sanitize")
