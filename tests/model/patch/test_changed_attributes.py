"""What a forward reads besides its input: its mode, and attributes that change after the patch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import cute_kernels as ck
from cute_kernels.errors import PatchError
from cute_kernels.model.patch import formula, state
from tests.contract import same_bytes
from tests.model.patch import families
from tests.model.patch.norms import Base, Centred, D, Rescale


class OnlyInTraining(Base):
    """A norm in evaluation; in training it is noisy."""

    def forward(self, x):
        y = self.scaled(x) * self.gain
        return nn.functional.dropout(y, 0.5) if self.training else y


class OnlyInEvaluation(Base):
    def forward(self, x):
        return self.scaled(x) * self.gain if self.training else x * self.gain


class Switched(Base):
    """Attributes of each kind that change the formula: read here, and not by ours."""

    def __init__(self) -> None:
        super().__init__()
        self.centred, self.limit, self.mode, self.unit = False, 1e6, "rms", 0.0
        self.named = {"twice": False}

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        y = self.scaled(x) * (self.gain + self.unit)
        y = y.clamp(-self.limit, self.limit) if self.mode == "rms" else y.abs()
        y = -y if getattr(self, "negative", None) else y
        return y + y if self.named["twice"] else y


class BoundedEps(Base):
    """Reads its eps, and computes with another one below 1e-5."""

    def forward(self, x):
        eps = max(self.tiny, 1e-5)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.gain


class OfAnObject(Base):
    def __init__(self) -> None:
        super().__init__()
        self.settings = type("Settings", (), {"plus": 0.0})()

    def forward(self, x):
        return self.scaled(x) * (self.gain + self.settings.plus)


class TwoEpsilons(Base):
    """Two floats of one value, of which the second is the eps."""

    def __init__(self) -> None:
        super().__init__()
        self.another, self.tiny = 1e-5, 1e-5


class TheSecond(TwoEpsilons, Rescale):
    pass


def x(size: float = 3e-3) -> torch.Tensor:
    return torch.randn(7, D, generator=torch.Generator().manual_seed(3)) * size


@pytest.mark.parametrize("cls", [OnlyInTraining, OnlyInEvaluation])
@pytest.mark.parametrize("training", [True, False])
def test_a_norm_in_one_mode_is_left(cls, training):
    module = cls().train(training)
    state = torch.get_rng_state()
    assert isinstance(formula.norm_rule(module), formula.Refusal)
    assert same_bytes(torch.get_rng_state(), state) and module.training is training
    assert ck.patch(nn.Sequential(module)).replaced == ()


@pytest.mark.parametrize("training", [True, False])
def test_an_activation_in_one_mode_is_left(training, monkeypatch):
    def leaky(self, values):
        return values.relu() if self.training else nn.functional.silu(values)

    monkeypatch.setattr(nn.SiLU, "forward", leaky)
    module = nn.SiLU().train(training)
    assert isinstance(formula.activation(module), formula.Refusal)


@pytest.mark.parametrize("training", [True, False])
def test_a_rotary_table_in_one_mode_is_left(training, monkeypatch):
    rotary = families.model("llama").model.rotary_emb.train(training)
    forward = type(rotary).forward

    def other(self, x, position_ids):
        tables = forward(self, x, position_ids)
        return tables if self.training else tuple(2 * t for t in tables)

    assert isinstance(formula.rotary_rule(rotary), formula.Rule)
    monkeypatch.setattr(type(rotary), "forward", other)
    assert isinstance(formula.rotary_rule(rotary), formula.Refusal)


NORMS = {
    "an attribute": (Rescale, "tiny"),
    "layer norm": (Centred, "small"),
    "torch's LayerNorm": (lambda: nn.LayerNorm(D), "eps"),
    "torch's RMSNorm": (lambda: nn.RMSNorm(D), "eps"),
    "two of one value": (TheSecond, "tiny"),
    "Llama's": (lambda: families.model("llama").model.norm.float(), "variance_epsilon"),
}


@pytest.mark.parametrize("which", NORMS)
def test_eps_is_read_at_each_call(which):
    make, name = NORMS[which]
    module, values = make(), x()
    values = torch.cat((values, values), dim=1)[:, : next(module.parameters()).shape[0]]
    values = values.repeat(1, 2)[:, : next(module.parameters()).shape[0]]
    ck.patch(module, strict=True)
    before = module(values)
    setattr(module, name, 1e-3)
    after = module(values)
    twin = copy.deepcopy(module)
    ck.unpatch(module)
    want = module(values)
    assert (after - want).abs().max() <= 1e-5 * want.abs().max()
    assert (before - want).abs().max() > 0.1 * want.abs().max()
    assert same_bytes(twin(values), after)


def test_torchs_default_eps_comes_back():
    module, values = nn.RMSNorm(D), x(3e-4)
    ck.patch(module, strict=True)
    want = module(values)
    module.eps = 1e-2
    assert not same_bytes(module(values), want)
    module.eps = None
    assert same_bytes(module(values), want)


CHANGES = {
    "bool": ("centred", True),
    "float": ("limit", 0.5),
    "string": ("mode", "absolute"),
    "offset": ("unit", 1.0),
    "one that was not there": ("negative", True),
    "inside of a dict": ("named", {"twice": True}),
}


@pytest.mark.parametrize("which", CHANGES)
@pytest.mark.parametrize("way", ["itself", "deepcopy", "pickle"])
def test_another_attribute_is_refused_by_name(which, way):
    """Ours would go on with the formula of the patch; a second patch finds the new one."""
    name, value = CHANGES[which]
    module = Switched()
    ck.patch(module, strict=True)
    if way != "itself":
        module = copy.deepcopy(module) if way == "deepcopy" else pickle.loads(pickle.dumps(module))
    want, held = module(x()), getattr(module, name, None)
    if isinstance(value, dict):
        module.named["twice"] = True
    else:
        setattr(module, name, value)
    with pytest.raises(PatchError, match=rf"^Switched\.{name}: expected"):
        module(x())
    ck.patch(module)
    changed = module(x())
    ck.unpatch(module)
    exact = module(x())
    assert (changed - exact).abs().max() <= 1e-5 * exact.abs().max()
    if held is not None and not isinstance(value, dict):
        ck.patch(module)
        setattr(module, name, held)
        if state.kind_of(module) is None:
            assert (module(x()) - want).abs().max() <= 1e-5 * want.abs().max()


def test_an_eps_that_is_bounded_may_not_change():
    module = BoundedEps()
    ck.patch(module, strict=True)
    want = module(x())
    module.tiny = 1e-7
    with pytest.raises(PatchError, match=r"BoundedEps\.tiny"):
        module(x())
    ck.patch(module)
    assert state.kind_of(module) is None
    assert (module(x()) - want).abs().max() <= 1e-5 * want.abs().max()


def test_an_object_that_may_change_is_left():
    (left,) = ck.patch(nn.Sequential(OfAnObject())).left
    assert "settings" in left.known and left.part == "OfAnObject"


OTHERS = {
    "gelu": (lambda: nn.GELU(), "approximate", "tanh", x(1.0)),
    "embedding": (lambda: nn.Embedding(9, D), "max_norm", 1.0, torch.arange(9)),
    "sparse": (lambda: nn.Embedding(9, D), "sparse", True, torch.arange(9)),
}


@pytest.mark.parametrize("which", OTHERS)
def test_options_of_other_modules(which):
    make, name, value, values = OTHERS[which]
    module = make()
    ck.patch(module, strict=True)
    module(values)
    setattr(module, name, value)
    with pytest.raises(PatchError, match=name):
        module(values)


def test_options_without_effect_may_change():
    module, values = nn.SiLU(), x(1.0)
    ck.patch(module, strict=True)
    want = module(values)
    module.inplace = True
    module.of_mine = 3
    assert same_bytes(module.train()(values.clone()), want)


def test_the_soft_cap_is_read_at_each_call():
    net, tokens = families.model("gemma2"), families.ids(2, 9)
    ck.patch(net, strict=True)
    capped = families.logits(net, tokens)
    net.config.final_logit_softcapping = None
    free = families.logits(net, tokens)
    labelled = net(tokens, labels=tokens, use_cache=False)
    assert same_bytes(labelled.logits, free) and not same_bytes(free, capped)
    cap = 3.0
    net.config.final_logit_softcapping = cap
    assert same_bytes(families.logits(net, tokens), ck.tanh(free / cap) * cap)
    assert not same_bytes(net(tokens, labels=tokens, use_cache=False).loss, labelled.loss)
