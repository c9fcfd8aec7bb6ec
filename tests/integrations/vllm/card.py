"""vLLM on a GPU: stock, VLLM_BATCH_INVARIANT and ours, beside the patched trainer.

    python -m tests.integrations.vllm.card [SECONDS]     all stages of $STAGES, each in a process
    python -m tests.integrations.vllm.card STAGE          one stage

    STAGES=ours_moe,stock_moe python -m tests.integrations.vllm.card      a mixture of experts

ours_moe makes the mixture and scores what it drew in its own process, so that two processes do all
of it.  stock_moe needs vLLM's _moe_C extension.

Records go to $OUT/card.jsonl and, shortened, to standard output; the log of a stage to
$LOGS/STAGE.log, in $OUT where unset.  $STAGES: names of `STAGES` and of `card_stages`, and
"trainer" where what was drawn so far is to be scored.  Two calls may run at once, each with stages
and a card of its own (CUDA_VISIBLE_DEVICES).  $SHAPE: prompts, their length, new tokens, prompts
served alone.  $SMALL=1: small sizes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from perf.core.bits import fp32_bits
from perf.rl.engine import ENVIRONMENT, facts, graphs, plugin_folder, sampled
from perf.rl.llama import random_llama
from tests.integrations.vllm import card_stages
from tests.ranks import ROOT

SMALL = os.environ.get("SMALL") == "1"
OUT = Path(os.environ.get("OUT") or "out").resolve()
WORK = Path(os.environ.get("WORK") or Path(tempfile.gettempdir()) / "vllm_card")
PROMPTS, LENGTH, NEW, ALONE = (
    int(n) for n in os.environ.get("SHAPE", "8,40,6,2" if SMALL else "64,256,128,8").split(",")
)
#: Prompts of a mixed batch, and the tokens that each draws.
MIXED = (5, 17, 70) if SMALL else (5, 17, 100, 255, 257, 700, 1500, 3000)
MIXED_NEW = 4 if SMALL else 32
LONGEST, VOCAB = (128, 1024) if SMALL else (4096, 32000)
_EAGER, _GRAPH = {"enforce_eager": True}, {"compilation_config": graphs(64)}
_OURS, _STOCK = {"CUTE_KERNELS_VLLM": "1"}, {"CUTE_KERNELS_VLLM": "0"}
#: Stage -> (environment, arguments of the engine).
STAGES = {
    "ours_eager": (_OURS, _EAGER),
    "ours_graph": (_OURS, _GRAPH),
    "ours_sampled": (_OURS, _GRAPH | {"logprobs_mode": "processed_logprobs"}),
    "ours_bi_graph": (_OURS | {"VLLM_BATCH_INVARIANT": "1"}, _GRAPH),
    "stock_graph": (_STOCK, _GRAPH),
    "bi_graph": (_STOCK | {"VLLM_BATCH_INVARIANT": "1"}, _GRAPH),
    "ours_moe": (_OURS, _GRAPH),
    "stock_moe": (_STOCK, _GRAPH),
}
_MOE = "_moe"
_DEFAULT = "model,ours_eager,ours_graph,trainer,stock_graph,bi_graph,ours_sampled,trainer"
TEMPERATURE = 0.7


def say(stage: str, what: str, **numbers: object) -> None:
    """Append a record, and print it."""
    line = json.dumps({"stage": stage, "what": what} | numbers)
    with (OUT / "card.jsonl").open("a") as file:
        print(line, file=file)
    print("RESULT", line, flush=True)


# ---- the model -----------------------------------------------------------------------------------


def make_model() -> None:
    """Write a random Llama whose log-probs are neither flat nor certain."""
    import torch

    sizes = (512, 768, 2, 4, 2) if SMALL else (2048, 5632, 8, 16, 4)
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads"
    values = dict(zip((names + " num_key_value_heads").split(), sizes, strict=True))
    model = random_llama(VOCAB, LONGEST, **values)
    model.save_pretrained(WORK / "model")
    count = sum(p.numel() for p in model.parameters())
    say("model", "model", parameters=count, torch=torch.__version__)


def make_mixture() -> None:
    """Write a random Qwen3-MoE: 64 experts, of which a token has 8, in each of 8 layers."""
    import torch
    import transformers

    hidden, inner, layers, experts, k = (512, 128, 2, 8, 3) if SMALL else (2048, 768, 8, 64, 8)
    config = transformers.Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_tok=k,
        norm_topk_prob=True,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512),
        head_dim=128,
        vocab_size=VOCAB,
        max_position_embeddings=LONGEST,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.Qwen3MoeForCausalLM(config).bfloat16()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.normal_(1.0, 0.1)
                continue
            gain = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
            weight.normal_(0.0, gain * (3.0 if "lm_head" in name else 1.0))
    model.save_pretrained(WORK / "mixture")
    count = sum(p.numel() for p in model.parameters())
    say("mixture", "model", parameters=count, torch=torch.__version__)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _folder(stage: str) -> Path:
    """The model of a stage; a mixture is made by the stage that comes first."""
    if not stage.endswith(_MOE):
        return WORK / "model"
    if not (WORK / "mixture").exists():
        make_mixture()
    return WORK / "mixture"


# ---- an engine -----------------------------------------------------------------------------------


def run_stage(stage: str) -> None:
    """One engine: alone against batched, decode against prefill, kernels, speed; what it drew."""
    began = time.time()
    import torch
    import vllm

    is_sampled = stage == "ours_sampled"
    llm = vllm.LLM(
        model=str(_folder(stage)),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=LONGEST,
        seed=0,
        max_num_seqs=64,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **({} if SMALL else {"gpu_memory_utilization": 0.5}),
        **STAGES[stage][1],
    )
    draw = torch.Generator().manual_seed(1)

    def prompts(lengths) -> list[list[int]]:
        return [torch.randint(3, VOCAB, (n,), generator=draw).tolist() for n in lengths]

    def generate(ids: list[list[int]], new: int, **options):
        params = vllm.SamplingParams(
            temperature=TEMPERATURE if is_sampled else 0.0,
            seed=7 if is_sampled and not SMALL else None,
            max_tokens=new,
            ignore_eos=True,
            detokenize=False,
            **({"logprobs": 0} | options),
        )
        given = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in ids]
        start = time.perf_counter()
        outputs = llm.generate(given, params, use_tqdm=False)
        return outputs, time.perf_counter() - start

    say(stage, "engine", seconds=round(time.time() - began, 1), **facts(llm))
    main, mixed = prompts([LENGTH] * PROMPTS), prompts(MIXED)
    generate(main, 4)  # compiles what is still to be compiled
    for name, ids, new, alone in (("main", main, NEW, ALONE), ("mixed", mixed, MIXED_NEW, 99)):
        outputs, seconds = generate(ids, new)
        batch = sampled(outputs)
        single = [sampled(generate([prompt], new)[0])[0] for prompt in ids[:alone]]
        say(stage, "alone_vs_batched", of=name, **_compare(single, batch))
        if not is_sampled:
            full = [p + tokens for p, (tokens, _) in zip(ids[:alone], batch, strict=False)]
            again = generate(full, 1, prompt_logprobs=0)[0]
            say(stage, "decode_vs_prefill", of=name, **_prefill(again, ids, batch))
        with (WORK / f"drawn_{stage}.jsonl").open("a") as file:
            for prompt, (tokens, logps) in zip(ids, batch, strict=True):
                print(json.dumps({"prompt": prompt, "tokens": tokens, "bits": logps}), file=file)
        say(stage, "seconds", of=name, batched=round(seconds, 3), sequences=len(ids), new=new)
    if not is_sampled and torch.cuda.is_available():
        _profile(stage, generate, main)
        runs = [generate(main, NEW)[1] for _ in range(3)]
        say(
            stage,
            "speed",
            seconds=[round(s, 3) for s in runs],
            tok_s=round(PROMPTS * NEW / min(runs)),
        )
    if stage == "ours_moe":
        run_trainer(stage)
    say(stage, "done", seconds=round(time.time() - began, 1))


def _compare(single: list, batch: list) -> dict[str, int]:
    """Log-probs that differ, up to the first token that does."""
    steps = differ = tokens = 0
    for (ours, mine), (theirs, others) in zip(single, batch, strict=False):
        for a, b, x, y in zip(ours, theirs, mine, others, strict=True):
            steps, differ = steps + 1, differ + (x != y)
            if a != b:
                tokens += 1
                break
    return {"steps": steps, "differ": differ, "sequences_with_other_tokens": tokens}


def _prefill(outputs, prompts: list, batch: list) -> dict[str, int]:
    """Log-probs of drawn tokens as tokens of a prompt, against those of their decode."""
    steps = differ = 0
    for output, prompt, (tokens, logps) in zip(outputs, prompts, batch, strict=False):
        places = range(len(prompt), len(prompt) + len(tokens))
        again = [
            output.prompt_logprobs[place][token].logprob
            for place, token in zip(places, tokens, strict=True)
        ]
        steps += len(tokens)
        differ += sum(a != b for a, b in zip(fp32_bits(again), logps, strict=True))
    return {"steps": steps, "differ": differ}


def _profile(stage: str, generate, prompts: list) -> None:
    """GPU time of the kernels of one prefill and eight steps."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as run:
        generate(prompts, 9)
    rows = [(e.self_device_time_total, e.count, e.key) for e in run.key_averages()]
    rows.sort(reverse=True)
    top = [[round(us), count, key[:60]] for us, count, key in rows[:24]]
    say(stage, "kernels", total_us=round(sum(row[0] for row in rows)), top=top)


# ---- the trainer ---------------------------------------------------------------------------------


def run_trainer(only: str | None = None) -> None:
    """Score what each stage drew with the patched transformers model; count what differs.

    only: A stage; None: those of the Llama.
    """
    import torch
    import transformers

    import cute_kernels as ck
    from cute_kernels.integrations.transformers import token_logps

    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = _folder(only or "")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ck.patch(model.to(device).eval(), strict=True)
    for path in sorted(WORK.glob("drawn_*.jsonl")):
        stage = path.stem.removeprefix("drawn_")
        if stage != only and (only is not None or stage.endswith(_MOE)):
            continue
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        temperature = TEMPERATURE if stage == "ours_sampled" else 1.0
        count = differ = 0
        for first in range(0, len(lines), 8):
            part = lines[first : first + 8]
            rows = [line["prompt"] + line["tokens"] for line in part]
            width = max(map(len, rows))
            ids = torch.zeros(len(rows), width, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for i, row in enumerate(rows):
                ids[i, width - len(row) :] = torch.tensor(row)
                mask[i, width - len(row) :] = 1
            with torch.no_grad():
                logps = token_logps(
                    model, ids.to(device), attention_mask=mask.to(device), temperature=temperature
                ).cpu()
            for i, line in enumerate(part):
                scored = fp32_bits(logps[i, -len(line["tokens"]) :].tolist())
                count += len(scored)
                differ += sum(a != b for a, b in zip(scored, line["bits"], strict=True))
        say("trainer", "engine_vs_trainer", of=stage, steps=count, differ=differ)


# ---- all of them ---------------------------------------------------------------------------------


def run_all(seconds: float) -> None:
    """Run the stages of $STAGES one after the other, each with what is left of the time."""
    logs = Path(os.environ.get("LOGS") or OUT)
    for folder in (OUT, WORK, logs):
        folder.mkdir(parents=True, exist_ok=True)
    names = os.environ.get("STAGES", _DEFAULT).split(",")
    if set(names) & set(STAGES):
        for path in WORK.glob("drawn_*.jsonl"):
            path.unlink()
    path = os.pathsep.join(
        str(p) for p in (ROOT, plugin_folder(WORK / "site"), os.environ.get("PYTHONPATH")) if p
    )
    end, limit = time.time() + seconds, float(os.environ.get("STAGE_LIMIT", "240"))
    for name in names:
        stage = card_stages.find(name, OUT, WORK)
        left = min(stage.limit_s if stage else limit, end - time.time())
        if left < 15:
            print(f"no time left for {name}", flush=True)
            continue
        environment = os.environ | ENVIRONMENT | {"OUT": str(OUT), "WORK": str(WORK)}
        environment |= STAGES.get(name, ({},))[0] | (stage.environment if stage else {})
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [stage and stage.site, path]))
        own = ("-m", "tests.integrations.vllm.card", name)
        log, start = logs / f"{name}.log", time.time()
        code = run_process(stage.arguments if stage else own, environment, log, left)
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


def run_process(
    arguments: tuple[str, ...], environment: dict[str, str], log: Path, seconds: float
) -> int | str:
    """Run ``python ARGUMENTS``; its exit code, or "timeout".  What it started ends with it."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    """Run all stages, or the one of the command line."""
    argument = sys.argv[1] if len(sys.argv) > 1 else "560"
    if argument.replace(".", "").isdigit():
        return run_all(float(argument))
    {"model": make_model, "trainer": run_trainer}.get(argument, lambda: run_stage(argument))()
    sys.stdout.flush()
    os._exit(0)  # the end of vLLM's process is not what is tested


if __name__ == "__main__":
    main()
