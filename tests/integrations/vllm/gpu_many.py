"""Millions of an engine's log-probs against the trainer's, as many as fit into the seconds.

    python -m tests.integrations.vllm.gpu_many engine MODEL SECONDS
    python -m tests.integrations.vllm.gpu_many trainer MODEL SECONDS

The engine draws and scores in rounds, and a file of each round goes to $WORK:

    long       prompts of nearly 16k tokens; their log-probs, and those of completions
    decode     batches of as many sequences as graphs hold, at temperature 1
    prompt     log-probs of prompts of 4k tokens, prefilled in chunks

Counted are the log-probs that vLLM's public interface returned: of each drawn token (`logprobs=0`)
and of each token of a prompt but its first (`prompt_logprobs=0`).  The trainer scores each round by
`token_logps` in passes of whole sequences; unpatched transformers score one pass as the control.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

from perf.rl.engine import facts
from tests.integrations.vllm import gpu_large as large
from tests.integrations.vllm.gpu_large import SMALL, WORK, say


class Sizes(NamedTuple):
    """Sizes of the rounds of a model.

    sequences, new: of a round of decoding.  lengths: of its prompts, each as often.
    long: prompts of the first round, and tokens that each draws.
    """

    sequences: int
    new: int
    lengths: tuple[int, ...]
    long: tuple[int, int]
    prompts: int
    prompt: int


SIZES = {
    "llama": Sizes(512, 512, (16, 128, 512, 1024), (16, 128), 64, 4096),
    "qwen3": Sizes(256, 512, (16, 128, 512, 1024), (8, 128), 64, 4096),
}
if SMALL:
    SIZES = dict.fromkeys(SIZES, Sizes(8, 6, (5, 17, 40, 70), (2, 4), 4, 100))
#: Part of the seconds after which no round of decoding starts.
DECODE_SHARE = 0.5
LONG = 200 if SMALL else 16000


def save(model: str, kind: str, number: int, scores: list[large.Scores]) -> int:
    """Write a round's scores; how many log-probs they hold."""
    torch.save([tuple(one) for one in scores], WORK / f"many_{model}_{number:03}_{kind}.pt")
    return sum(one.logps.numel() for one in scores)


def run_engine(model: str, seconds: float) -> None:
    """Draw and score until the seconds are spent."""
    began, sizes = time.time(), SIZES[model]
    for path in WORK.glob(f"many_{model}_*.pt"):
        path.unlink()
    llm = large.start(model, sizes.sequences, memory=0.8)
    vocab = large.config_of(model).vocab_size
    say("many", "engine", of=model, seconds=round(time.time() - began, 1), **facts(llm))
    large.generate(llm, large.random_prompts(vocab, [20] * 4, 0), 4)
    counts, number, start = Counter(), 0, time.time()
    while number == 0 or time.time() - start < seconds:
        round_start = time.time()
        if number == 0:
            kind, (rows, new) = "long", sizes.long
            prompts = large.random_prompts(vocab, range(LONG - rows, LONG), number)
            outputs = large.generate(llm, prompts, new, temperature=1.0, prompt_logprobs=0)
            pairs = large.decoded(outputs)
            counts["decode"] += save(model, "decode", 0, list(large.grouped(pairs)))
            pairs = large.prompted(outputs)
        elif time.time() - start < DECODE_SHARE * seconds:
            kind, repeats = "decode", sizes.sequences // len(sizes.lengths)
            prompts = large.random_prompts(vocab, sizes.lengths * repeats, number)
            outputs = large.generate(llm, prompts, sizes.new, temperature=1.0)
            pairs = large.decoded(outputs)
        else:
            kind = "prompt"
            prompts = large.random_prompts(vocab, [sizes.prompt] * sizes.prompts, number)
            pairs = large.prompted(large.generate(llm, prompts, 1, prompt_logprobs=0))
        count = save(model, kind, number, list(large.grouped(pairs)))
        counts[kind] += count
        took = round(time.time() - round_start, 2)
        say("many", "round", of=model, kind=kind, count=count, seconds=took, so_far=dict(counts))
        number += 1
    say("many", "done", of=model, counts=dict(counts), seconds=round(time.time() - began, 1))


def run_trainer(model: str, seconds: float) -> None:
    """Score the rounds until the seconds are spent; the control first."""
    began, start = time.time(), None
    paths = sorted(WORK.glob(f"many_{model}_*.pt"))
    trainer = large.load_trainer(model)
    score = large.score_with(trainer)
    count, differ, longest, distinct = Counter(), Counter(), Counter(), {}
    for done, path in enumerate(paths, 1):
        kind = path.stem.rsplit("_", 1)[1]
        for part in (large.Scores(*one) for one in torch.load(path)):
            counts = large.count_differing([part], score)
            differ[kind] += counts["differ"]
            count[kind] += counts["count"]
            longest[kind] = max(longest[kind], part.ids.shape[1])
            values = part.logps.unique()
            distinct[kind] = max(distinct.get(kind, 0), values.numel())
        start = start or time.time()  # the first round compiles kernels
        numbers = {"count": dict(count), "differ": dict(differ), "longest": dict(longest)}
        say("many_trainer", "so_far", of=model, rounds=f"{done} of {len(paths)}", **numbers)
        if time.time() - start > seconds:
            break
    total = {"count": sum(count.values()), "differ": sum(differ.values())}
    numbers = {
        "kinds": numbers,
        "distinct_in_a_file": distinct,
        "rounds": f"{done} of {len(paths)}",
    }
    took = round(time.time() - began, 1)
    say("many_trainer", "engine_vs_trainer", of=model, **total, **numbers, seconds=took)
    del trainer
    control(model, paths[-1])


def control(model: str, path: Path) -> None:
    """Count the log-probs of a pass that an unpatched trainer has otherwise."""
    import transformers

    stock = transformers.AutoModelForCausalLM.from_pretrained(
        WORK / model, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    stock.to(large.DEVICE).eval()

    def score(ids: torch.Tensor) -> torch.Tensor:
        logits = stock(ids, use_cache=False).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    scores = large.Scores(*torch.load(path)[0])
    first = large.Scores(scores.ids[:1], scores.logps[:1])
    say("many_trainer", "control", of=model, **large.count_differing([first], score))


if __name__ == "__main__":
    what, name, limit = sys.argv[1:]
    {"engine": run_engine, "trainer": run_trainer}[what](name, float(limit))
    sys.stdout.flush()
    os._exit(0)  # the end of vLLM's process is not what is tested
