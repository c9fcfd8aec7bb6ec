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


def test_every_ratio_of_the_example_is_one():
    text = processes.run(loop.PATH, "--steps=2", CUTE_KERNELS_VLLM="0")
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


def test_the_stock_engine_has_other_bytes_and_another_contract():
    """The control: same loop, same trainer, vLLM without the plug-in."""
    text = processes.run(loop.PATH, "--steps=1", "--stock", code=1, CUTE_KERNELS_VLLM="0")
    ((differ, count, ones),) = counts(text)
    assert differ > count // 2 and ones < count // 2 and "lines differ" in text


@pytest.fixture(scope="module")
def report_of(tmp_path_factory):
    """Report of three steps whose engine is killed, or never."""
    reports = {}

    def run(when: str) -> dict:
        if when not in reports:
            folder = tmp_path_factory.mktemp(when)
            out = folder / "report.json"
            module = killed_engine.__name__
            processes.run("-m", module, folder, out, when, CUTE_KERNELS_VLLM="0", **SEVERAL)
            reports[when] = json.loads(out.read_text())
        return reports[when]

    return run


@pytest.mark.parametrize("when", ["generate", "load", "worker"])
def test_a_killed_engine_resumes_from_published_weights(report_of, when):
    """Steps, weights and bytes are those of a run whose engine lived."""
    report, whole = report_of(when), report_of("never")
    # A core that lives tells of the end of its worker.
    told = "Exception: Call to collective_rpc method failed" if when == "worker" else "EngineDead"
    assert report["death"].startswith(told)
    assert report["steps"] == whole["steps"] and len(whole["steps"]) == killed_engine.STEPS
    assert all(step["good"] for step in whole["steps"])
    published = [step["published"] for step in whole["steps"]]
    assert len(set(published)) == len(published)
    refused = report["refused"]
    assert (
        "weights are stale: expected version 2, got none that was published"
        in (refused["unloaded"])
    )
    assert "weights: version 2, sha256" in refused["contract"]
    assert "version 1 is stale: 2 is published" in refused["older"]


def test_the_bench_runs_on_a_cpu(tmp_path):
    out = tmp_path / "rl.jsonl"
    processes.run("-m", "perf", "bench", "rl", "--device", "cpu", "-o", out)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    steps = {r["system"]: r for r in records if r["product"] == "step"}
    assert all(r["status"] == "ok" for r in records) and len(records) == 10
    assert steps["ours"]["differ"] == 0 and steps["ours"]["contract"] == "equal"
    assert steps["ours"]["distinct"] > steps["ours"]["tokens"] // 2
    assert steps["native"]["differ"] > 0 and steps["native"]["contract"] != "equal"
