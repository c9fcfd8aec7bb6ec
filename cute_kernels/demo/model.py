"""Two models with the same weights: transformers' Llama as it is, and the same one row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import cute_kernels as ck

from ..integrations import transformers as integration
from . import rows, text

integration.register()

#: A token that is not scored.
IGNORED = -100


@dataclass(frozen=True)
class Size:
    """What decides the parameter count; every width a multiple of 64 (rows.fixed_rows)."""

    hidden: int = 256  # 64 per head, a head size of the attention op
    inner: int = 512
    layers: int = 4
    heads: int = 4
    key_heads: int = 2
    capacity: int = 256  # the longest sequence


@dataclass(frozen=True)
class Side:
    """One column of the table: a model, and how its hidden states are scored.

    score: (model, hidden [..., D], tokens [...]) -> log-probs [...]; 0 where a token is `IGNORED`.
    log_softmax: logits [..., V] -> log-probs of all tokens, to draw one from.
    """

    name: str
    model: LlamaForCausalLM
    score: Callable[[LlamaForCausalLM, torch.Tensor, torch.Tensor], torch.Tensor]
    log_softmax: Callable[[torch.Tensor], torch.Tensor]

    def hidden(self, **inputs: object) -> torch.Tensor:
        """The hidden states [B, T, D] that the head would take."""
        return self.model.model(**inputs).last_hidden_state

    def logps(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The log-probs of tokens after hidden states [..., D]."""
        return self.score(self.model, hidden, tokens)

    def next_logps(self, hidden: torch.Tensor) -> torch.Tensor:
        """The log-probs [..., V] of what may come next, to draw from."""
        return self.log_softmax(self.model.lm_head(hidden))


class Linear(nn.Module):
    """``ck.linear`` in place of nn.Linear; backward adds into main_grad where there is one."""

    def __init__(self, weight: nn.Parameter, order: str) -> None:
        super().__init__()
        self.weight = weight
        self.order = order
        self.main_grad: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ck.linear(x, self.weight, order=self.order, main_grad=self.main_grad)


class RMSNorm(nn.Module):
    """LlamaRMSNorm, row by row."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rows.rms_norm(x, self.weight, self.eps)


class SiLU(nn.Module):
    """SiLU, row by row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rows.silu(x)


class Rotary(nn.Module):
    """cos and sin looked up in one table by position; positions of padding read its first row."""

    def __init__(self, rotary: nn.Module, capacity: int) -> None:
        super().__init__()
        like = torch.zeros(1, dtype=torch.bfloat16, device=rotary.inv_freq.device)
        positions = torch.arange(capacity, device=like.device)[None]
        cos, sin = rotary(like, positions)
        self.cos = nn.Buffer(cos[0], persistent=False)
        self.sin = nn.Buffer(sin[0], persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor):
        at = position_ids.clamp(min=0)
        return self.cos[at], self.sin[at]


def build(size: Size, device: torch.device, seed: int, order: str = "chain") -> LlamaForCausalLM:
    """The model of our column, bf16, with new weights drawn from ``seed``; ``order``: of linear."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(_config(size, integration.NAME)).to(torch.bfloat16).to(device)
    return row_local(model, order)


def row_local(model: LlamaForCausalLM, order: str) -> LlamaForCausalLM:
    """Replaces, in place, every part whose bits could depend on the batch; weights are shared."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, Linear(child.weight, order))
            elif type(child).__name__ == "LlamaRMSNorm":
                setattr(module, name, RMSNorm(child.weight, child.variance_epsilon))
            elif type(child).__name__ == "LlamaRotaryEmbedding":
                setattr(module, name, Rotary(child, model.config.max_position_embeddings))
            elif name == "act_fn":
                setattr(module, name, SiLU())
    return model


def ours(net: LlamaForCausalLM) -> Side:
    """Our column, on the model that `build` made."""
    return Side("ours", net, _linear_logp, rows.log_softmax)


def plain(net: LlamaForCausalLM, size: Size) -> Side:
    """torch's column: transformers' model untouched, with a copy of the weights of ``net``."""
    copy = LlamaForCausalLM(_config(size, "sdpa")).to(torch.bfloat16)
    copy.load_state_dict(net.state_dict())
    return Side("torch", copy.to(net.device), _log_softmax_of_logits, _log_softmax)


def _linear_logp(
    model: LlamaForCausalLM, hidden: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """``ck.linear_logp``: no logits are made."""
    head = model.lm_head
    options = {"order": head.order, "main_grad": head.main_grad, "ignore_index": IGNORED}
    return ck.linear_logp(hidden, head.weight, tokens, **options)


def _log_softmax_of_logits(
    model: LlamaForCausalLM, hidden: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """As trainers without a fused head do."""
    logps = _log_softmax(model.lm_head(hidden))
    picked = logps.gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    return torch.where(tokens == IGNORED, 0.0, picked)


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.float(), dim=-1)


def linear_weights(model: LlamaForCausalLM) -> dict[str, nn.Parameter]:
    """Name -> weight of every linear layer (of either model)."""
    return {
        f"{name}.weight": module.weight
        for name, module in model.named_modules()
        if isinstance(module, Linear | nn.Linear)
    }


def set_main_grads(model: LlamaForCausalLM, grads: dict[str, torch.Tensor] | None) -> None:
    """Gives each of our linear layers the fp32 tensor that backward adds to, or takes it away."""
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            module.main_grad = grads[f"{name}.weight"] if grads is not None else None


def _config(size: Size, implementation: str) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=text.VOCAB,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        head_dim=size.hidden // size.heads,
        max_position_embeddings=size.capacity,
        pad_token_id=text.PAD,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        initializer_range=size.hidden**-0.5,
        use_cache=False,
        attn_implementation=implementation,
    )
