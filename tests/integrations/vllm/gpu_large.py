"""What the stages of `card` share: models, an engine, a trainer, log-probs, records.

Records go to $OUT/card.jsonl and to standard output.  $SMALL=1: small sizes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from perf.rl.engine import EXTENSION, graphs
from perf.rl.llama import random_model

__all__ = ["EXTENSION"]

SMALL = os.environ.get("SMALL") == "1"
OUT = Path(os.environ.get("OUT") or "out").resolve()
WORK = Path(os.environ.get("WORK") or Path(tempfile.gettempdir()) / "vllm_card")
ON_CARD = torch.cuda.is_available()
DEVICE = "cuda" if ON_CARD else "cpu"
LONGEST = 256 if SMALL else 16640
#: Tokens of one pass of a trainer.
PASS_TOKENS = 512 if SMALL else 32768


def say(stage: str, what: str, **numbers: object) -> None:
    """Append a record, and print it."""
    line = json.dumps({"stage": stage, "what": what} | numbers)
    with (OUT / "card.jsonl").open("a") as file:
        print(line, file=file)
    print("RESULT", line, flush=True)


# ---- models --------------------------------------------------------------------------------------

_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
#: Model -> sizes of `_FIELDS`, width of its MLP or experts, vocabulary; the same with $SMALL.
SIZES = {
    "model": ((2048, 8, 16, 4, 5632, 32000), (512, 2, 4, 2, 768, 1024)),
    "mixture": ((2048, 8, 16, 4, 768, 32000), (512, 2, 4, 1, 128, 1024)),
    "llama": ((2048, 16, 16, 4, 8192, 32000), (512, 2, 4, 2, 768, 1024)),
    "qwen3": ((2048, 28, 16, 8, 6144, 151936), (512, 2, 4, 2, 768, 1024)),
}


def config_of(model: str):
    """A config of transformers: Llamas of 0.5 and 1.1 billion parameters, a Qwen3-MoE, Qwen 3 1.7B.

    A token of the mixture has 8 of 64 experts, 3 of 8 with $SMALL.
    """
    import transformers

    *sizes, inner, vocab = SIZES[model][SMALL]
    options = dict(zip(_FIELDS, sizes, strict=True)) | {"vocab_size": vocab, "head_dim": 128}
    options |= {"max_position_embeddings": LONGEST, "bos_token_id": None, "eos_token_id": None}
    if model == "mixture":
        experts, k = (8, 3) if SMALL else (64, 8)
        options |= {"num_experts": experts, "num_experts_per_tok": k, "norm_topk_prob": True}
        return transformers.Qwen3MoeConfig(**options, moe_intermediate_size=inner)
    options["intermediate_size"] = inner
    if model == "qwen3":
        return transformers.Qwen3Config(**options, tie_word_embeddings=True)
    return transformers.LlamaConfig(**options, rms_norm_eps=1e-5, tie_word_embeddings=False)


def save_model(name: str) -> None:
    """Write a random model to $WORK, whose log-probs are neither flat nor certain."""
    model = random_model(config_of(name))
    model.save_pretrained(WORK / name)
    count = sum(p.numel() for p in model.parameters())
    say(name, "model", parameters=count, torch=torch.__version__)


# ---- an engine -----------------------------------------------------------------------------------


def start(
    model: str, sequences: int, *, eager: bool = False, memory: float = 0.4, **options: object
):
    """Return an engine with CUDA graphs of decode steps of up to so many sequences."""
    import vllm

    captured = {"compilation_config": graphs(sequences)}
    defaults = {
        "model": str(WORK / model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": LONGEST,
        "max_num_seqs": sequences,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": 0,
        **({"gpu_memory_utilization": memory} if ON_CARD else {}),
        **({"enforce_eager": True} if eager or not ON_CARD else captured),
    }
    return vllm.LLM(**defaults | options)


def random_prompts(vocab: int, lengths: Iterable[int], seed: int) -> list[list[int]]:
    """Random token ids."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=draw).tolist() for n in lengths]


def generate(llm, prompts: list[list[int]], new: int, **options: object) -> list:
    """Outputs of vLLM for these prompts, each with so many new tokens."""
    import vllm

    parameters = vllm.SamplingParams(
        max_tokens=new,
        ignore_eos=True,
        detokenize=False,
        flat_logprobs=True,
        **{"temperature": 0.0, "logprobs": 0} | options,
    )
    requests = [vllm.TokensPrompt(prompt_token_ids=ids) for ids in prompts]
    return llm.generate(requests, parameters, use_tqdm=False)


# ---- log-probs of sequences ----------------------------------------------------------------------

#: A sequence, and the log-probs of its last tokens.
Pair = tuple[list[int], list[float]]


class Scores(NamedTuple):
    """Sequences of one length, int64 [B, S], and log-probs of their last tokens, fp32 [B, N]."""

    ids: torch.Tensor
    logps: torch.Tensor


def grouped(pairs: Iterable[Pair]) -> Iterator[Scores]:
    """Scores of pairs, by their lengths."""

    def lengths(pair: Pair) -> tuple[int, int]:
        return len(pair[0]), len(pair[1])

    for _, group in groupby(sorted(pairs, key=lengths), key=lengths):
        ids, logps = zip(*group, strict=True)
        yield Scores(torch.tensor(ids), torch.tensor(logps, dtype=torch.float32))


def decoded(outputs) -> list[Pair]:
    """(prompt and completion, log-probs of the completion) of each output."""
    completions = [output.outputs[0] for output in outputs]
    return [
        (list(output.prompt_token_ids) + list(one.token_ids), list(one.logprobs.logprobs))
        for output, one in zip(outputs, completions, strict=True)
    ]


def prompted(outputs) -> list[Pair]:
    """(prompt, log-probs of all its tokens but the first) of each output."""
    return [
        (list(output.prompt_token_ids), list(output.prompt_logprobs.logprobs)) for output in outputs
    ]


def compare(some: list[Pair], others: list[Pair], *, to_first: bool = False) -> dict[str, int]:
    """Count log-probs of two runs, and those that differ in tokens or in bytes.

    others: their last log-probs count.  to_first: Up to the first other token of each sequence.
    """
    count = differ = 0
    for (ids, logps), (other_ids, other_logps) in zip(some, others, strict=True):
        n = len(logps)
        mine, theirs = (torch.tensor(x[-n:], dtype=torch.float32) for x in (logps, other_logps))
        same_tokens = torch.tensor(ids[-n:]) == torch.tensor(other_ids[-n:])
        same = same_tokens & (mine.view(torch.int32) == theirs.view(torch.int32))
        if to_first and not same_tokens.all():
            same = same[: int(same_tokens.int().argmin()) + 1]
        count += len(same)
        differ += int((~same).sum())
    return {"count": count, "differ": differ}


def load_trainer(model: str | Path, order: str = "chain"):
    """Return the model of a folder, patched, on the device."""
    import transformers

    import cute_kernels as ck

    loaded = transformers.AutoModelForCausalLM.from_pretrained(WORK / model, dtype=torch.bfloat16)
    ck.patch(loaded.to(DEVICE).eval(), strict=True, order=order)
    return loaded


def score_with(model, **options: object) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that scores sequences by `token_logps`."""
    from cute_kernels.integrations.transformers import token_logps

    return lambda ids: token_logps(model, ids, **options)


@torch.no_grad()
def count_differing(
    scores: Iterable[Scores], score: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, int]:
    """Count log-probs, and those whose bytes are not the trainer's, in passes of `PASS_TOKENS`."""
    count = differ = 0
    for one in scores:
        rows = max(1, PASS_TOKENS // one.ids.shape[1])
        for ids, logps in zip(one.ids.split(rows), one.logps.split(rows), strict=True):
            mine = score(ids.to(DEVICE))[:, -logps.shape[1] :].contiguous().view(torch.int32)
            differ += int((mine != logps.to(DEVICE).view(torch.int32)).sum())
            count += logps.numel()
    return {"count": count, "differ": differ}
