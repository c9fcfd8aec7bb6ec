"""Caches of patched hybrids between calls: padding, masks that change, unpatched models."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import transformers

import cute_kernels as ck
from cute_kernels.integrations import packs
from tests.contract import same_bytes
from tests.model.patch import families


@pytest.fixture
def net() -> torch.nn.Module:
    """A patched model, in evaluation."""
    out = families.model("qwen3_5")
    ck.patch(out, strict=True)
    return out


@pytest.mark.parametrize("cuts", [range(1, 18), [3, 4, 17]])
def test_padding_in_calls_of_one_column(net, cuts):
    """transformers gives a state's layers no mask of one column; a mask may be written to later."""
    tokens, mask = families.TOKENS[:2, :17], torch.ones(2, 17, dtype=torch.long)
    mask[0, :4] = 0
    alone = families.logits(net, tokens[:1, 4:]).detach()
    cache = transformers.DynamicCache(config=net.config)
    for _ in range(2):  # a cache that is reset begins again
        rows = []
        for first, end in itertools.pairwise([0, *cuts]):
            given = mask[:, :end].clone()
            positions = (given.cumsum(1) - 1).clamp(min=0)[:, first:end]
            inputs = {"attention_mask": given, "position_ids": positions, "past_key_values": cache}
            rows.append(net(tokens[:, first:end], **inputs).logits.detach())
            given.zero_()
        assert same_bytes(torch.cat(rows, 1)[:1, 4:], alone)
        cache.reset()


@pytest.mark.parametrize("length", [1, 5])
def test_a_model_reads_no_mask_on_the_host(net, length):
    tokens = families.TOKENS[:, :length]
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    with mock.patch.object(torch.Tensor, "__bool__", side_effect=AssertionError("read")):
        assert packs.with_sequences(net.model, given) is given


def test_an_unpatched_model_does_not_take_a_patched_ones_cache(net):
    cache = transformers.DynamicCache(config=net.config)
    with torch.no_grad():
        net(families.TOKENS, past_key_values=cache)
        ck.unpatch(net)
        with pytest.raises(ck.errors.ArgumentValueError, match="got one of a patched model"):
            net(families.TOKENS, past_key_values=cache)
