"""Kimi's delta attention under `ck.patch` where test_hybrids.py does not go: its gate."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import PatchError
from cute_kernels.integrations import packs
from cute_kernels.model.patch.forwards import mixers
from tests.contract import same_bytes
from tests.model.patch import families

#: What is changed in a mixer -> why it is left.
LEFT = {
    "gate": (lambda m: setattr(m.forget_gate, "forward", torch.abs), "its gate has a forward of"),
    "size": (lambda m: setattr(m, "head_dim", 12), "head sizes .12.; ck.chunk_kda takes multiples"),
    "missing": (lambda m: delattr(m, "num_heads"), "mixer of this version has no num_heads"),
}


@pytest.mark.parametrize("change", LEFT)
def test_mixers_that_are_left(change):
    (function, text), net = LEFT[change], families.model("kimi_linear")
    function(mixers.mixers_in(net)[0])
    with pytest.raises(PatchError, match=text):
        ck.patch(net, strict=True)


def gates(net: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """g [B, T, H, K] of hidden states by the patched gate, and by the author's in fp32."""
    gate = mixers.mixers_in(net)[0].forget_gate
    ours = gate(x, packs.sequences_of(x, mask, {}))
    ck.unpatch(net)
    want = gate.float()(x.float())
    return ours, want


@torch.no_grad()
def test_a_gate_has_decays_by_channel():
    """As transformers' in fp32, but for roundings of its input; 0 of padding."""
    net = families.model("kimi_linear")
    ck.patch(net, strict=True)
    x = torch.randn(2, 9, families.HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    mask = torch.ones(2, 9)
    mask[0, :3] = 0
    got, want = gates(net, x, mask)
    assert got.shape == (2, 9, 4, 16) and got.dtype == torch.float32 and not got[0, :3].any()
    got, want = got[mask.bool()], want[mask.bool()]
    assert (got - want).abs().max() < 2e-2 * want.abs().max()
    # One gate of a head would be far from that.
    assert (got.mean(-1, keepdim=True) - want).abs().max() > 0.2 * want.abs().max()


def test_the_way_back():
    net = families.model("kimi_linear")
    want = families.logits(net, families.TOKENS)
    ck.patch(net, strict=True)
    assert not same_bytes(families.logits(net, families.TOKENS), want)
    ck.unpatch(net)
    assert same_bytes(families.logits(net, families.TOKENS), want)
