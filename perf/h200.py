"""`python -m perf h200`: everything a lent GPU machine is asked, in one call of bounded length.

Each stage is a process of its own with a time limit, so a hang costs its stage only.  All results
go into one folder: at most 8 files, none above 16 MiB.  A short table comes last.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from .core import record
from .core.stage import Place, Stage, gpu_tests, pytest
from .core.systems import modules

BUDGET_S = 560  # a call ends after 600 s; the rest is for unpacking and for the table
LOG_BYTES = 1 << 19
_SHORTEST_S = 10.0  # a stage with less time left is not started


@dataclass(frozen=True)
class Outcome:
    """Outcome of a stage: "ok", "failed (code)", "timed out" or "not run"; its last line."""

    stage: str
    status: str
    seconds: float
    last: str


def stages(out: Path, commit: str | None) -> tuple[Stage, ...]:
    """Every stage, in the order in which they run."""
    place = Place(out, commit)
    system_stages = [stage for module in modules("stages") for stage in module.stages(place)]
    run_by_systems = {argument for stage in system_stages for argument in stage.arguments}
    tests = [path for path in gpu_tests() if path not in run_by_systems]
    probe = ("--golden", str(out))
    probe_names = ("width", "zeros", "model", "promotion")
    return (
        Stage("smoke", place.perf("probe", "smoke", *probe, file="probes.jsonl"), 120),
        Stage("digest", place.perf("digest", file="digests.jsonl"), 150),
        *(stage for stage in system_stages if stage.early),
        Stage("probes", place.perf("probe", *probe_names, *probe, file="probes.jsonl"), 240),
        Stage("pytest", pytest(tests), 400),
        *(stage for stage in system_stages if not stage.early),
    )


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
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            status = "ok" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            _stop(process)
            status = f"timed out ({limit_s:.0f} s)"
        output.seek(max(0, output.seek(0, os.SEEK_END) - LOG_BYTES))
        text = output.read().decode(errors="replace")
    seconds = time.monotonic() - start
    with log.open("a") as file:
        file.write(f"==== {stage.name}: {status}, {seconds:.1f} s\n{text}\n")
    printed = [line.strip() for line in text.splitlines() if line.strip()]
    return Outcome(stage.name, status, round(seconds, 1), printed[-1][:160] if printed else "")


def run(todo: list[Stage], out: Path, budget_s: float = BUDGET_S) -> list[Outcome]:
    """Runs stages until the budget is spent; writes h200.log and summary.json into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + budget_s
    outcomes = []
    for stage in todo:
        remaining_s = end - time.monotonic()
        if remaining_s < _SHORTEST_S:
            outcomes.append(Outcome(stage.name, "not run", 0.0, "the time of this call is spent"))
        else:
            outcomes.append(run_stage(stage, min(stage.limit_s, remaining_s), out / "h200.log"))
        summary = json.dumps([asdict(outcome) for outcome in outcomes], indent=1)
        (out / "summary.json").write_text(summary + "\n")
    return outcomes


def tail(out: Path, outcomes: list[Outcome], lines: int = 12) -> list[str]:
    """The last lines of every stage that did not end well, for a reader who has only the reply."""
    tails = []
    sections = (out / "h200.log").read_text().split("==== ")[1:] if outcomes else []
    for section in sections:
        head, *body = section.strip().splitlines()
        if ": ok," not in head:
            tails += [f"---- {head}", *body[-lines:]]
    return tails
