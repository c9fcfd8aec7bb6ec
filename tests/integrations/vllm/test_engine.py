"""vLLM on a CPU beside the patched trainer: equal bytes; the stock engine's differ.

Each case is a random model, 768 wide.  Its prompts run alone (their prefill in chunks of 64), in a
batch for which the cache has too few pages, and once more from the prefix cache.  The trainer
scores all of it in one padded batch.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: docs/vllm.md says how")
pytest.importorskip("transformers")
from tests.integrations.vllm import cases, processes

pytestmark = pytest.mark.nightly
RUNS = "alone", "batched", "cached"


def start(module: str, *arguments: object, plugin: str, **environment: str) -> None:
    """Run a module of this folder in a process of its own."""
    environment = {"CUTE_KERNELS_VLLM": plugin} | environment
    processes.run("-m", f"{__package__}.{module}", *arguments, **environment)


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module", params=["1", "0"], ids=["ours", "stock"])
def drawn(request, tmp_path_factory):
    """(whether the plug-in ran, lines of the engine, bytes of the trainer by sequence)."""
    folder = tmp_path_factory.mktemp("vllm")
    for name in cases.CASES:
        cases.save(name, folder)
    out, scored = folder / "engine.jsonl", folder / "trainer.jsonl"
    start("engine", folder, out, *cases.CASES, plugin=request.param)
    start("trainer", folder, out, scored, "chain", plugin="0")
    trainer = {(e["case"], e["prompt"], tuple(e["tokens"])): e["bits"] for e in read(scored)}
    return request.param == "1", read(out), trainer


@pytest.mark.parametrize("name", cases.CASES)
def test_log_probs_have_the_trainers_bytes_and_the_stock_engines_have_not(drawn, name):
    ours, lines, trainer = drawn
    for what in RUNS:
        runs = [line for line in lines if (line["case"], line["run"]) == (name, what)]
        assert len(runs) == (1 if what == "cached" else len(cases.CASES[name].lengths))
        pairs = [
            pair
            for line in runs
            for pair in zip(
                line["bits"], trainer[name, line["prompt"], tuple(line["tokens"])], strict=True
            )
        ]
        assert len(set(pairs)) > len(pairs) // 2, "log-probs that are all alike show nothing"
        differing = sum(mine != theirs for mine, theirs in pairs)
        print(f"{name} {what}: {differing} of {len(pairs)} log-probs differ")
        assert (differing == 0) if ours else (differing > 0)


@pytest.mark.parametrize("name", cases.CASES)
def test_the_runs_are_what_they_are_said_to_be(drawn, name):
    _, lines, _ = drawn
    of_case = {(e["run"], e["prompt"]): e for e in lines if e["case"] == name}
    assert of_case["batched", 0]["preempted"] > 0
    assert of_case["cached", len(cases.CASES[name].lengths) - 1]["cached"] >= cases.PAGE
    assert all(line["cached"] == 0 for (run, _), line in of_case.items() if run == "alone")


def test_layers_of_a_mixture_have_the_trainers_formula_and_refuse_other_options():
    start("mixture_layer", plugin="0")


@pytest.mark.parametrize(
    ("mutant", "name"),
    [("combine_rounded_products", "qwen3_moe"), ("weights_in_another_dtype", "mixtral")],
)
def test_a_mixture_that_is_not_the_trainers_differs(tmp_path, mutant, name):
    out, scored = tmp_path / "engine.jsonl", tmp_path / "trainer.jsonl"
    cases.save(name, tmp_path)
    start("mutant_engine", mutant, tmp_path, out, name, plugin="1")
    start("trainer", tmp_path, out, scored, "chain", plugin="0")
    trainer = {(e["prompt"], tuple(e["tokens"])): e["bits"] for e in read(scored)}
    lines = read(out)
    assert any(e["bits"] != trainer[e["prompt"], tuple(e["tokens"])] for e in lines)


def test_two_ranks_have_the_bytes_of_the_trainers_one(tmp_path):
    """Weights are cut over two processes, and sums have an order that both share."""
    out, scored = tmp_path / "engine.jsonl", tmp_path / "trainer.jsonl"
    cases.save("qwen2", tmp_path)
    # The plug-in is asked for by an argument, which processes of the engine have to hear of.
    several = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    start("engine_ranks", tmp_path, out, "qwen2", 2, plugin="0", **several)
    start("trainer", tmp_path, out, scored, "tree", plugin="0")
    pairs = list(zip(read(out), read(scored), strict=True))
    assert len(pairs) == len(cases.CASES["qwen2"].lengths)
    assert all(mine["tokens"] == list(theirs["tokens"]) for mine, theirs in pairs)
    assert all(mine["bits"] == theirs["bits"] for mine, theirs in pairs)
