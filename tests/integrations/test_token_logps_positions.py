"""Positions of padded sequences: each has the log-probs that it has alone."""

from __future__ import annotations

import pytest
import torch
import transformers

import cute_kernels as ck
from cute_kernels.errors import ArgumentValueError
from cute_kernels.integrations.token_logps import token_logps
from tests.contract import same_bytes
from tests.integrations import tiny
from tests.model.patch import families

PAD, LENGTH = 5, 12


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, slice]:
    """(ids of one sequence, a batch of it and another, the mask, where its log-probs are)."""
    one = families.ids(1, LENGTH)
    width = {"left": (PAD, 0), "right": (0, PAD)}[side]
    ids = torch.nn.functional.pad(one, width, value=3)
    mask = torch.nn.functional.pad(torch.ones_like(one), width)
    other = families.ids(1, LENGTH + PAD, seed=4)
    first = width[0]
    columns = slice(first, first + LENGTH - 1)
    return one, torch.cat((ids, other)), torch.cat((mask, torch.ones_like(other))), columns


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3"])
@torch.no_grad()
def test_padding_does_not_change_bytes(name, side):
    model = families.model(name)
    ck.patch(model)
    one, ids, mask, columns = padded(side)
    want = token_logps(model, one)
    assert same_bytes(token_logps(model, ids, attention_mask=mask)[:1, columns], want)
    # With targets nothing is shifted, and positions are the same.
    targets = ids.roll(-1, 1).masked_fill(mask.roll(-1, 1) == 0, -100)
    got = token_logps(model, ids, targets, attention_mask=mask)[:1, columns]
    assert same_bytes(got, want)


TABLES = {
    "gpt2": transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=tiny.VOCAB + 1),
    "opt": transformers.OPTConfig(
        vocab_size=97, hidden_size=64, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2
    ),
    "bloom": transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=1, n_head=2),
}


@pytest.mark.parametrize("name", TABLES)
@torch.no_grad()
def test_learned_positions_and_alibi(name):
    """Columns taken for positions are off by far more than rounding."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(TABLES[name]).eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    one, ids, mask, columns = padded("left")
    want = token_logps(model, one)
    got = token_logps(model, ids, attention_mask=mask)[:1, columns]
    assert (got - want).abs().max() < 1e-3
    if name == "gpt2":  # the caller's own positions count
        given = torch.arange(ids.shape[1])[None].expand_as(ids)
        got = token_logps(model, ids, attention_mask=mask, position_ids=given)[:1, columns]
        assert (got - want).abs().max() > 0.1


def test_a_table_without_position_ids_refuses_padding_before_tokens():
    torch.manual_seed(0)
    sizes = {"d_model": 64, "decoder_layers": 1, "decoder_ffn_dim": 64}
    config = transformers.BartConfig(
        vocab_size=97, decoder_attention_heads=2, pad_token_id=0, **sizes
    )
    model = transformers.BartForCausalLM(config).eval()
    one, ids, mask, columns = padded("right")
    got = token_logps(model, ids, attention_mask=mask)[:1, columns]
    assert (got - token_logps(model, one)).abs().max() < 1e-3
    with pytest.raises(ArgumentValueError, match=r"attention_mask: .*BartDecoder.*position_ids"):
        token_logps(model, ids.flip(1), attention_mask=mask.flip(1))
