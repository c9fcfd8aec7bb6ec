"""The driver for a lent machine: stages in turn, time limits, few files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time

import pytest
import torch
from typer.testing import CliRunner

from perf import h200
from perf.__main__ import app
from perf.core import record
from perf.core import stage as stages_core
from perf.core.stage import Stage
from tests.hang import HANG_SECONDS


def python(name: str, code: str, limit_s: float = HANG_SECONDS) -> Stage:
    return Stage(name, ("-c", code), limit_s)


def test_each_stage_has_its_outcome(tmp_path):
    todo = [
        python("good", "print('first'); print('all good')"),
        python("bad", "print('about to fail'); raise SystemExit(3)"),
        python("after", "print('still run')"),
    ]
    outcomes = h200.run(todo, tmp_path)
    assert [(o.stage, o.status, o.last) for o in outcomes] == [
        ("good", "ok", "all good"),
        ("bad", "failed (3)", "about to fail"),
        ("after", "ok", "still run"),
    ]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [item["status"] for item in summary] == ["ok", "failed (3)", "ok"]
    log = (tmp_path / "h200.log").read_text()
    assert "==== good: ok" in log and "first\nall good" in log
    tail_lines = h200.tail(tmp_path, outcomes)
    assert tail_lines[0].startswith("---- bad: failed (3)") and tail_lines[-1] == "about to fail"


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
    monkeypatch.setattr(stages_core.subprocess, "Popen", Process)
    hung, after = h200.run([python("hung", code, 2.0), python("after", "print(1)")], tmp_path)
    assert hung.status == "timed out (2 s)"
    assert after.status == "ok"
    assert not running(int(hung.last))


def running(pid: int) -> bool:
    """Whether a process is alive: neither gone nor waiting to be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_what_the_budget_does_not_reach_is_not_run(tmp_path):
    outcomes = h200.run([python("one", "print(1)"), python("two", "print(2)")], tmp_path, 5.0)
    assert [o.status for o in outcomes] == ["not run", "not run"]
    assert not (tmp_path / "h200.log").exists()
    assert h200.tail(tmp_path, []) == []


def test_the_log_keeps_the_end_of_a_long_output(tmp_path, monkeypatch):
    monkeypatch.setattr(stages_core, "LOG_BYTES", 1000)
    h200.run([python("talks", "print('x' * 100_000); print('the end')")], tmp_path)
    log = (tmp_path / "h200.log").read_text()
    assert len(log) < 1200 and log.rstrip().endswith("the end")


def test_the_stages_write_few_files_into_one_folder(tmp_path):
    stages = h200.stages(tmp_path, "abc123")
    assert [stage.name for stage in stages] == [
        "smoke",
        "digest",
        "correctness",
        "probes",
        "pytest",
        "tune",
        "bench",
        "profile",
        "bench_logp",
        "bench_mhc",
        "bench_moe",
        "bench_qwen3",
        "bench_norm",
        "smoke_attention",
        "pytest_attention",
        "bench_attention",
        "profile_attention",
        "soak_attention",
        "sanitize_attention",
        "bench_model",
        "bench_rl",
    ]
    for stage in stages:
        assert all(os.path.dirname(path) == str(tmp_path) for path in written(stage, tmp_path))
    assert len(stages) * stages_core.LOG_BYTES < 16 << 20
    marked = [stage.name for stage in stages if "abc123" in stage.arguments]
    unmarked = [stage for stage in stages if stage.name not in marked]
    assert [stage.name for stage in unmarked] == ["pytest", "pytest_attention"]
    ran = [argument for stage in unmarked for argument in stage.arguments if "tests/" in argument]
    assert len(ran) == len(set(ran)) >= 4 and "tests/sparse_attn/test_triton_gpu.py" in ran


def written(stage: Stage, out) -> set[str]:
    """The files of records that a stage appends to."""
    return {a for a in stage.arguments if a.startswith(str(out)) and a.endswith(".jsonl")}


def test_the_schedule_of_calls_has_every_stage_and_brings_back_8_files(tmp_path):
    """perf/README.md's table; a call also brings h200.log, summary.json and golden vectors."""
    known = {stage.name: stage for stage in h200.stages(tmp_path, None)}
    text = (record.ROOT / "perf/README.md").read_text()
    calls = [
        [name for part in stages for name in part.split(",")]
        for line in text.split("| call | stages | writes |\n")[1].split("\n\n")[0].splitlines()[1:]
        for stages in [re.findall(r"`([\w,]+)`", line.split(" | ")[1])]
    ]
    assert sorted(name for call in calls for name in call) == sorted(known)
    for call in calls:
        files = set().union(*(written(known[name], tmp_path) for name in call))
        assert len(files) + 3 <= 8, call


@pytest.mark.parametrize("commit", [None, "abc123"])
def test_every_stage_is_a_command_this_program_has(tmp_path, commit, monkeypatch):
    """The parsers accept the arguments; without a card they stop at the card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for stage in h200.stages(tmp_path, commit):
        if stage.arguments[:2] == ("-m", "perf"):
            cli_result = CliRunner().invoke(app, list(stage.arguments[2:]))
            assert "needs a CUDA GPU" in cli_result.output, (stage, cli_result.output)
            assert cli_result.exit_code == 2
