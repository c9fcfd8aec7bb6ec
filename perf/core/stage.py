"""Stages of a run on a lent machine: processes with time limits, so a hang costs its stage only."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import record

LOG, LOG_BYTES = "stages.log", 1 << 19
_SHORTEST_S = 10.0  # a stage with less time left is not started


@dataclass(frozen=True)
class Stage:
    """A command line after `python`, and the seconds it may take.

    environment: Variables besides this process's.
    """

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a stage: "ok", "failed (code)", "timed out" or "not run"; its last line."""

    stage: str
    status: str
    seconds: float
    last: str


def _stop(process: subprocess.Popen) -> None:
    """Ends the stage's own process group: asks first, then insists."""
    for signal_number, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, 30)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            return


def run_stage(stage: Stage, limit_s: float, log: Path) -> Outcome:
    """Runs one stage and appends the end of its output to the log."""
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-u", *stage.arguments],
            cwd=record.ROOT,
            env=os.environ | stage.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            status = "ok" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            status = f"timed out ({limit_s:.0f} s)"
        finally:
            if process.poll() is None:
                _stop(process)
        output.seek(max(0, output.seek(0, os.SEEK_END) - LOG_BYTES))
        text = output.read().decode(errors="replace")
    seconds = time.monotonic() - start
    with log.open("a") as file:
        file.write(f"==== {stage.name}: {status}, {seconds:.1f} s\n{text}\n")
    printed = [line.strip() for line in text.splitlines() if line.strip()]
    return Outcome(stage.name, status, round(seconds, 1), printed[-1][:160] if printed else "")


def run(todo: list[Stage], out: Path, budget_s: float) -> list[Outcome]:
    """Runs stages until the budget is spent; writes stages.log and summary.json into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / LOG).unlink(missing_ok=True)  # stages append to it
    end = time.monotonic() + budget_s
    outcomes = []
    for stage in todo:
        remaining_s = end - time.monotonic()
        if remaining_s < _SHORTEST_S:
            outcomes.append(Outcome(stage.name, "not run", 0.0, "the time of this call is spent"))
        else:
            outcomes.append(run_stage(stage, min(stage.limit_s, remaining_s), out / LOG))
        summary = json.dumps([asdict(outcome) for outcome in outcomes], indent=1)
        (out / "summary.json").write_text(summary + "\n")
    return outcomes


def tail(out: Path, outcomes: list[Outcome], lines: int = 12) -> list[str]:
    """The last lines of every stage that did not end well, for a reader who has only the reply."""
    tails = []
    sections = (out / LOG).read_text().split("==== ")[1:] if outcomes else []
    for section in sections:
        head, *body = section.strip().splitlines()
        if ": ok," not in head:
            tails += [f"---- {head}", *body[-lines:]]
    return tails
