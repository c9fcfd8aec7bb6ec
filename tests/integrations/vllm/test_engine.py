"""vLLM on a CPU beside the patched trainer: equal bytes; the stock engine's differ.

Each case is a random model, 768 wide.  Its prompts run alone (their prefill in chunks of 64), in a
batch for which the cache has too few pages, and once more from the prefix cache.  Some score what
they drew in chunks of other sizes, of four rows too, as speculation would.  The trainer scores all
of it in one padded batch.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: docs/vllm.md says how")
pytest.importorskip("transformers")
from tests.integrations.vllm import cases, processes

pytestmark = pytest.mark.nightly
RUNS = "alone", "batched", "cached"
#: vLLM's own scans of Mamba-2 have no CPU backend; of hybrids there are mutants below.
STOCK = [name for name, case in cases.CASES.items() if not case.is_hybrid]
SYSTEMS = [
    (system, name) for system in ("ours", "stock") for name in cases.CASES
    if system == "ours" or name in STOCK
]  # fmt: skip


def start(module: str, *arguments: object, plugin: str, **environment: str) -> None:
    """Run a module of this folder in a process of its own."""
    environment = {"CUTE_KERNELS_VLLM": plugin} | environment
    processes.run("-m", f"{__package__}.{module}", *arguments, **environment)


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


#: Test -> jobs of its processes.
JOBS = {
    "test_log_probs_have_the_trainers_bytes_and_the_stock_engines_have_not": ("ours", "stock"),
    "test_the_runs_are_what_they_are_said_to_be": ("ours", "stock"),
    "test_two_ranks_have_the_bytes_of_the_trainers_one": ("ranks",),
}


@pytest.fixture(scope="module")
def background(request, tmp_path_factory):
    """Engines and trainers: one engine and one trainer for all cases of a system."""
    folder = tmp_path_factory.mktemp("vllm")
    names = processes.selected(request.session, JOBS)
    for name in cases.CASES:
        cases.save(name, folder)
    jobs = {"ours": lambda: draw(folder, "1"), "stock": lambda: draw(folder, "0")}
    jobs["ranks"] = lambda: draw_on_ranks(folder)
    running = processes.Background({name: jobs[name] for name in names})
    yield running
    running.end()


def draw(folder, plugin: str) -> tuple[list[dict], dict[tuple, list[int]]]:
    """Return the lines of the engine, and the trainer's bytes by sequence."""
    out, scored = folder / f"engine_{plugin}.jsonl", folder / f"trainer_{plugin}.jsonl"
    start("engine", folder, out, *(cases.CASES if plugin == "1" else STOCK), plugin=plugin)
    start("trainer", folder, out, scored, "chain", plugin="0")
    return read(out), bits_by_sequence(scored)


def bits_by_sequence(scored) -> dict[tuple, list[int]]:
    """(case, prompt, tokens) -> bits of the trainer's log-probs."""
    return {(e["case"], e["prompt"], tuple(e["tokens"])): e["bits"] for e in read(scored)}


def draw_on_ranks(folder) -> tuple[list[dict], list[dict], list[dict]]:
    """Return the lines of an engine of two ranks and of the trainer, and contracts of the ranks."""
    out, scored = folder / "ranks.jsonl", folder / "ranks_trainer.jsonl"
    # The plug-in is asked for by an argument, which processes of the engine have to hear of.
    start("engine", "--ranks", folder, out, "qwen2", plugin="0")
    start("trainer", folder, out, scored, "tree", plugin="0")
    return read(out), read(scored), json.loads(out.with_suffix(".contracts").read_text())


@pytest.mark.parametrize(("system", "name"), SYSTEMS)
def test_log_probs_have_the_trainers_bytes_and_the_stock_engines_have_not(background, name, system):
    lines, trainer = background.result(system)
    chunks = tuple(f"chunks of {budget}" for budget in cases.CASES[name].budgets)
    for what in (RUNS if cases.CASES[name].caches else RUNS[:2]) + chunks:
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
        assert (differing == 0) if system == "ours" else (differing > 0)


@pytest.mark.parametrize(("system", "name"), SYSTEMS)
def test_the_runs_are_what_they_are_said_to_be(background, name, system):
    lines, _ = background.result(system)
    case = cases.CASES[name]
    of_case = {(e["run"], e["prompt"]): e for e in lines if e["case"] == name}
    if not (case.is_hybrid and case.caches):  # those wait for pages before they begin
        assert of_case["batched", 0]["preempted"] > 0
    if case.caches:
        assert of_case["cached", len(case.lengths) - 1]["cached"] >= case.page
    assert all(line["cached"] == 0 for (run, _), line in of_case.items() if run == "alone")


def test_layers_of_a_mixture_have_the_trainers_formula_and_refuse_other_options():
    start("mixture_layer", plugin="0")


@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        ("combine_rounded_products", "qwen3_moe"),
        ("weights_in_another_dtype", "mixtral"),
        ("resume_without_inputs", "qwen3_next"),
        ("keep_states", "qwen3_next_chunks"),
        ("steps_without_limits", "nemotron_h"),
    ],
)
def test_an_engine_that_is_not_the_trainers_differs(tmp_path, mutant, name):
    out, scored = tmp_path / "engine.jsonl", tmp_path / "trainer.jsonl"
    cases.save(name, tmp_path)
    start("engine", f"--{mutant}", tmp_path, out, name, plugin="1")
    start("trainer", tmp_path, out, scored, "chain", plugin="0")
    trainer = bits_by_sequence(scored)
    lines = read(out)
    assert any(e["bits"] != trainer[name, e["prompt"], tuple(e["tokens"])] for e in lines)


def test_two_ranks_have_the_bytes_of_the_trainers_one(background):
    """Weights are cut over two processes, and sums have an order that both share."""
    drawn, scored, contracts = background.result("ranks")
    pairs = list(zip(drawn, scored, strict=True))
    assert len(pairs) == len(cases.CASES["qwen2"].lengths)
    assert all(mine["tokens"] == list(theirs["tokens"]) for mine, theirs in pairs)
    assert all(mine["bits"] == theirs["bits"] for mine, theirs in pairs)
    assert [contract["orders"] for contract in contracts] == 2 * [{"linear": "tree"}]
