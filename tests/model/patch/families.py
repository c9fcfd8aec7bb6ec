"""Tiny random models of each family, with a step behind a part, and what runs in them."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import cute_kernels as ck
from cute_kernels.model import aten
from cute_kernels.model.observe import ops
from cute_kernels.model.patch.forwards import mixers
from cute_kernels.sparse_attn import api
from tests.contract import same_bytes

VOCABULARY, HIDDEN = 97, 128
#: Heads of 64 in a hidden size of 128; some have more, or share keys.
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
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


_MIXERS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention"],
}
_SHARED = {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64}
_NEMOTRON = {
    "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16,
    "time_step_min": 0.5,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 2,
    "moe_shared_expert_intermediate_size": 64, "topk_group": 1, "n_shared_experts": 1,
    "num_hidden_layers": 4, "layers_block_type": ["mamba", "moe", "attention", "mlp"],
}  # fmt: skip
_GRANITE = {
    "mamba_n_heads": 16, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
    "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64,
    "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2,
    "embedding_multiplier": 2.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
    "position_embedding_type": "rope",
}  # fmt: skip
_BAMBA = {
    "mamba_n_heads": 16, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
    "attn_layer_indices": [1], "num_attention_heads": 4, "time_step_limit": (0.5, 2.0),
}  # fmt: skip
_FALCON = {
    "mamba_n_heads": 16, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
    "mamba_d_ssm": 256, "num_attention_heads": 4, "ssm_multipliers": [0.5, 1.5, 0.7, 1.1, 0.3],
    "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6, "mlp_multipliers": [0.5, 1.5],
}  # fmt: skip
_ZAMBA2 = {
    "n_mamba_heads": 16, "mamba_headdim": 16, "mamba_ngroups": 2, "mamba_d_state": 16,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4,
    "attention_hidden_size": 256, "attention_head_dim": 64, "adapter_rank": 8, "use_mem_rope": True,
    "num_mem_blocks": 1, "time_step_min": 0.5,
}  # fmt: skip
_MAMBA2 = {
    "num_heads": 16, "head_dim": 16, "n_groups": 2, "state_size": 16, "time_step_limit": (0.5, 2.0)
}  # fmt: skip
_MAMBA = {"state_size": 16, "time_step_rank": 8, "intermediate_size": 256}
_JAMBA = {
    "mamba_d_state": 16, "mamba_dt_rank": 8, "attn_layer_period": 2, "attn_layer_offset": 1,
    "num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
_KIMI = {
    "linear_num_heads": 4, "linear_head_dim": 16, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"],
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1,
}  # fmt: skip
#: Hybrids of attention and the gated delta rule, Mamba-2 or Mamba; OLMo's beta goes up to 2.
HYBRIDS = {
    "qwen3_next": ("Qwen3NextConfig", {**_MIXERS, **_SHARED, "mlp_only_layers": [0]}),
    "qwen3_5": ("Qwen3_5TextConfig", _MIXERS),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**_MIXERS, **_SHARED}),
    "olmo_hybrid": ("OlmoHybridConfig", _MIXERS),
    "kimi_linear": ("KimiLinearConfig", _KIMI),
    "nemotron_h": ("NemotronHConfig", _NEMOTRON),
    "bamba": ("BambaConfig", _BAMBA),
    "mamba2": ("Mamba2Config", _MAMBA2),
    "falcon_h1": ("FalconH1Config", _FALCON),
    "falcon_h1_norm": (
        "FalconH1Config",
        {**_FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": True},
    ),
    "zamba2": ("Zamba2Config", _ZAMBA2),
    "granitemoehybrid": ("GraniteMoeHybridConfig", _GRANITE),
    "jamba": ("JambaConfig", _JAMBA),
    "falcon_mamba": ("FalconMambaConfig", _MAMBA),
    "mamba": ("MambaConfig", _MAMBA),
}


def model(name: str, seed: int = 0, **settings: object) -> torch.nn.Module:
    """bf16, in evaluation; every parameter random, norms' and biases' as well."""
    config, differs = (FAMILIES | MIXTURES | HYBRIDS)[name]
    torch.manual_seed(seed)
    tiny = getattr(transformers, config)(**{**_SIZES, **differs, **settings})
    net = transformers.AutoModelForCausalLM.from_config(tiny)
    randomize(net)
    return net.to(torch.bfloat16).eval()


@torch.no_grad()
def randomize(net: torch.nn.Module) -> None:
    """Make norms and biases, which begin as ones and zeros, random."""
    for parameter in net.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.3)


def exact(net: torch.nn.Module) -> torch.nn.Module:
    """A copy in float64 with torch's eager attention."""
    other = copy.deepcopy(net).double()
    other.set_attn_implementation("eager")
    return other


def ids(batch: int = 3, length: int = 40, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


@torch.no_grad()
def logits(net: torch.nn.Module, tokens: torch.Tensor, **inputs: object) -> torch.Tensor:
    return net(tokens, use_cache=False, **inputs).logits


NEW = 8


def generated(net: torch.nn.Module, prompts: torch.Tensor, **options: object):
    """Ids and the logits [B, NEW, vocabulary] that they were chosen by."""
    net.generation_config.eos_token_id = None
    # Its masks are made of ids: padding is none that can be generated.
    options |= {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": VOCABULARY}
    out = net.generate(prompts, output_logits=True, return_dict_in_generate=True, **options)
    return out.sequences, torch.stack(out.logits, 1)


# ---- mixers of hybrids ---------------------------------------------------------------------------


def by_night(*names: str) -> list:
    return [pytest.param(name, marks=pytest.mark.nightly) for name in names]


def first_mixer(net: torch.nn.Module) -> torch.nn.Module:
    return mixers.mixers_in(net)[0]


def mixer_of(name: str, dtype: torch.dtype) -> tuple[torch.nn.Module, object]:
    """A mixer of a patched model, and the config."""
    net = model(name).to(dtype)
    ck.patch(net)
    return first_mixer(net), net.config


def hidden(batch: int, length: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, HIDDEN, generator=generator).to(dtype)


def cache_of(config) -> transformers.DynamicCache:
    return transformers.DynamicCache(config=config)


@torch.no_grad()
def through(mixer, x, cuts, cache, mask=None) -> torch.Tensor:
    """Results of a mixer for x, piece by piece."""
    ends, rows = [0, *cuts, x.shape[1]], []
    for first, end in itertools.pairwise(ends):
        part = None if mask is None else mask[:, first:end]
        rows.append(mixer(x[:, first:end], cache_params=cache, attention_mask=part))
    return torch.cat(rows, 1)


# ---- a step behind a part ------------------------------------------------------------------------

PLACE = "model.layers.0.mlp"


def granite(layers: int = 1) -> nn.Module:
    """Of a family that is not reviewed: it is observed."""
    torch.manual_seed(0)
    sizes = {k: v for k, v in _SIZES.items() if k != "head_dim"}
    sizes |= {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1}
    config = transformers.GraniteConfig(**sizes | {"num_hidden_layers": layers})
    return transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()


def llama(layers: int = 1) -> nn.Module:
    return model("llama", num_hidden_layers=layers)


class After(nn.Module):
    """A part of a model, and a step behind it, which may read its keywords."""

    def __init__(self, inner: nn.Module, step: Callable, keywords: bool = False) -> None:
        super().__init__()
        self.inner, self.step, self.keywords = inner, step, keywords

    def forward(self, x, *args, **kwargs):
        y = self.inner(x, *args, **kwargs)
        return self.step(y, kwargs) if self.keywords else self.step(y)


def changed(make, step: Callable, layers: int = 1, place: str = PLACE, **options) -> nn.Module:
    """A model with a step behind a part."""
    net = make(layers)
    parent, _, name = place.rpartition(".")
    setattr(net.get_submodule(parent), name, After(net.get_submodule(place), step, **options))
    return net


# ---- what runs ----------------------------------------------------------------------------------

TOKENS = ids(2, 17)
#: The positions that a model makes; given, they are looked at for packs, and spans are made.
POSITIONS = {"position_ids": torch.arange(17)[None]}
#: Kind of forward of what holds other modules -> (op that it launches, families that have it).
HOLDERS = {
    "attention": ("rotary_pair", set(FAMILIES)),
    "residual": ("norm_in_steps", {"llama", "mistral", "qwen2", "qwen3"}),
    "mlp": ("gated", set(FAMILIES) - {"phi3", "gpt_neox"}),
}


def patched_once(make: Callable[[str], nn.Module]) -> Callable[[str], tuple]:
    """Function from a name to (the model, patched, what the patch said), made once."""

    @functools.cache
    def patched(name: str) -> tuple:
        net = make(name)
        return net, ck.patch(net, strict=True)

    return patched


class Watch(TorchDispatchMode):
    """Inside, collects the names of torch's ops that are not exact, and those of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.ours: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, name = ops.name_of(func)
        result = func(*args, **(kwargs or {}))
        tensors = ops.tensors([args, kwargs or {}, result])
        if space == "cute_kernels":
            self.ours.add(name)
        elif not aten.is_exact(name, args, tensors, {"cpu"}):
            self.found.add(name)
        return result


def step(net: torch.nn.Module, **inputs: object) -> list[torch.Tensor]:
    """Loss, hidden states and gradients of a step, that of the embedded tokens among them."""
    net.zero_grad()
    embedded = net.get_input_embeddings()(TOKENS).detach().requires_grad_()
    options = {"use_cache": False, "output_hidden_states": True}
    output = net(inputs_embeds=embedded, labels=TOKENS, **options, **inputs)
    output.loss.backward()
    weights = [p.grad for p in net.parameters() if p.grad is not None]
    tensors = [output.loss, *output.hidden_states, embedded.grad, *weights]
    return [t.detach().clone() for t in tensors]


def give_main_grads(net: torch.nn.Module) -> None:
    """Give every parameter a main_grad of zeros."""
    for parameter in net.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32)


#: What attends: all keys up to a query, and ranges of them.
ATTENDING = ((api, "causal_attention"), (api, "sequence_attention"))


def calls_of(monkeypatch, *functions, note: Callable = lambda name, *args: name) -> list:
    """Notes on the calls of functions (holder, name) from now on, in order: names by default."""
    notes: list = []
    for holder, name in functions:

        def noted(*args, name=name, true=getattr(holder, name), **options):
            notes.append(note(name, *args))
            return true(*args, **options)

        monkeypatch.setattr(holder, name, noted)
    return notes


def agree(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(map(same_bytes, got, want))
