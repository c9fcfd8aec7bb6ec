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
    sizes_ours, sizes_stock, sizes_bi   GPU time of a decode step at 1, 64 and 256 sequences
    tp1, tp2, tp2_eager, tp_trainer     one rank, two ranks (two cards), both beside the trainer
    families, families_trainer          small models: chunks, preemption, prefix cache, windows
    continuous          transformers' generate_batch; $NEW_TRANSFORMERS: folder with 5.23
    example             examples/grpo_vllm.py
    determinism         vLLM's own tests; $VLLM_TESTS: the folder `tests` of its sources
    bench_rl, bench_rl_2                python -m perf bench rl --size 3b; with --gpus 2

$MANY_SECONDS: of the rounds of a stage "many_..."; $SEQUENCES: those of a stage "sizes_...", as
"64,256"; $SELECTED: tests of "determinism".

Records go to $OUT/card.jsonl and, shortened, to standard output; the log of a stage to
$LOGS/STAGE.log, in $OUT where unset.  $STAGES: names of `ENGINES` and of the stages
above, and "trainer" where what was drawn so far is to be scored.  Two calls may run at
once, each with stages and a card of its own (CUDA_VISIBLE_DEVICES).  $SHAPE: prompts, their
length, new tokens, prompts served alone.  $SMALL=1: small sizes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from perf.rl.engine import ENVIRONMENT, facts, plugin_folder
from tests.integrations.vllm import cases, gpu_stages, processes
from tests.integrations.vllm import gpu_large as large
from tests.integrations.vllm.gpu_large import OUT, SMALL, WORK, say
from tests.ranks import ROOT

PROMPTS, LENGTH, NEW, ALONE = (
    int(n) for n in os.environ.get("SHAPE", "8,40,6,2" if SMALL else "64,256,128,8").split(",")
)
#: Prompts of a mixed batch, and the tokens that each draws.
MIXED = (5, 17, 70) if SMALL else (5, 17, 100, 255, 257, 700, 1500, 3000)
MIXED_NEW = 4 if SMALL else 32
LONGEST = 128 if SMALL else 4096
OURS, STOCK = {"CUTE_KERNELS_VLLM": "1"}, {"CUTE_KERNELS_VLLM": "0"}
INVARIANT = STOCK | {"VLLM_BATCH_INVARIANT": "1"}
#: NVLink multicast is of a host that others share.
_RANKS = OURS | {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
_RANKS |= {"NVSHMEM_DISABLE_NVLS": "1"}
#: Stage -> variables of its engine.
ENGINES = {
    "ours_eager": OURS,
    "ours_graph": OURS,
    "ours_sampled": OURS,
    "ours_bi_graph": OURS | {"VLLM_BATCH_INVARIANT": "1"},
    "stock_graph": STOCK,
    "bi_graph": INVARIANT,
    "ours_moe": OURS,
    "stock_moe": STOCK,
}
_MOE, _SAMPLED = "_moe", "ours_sampled"
_DEFAULT = "model,ours_eager,ours_graph,trainer,stock_graph,bi_graph,ours_sampled,trainer"
TEMPERATURE = 0.7


def run_stage(stage: str) -> None:
    """One engine: alone against batched, decode against prefill, kernels, speed; what it drew."""
    began, model = time.time(), "mixture" if stage.endswith(_MOE) else "model"
    if not (WORK / model).exists():
        large.save_model(model)
    is_sampled, options = stage == _SAMPLED, {}
    sampling: dict[str, object] = {}
    if is_sampled:
        options = {"logprobs_mode": "processed_logprobs"}
        # vLLM cannot rewind the generators of a CPU for the chunks of a prefill.
        sampling = {"temperature": TEMPERATURE, "seed": None if SMALL else 7}
    eager = stage == "ours_eager"
    llm = large.start(model, 64, eager=eager, memory=0.5, max_model_len=LONGEST, **options)

    def generate(prompts: list[list[int]], new: int, **more: object) -> tuple[list, float]:
        start = time.perf_counter()
        return large.generate(llm, prompts, new, **sampling | more), time.perf_counter() - start

    say(stage, "engine", seconds=round(time.time() - began, 1), **facts(llm))
    vocab = large.config_of(model).vocab_size
    main = large.random_prompts(vocab, [LENGTH] * PROMPTS, 1)
    mixed = large.random_prompts(vocab, MIXED, 2)
    generate(main, 4)  # compiles what is still to be compiled
    drawn = []
    for name, prompts, new, alone in (("main", main, NEW, ALONE), ("mixed", mixed, MIXED_NEW, 99)):
        outputs, seconds = generate(prompts, new)
        batch = large.decoded(outputs)
        single = [large.decoded(generate([one], new)[0])[0] for one in prompts[:alone]]
        counts = large.compare(single, batch[:alone], to_first=True)
        say(stage, "alone_vs_batched", of=name, **counts)
        if not is_sampled:
            again, _ = generate([ids for ids, _ in batch[:alone]], 1, prompt_logprobs=0)
            counts = large.compare(batch[:alone], large.prompted(again))
            say(stage, "decode_vs_prefill", of=name, **counts)
        drawn += batch
        say(stage, "seconds", of=name, batched=round(seconds, 3), sequences=len(batch), new=new)
    torch.save(drawn, WORK / f"drawn_{stage}.pt")
    if not is_sampled and large.ON_CARD:
        _profile(stage, generate, main)
        runs = [generate(main, NEW)[1] for _ in range(3)]
        speed = round(PROMPTS * NEW / min(runs))
        say(stage, "speed", seconds=[round(s, 3) for s in runs], tok_s=speed)
    if stage == "ours_moe":
        run_trainer(stage)
    say(stage, "done", seconds=round(time.time() - began, 1))


def _profile(stage: str, generate, prompts: list) -> None:
    """GPU time of the kernels of one prefill and eight steps."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as run:
        generate(prompts, 9)
    rows = [(e.self_device_time_total, e.count, e.key) for e in run.key_averages()]
    rows.sort(reverse=True)
    top = [[round(us), count, key[:60]] for us, count, key in rows[:24]]
    say(stage, "kernels", total_us=round(sum(row[0] for row in rows)), top=top)


def run_trainer(only: str | None = None) -> None:
    """Count what differs from the patched trainer in what each stage drew.

    only: A stage; None: those of the Llama.
    """
    model = large.load_trainer("model" if only is None else "mixture")
    for path in sorted(WORK.glob("drawn_*.pt")):
        stage = path.stem.removeprefix("drawn_")
        if stage != only if only is not None else stage.endswith(_MOE):
            continue
        score = large.score_with(model, temperature=TEMPERATURE if stage == _SAMPLED else 1.0)
        counts = large.count_differing(large.grouped(torch.load(path)), score)
        say("trainer", "engine_vs_trainer", of=stage, **counts)


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
    out |= {"families_trainer": Stage(100, STOCK), "tp_trainer": Stage(90, STOCK)}
    out |= {"tp1": Stage(100, OURS), "tp2": Stage(150, _RANKS), "tp2_eager": Stage(130, _RANKS)}
    for model in ("llama", "qwen3"):
        out[f"large_{model}"] = Stage(90)
        out |= {f"many_{model}": Stage(many, OURS), f"many_{model}_trainer": Stage(many, STOCK)}
    systems = (("ours", OURS), ("stock", STOCK), ("bi", INVARIANT))
    out |= {f"sizes_{system}": Stage(200, variables) for system, variables in systems}
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
    if set(names) & set(ENGINES):
        for path in WORK.glob("drawn_*.pt"):
            path.unlink()
    path = os.pathsep.join(
        str(p) for p in (ROOT, plugin_folder(WORK / "site"), os.environ.get("PYTHONPATH")) if p
    )
    end, limit = time.time() + seconds, float(os.environ.get("STAGE_LIMIT", "240"))
    for name in names:
        stage = stages().get(name) or Stage(limit, ENGINES.get(name, {}))
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
    elif argument == "trainer":
        run_trainer()
    elif function := gpu_stages.functions().get(argument):
        function()
    else:
        run_stage(argument)
    processes.end()


if __name__ == "__main__":
    main()
