"""Random models, prompts and engine settings of the runs beside each other."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

VOCAB, WIDTH, NEW_TOKENS = 2048, 768, 6
#: Tokens of a step: of as many rows as speculation of three has, of no whole pages, of one.
BUDGETS = (4, 45, 64)
#: Prompts end one token before a page does, so that decoding soon asks for new pages.
PAGE, LENGTHS, PAGES = 32, (31, 63, 95, 127), 13
_SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "initializer_range": 0.06,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}
_LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 128}


@dataclass(frozen=True)
class Case:
    """A model, its prompts and its engine.

    pages: too few for all prompts at once.  temperature: of sampling; 0: greedy.
    logprobs_mode: vLLM's.  A window or a layer type makes the context matter.  budgets: tokens of
    a step; each run scores what was drawn, in chunks of so many.  page: tokens of one.  caches:
    whether prefixes are cached, as those of hybrids only at the ends of steps of whole pages.
    """

    config: transformers.PretrainedConfig
    lengths: tuple[int, ...] = LENGTHS
    pages: int = PAGES
    temperature: float = 0.0
    logprobs_mode: str = "raw_logprobs"
    budgets: tuple[int, ...] = ()
    page: int = PAGE
    caches: bool = True

    @property
    def budget(self) -> int:
        """Tokens of a step; a prefix is cached where a step ends with a page."""
        return 8 * self.page if self.is_hybrid and self.caches else 64

    @property
    def is_hybrid(self) -> bool:
        """Whether it has layers with a state."""
        return hasattr(self.config, "layers_block_type")


def _heads(query: int, key: int, dim: int) -> dict[str, int]:
    return {"num_attention_heads": query, "num_key_value_heads": key, "head_dim": dim}


_TWELVE = {"num_attention_heads": 12, "num_key_value_heads": 4}
_SAMPLED = {"temperature": 0.7, "logprobs_mode": "processed_logprobs"}
_SLIDING = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}


def _case(kind: str, options: dict[str, object], **case: object) -> Case:
    return Case(getattr(transformers, f"{kind}Config")(**_SIZES | options), **case)


_DELTA = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
_DELTA |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
_DELTA |= {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 192}
_DELTA |= {"num_experts": 12, "num_experts_per_tok": 4, "mlp_only_layers": [0]}
_DELTA |= {"layer_types": ["linear_attention", "full_attention"]}
_NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 32}
_NEMOTRON |= {"layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3}
#: vLLM's name of those layers, as of the checkpoints that there are.
_NEMOTRON |= {"time_step_min": 0.5, "hybrid_override_pattern": "M*-"}
_GRANITE = {"mamba_n_heads": 24, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 16}
_GRANITE |= {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 0}
_GRANITE |= {"num_experts_per_tok": 0, "shared_intermediate_size": 512}
_GRANITE |= {"embedding_multiplier": 2.0, "residual_multiplier": 0.5}

CASES = {
    "llama": _case(
        "Llama",
        _heads(6, 2, 128) | {"rope_parameters": _LLAMA3, "tie_word_embeddings": True},
        **_SAMPLED,
    ),
    "qwen2": _case("Qwen2", _TWELVE),
    "qwen3": _case("Qwen3", _heads(12, 4, 64), temperature=1.0, budgets=BUDGETS),
    "gemma3": _case("Gemma3Text", _heads(4, 1, 256) | _SLIDING | {"query_pre_attn_scalar": 256}),
    "mistral": _case(
        "Mistral", _heads(6, 2, 128) | {"sliding_window": 96}, lengths=(31, 63, 543), pages=10
    ),
    "mixtral": _case(
        "Mixtral",
        _heads(6, 2, 128)
        | {"intermediate_size": 256, "num_local_experts": 8, "sliding_window": 96},
    ),
    "qwen3_moe": _case(
        "Qwen3Moe",
        _heads(12, 4, 64)
        | {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 5}
        | {"norm_topk_prob": True},
        **_SAMPLED,
    ),
    "olmoe": _case(
        "Olmoe",
        _TWELVE | {"intermediate_size": 128, "num_experts": 12, "num_experts_per_tok": 3},
        budgets=BUDGETS,
    ),
    "qwen2_moe": _case(
        "Qwen2Moe",
        _TWELVE
        | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 192}
        | {"num_experts": 12, "num_experts_per_tok": 4},
    ),
    "qwen3_next": _case(
        "Qwen3Next", _heads(12, 4, 64) | _DELTA, page=64, pages=14, lengths=(127, 127, 127, 191)
    ),
    "qwen3_next_chunks": _case(
        "Qwen3Next", _heads(12, 4, 64) | _DELTA, budgets=BUDGETS, pages=8, caches=False
    ),
    "nemotron_h": _case(
        "NemotronH", _heads(12, 4, 64) | _NEMOTRON, page=128, pages=9, lengths=(127, 255, 300)
    ),
    "granite_hybrid": _case(
        "GraniteMoeHybrid", _TWELVE | _GRANITE, budgets=BUDGETS, pages=5, caches=False
    ),
}


def save(name: str, folder: Path) -> Path:
    """Write a random model of that case, in bf16, with norms that are not 1."""
    torch.manual_seed(0)
    config = CASES[name].config
    model = transformers.AutoModelForCausalLM.from_config(config)
    pattern = getattr(config, "hybrid_override_pattern", None)
    return save_random(model, folder / name, torch.Generator().manual_seed(len(name)), pattern)


def save_random(model, path: Path, generator: torch.Generator, pattern: str | None) -> Path:
    """Write a model in bf16, with vectors that are moved.

    pattern: vLLM's name of the layers of a Nemotron-H, which checkpoints have.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator, device=generator.device)
                parameter += 0.2 * noise
        if model.config.tie_word_embeddings:
            # Else each token predicts itself, with a log-prob of 0.
            model.get_input_embeddings().weight *= 0.01 / _SIZES["initializer_range"]
    model.bfloat16().save_pretrained(path)
    if pattern is not None:
        file = path / "config.json"
        file.write_text(
            json.dumps(json.loads(file.read_text()) | {"hybrid_override_pattern": pattern})
        )
    return path


def prompts(name: str) -> list[list[int]]:
    """Random token ids of a case's lengths."""
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randint(3, VOCAB, (n,), generator=generator) for n in CASES[name].lengths]
    return [ids.tolist() for ids in draw]
