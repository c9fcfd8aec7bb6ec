"""Small mixtures of experts of transformers, with random weights."""

from __future__ import annotations

import torch
import transformers

from cute_kernels.integrations import transformers as ours
from tests.model.patch import families

VOCABULARY, LENGTH, WIDTH = families.VOCABULARY, 20, families.HIDDEN
KINDS = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
#: Experts for four ranks, three of them for each token; heads of 64.
_MANY = {"num_experts": 8, "num_experts_per_tok": 3}
_MANY |= {"num_attention_heads": 2, "num_key_value_heads": 1}
_GPT_OSS = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 64}


def model_of(kind: str, **options: object) -> torch.nn.Module:
    names = dict.fromkeys(("attn_implementation", "experts_implementation"), ours.NAME)
    options = names | {"eos_token_id": None} | options
    if kind != "gpt_oss":
        many = {"num_local_experts": 6} if kind == "mixtral" else _MANY
        return families.model(kind, **many | options)
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.GptOssConfig(**sizes, **_GPT_OSS, **options)
    return transformers.AutoModelForCausalLM.from_config(config).bfloat16().eval()


def tokens(rows: int = 3) -> torch.Tensor:
    return families.ids(rows, LENGTH)
