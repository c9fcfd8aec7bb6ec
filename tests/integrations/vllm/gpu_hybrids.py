"""Stages of `card` for models with layers that have a state: an engine beside the patched trainer.

    STAGES=hybrid_qwen3_next,hybrid_nemotron_h,hybrid_granite python -m tests.integrations.vllm.card

A stage is one process: it makes a random model of about a billion parameters and serves it twice.
"graph": decode steps in CUDA graphs, prefill in chunks that end anywhere, fewer pages than prompts
that decode need, so that requests are preempted.  "cached": prompts with one prefix, from the
prefix cache.  The trainer scores what both drew, and the prompts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch

from tests.integrations.vllm import cases
from tests.integrations.vllm import gpu_large as large
from tests.integrations.vllm.gpu_large import DEVICE, SMALL, WORK, say

#: Tokens of a page: whole chunks of both rules, and no fewer than a state takes.
PAGE = 128 if SMALL else 1152
VOCAB = 1024 if SMALL else 32000
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_NEXT = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
_NEXT |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}
_EXPERTS |= {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
_SCAN = {"mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 32}
_GRANITE = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 16}
if not SMALL:
    _HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    _NEXT = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    _NEXT |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_key_value_heads": 2}
    _NEXT |= {"head_dim": 256}
    _EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4}
    _EXPERTS |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    _SCAN = {"mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128}
    _GRANITE = {"mamba_n_heads": 64, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128}


class Hybrid(NamedTuple):
    """A config of transformers, and how many groups of pages its layers with a state have."""

    kind: str
    options: Mapping[str, object]
    groups: int
    pattern: str | None = None


_KINDS = ["mamba", "mlp", "attention", "mamba", "mlp", "mamba", "attention", "mamba"]
HYBRIDS = {
    "qwen3_next": Hybrid("Qwen3Next", {**_HEADS, **_NEXT, **_EXPERTS, "num_hidden_layers": 8}, 3),
    "nemotron_h": Hybrid(
        "NemotronH", {**_HEADS, **_SCAN, "layers_block_type": _KINDS, "num_hidden_layers": 8}, 2,
        "".join({"mamba": "M", "mlp": "-", "attention": "*"}[kind] for kind in _KINDS),
    ),
    "granite": Hybrid(
        "GraniteMoeHybrid",
        {
            **{name: n for name, n in _HEADS.items() if name != "head_dim"}, **_GRANITE,
            "num_local_experts": 0, "num_experts_per_tok": 0, "num_hidden_layers": 6,
            "shared_intermediate_size": 256 if SMALL else 8192,
            "layer_types": 2 * ["linear_attention", "linear_attention", "full_attention"],
        }, 2,
    ),
}  # fmt: skip
STAGE = "hybrid_"


def save(name: str) -> None:
    """Write a random model to $WORK."""
    import transformers

    hybrid, width = HYBRIDS[name], 256 if SMALL else 2048
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "vocab_size": VOCAB}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = getattr(transformers, f"{hybrid.kind}Config")(
        max_position_embeddings=8192,
        **sizes,
        **ends,
        initializer_range=2 / width**0.5,
        **hybrid.options,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config)
    cases.save_random(model, WORK / name, torch.Generator(DEVICE).manual_seed(0), hybrid.pattern)
    say(STAGE + name, "model", parameters=sum(p.numel() for p in model.parameters()))


def run(name: str) -> None:
    """Serve a model twice, and score what was drawn."""
    began, stage, groups = time.time(), STAGE + name, HYBRIDS[name].groups
    save(name)
    runs: dict[str, tuple[list[large.Pair], dict[str, int]]] = {}
    crossing, mixed = (4, (5, 17, 150)) if SMALL else (24, (5, 17, 100, 255, 257, 700, 1500, 3000))
    longest, new = (4 * PAGE, 24 if SMALL else 64)
    # A page fewer than all prompts and the first token behind a page need.
    pages = crossing * (groups + 1) + sum(groups + 1 + n // PAGE for n in mixed) + 2
    options = {"max_model_len": longest, "block_size": PAGE, "memory": 0.35}

    llm = large.start(
        name, 32, max_num_batched_tokens=PAGE // 3 * 4 + 1, num_gpu_blocks_override=pages, **options
    )
    preempted = count_preempted()
    prompts = large.random_prompts(VOCAB, [PAGE - 16] * crossing + [*mixed], 1)
    pairs = large.decoded(large.generate(llm, prompts, new, temperature=1.0))
    scored = large.random_prompts(VOCAB, [PAGE + 300] * (2 if SMALL else 8), 2)
    pairs += large.prompted(large.generate(llm, scored, 1, prompt_logprobs=0))
    runs["graph"] = pairs, {"preempted": len(preempted)}
    llm = end(llm)

    llm = large.start(
        name, 32, enable_prefix_caching=True, max_num_batched_tokens=2 * PAGE, **options
    )
    (shared,) = large.random_prompts(VOCAB, [2 * PAGE], 3)
    prompts = [shared + rest for rest in large.random_prompts(VOCAB, range(1, 100, 12), 4)]
    first = large.generate(llm, prompts, new, temperature=1.0)
    outputs = large.generate(llm, prompts, new, temperature=1.0)
    cached = sum(output.num_cached_tokens for output in outputs)
    runs["cached"] = large.decoded([*first, *outputs]), {"cached": cached}
    end(llm)

    score = large.score_with(large.load_trainer(name))
    for what, (pairs, numbers) in runs.items():
        counts = large.count_differing(large.grouped(pairs), score)
        say(stage, "engine_vs_trainer", of=name, run=what, **counts, **numbers)
    say(stage, "done", seconds=round(time.time() - began, 1))


def count_preempted() -> list[str]:
    """Return the list to which this process's scheduler adds the requests that it preempts."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt, names = Scheduler._preempt_request, []

    def counted(self, request, *args, **kwargs):
        names.append(request.request_id)
        return preempt(self, request, *args, **kwargs)

    Scheduler._preempt_request = counted
    return names


def end(llm) -> None:
    """End an engine of this process, and free what it had."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
