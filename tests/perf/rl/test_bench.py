"""The bench of an RL step without vLLM: stages, records, refusals; its trainers on a CPU."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
import torch

from perf.core import record
from perf.core.stage import Outcome
from perf.rl import bench, llama, trainer
from perf.rl.size import TINY, Size, results, say

SIZE = dataclasses.replace(TINY, prompts=1, samples=2, layers=1, prompt=8, new=4, steps=2)


# ---- the parent ---------------------------------------------------------------------------------


def test_stages_follow_each_other_in_processes_of_their_own(tmp_path):
    stages = bench.stages(["native", "ours"], tmp_path, 90.0, "cuda")
    assert [stage.name for stage in stages] == [
        "llama", "engine native", "trainer native", "engine ours", "trainer ours",
    ]  # fmt: skip
    assert all(stage.limit_s == 90.0 for stage in stages)
    assert stages[3].arguments == ("-m", "perf.rl.engine", str(tmp_path), "ours")
    plugin = [stage.environment.get("CUTE_KERNELS_VLLM") for stage in stages]
    assert plugin == [None, "0", "0", "1", "1"]
    assert str(record.ROOT) in stages[1].environment["PYTHONPATH"].split(os.pathsep)
    assert "VLLM_CPU_KVCACHE_SPACE" not in stages[1].environment
    on_cpu = bench.environment("native_invariant", tmp_path, "cpu")
    assert on_cpu["OMP_NUM_THREADS"] == "1" and on_cpu["VLLM_BATCH_INVARIANT"] == "1"


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


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A run whose engine drew random tokens, with the log-probs of a patched model."""
    pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("work")
    SIZE.save(folder)
    assert Size.load(folder) == SIZE
    llama.main(folder)
    ours = trainer.Ours(SIZE, folder, "cpu")
    for step in range(SIZE.steps):
        draw = torch.Generator().manual_seed(step)
        shape = SIZE.rows, SIZE.prompt + SIZE.new
        ids = torch.randint(SIZE.vocab, shape, generator=draw)
        with torch.no_grad():  # each sequence alone
            logps = torch.cat([ours.logps(row[None]) for row in ids])
        for system in ("native", "ours"):
            torch.save({"ids": ids, "logps": logps}, folder / f"{system}_{step}.pt")
    contracts = [trainer.contract_of(ours.model).to_dict()]
    for system in ("native", "ours"):
        say(folder, system, "generate", seconds=[1.0] * SIZE.steps, contracts=contracts)
    yield folder
    torch.set_num_threads(threads)


@pytest.mark.parametrize("system", ["native", "ours"])
def test_a_trainer_scores_and_updates(work, system, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trainer.main(work, system)
    out = results(work, system)
    scores, update = out["log-probs"], out["update"]
    assert scores["tokens"] == SIZE.steps * SIZE.tokens and update["tokens"] == SIZE.tokens
    assert len(scores["seconds"]) == len(update["seconds"]) == SIZE.steps
    assert scores["distinct"] == scores["tokens"]
    if system == "ours":
        assert scores["differ"] == update["differ"] == 0 and scores["contract_error"] is None
    else:  # the control: torch's formulas
        assert scores["differ"] > scores["tokens"] // 2 and update["differ"] > 0
        assert 0 < scores["mean_away"] < 1 and "formula of" in scores["contract_error"]


def test_a_bit_is_counted():
    old = torch.linspace(-9, -1, 8)
    other = old.clone()
    other[3] = torch.nextafter(other[3], torch.tensor(0.0))
    assert trainer.compare(old, old)["differ"] == 0
    counts = trainer.compare(other, old)
    assert (counts["differ"], counts["tokens"], counts["distinct"]) == (1, 8, 8)
    assert 0 < counts["most_away"] < 1e-5
