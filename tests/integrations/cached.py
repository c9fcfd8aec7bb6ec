"""A layer of a model of transformers with its own masks and caches, and what it must give."""

from __future__ import annotations

import itertools

import torch
import transformers
from transformers import masking_utils

from cute_kernels.integrations import transformers as ours
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn.api import block_sparse_attention
from tests.contract import same_bytes
from tests.sparse_attn import cases

S, WINDOW = 230, 64

MODULE = torch.nn.Module()


def config(kind: str):
    shared = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    shared |= {"head_dim": 64, "hidden_size": 128, "attn_implementation": ours.NAME}
    if kind == "llama":
        return transformers.LlamaConfig(**shared)
    return transformers.MistralConfig(**shared, sliding_window=WINDOW)


def tensors(length: int = S, seed: int = 1) -> list[torch.Tensor]:
    """q [1, 2, S, 64], k and v [1, 1, S, 64], as transformers has them."""
    x = cases.inputs(1, 2, 1, length, length, 64, seed=seed)
    return [t.detach().transpose(1, 2) for t in x.leaves()]


def alone(kind: str, length: int = S, seed: int = 1) -> torch.Tensor:
    mask = BlockMask.causal(length, length)
    if kind == "mistral":
        mask = BlockMask.sliding_window(length, length, left=WINDOW - 1, right=0)
    return block_sparse_attention(*(t.transpose(1, 2) for t in tensors(length, seed)), mask)


def attended(
    kind: str, q, k, v, padding=None, cache=None, positions=None, **lengths
) -> torch.Tensor:
    """One forward pass of a model's only attention layer, as its code does it."""
    make = masking_utils.create_causal_mask
    if kind == "mistral":
        make = masking_utils.create_sliding_window_causal_mask
    embeds = torch.zeros(q.shape[0], q.shape[2], 1)
    mask = make(config(kind), embeds, padding, cache, position_ids=positions)
    if cache is not None:
        k, v = cache.update(k, v, 0)
    return ours.attention(MODULE, q, k, v, mask, is_causal=True, **lengths)[0]


def cache_of(kind: str, static: bool):
    if static:
        return transformers.StaticCache(config(kind), max_cache_len=S + 200)
    return transformers.DynamicCache(config=config(kind))


def small(kind: str):
    torch.manual_seed(0)
    given = config(kind)
    given.vocab_size, given.intermediate_size = 97, 160
    return transformers.AutoModelForCausalLM.from_config(given).bfloat16().eval()


def prefill_and_decode_behind_padding(kind, pad, static):
    """Chunks and single tokens through a cache, beside a neighbour that fills the batch."""
    near = tensors(S + pad, seed=2)
    mine = [torch.nn.functional.pad(t, (0, 0, pad, 0), value=3.0) for t in tensors()]
    batch = [torch.cat(pair) for pair in zip(near, mine, strict=True)]
    padding = torch.arange(S + pad) >= torch.tensor([[0], [pad]])
    cache, rows = cache_of(kind, static), []
    ends = [0, pad + 90, pad + 91, pad + 92, pad + 161, S + pad - 1, S + pad]
    for first, last in itertools.pairwise(ends):
        part = [t[:, :, first:last] for t in batch]
        rows.append(attended(kind, *part, padding[:, :last].long(), cache))
    out = torch.cat(rows, dim=1)
    assert same_bytes(out[1:, pad:], alone(kind))
    assert same_bytes(out[:1], alone(kind, S + pad, seed=2))


def packed(cut: int) -> list[torch.Tensor]:
    """q, k and v of two sequences, one behind the other."""
    one, two = tensors(cut), tensors(S - cut, seed=2)
    return [torch.cat(pair, dim=2) for pair in zip(one, two, strict=True)]


def packs_through_lengths(cut, kind, with_positions):
    positions = torch.cat((torch.arange(cut), torch.arange(S - cut)))[None]
    lengths = torch.tensor([0, cut, S], dtype=torch.int32)
    given = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths.clone()}
    out = attended(kind, *packed(cut), positions=positions if with_positions else None, **given)
    want = torch.cat((alone(kind, cut), alone(kind, S - cut, seed=2)), dim=1)
    assert same_bytes(out, want)


def packs_through_position_ids(cut, kind):
    positions = torch.cat((torch.arange(cut), torch.arange(S - cut)))[None]
    out = attended(kind, *packed(cut), positions=positions)
    want = torch.cat((alone(kind, cut), alone(kind, S - cut, seed=2)), dim=1)
    assert same_bytes(out, want)
