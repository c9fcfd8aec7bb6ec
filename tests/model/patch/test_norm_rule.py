"""Norms are recognised by their formula: whose forward agrees is replaced, by any name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cute_kernels as ck
from cute_kernels.model.patch import formula, state
from tests.contract import same_bytes
from tests.model.patch import families
from tests.model.patch.norms import Base, Centred, D, GainPlusOne, Rescale


class EpsOutside(Base):
    """Looks like RMSNorm, and is not."""

    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.tiny) * self.gain


class EpsOfNobody(Base):
    """Its eps is in the code, and the one that it holds is not used."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * self.gain


class Norm2(Base):
    """A norm, by the length of the row instead of its mean square."""

    def forward(self, x):
        return nn.functional.normalize(x, dim=-1, eps=self.tiny) * self.gain


class RMSNorm(Base):
    """No norm at all, in spite of its name."""

    def forward(self, x):
        return x * self.gain


class Clipped(Base):
    def forward(self, x):
        return (self.scaled(x) * self.gain).clamp(-2, 2)


class Halved(Base):
    """Rows of the batch, not of the last dimension."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + self.tiny) * self.gain


class Fails(Base):
    def forward(self, x):
        return torch.ops.nobody.rms_norm(x, self.gain)


REPLACED = {
    "gain": (Rescale, ("rms_norm", 1e-5, 0.0, "gain", None)),
    "gain + 1": (GainPlusOne, ("rms_norm", 1e-5, 1.0, "gain", None)),
    "centred": (Centred, ("layer_norm", 1e-6, 0.0, "gain", "shift")),
    "torch's LayerNorm": (lambda: nn.LayerNorm(D), ("layer_norm", 1e-5, 0.0, "weight", "bias")),
    "no bias": (lambda: nn.LayerNorm(D, bias=False), ("layer_norm", 1e-5, 0.0, "weight", None)),
    "nothing": (
        lambda: nn.LayerNorm(D, elementwise_affine=False),
        ("layer_norm", 1e-5, 0.0, None, None),
    ),
    "torch's RMSNorm": (
        lambda: nn.RMSNorm(D),
        ("rms_norm", torch.finfo(torch.float32).eps, 0.0, "weight", None),
    ),
    "eps 0.01": (lambda: nn.RMSNorm(D, eps=0.01), ("rms_norm", 0.01, 0.0, "weight", None)),
    "width 1": (lambda: nn.LayerNorm(1), ("layer_norm", 1e-5, 0.0, "weight", "bias")),
}
LEFT = [EpsOutside, EpsOfNobody, Norm2, RMSNorm, Clipped, Halved, Fails]


@pytest.mark.parametrize("which", REPLACED)
def test_by_formula(which):
    make, rule = REPLACED[which]
    module = make()
    if which != "width 1":  # where a layer norm is its bias alone, whatever the rest
        assert formula.norm_rule(module)[:5] == rule
    width = module.gain.shape[0] if hasattr(module, "gain") else module.normalized_shape[0]
    x = torch.randn(7, width, generator=torch.Generator().manual_seed(3)) * 3e-3
    want = module(x).double()
    ck.patch(module, strict=True)
    assert state.kind_of(module) == rule[0]
    assert (module(x).double() - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("cls", LEFT, ids=lambda cls: cls.__name__)
def test_by_name_alone_nothing_is(cls):
    module = cls()
    rule = formula.norm_rule(module)
    assert isinstance(rule, formula.Refusal)
    assert "agrees with no formula" in rule.text or "does not run" in rule.text
    report = ck.patch(nn.Sequential(module))
    assert report.replaced == () and type(module) is cls


def test_a_formula_that_is_not_looked_at_closely_would_pass(monkeypatch):
    """The mutant: inputs far above the root of eps only, where no eps shows."""
    assert isinstance(formula.norm_rule(EpsOfNobody()), formula.Refusal)
    monkeypatch.setattr(formula, "_SIZES", (30.0, 100.0))
    assert isinstance(formula.norm_rule(EpsOfNobody()), formula.Rule)


def test_weights_that_are_all_alike_do_not_matter():
    """Ones for Llama's, zeros for Gemma's, none yet (meta): the probe draws its own."""
    for name, offset in (("llama", 0.0), ("gemma2", 1.0)):
        norm = families.model(name).model.norm
        for weight in (torch.zeros, torch.ones):
            norm.weight.data = weight(128, dtype=torch.bfloat16)
            assert formula.norm_rule(norm).offset == offset
        norm.to("meta")
        assert formula.norm_rule(norm).offset == offset


def test_a_module_is_probed_without_touching_it():
    """Its hooks stay silent, its parameters and the random state of torch as they were."""
    module, called = nn.LayerNorm(D), []
    module.register_forward_hook(lambda *given: called.append(given))
    before, state = module.weight.clone(), torch.get_rng_state()
    formula.norm_rule(module)
    assert called == [] and same_bytes(module.weight, before)
    assert same_bytes(torch.get_rng_state(), state) and module.weight.grad is None


def test_several_dimensions_are_left():
    report = ck.patch(nn.Sequential(nn.LayerNorm((4, 8))))
    (left,) = report.left
    assert "not over the last dimension alone" in left.known and left.moves
