"""Stages of a run on a lent machine: in turn, with time limits."""

from __future__ import annotations

import json
import subprocess
import time

import torch
from typer.testing import CliRunner

from perf import headline
from perf.__main__ import app
from perf.core import stage
from perf.core.stage import Stage
from tests.hang import HANG_SECONDS


def python(name: str, code: str, limit_s: float = HANG_SECONDS) -> Stage:
    return Stage(name, ("-c", code), limit_s)


def test_each_stage_has_its_outcome_and_the_end_of_its_output(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "LOG_BYTES", 1000)
    todo = [
        python("good", "print('x' * 100_000); print('all good')"),
        python("bad", "print('about to fail'); raise SystemExit(3)"),
        python("after", "print('still run')"),
    ]
    outcomes = stage.run(todo, tmp_path, HANG_SECONDS)
    assert [(o.stage, o.status, o.last) for o in outcomes] == [
        ("good", "ok", "all good"),
        ("bad", "failed (3)", "about to fail"),
        ("after", "ok", "still run"),
    ]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [item["status"] for item in summary] == ["ok", "failed (3)", "ok"]
    log = (tmp_path / stage.LOG).read_text()
    assert len(log) < 1500 and "all good" in log and "about to fail" in log
    assert stage.tail(tmp_path, outcomes)[-1] == "about to fail"
    again = stage.run([python("good", "print(1)")], tmp_path, HANG_SECONDS)
    assert stage.tail(tmp_path, again) == [], "a run's log is its own"


def running(pid: int) -> bool:
    """Whether a process is alive: neither gone nor waiting to be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_hanging_stage_ends_with_its_children_and_costs_itself_only(tmp_path, monkeypatch):
    started = tmp_path / "started"

    class Process(subprocess.Popen):
        """Stand-in process whose limit of 2 s is over when its child has started, however late."""

        def wait(self, timeout=None):
            if timeout == 2.0:
                for _ in range(100 * HANG_SECONDS):
                    if started.exists():
                        raise subprocess.TimeoutExpired(self.args, timeout)
                    time.sleep(0.01)
            return super().wait(timeout)

    code = (
        "import subprocess, sys, time\n"
        f"sleeper = 'import time; time.sleep({HANG_SECONDS})'\n"
        "child = subprocess.Popen([sys.executable, '-c', sleeper])\n"
        "print(child.pid, flush=True)\n"
        f"open({str(started)!r}, 'x').close()\n"
        f"time.sleep({HANG_SECONDS})\n"
    )
    monkeypatch.setattr(stage.subprocess, "Popen", Process)
    hung, after = stage.run(
        [python("hung", code, 2.0), python("after", "print(1)")], tmp_path, HANG_SECONDS
    )
    assert (hung.status, after.status) == ("timed out (2 s)", "ok")
    assert not running(int(hung.last))


def test_what_the_budget_does_not_reach_is_not_run(tmp_path):
    outcomes = stage.run([python("one", "print(1)"), python("two", "print(2)")], tmp_path, 5.0)
    assert [o.status for o in outcomes] == ["not run", "not run"]
    assert not (tmp_path / stage.LOG).exists() and stage.tail(tmp_path, []) == []


def test_stages_of_the_headline_are_commands_that_name_the_commit(tmp_path, monkeypatch):
    """The parsers accept the arguments; without a card they stop at the card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for one in headline.stages(tmp_path / "run.jsonl", "abc123"):
        assert one.arguments[-4:] == ("-o", str(tmp_path / "run.jsonl"), "--commit", "abc123")
        result = CliRunner().invoke(app, list(one.arguments[2:]))
        assert result.exit_code == 2 and "needs a CUDA GPU" in result.output, (one, result.output)
