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
from typing import NamedTuple

import torch
import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import cute_kernels as ck
from cute_kernels.integrations import continuous_batching
from tests.model.patch import families


class Setup(NamedTuple):
    """Sizes of a run.

    pages: of the manager; its tokens of a batch are below the longest prompt, so that prefills are
    cut and decode rows are beside them.
    """

    device: str
    vocab: int
    new: int
    lengths: tuple[int, ...]
    width: int
    layers: int
    pages: dict[str, object]


_PAGES = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 48}
SMALL = Setup("cpu", 397, 6, (5, 17, 40, 3, 70, 33), 256, 2, _PAGES)
_PAGES = {"page_size": 64, "max_memory_percent": 0.3, "max_batch_tokens": 1024}
CARD = Setup("cuda", 32000, 48, (5, 17, 100, 255, 257, 700, 1500, 3000) * 4, 1024, 8, _PAGES)
#: Form -> options of the manager.  It takes block tables for flash attention alone.
FORMS = {
    "plain": {"use_cuda_graph": False, "use_async_batching": False},
    "as transformers chooses": {},
    "graphs": {"use_cuda_graph": True, "use_async_batching": False},
    "graphs, two batches in flight": {"use_cuda_graph": True, "use_async_batching": True},
}


def make_model(setup: Setup, patched: bool) -> torch.nn.Module:
    """A random Llama whose log-probs are neither flat nor certain."""
    width = setup.width
    model = families.model(
        "llama",
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=setup.layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        vocab_size=setup.vocab,
        max_position_embeddings=8192,
        initializer_range=width**-0.5,
        attn_implementation="sdpa",
    ).to(setup.device)
    if patched:
        ck.patch(model, strict=True)
    return model


def prompts(setup: Setup, lengths: tuple[int, ...] = ()) -> list[list[int]]:
    draw, lengths = torch.Generator().manual_seed(7), lengths or setup.lengths
    return [torch.randint(1, setup.vocab, (n,), generator=draw).tolist() for n in lengths]


def draw(model, setup: Setup, requests, **options) -> list[tuple[list[int], torch.Tensor]]:
    """Completions and their log-probs, by the manager; ``options`` of it, and of the sampling."""
    names = ("do_sample", "temperature", "top_k")
    sampling = {"do_sample": False} | {k: options.pop(k) for k in names if k in options}
    settings = transformers.GenerationConfig(
        max_new_tokens=setup.new, eos_token_id=-1, pad_token_id=0, **sampling
    )
    outputs = model.generate_batch(
        requests,
        generation_config=settings,
        continuous_batching_config=ContinuousBatchingConfig(
            return_logprobs=True, **setup.pages | options
        ),
        progress_bar=False,
    )
    errors = {output.error for output in outputs.values()} - {None}
    assert len(outputs) == len(requests) and not errors, errors
    return [(o.generated_tokens, torch.tensor(o.logprobs)) for o in outputs.values()]


@torch.no_grad()
def trained(model, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of a completion in one pass over the sequence, as a trainer makes them."""
    ids = torch.tensor([prompt + tokens], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].contiguous()
    target = torch.tensor(tokens, device=model.device)
    return ck.log_probs(logits, target, temperature=temperature).cpu()


@torch.no_grad()
def generated(model, requests: list[list[int]], new: int) -> list[list[int]]:
    """Greedy completions of ``generate``, one prompt at a time."""
    completions = []
    for prompt in requests:
        ids = torch.tensor([prompt], device=model.device)
        options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        completions.append(out[0, len(prompt) :].tolist())
    return completions


def compare(model, setup: Setup, requests, options: dict) -> dict[str, object]:
    """Counts of one form."""
    began = time.perf_counter()
    drawn = draw(model, setup, requests, **options)
    seconds = round(time.perf_counter() - began, 2)
    count = differ = 0
    for prompt, (tokens, logps) in zip(requests, drawn, strict=True):
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
    setup = SMALL if "--cpu" in sys.argv[1:] or os.environ.get("SMALL") == "1" else CARD
    requests, model, failed = prompts(setup), make_model(setup, patched=True), 0
    dense = generated(model, requests[:8], setup.new)
    say("start", transformers=transformers.__version__, torch=torch.__version__)
    for form, options in list(FORMS.items())[: 2 if setup is SMALL else None]:
        try:
            counts = compare(model, setup, requests, options)
        except Exception as error:
            failed += 1
            say(form, error=f"{type(error).__name__}: {error}"[:500])
            continue
        others = sum(a != b for a, b in zip(counts.pop("tokens"), dense, strict=False))
        failed += counts["differ"] > 0 or others > 0
        say(form, **counts, sequences_with_other_tokens_than_generate=others)
    control = compare(make_model(setup, patched=False), setup, requests, {})
    control.pop("tokens")
    say("control, unpatched", **control)
    failed += control["differ"] == 0
    print("failed" if failed else "ok")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
