"""Tiny random models of each family, and the ways to run them: alone, padded, in chunks, cached."""

from __future__ import annotations

import copy
import itertools

import torch
import transformers

VOCABULARY, HIDDEN, LENGTH = 97, 128, 40
#: Heads of 64 in a hidden size of 128; some have more, or share keys.
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.15,
}
_NARROW = {"num_attention_heads": 2, "num_key_value_heads": 1}
_GEMMA = {"sliding_window": 9, "query_pre_attn_scalar": 64}
_PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}

#: Name -> (class of the config, what differs).
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", _NARROW),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 9}),
    "gemma2": ("Gemma2Config", _GEMMA),
    "gemma3": ("Gemma3TextConfig", {**_GEMMA, "final_logit_softcapping": 20.0}),
    "phi3": ("Phi3Config", _NARROW),
    "olmo2": ("Olmo2Config", _NARROW),
    "gpt_neox": ("GPTNeoXConfig", {**_NARROW, "rope_parameters": _PARTIAL}),
}


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
#: Mixtures of experts that ranks can cut, likewise.
MIXTURES = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_EXPERTS, "num_experts": 5, "shared_expert_intermediate_size": 128},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**_EXPERTS, "num_experts": 6, "norm_topk_prob": True}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
}


def model(name: str, seed: int = 0, **settings: object) -> torch.nn.Module:
    """bf16, in evaluation; every parameter random, norms' and biases' as well."""
    config, differs = (FAMILIES | MIXTURES)[name]
    torch.manual_seed(seed)
    made = getattr(transformers, config)(**{**_SIZES, **differs, **settings})
    net = transformers.AutoModelForCausalLM.from_config(made)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return net.to(torch.bfloat16).eval()


def exact(net: torch.nn.Module) -> torch.nn.Module:
    """A copy in float64 with torch's eager attention."""
    other = copy.deepcopy(net).double()
    other.set_attn_implementation("eager")
    return other


def ids(batch: int = 3, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


@torch.no_grad()
def logits(net: torch.nn.Module, tokens: torch.Tensor, **inputs: object) -> torch.Tensor:
    return net(tokens, use_cache=False, **inputs).logits


def padded(net: torch.nn.Module, tokens: torch.Tensor, side: str, by: int = 7) -> torch.Tensor:
    """The logits of the tokens, each sequence with padding on one side, beside a full one."""
    width = (by, 0) if side == "left" else (0, by)
    full = torch.nn.functional.pad(tokens, width, value=0)
    mask = torch.nn.functional.pad(torch.ones_like(tokens), width, value=0)
    near = ids(1, full.shape[1], seed=5)
    full, mask = torch.cat((full, near)), torch.cat((mask, torch.ones_like(near)))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = logits(net, full, attention_mask=mask, position_ids=positions)[:-1]
    return found[:, by:] if side == "left" else found[:, :-by]


@torch.no_grad()
def cached(net: torch.nn.Module, tokens: torch.Tensor, cuts: list[int], kind: str) -> torch.Tensor:
    """The logits of the tokens, given piece by piece to a dynamic or a static cache."""
    length = tokens.shape[1]
    if kind == "static":
        cache = transformers.StaticCache(net.config, max_cache_len=length + 24)
    else:
        cache = transformers.DynamicCache(config=net.config)
    rows = []
    for first, last in itertools.pairwise([0, *cuts, length]):
        positions = torch.arange(first, last)[None].expand(len(tokens), -1)
        given = {"past_key_values": cache, "position_ids": positions, "use_cache": True}
        rows.append(net(tokens[:, first:last], **given).logits)
    return torch.cat(rows, dim=1)


#: Name -> the logits of one sequence among other surroundings.
SURROUNDINGS = {
    "alone": lambda net, tokens: logits(net, tokens),
    "in a batch": lambda net, tokens: logits(net, torch.cat((ids(4, seed=7), tokens)))[4:],
    "left": lambda net, tokens: padded(net, tokens, "left"),
    "right": lambda net, tokens: padded(net, tokens, "right"),
    "chunks": lambda net, tokens: cached(net, tokens, [13, 14, 30], "dynamic"),
    "decoded": lambda net, tokens: cached(net, tokens, list(range(5, LENGTH)), "dynamic"),
    "static": lambda net, tokens: cached(net, tokens, [20, *range(30, LENGTH)], "static"),
}
