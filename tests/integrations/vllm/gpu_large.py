"""What stages of `card` with larger models share: models, an engine, a trainer, files of log-probs.

    python -m tests.integrations.vllm.gpu_large MODEL     writes $WORK/MODEL, of `MODELS`

A file of scores holds sequences of one length and the bytes of the last log-probs of each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from perf.rl.engine import graphs
from perf.rl.llama import random_model
from tests.integrations.vllm.card import SMALL, WORK, say

ON_CARD = torch.cuda.is_available()
DEVICE = "cuda" if ON_CARD else "cpu"
LONGEST = 256 if SMALL else 16640
#: Tokens of one pass of a trainer.
PASS_TOKENS = 512 if SMALL else 32768
EXTENSION = "cute_kernels.integrations.contract_exchange.WorkerExtension"


# ---- models --------------------------------------------------------------------------------------


def config_of(model: str):
    """A config of transformers: a Llama of 1.1 billion parameters, or Qwen 3 1.7B."""
    import transformers

    common = {"max_position_embeddings": LONGEST, "bos_token_id": None, "eos_token_id": None}
    if model == "llama":
        names = "hidden_size intermediate_size num_hidden_layers num_attention_heads"
        names += " num_key_value_heads vocab_size"
        sizes = (512, 768, 2, 4, 2, 1024) if SMALL else (2048, 8192, 16, 16, 4, 32000)
        values = dict(zip(names.split(), sizes, strict=True))
        return transformers.LlamaConfig(
            **values, **common, head_dim=128, rms_norm_eps=1e-5, tie_word_embeddings=False
        )
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads"
    names += " num_key_value_heads vocab_size"
    sizes = (512, 768, 2, 4, 2, 1024) if SMALL else (2048, 6144, 28, 16, 8, 151936)
    values = dict(zip(names.split(), sizes, strict=True))
    return transformers.Qwen3Config(**values, **common, head_dim=128, tie_word_embeddings=True)


MODELS = ("llama", "qwen3")


def save_model(name: str) -> None:
    """Write a random model to $WORK."""
    model = random_model(config_of(name))
    model.save_pretrained(WORK / name)
    count = sum(p.numel() for p in model.parameters())
    say("model", "model", of=name, parameters=count, torch=torch.__version__)


# ---- an engine -----------------------------------------------------------------------------------


def start(model: str, sequences: int, *, memory: float = 0.4, **options: object):
    """Return an engine with CUDA graphs of decode steps of up to so many sequences."""
    import vllm

    on_card = {"gpu_memory_utilization": memory, "compilation_config": graphs(sequences)}
    defaults = {
        "model": str(WORK / model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": LONGEST,
        "max_num_seqs": sequences,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": 0,
        **(on_card if ON_CARD else {"enforce_eager": True}),
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


class Scores(NamedTuple):
    """Sequences of one length, int64 [B, S], and log-probs of their last tokens, fp32 [B, N]."""

    ids: torch.Tensor
    logps: torch.Tensor


def grouped(pairs: Iterable[tuple[list[int], list[float]]]) -> Iterator[Scores]:
    """Scores of (sequence, log-probs of its last tokens), by their lengths."""

    def lengths(pair) -> tuple[int, int]:
        return len(pair[0]), len(pair[1])

    for _, group in groupby(sorted(pairs, key=lengths), key=lengths):
        ids, logps = zip(*group, strict=True)
        yield Scores(torch.tensor(ids), torch.tensor(logps, dtype=torch.float32))


def decoded(outputs) -> list[tuple[list[int], list[float]]]:
    """(prompt and completion, log-probs of the completion) of each output."""
    completions = [output.outputs[0] for output in outputs]
    return [
        (list(output.prompt_token_ids) + list(one.token_ids), list(one.logprobs.logprobs))
        for output, one in zip(outputs, completions, strict=True)
    ]


def prompted(outputs) -> list[tuple[list[int], list[float]]]:
    """(prompt, log-probs of all its tokens but the first) of each output."""
    return [
        (list(output.prompt_token_ids), list(output.prompt_logprobs.logprobs)) for output in outputs
    ]


def load_trainer(model: str | Path, order: str = "chain"):
    """Return the model of a folder, patched, on the device."""
    import transformers

    import cute_kernels as ck

    loaded = transformers.AutoModelForCausalLM.from_pretrained(WORK / model, dtype=torch.bfloat16)
    ck.patch(loaded.to(DEVICE).eval(), strict=True, order=order)
    return loaded


def score_with(model, order: str = "chain") -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that scores sequences by `token_logps`."""
    from cute_kernels.integrations.transformers import token_logps

    return lambda ids: token_logps(model, ids, order=order)


def passes(scores: Scores) -> Iterator[Scores]:
    """Parts of as many sequences as a pass of a trainer takes."""
    rows = max(1, PASS_TOKENS // scores.ids.shape[1])
    for ids, logps in zip(scores.ids.split(rows), scores.logps.split(rows), strict=True):
        yield Scores(ids, logps)


@torch.no_grad()
def count_differing(scores: Scores, score: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Log-probs whose bytes are not those of the trainer."""
    differ = 0
    for ids, logps in passes(scores):
        mine = score(ids.to(DEVICE))[:, -logps.shape[1] :].contiguous().view(torch.int32)
        differ += int((mine != logps.to(DEVICE).view(torch.int32)).sum())
    return differ


def main(name: str) -> None:
    """Write the model of that name."""
    save_model(name)


if __name__ == "__main__":
    main(sys.argv[1])
