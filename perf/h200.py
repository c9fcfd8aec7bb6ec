"""`python -m perf h200`: everything a lent GPU machine is asked, in one call of bounded length.

Each stage is a process of its own with a time limit, so a hang costs its stage only.  All results
go into one folder: at most 8 files, none above 16 MiB.  A short table comes last.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from .core import record
from .core.stage import Outcome, Stage, run_stage

BUDGET_S = 560  # a call ends after 600 s; the rest is for unpacking and for the table
_SHORTEST_S = 10.0  # a stage with less time left is not started


#: (name, `perf` command, file of its records, seconds it may take), in the order in which they run:
#: what is right comes before what is fast.
COMMANDS = (
    ("smoke", "probe smoke", "probes.jsonl", 120),
    ("digest", "digest", "digests.jsonl", 150),
    (
        "correctness",
        "bench gemm --check-only --rivals ours,ours_triton,cublas",
        "checks.jsonl",
        150,
    ),
    ("probes", "probe width zeros model promotion", "probes.jsonl", 240),
    ("tune", "tune", "tune.jsonl", 240),
    ("bench", "bench gemm", "bench.jsonl", 500),
    ("profile", "profile gemm", "profile.jsonl", 120),
    ("bench_logp", "bench logp", "logp.jsonl", 500),
    ("bench_mhc", "bench mhc", "mhc.jsonl", 600),
    ("bench_moe", "bench moe", "moe.jsonl", 520),
    ("bench_qwen3", "bench qwen3-moe", "moe.jsonl", 300),
    ("bench_norm", "bench norm", "norm.jsonl", 300),
    (
        "smoke_attention",
        "bench attention --check-only --heads 16 --systems ours,ours_unordered",
        "checks.jsonl",
        150,
    ),
    ("bench_attention", "bench attention", "bench.jsonl", 420),
    ("profile_attention", "profile attention", "profile.jsonl", 300),
    ("soak_attention", "soak attention", "checks.jsonl", 330),
    ("sanitize_attention", "sanitize attention", "checks.jsonl", 400),
    ("bench_model", "bench model", "model.jsonl", 400),
    ("bench_rl", "bench rl", "rl.jsonl", 560),
)
#: Stages of tests: the stage that each follows, and the seconds it may take. Those of attention
#: take as long as all others.
TESTS = {"pytest": ("probes", 400), "pytest_attention": ("smoke_attention", 550)}
_TEST_FILES = ("tests/**/test_gpu.py", "tests/**/test_*_gpu.py")


def stages(out: Path, commit: str | None) -> list[Stage]:
    """Every stage, in the order in which they run."""
    mark = ("--commit", commit) if commit else ()
    tests = {after: Stage(name, _pytest(name), limit) for name, (after, limit) in TESTS.items()}
    todo = []
    for name, command, file, limit_s in COMMANDS:
        golden = ("--golden", str(out)) if command.startswith("probe ") else ()
        options = (*golden, "-o", str(out / file), *mark)
        todo.append(Stage(name, ("-m", "perf", *command.split(), *options), limit_s))
        if name in tests:
            todo.append(tests[name])
    return todo


def _pytest(name: str) -> tuple[str, ...]:
    """Tests for a GPU by file: collecting the others would import what that machine may lack."""
    paths = sorted({p for pattern in _TEST_FILES for p in record.ROOT.glob(pattern)})
    files = [str(path.relative_to(record.ROOT)) for path in paths]
    of_attention = name == "pytest_attention"
    files = [file for file in files if file.startswith("tests/sparse_attn/") == of_attention]
    return ("-m", "pytest", *files, "-q", "-p", "no:cacheprovider")


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
