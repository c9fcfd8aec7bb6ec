"""Mamba's mixers under `ck.patch` where test_hybrids.py does not go: generation, packs, options."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import cute_kernels as ck
from cute_kernels.linear_attn import cache, op_selective
from cute_kernels.model.patch.forwards import mixers
from tests.contract import same_bytes
from tests.model.patch import all_causal_lms, families

NAMES = ["falcon_mamba", pytest.param("mamba", marks=pytest.mark.nightly)]


def patched(name: str, **options: object) -> torch.nn.Module:
    net = families.model(name)
    ck.patch(net, strict=not options, **options)
    return net


@pytest.mark.parametrize("name", NAMES)
def test_what_is_generated_has_the_logits_of_training(name):
    """Padded prompts, token by token, with a cache of another name than in other models."""
    net, prompts = patched(name), families.ids(3, 61, seed=5)
    mask = torch.ones_like(prompts)
    mask[0, :7], mask[2, :2] = 0, 0
    ids, logits = families.generated(net, prompts, attention_mask=mask)
    mask = F.pad(mask, (0, families.NEW), value=1)
    want = families.logits(net, ids, attention_mask=mask)
    assert same_bytes(logits.to(want.dtype), want[:, -families.NEW - 1 : -1])
    alone = families.logits(net, ids[:1, 7:])
    assert same_bytes(alone[:, -families.NEW - 1 : -1], want[:1, -families.NEW - 1 : -1])


def test_without_products():
    """Of a model whose linear layers stay torch's the mixer is replaced all the same."""
    net = patched("mamba", linear=False)
    assert type(mixers.mixers_in(net)[0].dt_proj) is torch.nn.Linear
    want = families.logits(families.model("mamba"), families.TOKENS)
    got = families.logits(net, families.TOKENS)
    assert (got - want).norm() < 0.03 * want.norm()


def without_a_state(monkeypatch):
    """Each call starts from zero, as transformers' second part of a prefill."""
    scan = op_selective.selective_scan

    def from_zero(*args):
        return scan(*args[:8], None if args[8] is None else args[8] * 0, *args[9:])

    monkeypatch.setattr(cache.op_selective, "selective_scan", from_zero)
    return {"chunks", "decoded", "static cache"}


def without_telling(monkeypatch):
    """A layer of Jamba keeps packs to itself."""
    monkeypatch.setattr(
        mixers._Told, "__init__", lambda self, layer, told: setattr(self, "_layer", layer)
    )
    return {"packs"}


def with_a_bias_twice(monkeypatch):
    """The steps of a call without a cache have the bias of dt_proj twice."""
    scan = mixers.linear_attn.selective_scan

    def more(u, delta, *operands, delta_bias, **options):
        return scan(u, delta, *operands, delta_bias=2 * delta_bias, **options)

    monkeypatch.setattr(mixers.linear_attn, "selective_scan", more)
    return {"chunks", "decoded", "static cache"}


@pytest.mark.parametrize("mutant", [without_a_state, without_telling, with_a_bias_twice])
def test_mutants_are_noticed(monkeypatch, mutant):
    net = patched("jamba")
    assert set(all_causal_lms.differing(net)) == set()
    want = mutant(monkeypatch)
    assert set(all_causal_lms.differing(net)) == want
