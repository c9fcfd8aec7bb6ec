"""Small models of all families on a card: chunks of a prefill, preemption, the prefix cache.

    python -m tests.integrations.vllm.gpu_families engine FOLDER
    python -m tests.integrations.vllm.gpu_families trainer FOLDER

The cases of `test_engine`, in eager mode; a case that fails is recorded, and the next one begins.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path

from tests.integrations.vllm import cases, engine, trainer
from tests.integrations.vllm.gpu_large import say

FILE = "drawn.jsonl"


def attempt(stage: str, name: str, call) -> None:
    """Run one case; say what it raised, and what it took."""
    began, error = time.time(), None
    try:
        call()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"[:400]
    took = round(time.time() - began, 1)
    say(stage, "case", of=name, error=error, seconds=took)


def run_engines(folder: Path) -> None:
    """Draw from an engine of each case."""
    from vllm.distributed import cleanup_dist_env_and_memory

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("w") as file:

        def write(line: dict) -> None:
            print(json.dumps(line), file=file, flush=True)

        def draw(name: str) -> None:
            cases.save(name, folder)
            engine.run(name, folder, write)

        for name in cases.CASES:
            attempt("families", name, lambda name=name: draw(name))
            gc.collect()
            cleanup_dist_env_and_memory()


def run_trainers(folder: Path) -> None:
    """Score what was drawn, and count what differs in each run of a case."""
    lines = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    for name in dict.fromkeys(line["case"] for line in lines):
        mine = [line for line in lines if line["case"] == name]
        attempt("families_trainer", name, lambda name=name, mine=mine: score(name, folder, mine))


def score(name: str, folder: Path, lines: list[dict]) -> None:
    """Count the log-probs of a case whose bytes are not the trainer's."""
    for line, bits in zip(lines, trainer.bits_of(name, folder, lines, "chain"), strict=True):
        line["differ"] = sum(a != b for a, b in zip(line["bits"], bits, strict=True))
    for run in dict.fromkeys(line["run"] for line in lines):
        of_run = [line for line in lines if line["run"] == run]
        numbers = {key: sum(line[key] for line in of_run) for key in ("differ", "cached")}
        numbers["preempted"] = max(line["preempted"] for line in of_run)
        count = sum(len(line["bits"]) for line in of_run)
        say("families_trainer", "engine_vs_trainer", of=name, run=run, count=count, **numbers)


if __name__ == "__main__":
    {"engine": run_engines, "trainer": run_trainers}[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # the end of vLLM's process is not what is tested
