"""The bench of an RL step without vLLM: stages, records, refusals; its trainers on a CPU."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from perf.core.stage import Outcome
from perf.rl import bench, trainer
from perf.rl.size import TINY, say

SIZE = dataclasses.replace(TINY, prompts=1, samples=2, layers=1, prompt=8, new=4, steps=2)


# ---- the parent ---------------------------------------------------------------------------------


def timed(work, system: str, seconds: dict[str, list[float]], differ: int) -> None:
    """What the processes of a system say."""
    counts = {"tokens": 16, "differ": differ, "mean_away": 0.0, "most_away": 0.0, "distinct": 9}
    say(work, system, "engine", seconds=[9.0], vllm="0.25.1")
    say(work, system, "generate", seconds=seconds["generate"], contracts=[])
    error = "two processes differ:\n  a\n  b" if differ else None
    say(work, system, "log-probs", seconds=seconds["log-probs"], contract_error=error, **counts)
    say(work, system, "update", seconds=seconds["update"], peak_gib=None, **counts)
    say(work, system, "load", seconds=[0.5, 0.5])


@pytest.fixture
def bench_with(monkeypatch, tmp_path):
    """Runs the bench with stages that are functions; its records and lines."""

    def run(ended, budget_s: float = 1e6):
        monkeypatch.setattr(bench, "run_stage", ended)
        limits = {"limit_s": 90.0, "budget_s": budget_s, "device": "cpu"}
        out, work = tmp_path / "rl.jsonl", tmp_path / "work"
        found = list(bench.rl(SIZE, ["native", "ours"], output=out, work=work, **limits))
        records = [item for item in found if isinstance(item, dict)]
        written = [json.loads(line) for line in out.read_text().splitlines()]
        assert written == json.loads(json.dumps(records))
        return records, [item for item in found if isinstance(item, str)]

    return run


def test_a_step_is_the_sum_of_its_parts(bench_with, tmp_path):
    def ended(stage, limit_s, log):
        part, _, system = stage.name.partition(" ")
        if part == "trainer":
            factor = 1.0 if system == "native" else 1.5
            parts = {"generate": [2.0, 4.0], "log-probs": [0.5, 0.5], "update": [1.0, 1.0]}
            parts = {name: [factor * s for s in seconds] for name, seconds in parts.items()}
            timed(tmp_path / "work", system, parts, differ=0 if system == "ours" else 16)
        if part == "engine":
            say(tmp_path / "work", system, "generate", seconds=[1.0, 1.0])
        return Outcome(stage.name, "ok", 1.0, "")

    records, lines = bench_with(ended)
    assert len(lines) == 5 and all(" ok " in line for line in lines)
    by_key = {(r["system"], r["product"]): r for r in records}
    assert len(by_key) == len(records) == 2 * len(bench.PRODUCTS)
    step = by_key["ours", "step"]
    assert (step["median_us"], step["kernel"], step["shape"]) == (6.75e6, "rl", SIZE.label)
    assert step["tokens_s"] == SIZE.tokens / 6.75 and step["samples"] == 2
    assert step["ratio"] == {"native": pytest.approx(1 / 1.5)}
    assert (step["differ"], step["tokens"], step["contract"]) == (0, 16, "equal")
    assert step["bitwise"] == {"engine and trainer": True} and step["engine"]["vllm"] == "0.25.1"
    native = by_key["native", "step"]
    assert native["contract"] != "equal" and not native["bitwise"]["engine and trainer"]
    assert all(map(bench.line, records))
    assert "tokens_s" not in by_key["ours", "load"]


def test_what_fails_is_named_and_costs_its_system_only(bench_with, tmp_path):
    def ended(stage, limit_s, log):
        if stage.name == "engine native":
            return Outcome(stage.name, "timed out (90 s)", 90.0, "Loading weights")
        if stage.name == "engine ours":
            say(tmp_path / "work", "ours", "generate", seconds=[1.0, 1.0])
            return Outcome(stage.name, "failed (1)", 9.0, "the load is broken")
        ran.append(stage.name)
        return Outcome(stage.name, "ok", 1.0, "")

    ran: list[str] = []
    records, lines = bench_with(ended)
    # Ours drew all its steps before it failed: there is something to score.
    assert ran == ["llama", "trainer ours"] and "not run" in lines[2]
    assert all(r["status"] == "failed" for r in records if r["system"] == "native")
    why = {r["why"] for r in records if r["system"] == "native"}
    assert why == {"engine native: timed out (90 s): Loading weights"}
    mine = {r["product"]: r for r in records if r["system"] == "ours"}
    assert mine["generate"]["status"] == "ok" and "load is broken" in mine["load"]["why"]
    assert "failed: engine ours" in bench.line(mine["load"])


# ---- the processes ------------------------------------------------------------------------------


def test_a_bit_is_counted():
    old = torch.linspace(-9, -1, 8)
    other = old.clone()
    other[3] = torch.nextafter(other[3], torch.tensor(0.0))
    assert trainer.compare(old, old)["differ"] == 0
    counts = trainer.compare(other, old)
    assert (counts["differ"], counts["tokens"], counts["distinct"]) == (1, 8, 8)
    assert 0 < counts["most_away"] < 1e-5
