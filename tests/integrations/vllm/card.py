"""vLLM on a GPU: stock, VLLM_BATCH_INVARIANT and ours, beside the patched trainer.

    python -m tests.integrations.vllm.card [SECONDS]     all stages of $STAGES, each in a process
    python -m tests.integrations.vllm.card STAGE          one stage of `ENGINES`, "model", "trainer"

    STAGES=ours_moe,stock_moe python -m tests.integrations.vllm.card      a mixture of experts

ours_moe makes the mixture and scores what it drew in its own process, so that two processes do all
of it.  stock_moe needs vLLM's _moe_C extension.

    large_llama, large_qwen3            models of 1.1 and 1.7 billion random parameters
    many_llama, many_qwen3              log-probs by the million
    many_llama_trainer, many_qwen3_trainer      the trainer's, beside them
    weights                             weights that change under captured graphs
    tp1, tp2, tp2_eager, tp_trainer     one rank, two ranks (two cards), both beside the trainer
    families, families_trainer          small models: chunks, preemption, prefix cache, windows
    hybrid_qwen3_next, hybrid_nemotron_h, hybrid_granite       models with layers that have a state
    continuous          transformers' generate_batch; $NEW_TRANSFORMERS: folder with 5.23
    example             examples/grpo_vllm.py
    determinism         vLLM's own tests; $VLLM_TESTS: the folder `tests` of its sources
    bench_rl, bench_rl_2                python -m perf bench rl --size 3b; with --gpus 2

$MANY_SECONDS: of the rounds of a stage "many_..."; $SELECTED: tests of "determinism".

Records go to $OUT/card.jsonl and, shortened, to standard output; the log of a stage to
$LOGS/STAGE.log, in $OUT where unset.  $STAGES: names of `ENGINES` and of the stages
above, and "trainer" where what was drawn so far is to be scored.  Two calls may run at
once, each with stages and a card of its own (CUDA_VISIBLE_DEVICES).  $SHAPE: prompts, their
length, new tokens, prompts served alone.  $SMALL=1: small sizes.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from perf.rl.engine import ENVIRONMENT, facts, plugin_folder
from tests.integrations.vllm import cases, gpu_hybrids, gpu_stages, processes
from tests.integrations.vllm import gpu_large as large
from tests.integrations.vllm.gpu_large import OUT, SMALL, WORK, say
from tests.ranks import ROOT

PROMPTS, LENGTH, NEW, ALONE = (
    int(n) for n in os.environ.get("SHAPE", "8,40,6,2" if SMALL else "64,256,128,8").split(",")
)
TEMPERATURE = 0.7


class Batch(NamedTuple):
    """Prompts of these lengths, tokens that each draws, and how many are drawn from alone too."""

    lengths: Sequence[int]
    new: int
    alone: int


class Engine(NamedTuple):
    """Variables of an engine's process, a model, its longest sequence, and what is drawn.

    options: of vLLM.  order: of the products, its trainer's too.
    """

    environment: Mapping[str, str]
    options: Mapping[str, object] = {}
    temperature: float = 0.0
    order: str = "chain"
    model: str = "model"
    longest: int = 128 if SMALL else 4096
    batches: Mapping[str, Batch] = {
        "main": Batch([LENGTH] * PROMPTS, NEW, ALONE),
        "mixed": Batch((5, 17, 70), 4, 3)
        if SMALL
        else Batch((5, 17, 100, 255, 257, 700, 1500, 3000), 32, 8),
    }


def ranks(count: int, **options: object) -> Engine:
    """Return an engine of so many ranks, whose sums have the order of one rank's."""
    # NVLink multicast is of a host that others share.
    names = ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
    environment = OURS | {"NCCL_NVLS_ENABLE": "0"} | dict.fromkeys(names, "1")
    options |= {"tensor_parallel_size": count, "disable_custom_all_reduce": True}
    options |= {"additional_config": {"cute_kernels": {"order": "tree"}}}
    options |= {"worker_extension_cls": large.EXTENSION}
    lengths = (5, 17, 100, 255, 257, 700, 1500, 3000) * 4 + (12000,) * 2
    batch = Batch((5, 17, 70, 120), 4, 4) if SMALL else Batch(lengths, 128, 4)
    of_model = {"order": "tree", "model": "llama", "longest": large.LONGEST}
    return Engine(environment, options, batches={"ranks": batch}, **of_model)


OURS, STOCK = {"CUTE_KERNELS_VLLM": "1"}, {"CUTE_KERNELS_VLLM": "0"}
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
ENGINES = {
    "ours_eager": Engine(OURS, {"eager": True}),
    "ours_graph": Engine(OURS),
    "ours_sampled": Engine(OURS, {"logprobs_mode": "processed_logprobs"}, TEMPERATURE),
    "ours_bi_graph": Engine(OURS | INVARIANT),
    "stock_graph": Engine(STOCK),
    "bi_graph": Engine(STOCK | INVARIANT),
    "ours_moe": Engine(OURS, model="mixture"),
    "stock_moe": Engine(STOCK, model="mixture"),
    "tp1": ranks(1),
    "tp2": ranks(2),
    "tp2_eager": ranks(2, eager=True),
}
#: Stages that score what those of a model drew.
TRAINERS = {"trainer": "model", "tp_trainer": "llama"}
_DEFAULT = "model,ours_eager,ours_graph,trainer,stock_graph,bi_graph,ours_sampled,trainer"


def drawn_file(stage: str) -> Path:
    return WORK / f"drawn_{stage}.pt"


def run_stage(stage: str) -> None:
    """One engine: alone against batched, decode against prefill; what it drew."""
    began, engine = time.time(), ENGINES[stage]
    if not (WORK / engine.model).exists():
        large.save_model(engine.model)
    sampling: dict[str, object] = {}
    if engine.temperature:
        # vLLM cannot rewind the generators of a CPU for the chunks of a prefill.
        sampling = {"temperature": engine.temperature, "seed": None if SMALL else 7}
    options = {"memory": 0.5, "max_model_len": engine.longest} | engine.options
    llm = large.start(engine.model, 64, **options)

    def generate(prompts: list[list[int]], new: int, **more: object) -> list:
        return large.generate(llm, prompts, new, **sampling | more)

    say(stage, "engine", seconds=round(time.time() - began, 1), **facts(llm))
    vocab, drawn = large.config_of(engine.model).vocab_size, []
    generate(large.random_prompts(vocab, (LENGTH,) * PROMPTS, 1), 4)  # compiles what is left
    for seed, (name, batch) in enumerate(engine.batches.items(), 1):
        prompts = large.random_prompts(vocab, batch.lengths, seed)
        pairs = large.decoded(generate(prompts, batch.new))
        alone = [large.decoded(generate([one], batch.new))[0] for one in prompts[: batch.alone]]
        counts = large.compare(alone, pairs[: batch.alone], to_first=True)
        say(stage, "alone_vs_batched", of=name, **counts)
        if not engine.temperature:
            again = generate([ids for ids, _ in pairs[: batch.alone]], 1, prompt_logprobs=0)
            counts = large.compare(pairs[: batch.alone], large.prompted(again))
            say(stage, "decode_vs_prefill", of=name, **counts)
        drawn += pairs
    states = "worker_extension_cls" in engine.options
    contracts = llm.collective_rpc("cute_kernels_contract") if states else None
    torch.save({"pairs": drawn, "contracts": contracts}, drawn_file(stage))
    if stage == "ours_moe":
        run_trainer([stage])
    say(stage, "done", seconds=round(time.time() - began, 1))
    llm.llm_engine.engine_core.shutdown()


def run_trainer(stages: Iterable[str]) -> None:
    """Count what differs from the patched trainer in what each of these stages of a model drew."""
    import cute_kernels as ck
    from cute_kernels.integrations.contract_exchange import require_engine

    runs = {s: torch.load(drawn_file(s)) for s in stages if drawn_file(s).exists()}
    first = ENGINES[next(iter(runs))]
    model = large.load_trainer(first.model, first.order)
    contract = ck.contract(model=model)
    for stage, run in runs.items():
        options = {"temperature": ENGINES[stage].temperature or 1.0, "order": first.order}
        score, groups = large.score_with(model, **options), large.grouped(run["pairs"])
        counts = large.count_differing(groups, score)
        if run["contracts"]:
            call = functools.partial(require_engine, contract, run["contracts"])
            counts["contract_error"] = gpu_stages.message(call)
        say("trainer", "engine_vs_trainer", of=stage, **counts)
    if first.order != "chain":
        one, *others = (run["pairs"] for run in runs.values())
        for other in others:
            say("trainer", "tp1_vs_tp2", **large.compare(one, other))
        chain = large.score_with(large.load_trainer(first.model))
        counts = large.count_differing([next(large.grouped(one))], chain)
        say("trainer", "control_of_another_order", **counts)


# ---- stages in other modules ---------------------------------------------------------------------


class Stage(NamedTuple):
    """One process.

    limit_s: seconds at which it is ended.  arguments: after `python`; none: of this module.
    site: folder that comes first on PYTHONPATH.
    """

    limit_s: float
    environment: Mapping[str, str] = {}
    arguments: tuple[str, ...] = ()
    site: str = ""


def stages() -> dict[str, Stage]:
    """The stages that are functions of `gpu_stages`, or commands."""
    many = float(os.environ.get("MANY_SECONDS", "120")) + 120
    folder, engine = gpu_stages.FAMILIES, ("-m", f"{__package__}.engine")
    arguments = *engine, str(folder), str(folder / gpu_stages.FILE), *cases.CASES
    out = {"weights": Stage(150, OURS), "families": Stage(150, OURS, arguments)}
    out["families_trainer"] = Stage(100, STOCK)
    for model in ("llama", "qwen3"):
        out[f"large_{model}"] = Stage(90)
        out |= {f"many_{model}": Stage(many, OURS), f"many_{model}_trainer": Stage(many, STOCK)}
    out |= {gpu_hybrids.STAGE + name: Stage(280, OURS) for name in gpu_hybrids.HYBRIDS}
    tests = os.environ.get("VLLM_TESTS", "vllm-src/tests")
    # Tests that take a minute each or less.
    selected = os.environ.get("SELECTED", "bs1_vs_bsN or decode_logprobs or needle")
    determinism = f"{__package__}.determinism", tests, str(WORK / "determinism_model")
    bench = ("-m", "perf", "bench", "rl", "--size", "3b", "-o", str(OUT / "rl.jsonl"))
    continuous, site = "tests.integrations.gpu_continuous_batching", "NEW_TRANSFORMERS"
    of_determinism = {"OUT": str(OUT / "determinism")}
    return out | {
        "continuous": Stage(90, STOCK, ("-m", continuous), os.environ.get(site, "")),
        "example": Stage(200, STOCK, ("examples/grpo_vllm.py", "--steps=4", "--hidden=1024")),
        "determinism": Stage(300, of_determinism, ("-m", *determinism, "-k", selected)),
        "bench_rl": Stage(400, {}, bench),
        "bench_rl_2": Stage(400, {}, (*bench, "--gpus", "2")),
    }


# ---- all of them ---------------------------------------------------------------------------------


def run_all(seconds: float) -> None:
    """Run the stages of $STAGES one after the other, each with what is left of the time."""
    logs = Path(os.environ.get("LOGS") or OUT)
    for folder in (OUT, WORK, logs, gpu_stages.FAMILIES):
        folder.mkdir(parents=True, exist_ok=True)
    names = os.environ.get("STAGES", _DEFAULT).split(",")
    for name in ENGINES.keys() & names:
        drawn_file(name).unlink(missing_ok=True)
    path = os.pathsep.join(
        str(p) for p in (ROOT, plugin_folder(WORK / "site"), os.environ.get("PYTHONPATH")) if p
    )
    end, limit = time.time() + seconds, float(os.environ.get("STAGE_LIMIT", "240"))
    for name in names:
        engine = ENGINES.get(name, Engine(STOCK))
        stage = stages().get(name) or Stage(limit, engine.environment)
        left = min(stage.limit_s, end - time.time())
        if left < 15:
            print(f"no time left for {name}", flush=True)
            continue
        environment = os.environ | ENVIRONMENT | {"OUT": str(OUT), "WORK": str(WORK)}
        environment |= stage.environment
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [stage.site, path]))
        log, start = logs / f"{name}.log", time.time()
        arguments = stage.arguments or ("-m", __spec__.name, name)
        code = processes.execute([sys.executable, *arguments], environment, log, left)
        lines = log.read_text(errors="replace").splitlines()
        took, ending = round(time.time() - start, 1), [line[:300] for line in lines[-6:]]
        print(f"== {name}: {code}, {took:.0f} s", flush=True)
        say(name, "exit", code=code, seconds=took, ending=ending)
        found = [line for line in lines if line.startswith("RESULT")]
        last = [line for line in found if is_progress(line)][-1:]
        shown = [line for line in found if line in last or not is_progress(line)]
        shown += [] if code == 0 and found else lines[-25:]
        print("\n".join(line[:900] for line in shown), flush=True)


def is_progress(line: str) -> bool:
    """Whether a record only says how far a stage has come."""
    return any(f'"what": "{what}"' in line for what in ("round", "so_far"))


def main() -> None:
    """Run all stages, or the one of the command line."""
    argument = sys.argv[1] if len(sys.argv) > 1 else "560"
    if argument.replace(".", "").isdigit():
        return run_all(float(argument))
    if argument == "model":
        large.save_model("model")
    elif argument in TRAINERS:
        run_trainer(name for name, e in ENGINES.items() if e.model == TRAINERS[argument])
    elif function := gpu_stages.functions().get(argument):
        function()
    else:
        run_stage(argument)
    processes.end()


if __name__ == "__main__":
    main()
