"""transformers' ``generate_batch`` on a card: python -m tests.integrations.gpu_continuous_batching

A patched Llama draws for many prompts in each form that the manager has for it: with CUDA graphs or
not, with two batches in flight.  A line for each form says how many
log-probs have not the bytes of training, and whether greedy tokens are those of ``generate``; the
last one is the control, unpatched on SDPA.  Ends with "ok", or with exit code 1.  ``--cpu``: small.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import cute_kernels as ck
from cute_kernels.integrations import continuous_batching

CPU = "--cpu" in sys.argv[1:] or os.environ.get("SMALL") == "1"
DEVICE = "cpu" if CPU else "cuda"
VOCAB, NEW = (397, 6) if CPU else (32000, 48)
LENGTHS = (5, 17, 40, 3, 70, 33) if CPU else (5, 17, 100, 255, 257, 700, 1500, 3000) * 4
#: Form -> options of the manager.  It takes block tables for flash attention alone.
FORMS = {
    "plain": {"use_cuda_graph": False, "use_async_batching": False},
    "graphs": {"use_cuda_graph": True, "use_async_batching": False},
    "graphs, two batches in flight": {"use_cuda_graph": True, "use_async_batching": True},
    "as transformers chooses": {},
}
ON_CPU = ("plain", "as transformers chooses")


def make_model(patched: bool) -> torch.nn.Module:
    """A random Llama whose log-probs are neither flat nor certain."""
    torch.manual_seed(0)
    width, layers = (256, 2) if CPU else (1024, 8)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        head_dim=64,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        vocab_size=VOCAB,
        max_position_embeddings=8192,
        initializer_range=width**-0.5,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).bfloat16().to(DEVICE).eval()
    if patched:
        ck.patch(model, strict=True)
    return model


def draw(model, prompts: list[list[int]], options: dict) -> list[tuple[list[int], torch.Tensor]]:
    """Completions and their log-probs, by the manager."""
    settings = transformers.GenerationConfig(
        max_new_tokens=NEW, eos_token_id=-1, pad_token_id=0, do_sample=False
    )
    sizes = {"num_blocks": 64, "max_batch_tokens": 48} if CPU else {"max_memory_percent": 0.3}
    # A limit below the longest prompt, so that prefills are cut and decode rows are beside them.
    sizes.setdefault("max_batch_tokens", 1024)
    outputs = model.generate_batch(
        prompts,
        generation_config=settings,
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=16 if CPU else 64, return_logprobs=True, **sizes | options
        ),
        progress_bar=False,
    )
    errors = {output.error for output in outputs.values()} - {None}
    assert len(outputs) == len(prompts) and not errors, errors
    return [(o.generated_tokens, torch.tensor(o.logprobs)) for o in outputs.values()]


@torch.no_grad()
def trained(model, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Log-probs of a completion in one pass over the sequence."""
    ids = torch.tensor([prompt + tokens], device=DEVICE)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return ck.log_probs(logits.contiguous(), torch.tensor(tokens, device=DEVICE)).cpu()


@torch.no_grad()
def generated(model, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy completions of ``generate``, one prompt at a time."""
    completions = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=DEVICE)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )
        completions.append(out[0, len(prompt) :].tolist())
    return completions


def compare(model, prompts: list[list[int]], options: dict) -> dict[str, object]:
    """Counts of one form."""
    began = time.perf_counter()
    drawn = draw(model, prompts, options)
    seconds = round(time.perf_counter() - began, 2)
    count = differ = 0
    for prompt, (tokens, logps) in zip(prompts, drawn, strict=True):
        scored = trained(model, prompt, tokens)
        count += len(tokens)
        differ += int((scored.view(torch.int32) != logps.float().view(torch.int32)).sum())
    return {"count": count, "differ": differ, "seconds": seconds, "tokens": [t for t, _ in drawn]}


def say(form: str, **numbers: object) -> None:
    """Print a record, and append it to $OUT/card.jsonl where there is an $OUT."""
    line = json.dumps({"stage": "continuous", "what": form} | numbers)
    print("RESULT", line, flush=True)
    if "OUT" in os.environ:
        with Path(os.environ["OUT"], "card.jsonl").open("a") as file:
            print(line, file=file)


def main() -> int:
    """Run all forms; 0: no log-prob differed but the control's."""
    torch.set_num_threads(1)
    continuous_batching.register()
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    model, failed, dense = make_model(patched=True), 0, None
    say("start", transformers=transformers.__version__, torch=torch.__version__, device=DEVICE)
    for form, options in FORMS.items():
        if CPU and form not in ON_CPU:
            continue
        try:
            counts = compare(model, prompts, options)
        except Exception as error:
            failed += 1
            say(form, error=f"{type(error).__name__}: {error}"[:500])
            continue
        tokens = counts.pop("tokens")
        dense = dense or generated(model, prompts[:8])
        others = sum(a != b for a, b in zip(tokens, dense, strict=False))
        failed += counts["differ"] > 0 or others > 0
        say(form, **counts, sequences_with_other_tokens_than_generate=others)
    control = compare(make_model(patched=False), prompts, {})
    control.pop("tokens")
    say("control, unpatched", **control)
    failed += control["differ"] == 0
    print("failed" if failed else "ok")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
