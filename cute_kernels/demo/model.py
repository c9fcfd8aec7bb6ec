"""Two models of the same weights: transformers' Llama as it is, and the same by ``ck.patch``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import cute_kernels as ck

#: A token that is not scored.
IGNORED = -100
PAD = 0  # the one byte that no text has
VOCAB = 256


@dataclass(frozen=True)
class Size:
    """Sizes that decide the parameter count."""

    hidden: int = 256  # 64 per head, a head size of the attention op
    inner: int = 512
    layers: int = 4
    heads: int = 4
    key_heads: int = 2
    capacity: int = 256  # the longest sequence


@dataclass(frozen=True)
class Side:
    """One column of the table: a model, and how its hidden states are scored.

    granularity: Micro-batches are cut at multiples of this many tokens.
    logps: (hidden [..., D], tokens [...]) -> log-probs [...]; 0 where a token is `IGNORED`.
    log_softmax: logits [..., V] -> log-probs of all tokens, to draw one from.
    """

    name: str
    model: LlamaForCausalLM
    granularity: int
    logps: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    log_softmax: Callable[[torch.Tensor], torch.Tensor]

    def hidden(self, **inputs: object) -> torch.Tensor:
        """The hidden states [B, T, D] that the head would take."""
        return self.model.model(**inputs).last_hidden_state

    def next_logps(self, hidden: torch.Tensor) -> torch.Tensor:
        """The log-probs [..., V] of what may come next, to draw from."""
        return self.log_softmax(self.model.lm_head(hidden))


def ours(size: Size, device: torch.device, seed: int, order: str = "chain") -> Side:
    """Our column, bf16, with new weights drawn from ``seed``; ``order``: of linear layers."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(_config(size)).to(torch.bfloat16).to(device)
    report = ck.patch(model, order=order, main_grad=True, strict=True)

    def logps(hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        weight = model.lm_head.weight
        options = {"order": order, "main_grad": getattr(weight, "main_grad", None)}
        return ck.linear_logp(hidden, weight, tokens, ignore_index=IGNORED, **options)

    log_softmax = functools.partial(ck.log_softmax, dtype=torch.float32)
    return Side("ours", model, report.granularity, logps, log_softmax)


def plain(side: Side, size: Size) -> Side:
    """torch's column: transformers' model untouched, with a copy of the weights of ``side``."""
    copy = LlamaForCausalLM(_config(size)).to(torch.bfloat16)
    copy.load_state_dict(side.model.state_dict())
    copy.to(side.model.device)

    def log_softmax(logits: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits.float(), dim=-1)

    def logps(hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probabilities as trainers without a fused head compute them."""
        every = log_softmax(copy.lm_head(hidden))
        picked = every.gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
        return torch.where(tokens == IGNORED, 0.0, picked)

    return Side("torch", copy, side.granularity, logps, log_softmax)


def weights(model: LlamaForCausalLM) -> dict[str, nn.Parameter]:
    """Name -> weight of what a Llama has, of either column.

    Not those of hyper-connections (fp32), which add in parts of more tokens than there are here.
    """
    return {name: w for name, w in model.named_parameters() if w.dtype == torch.bfloat16}


def set_main_grads(model: LlamaForCausalLM, grads: dict[str, torch.Tensor] | None) -> None:
    """Gives each weight the fp32 tensor that our backward adds to, or takes it away.

    torch's column does not look for one.
    """
    for name, weight in weights(model).items():
        if grads is not None:
            weight.main_grad = grads[name]
        elif hasattr(weight, "main_grad"):
            del weight.main_grad


def _config(size: Size) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        head_dim=size.hidden // size.heads,
        max_position_embeddings=size.capacity,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        initializer_range=size.hidden**-0.5,
        use_cache=False,
        attn_implementation="sdpa",
    )
