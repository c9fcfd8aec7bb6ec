"""Small mixtures of experts of transformers, with random weights."""

from __future__ import annotations

import torch

from cute_kernels.integrations import transformers as ours

VOCABULARY, LENGTH = 97, 20
KINDS = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")


def config_of(kind: str, **options: object):
    import transformers

    shared = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "eos_token_id": None,
        "attn_implementation": ours.NAME,
        "experts_implementation": ours.NAME,
    } | options
    heads = {"head_dim": 64, "intermediate_size": 96}
    few, many = {"num_experts_per_tok": 2}, {"num_experts_per_tok": 3, "num_experts": 8}
    if kind == "mixtral":
        return transformers.MixtralConfig(**shared, **heads, **few, num_local_experts=6)
    if kind == "qwen3_moe":
        shared = {"moe_intermediate_size": 48, "norm_topk_prob": True} | shared
        return transformers.Qwen3MoeConfig(**shared, **heads, **many)
    if kind == "qwen2_moe":
        shared |= {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 72}
        return transformers.Qwen2MoeConfig(**shared, **many, intermediate_size=96)
    if kind == "olmoe":
        return transformers.OlmoeConfig(**shared, **many, intermediate_size=48)
    return transformers.GptOssConfig(**shared, **heads, **few, num_local_experts=6)


def model_of(kind: str, dtype=torch.bfloat16, **options: object) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    config = config_of(kind, **options)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def tokens(rows: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
