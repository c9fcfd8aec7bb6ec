"""RL steps with vLLM on a CPU: the example, its control, kill and resume, and the bench.

By night, as it takes minutes: each test starts engines.
"""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: docs/vllm.md says how")
pytest.importorskip("transformers")
from tests.integrations.vllm import cases, killed_engine, loop, processes

pytestmark = pytest.mark.nightly
#: An engine whose core is a process of its own, which can be killed.
SEVERAL = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
COUNTS = re.compile(r"log-probs that differ (\d+) of (\d+), ratio exactly 1 for (\d+) of")


def counts(text: str) -> list[tuple[int, int, int]]:
    """(log-probs that differ, all of them, ratios of 1) of each step."""
    return [tuple(map(int, found)) for found in COUNTS.findall(text)]


#: Deaths of an engine, in the order of their steps.
DEATHS = ("generate", "load", "worker")
#: Test -> jobs of its processes.
JOBS = {
    "test_a_killed_engine_resumes_from_published_weights": ("killed", "whole"),
    "test_the_bench_runs_on_a_cpu": ("bench",),
    "test_every_ratio_of_the_example_is_one": ("example",),
    "test_the_stock_engine_has_other_bytes_and_another_contract": ("stock",),
}


@pytest.fixture(scope="module")
def background(request, tmp_path_factory):
    """Loops and the bench, two at a time."""
    folder = tmp_path_factory.mktemp("loop")

    def report(name: str, *deaths: str, **environment: str) -> dict:
        (folder / name).mkdir()
        out = folder / f"{name}.json"
        command = "-m", killed_engine.__name__, folder / name, out, *deaths
        processes.run(*command, CUTE_KERNELS_VLLM="0", **environment)
        return json.loads(out.read_text())

    def bench() -> list[dict]:
        out = folder / "rl.jsonl"
        processes.run("-m", "perf", "bench", "rl", "--device", "cpu", "-o", out)
        return [json.loads(line) for line in out.read_text().splitlines()]

    def example(*options: str, code: int = 0) -> str:
        return processes.run(loop.PATH, *options, code=code, CUTE_KERNELS_VLLM="0")

    jobs = {
        "killed": lambda: report("killed", *DEATHS, **SEVERAL),
        "whole": lambda: report("whole"),
        "bench": bench,
        "example": lambda: example("--steps=2"),
        "stock": lambda: example("--steps=1", "--stock", code=1),
    }
    names = processes.selected(request.session, JOBS)
    running = processes.Background({name: jobs[name] for name in names})
    yield running
    running.end()


def test_every_ratio_of_the_example_is_one(background):
    text = background.result("example")
    steps = counts(text)
    assert len(steps) == 2 and all(count > 200 for _, count, _ in steps)
    assert all(differ == 0 and ones == count for differ, count, ones in steps)
    assert text.count("contract equal") == 2


def test_every_ratio_of_a_mixture_of_experts_is_one(tmp_path):
    """Its experts and router are trained, published and loaded as any weight is."""
    options = "--steps=2", f"--model={cases.save('qwen3_moe', tmp_path)}", *killed_engine.SIZES
    text = processes.run(loop.PATH, *options, CUTE_KERNELS_VLLM="0")
    assert counts(text) == [(0, 48, 48)] * 2
    assert text.count("contract equal") == 2


def test_the_stock_engine_has_other_bytes_and_another_contract(background):
    """The control: same loop, same trainer, vLLM without the plug-in."""
    text = background.result("stock")
    ((differ, count, ones),) = counts(text)
    assert differ > count // 2 and ones < count // 2 and "lines differ" in text


@pytest.mark.parametrize("when", DEATHS)
def test_a_killed_engine_resumes_from_published_weights(background, when):
    """Steps, weights and bytes are those of a run whose engine, in the same process, lived."""
    report, whole = background.result("killed"), background.result("whole")
    death, refused = report["deaths"][when], report["refused"][when]
    # A core that lives tells of the end of its worker.
    told = "Exception: Call to collective_rpc method failed" if when == "worker" else "EngineDead"
    assert death.startswith(told)
    assert report["steps"] == whole["steps"] and len(whole["steps"]) == killed_engine.STEPS
    assert all(step["good"] for step in whole["steps"])
    published = [step["published"] for step in whole["steps"]]
    assert len(set(published)) == len(published)
    version = DEATHS.index(when) + 2
    stale = f"weights are stale: expected version {version}, got none that was published"
    assert stale in refused["unloaded"]
    assert f"weights: version {version}, sha256" in refused["contract"]
    assert f"version {version - 1} is stale: {version} is published" in refused["older"]


def test_the_bench_runs_on_a_cpu(background):
    records = background.result("bench")
    steps = {r["system"]: r for r in records if r["product"] == "step"}
    assert all(r["status"] == "ok" for r in records) and len(records) == 10
    assert steps["ours"]["differ"] == 0 and steps["ours"]["contract"] == "equal"
    assert steps["ours"]["distinct"] > steps["ours"]["tokens"] // 2
    assert steps["native"]["differ"] > 0 and steps["native"]["contract"] != "equal"
