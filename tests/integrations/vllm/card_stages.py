"""Stages of `card` that are modules or commands of their own, with their variables and seconds.

    large_llama, large_qwen3            models of 1.1 and 1.7 billion random parameters
    many_llama, many_qwen3              log-probs by the million
    many_llama_trainer, many_qwen3_trainer      the trainer's, beside them
    weights                             weights that change under captured graphs
    sizes_ours, sizes_stock, sizes_bi   GPU time of a decode step at 1, 64 and 256 sequences
    tp1, tp2, tp2_eager, tp_trainer     one rank, two ranks (two cards), both beside the trainer
    families, families_trainer          small models: chunks, preemption, prefix cache, windows
    continuous          transformers' generate_batch; $NEW_TRANSFORMERS: folder with 5.23
    example             examples/grpo_vllm.py
    determinism         vLLM's own tests; $VLLM_TESTS: the folder `tests` of its sources
    bench_rl, bench_rl_2                python -m perf bench rl --size 3b; with --gpus 2

$MANY_SECONDS: of the rounds of a stage "many_..."; $SEQUENCES: those of a stage "sizes_...", as
"64,256"; $SELECTED: tests of "determinism".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_HERE = "tests.integrations.vllm"
OURS, STOCK = {"CUTE_KERNELS_VLLM": "1"}, {"CUTE_KERNELS_VLLM": "0"}
INVARIANT = STOCK | {"VLLM_BATCHINVARIANT": "1"}
#: NVLink multicast is of a host that others share.
_RANKS = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
#: Tests of `determinism` that take a minute each or less.
_SELECTED = "bs1_vs_bsN or decode_logprobs or needle"


class Stage(NamedTuple):
    """One process.

    arguments: after `python`.  limit_s: seconds at which it is ended.  site: folder that comes
    first on PYTHONPATH.
    """

    arguments: tuple[str, ...]
    limit_s: float
    environment: Mapping[str, str] = {}
    site: str = ""


def find(name: str, out: Path, work: Path) -> Stage | None:
    """Return the stage of that name; None: it is one of `card` itself."""
    return _modules().get(name) or _commands(out, work).get(name)


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return "-m", f"{_HERE}.{name}", *arguments


def _modules() -> dict[str, Stage]:
    seconds = os.environ.get("MANY_SECONDS", "120")
    stages = {
        "weights": Stage(_module("gpu_weights"), 150, OURS),
        "tp1": Stage(_module("gpu_ranks", "engine", "1"), 100, OURS),
        "tp2": Stage(_module("gpu_ranks", "engine", "2"), 150, OURS | _RANKS),
        "tp2_eager": Stage(_module("gpu_ranks", "engine", "2", "eager"), 130, OURS | _RANKS),
        "tp_trainer": Stage(_module("gpu_ranks", "trainer"), 90, STOCK),
    }
    for model in ("llama", "qwen3"):
        limit, many = float(seconds) + 120, f"many_{model}"
        stages[f"large_{model}"] = Stage(_module("gpu_large", model), 90)
        stages[many] = Stage(_module("gpu_many", "engine", model, seconds), limit, OURS)
        trainer = _module("gpu_many", "trainer", model, seconds)
        stages[f"{many}_trainer"] = Stage(trainer, limit, STOCK)
    for system, variables in (("ours", OURS), ("stock", STOCK), ("bi", INVARIANT)):
        name = f"sizes_{system}"
        stages[name] = Stage(_module("gpu_sizes", name), 200, variables)
    return stages


def _commands(out: Path, work: Path) -> dict[str, Stage]:
    tests = os.environ.get("VLLM_TESTS", "vllm-src/tests")
    selection = ("-k", os.environ.get("SELECTED", _SELECTED))
    determinism = _module("determinism", tests, str(work / "determinism_model"), *selection)
    bench = ("-m", "perf", "bench", "rl", "--size", "3b", "-o", str(out / "rl.jsonl"))
    families = str(work / "families")
    continuous = ("-m", "tests.integrations.gpu_continuous_batching")
    return {
        "families": Stage(_module("gpu_families", "engine", families), 150, OURS),
        "families_trainer": Stage(_module("gpu_families", "trainer", families), 100, STOCK),
        "continuous": Stage(continuous, 90, STOCK, os.environ.get("NEW_TRANSFORMERS", "")),
        "example": Stage(("examples/grpo_vllm.py", "--steps=4", "--hidden=1024"), 200, STOCK),
        "determinism": Stage(determinism, 300, {"OUT": str(out / "determinism")}),
        "bench_rl": Stage(bench, 400),
        "bench_rl_2": Stage((*bench, "--gpus", "2"), 400),
    }
