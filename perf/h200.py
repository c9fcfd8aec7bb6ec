"""`python -m perf h200`: everything a lent GPU machine is asked, in one call of bounded length.

Each stage is a process of its own with a time limit, so a hang costs its stage only.  All results
go into one folder: at most 8 files, none above 16 MiB.  A short table comes last.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from .core.stage import Outcome, Place, Stage, gpu_tests, pytest, run_stage
from .core.systems import modules

BUDGET_S = 560  # a call ends after 600 s; the rest is for unpacking and for the table
_SHORTEST_S = 10.0  # a stage with less time left is not started


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
