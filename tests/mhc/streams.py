"""The demo's model with hyper-connections in the place of residual ones."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaForCausalLM

import cute_kernels as ck


class Attention(nn.Module):
    """The norm and the attention of a layer, without the attention's weights in what it returns."""

    def __init__(self, norm: nn.Module, attention: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.attention = attention

    def forward(self, x: torch.Tensor, **given: object) -> torch.Tensor:
        return self.attention(hidden_states=self.norm(x), **given)[0]


class Layer(nn.Module):
    """A decoder layer of streams [B, T, C, n]; the first one makes them of an embedding."""

    def __init__(self, layer: nn.Module, channels: int, n: int, first: bool) -> None:
        super().__init__()
        self.n = n
        self.first = first
        branch = Attention(layer.input_layernorm, layer.self_attn)
        self.attention = ck.mhc.HyperConnection(branch, channels, n)
        mlp = nn.Sequential(layer.post_attention_layernorm, layer.mlp)
        self.mlp = ck.mhc.HyperConnection(mlp, channels, n)

    def forward(self, x: torch.Tensor, **given: object) -> torch.Tensor:
        if self.first:
            x = ck.mhc.expand_from_embedding(x, self.n)
        return self.mlp(self.attention(x, **given))


def hyper_connected(model: LlamaForCausalLM, n: int, seed: int) -> LlamaForCausalLM:
    """Puts n streams through the layers of ``model``, in place; its weights stay as they are.

    A site around each attention and each MLP, a head before the last norm; fp32 weights of theirs,
    drawn from ``seed``.
    """
    torch.manual_seed(seed)
    base, channels = model.model, model.config.hidden_size
    layers = [Layer(layer, channels, n, i == 0) for i, layer in enumerate(base.layers)]
    base.layers = nn.ModuleList(layers).to(model.device)
    base.norm = nn.Sequential(ck.mhc.HyperHead(channels, n).to(model.device), base.norm)
    return model
