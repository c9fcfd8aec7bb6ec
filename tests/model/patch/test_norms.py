"""Norms, known by their formula; what a forward reads besides its input, and what may change."""

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

D = 96


class Base(nn.Module):
    """A norm of nobody's library: weight, eps, and a formula below."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(D, generator=torch.Generator().manual_seed(1)))
        self.tiny = eps

    def scaled(self, x):
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.tiny).to(x.dtype)


class Centred(nn.Module):
    """A layer norm whose parameters have other names and another order."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.shift = nn.Parameter(torch.randn(D, generator=generator))
        self.gain = nn.Parameter(torch.randn(D, generator=generator))
        self.small = 1e-6

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + self.small).sqrt() * self.gain + self.shift


def norm(forward, **attributes: object) -> nn.Module:
    module = type("Norm", (Base,), {"forward": forward})()
    vars(module).update(attributes)
    return module


def rms(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rescale() -> nn.Module:
    return norm(lambda self, x: self.scaled(x) * self.gain)


def x(size: float = 3e-3, width: int = D) -> torch.Tensor:
    return torch.randn(7, width, generator=torch.Generator().manual_seed(3)) * size


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    return bool((got.double() - want).abs().max() <= 1e-5 * want.abs().max())


FP32_EPS = torch.finfo(torch.float32).eps
#: Norm -> (how it is made, its rule: kind, eps, offset, weight, bias).
REPLACED = {
    "gain": (rescale, ("rms_norm", 1e-5, 0.0, "gain", None)),
    "gain + 1": (
        lambda: norm(lambda self, values: self.scaled(values) * (1 + self.gain)),
        ("rms_norm", 1e-5, 1.0, "gain", None),
    ),
    "centred": (Centred, ("layer_norm", 1e-6, 0.0, "gain", "shift")),
    "torch's LayerNorm": (lambda: nn.LayerNorm(D), ("layer_norm", 1e-5, 0.0, "weight", "bias")),
    "no bias": (lambda: nn.LayerNorm(D, bias=False), ("layer_norm", 1e-5, 0.0, "weight", None)),
    "nothing": (
        lambda: nn.LayerNorm(D, elementwise_affine=False),
        ("layer_norm", 1e-5, 0.0, None, None),
    ),
    "torch's RMSNorm": (lambda: nn.RMSNorm(D), ("rms_norm", FP32_EPS, 0.0, "weight", None)),
    "eps 0.01": (lambda: nn.RMSNorm(D, eps=0.01), ("rms_norm", 0.01, 0.0, "weight", None)),
    # A layer norm of width 1 is its bias alone, whatever the rest.
    "width 1": (lambda: nn.LayerNorm(1), ("layer_norm", None, None, None, None)),
}


@pytest.mark.parametrize("which", REPLACED)
def test_by_formula(which):
    make, rule = REPLACED[which]
    module = make()
    assert which == "width 1" or formula.norm_rule(module)[:5] == rule
    values = x(width=1 if which == "width 1" else D)
    want = module(values).double()
    ck.patch(module, strict=True)
    assert state.kind_of(module) == rule[0] and near(module(values), want)


def dropping(self, x):
    y = self.scaled(x) * self.gain
    return nn.functional.dropout(y, 0.5) if self.training else y


class Settings:
    plus = 0.0


NO_FORMULA = "agrees with no formula"
#: What looks like a norm -> (its forward, why it is none).
LEFT = {
    "eps outside": (
        lambda self, x: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.tiny) * self.gain,
        NO_FORMULA,
    ),
    "eps of nobody": (lambda self, x: rms(x, 1e-3) * self.gain, NO_FORMULA),
    "length": (
        lambda self, x: nn.functional.normalize(x, dim=-1, eps=self.tiny) * self.gain,
        NO_FORMULA,
    ),
    "a name alone": (lambda self, x: x * self.gain, NO_FORMULA),
    "clipped": (lambda self, x: (self.scaled(x) * self.gain).clamp(-2, 2), NO_FORMULA),
    "rows of the batch": (
        lambda self, x: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + self.tiny) * self.gain,
        NO_FORMULA,
    ),
    "fails": (lambda self, x: torch.ops.nobody.rms_norm(x, self.gain), "does not run"),
    "in evaluation": (dropping, ""),
    "in training": (
        lambda self, x: self.scaled(x) * self.gain if self.training else x * self.gain,
        "",
    ),
    "an object": (lambda self, x: self.scaled(x) * (self.gain + self.settings.plus), "settings"),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("which", LEFT)
def test_by_name_alone_nothing_is(which, training):
    forward, reason = LEFT[which]
    module = norm(forward, settings=Settings()).train(training)
    cls, random = type(module), torch.get_rng_state()
    rule = formula.norm_rule(module)
    assert isinstance(rule, formula.Refusal) and reason in rule.text
    assert same_bytes(torch.get_rng_state(), random) and module.training is training
    assert ck.patch(nn.Sequential(module)).replaced == () and type(module) is cls


@pytest.mark.parametrize("training", [True, False])
def test_other_parts_in_one_mode_are_left(training, monkeypatch):
    def leaky(self, values):
        return values.relu() if self.training else nn.functional.silu(values)

    monkeypatch.setattr(nn.SiLU, "forward", leaky)
    assert isinstance(formula.activation(nn.SiLU().train(training)), formula.Refusal)
    rotary = families.model("llama").model.rotary_emb.train(training)
    forward = type(rotary).forward

    def other(self, x, position_ids):
        tables = forward(self, x, position_ids)
        return tables if self.training else tuple(2 * t for t in tables)

    assert isinstance(formula.rotary_rule(rotary), formula.Rule)
    monkeypatch.setattr(type(rotary), "forward", other)
    assert isinstance(formula.rotary_rule(rotary), formula.Refusal)


def test_a_formula_that_is_not_looked_at_closely_would_pass(monkeypatch):
    """The mutant: inputs far above the root of eps only, where no eps shows."""
    module = norm(LEFT["eps of nobody"][0])
    assert isinstance(formula.norm_rule(module), formula.Refusal)
    monkeypatch.setattr(formula, "_SIZES", (30.0, 100.0))
    assert isinstance(formula.norm_rule(module), formula.Rule)


def test_another_eps_is_noticed(monkeypatch):
    """The mutant: every norm gets ten times its eps."""
    rule_of = formula.norm_rule

    def larger(module):
        rule = rule_of(module)
        return rule._replace(eps=10 * rule.eps, eps_name=None)

    monkeypatch.setattr(formula, "norm_rule", larger)
    for module in (nn.LayerNorm(D), nn.RMSNorm(D, eps=1e-6)):
        want = module(x()).double()
        ck.patch(module, strict=True)
        assert not near(module(x()), want)


def test_weights_that_are_all_alike_do_not_matter():
    """Ones for Llama's, zeros for Gemma's, none yet (meta): the probe draws its own."""
    for name, offset in (("llama", 0.0), ("gemma2", 1.0)):
        module = families.model(name).model.norm
        for weight in (torch.zeros, torch.ones):
            module.weight.data = weight(128, dtype=torch.bfloat16)
            assert formula.norm_rule(module).offset == offset
        module.to("meta")
        assert formula.norm_rule(module).offset == offset


def test_a_module_is_probed_without_touching_it():
    """Its hooks stay silent, its parameters and the random state of torch as they were."""
    module, called = nn.LayerNorm(D), []
    module.register_forward_hook(lambda *args: called.append(args))
    before, random = module.weight.clone(), torch.get_rng_state()
    formula.norm_rule(module)
    assert called == [] and same_bytes(module.weight, before)
    assert same_bytes(torch.get_rng_state(), random) and module.weight.grad is None


# ---- attributes that change after the patch -----------------------------------------------------

TWO = {"another": 1e-5, "tiny": 1e-5}
#: Norm -> (how it is made, its eps); two floats of one value, of which the second is the eps.
EPS = {
    "an attribute": (rescale, "tiny"),
    "layer norm": (Centred, "small"),
    "torch's LayerNorm": (lambda: nn.LayerNorm(D), "eps"),
    "torch's RMSNorm": (lambda: nn.RMSNorm(D), "eps"),
    "two of one value": (lambda: norm(lambda s, x: s.scaled(x) * s.gain, **TWO), "tiny"),
    "Llama's": (lambda: families.model("llama").model.norm.float(), "variance_epsilon"),
}


@pytest.mark.parametrize("which", EPS)
def test_eps_is_read_at_each_call(which):
    make, name = EPS[which]
    module = make()
    values = x(width=len(next(module.parameters())))
    ck.patch(module, strict=True)
    before, eps = module(values), getattr(module, name)
    setattr(module, name, 1e-3)
    after, twin = module(values), copy.deepcopy(module)
    setattr(module, name, eps)
    assert same_bytes(module(values), before)
    setattr(module, name, 1e-3)
    ck.unpatch(module)
    want = module(values).double()
    assert near(after, want) and (before - want).abs().max() > 0.1 * want.abs().max()
    assert same_bytes(twin(values), after)


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


#: Attribute -> its new value: "negative" was not there; "named" changes inside.
CHANGES = {
    "centred": True, "limit": 0.5, "mode": "absolute", "unit": 1.0, "negative": True,
    "named": {"twice": True},
}  # fmt: skip
WAYS = {
    "itself": lambda module: module,
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("way", WAYS)
def test_another_attribute_is_refused_by_name(name, way):
    """Ours would go on with the formula of the patch; a second patch finds the new one."""
    value, module = CHANGES[name], Switched()
    ck.patch(module, strict=True)
    module = WAYS[way](module)
    module(x())
    if isinstance(value, dict):
        getattr(module, name).update(value)
    else:
        setattr(module, name, value)
    with pytest.raises(PatchError, match=rf"^Switched\.{name}: expected"):
        module(x())
    ck.patch(module)
    changed = module(x())
    ck.unpatch(module)
    assert near(changed, module(x()).double())


def test_an_eps_that_is_bounded_may_not_change():
    """Read, and another one is computed with below 1e-5."""
    module = norm(lambda self, x: rms(x, max(self.tiny, 1e-5)) * self.gain)
    ck.patch(module, strict=True)
    want = module(x()).double()
    module.tiny = 1e-7
    with pytest.raises(PatchError, match=r"Norm\.tiny"):
        module(x())
    ck.patch(module)
    assert state.kind_of(module) is None and near(module(x()), want)


#: Module -> (how it is made, an option, its new value, what the module takes).
OTHERS = {
    "gelu": (nn.GELU, "approximate", "tanh", x(1.0)),
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
    module.inplace, module.of_mine = True, 3
    assert same_bytes(module.train()(values.clone()), want)


def test_the_soft_cap_is_read_at_each_call():
    net, tokens, cap = families.model("gemma2"), families.ids(2, 9), 3.0
    ck.patch(net, strict=True)
    capped = families.logits(net, tokens)
    net.config.final_logit_softcapping = None
    free = families.logits(net, tokens)
    labelled = net(tokens, labels=tokens, use_cache=False)
    assert same_bytes(labelled.logits, free) and not same_bytes(free, capped)
    net.config.final_logit_softcapping = cap
    assert same_bytes(families.logits(net, tokens), ck.tanh(free / cap) * cap)
    assert not same_bytes(net(tokens, labels=tokens, use_cache=False).loss, labelled.loss)
