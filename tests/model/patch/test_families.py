"""Each family, patched: values, rows byte by byte among other surroundings, and what still runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import cute_kernels as ck
from cute_kernels.model.patch import decisions, formula, state
from cute_kernels.model.patch.forwards import layers
from tests.contract import same_bytes
from tests.model.patch import families
from tests.model.patch.ops import Watch

each = pytest.mark.parametrize("name", families.FAMILIES)


@pytest.fixture(scope="module")
def patched():
    """Name -> (the model, patched, what the patch said): made once."""
    made: dict[str, tuple[torch.nn.Module, object]] = {}

    def get(name: str):
        if name not in made:
            net = families.model(name)
            made[name] = net, ck.patch(net, strict=True)
        return made[name]

    return get


@each
def test_nothing_is_left(patched, name):
    net, report = patched(name)
    assert report.complete and report.left == () and report.family is not None
    linears = [m for m in net.modules() if isinstance(m, torch.nn.Linear)]
    assert all(state.kind_of(m) in ("linear", "head") for m in linears)
    assert "embedding" in state.kind_of(net.get_input_embeddings())
    assert net.config._attn_implementation == "cute_kernels"


@each
def test_values(patched, name):
    """No farther from float64 than the model was before, but for a tenth."""
    net, _ = patched(name)
    plain = families.model(name)
    tokens = families.ids()
    want = families.logits(families.exact(plain), tokens)
    mine, torchs = (families.logits(one, tokens).double() - want for one in (net, plain))
    assert 0 < mine.norm() <= 1.1 * torchs.norm()
    assert mine.abs().max() <= 2 * torchs.abs().max()


@each
def test_rows_keep_their_bytes(patched, name):
    net, _ = patched(name)
    tokens = families.ids(1, seed=3)
    want = families.logits(net, tokens)
    for surroundings, run in families.SURROUNDINGS.items():
        assert same_bytes(run(net, tokens), want), surroundings


@each
def test_only_exact_ops_of_torch_run(patched, name):
    """Whatever the bytes say on this machine: nothing that sums, multiplies matrices, or is e^x."""
    net, _ = patched(name)
    tokens = families.ids()
    with Watch() as watch:
        families.logits(net, tokens)
        families.cached(net, tokens, [30], "dynamic")
    assert watch.found == set() and len(watch.ours) >= 5


@each
def test_only_exact_ops_of_torch_run_in_training(name):
    net = families.model(name).train()
    ck.patch(net)
    tokens = families.ids()
    with Watch() as watch:
        net(tokens, labels=tokens, use_cache=False).loss.backward()
    assert watch.found == set()


@each
def test_the_unpatched_model_runs_others(name):
    net, tokens = families.model(name), families.ids()
    with Watch() as watch:
        families.logits(net, tokens)
    assert {"mm", "cos", "sin"} <= watch.found or {"addmm", "cos", "sin"} <= watch.found


def test_elements_differ_by_their_place():
    """One by one and all at once: torch's functions on any CPU with vectors, and never ours."""
    torch.manual_seed(0)
    x = torch.randn(1025) * 3

    def differing(function) -> int:
        alone = torch.cat([function(x[i : i + 1]) for i in range(len(x))])
        return int((alone.view(torch.int32) != function(x).view(torch.int32)).sum())

    torchs = {f.__name__: differing(f) for f in (F.silu, F.gelu)}
    assert all(torchs.values()), torchs
    ours = {f.__name__: differing(f) for f in (ck.silu, ck.gelu, ck.tanh)}
    assert not any(ours.values()), ours


@each
def test_norms_compute_their_own_formula(name):
    """At inputs about as large as the root of eps, where another eps would show."""
    net = families.model(name).float()
    plain = dict(families.model(name).double().named_modules())
    ck.patch(net)
    generator = torch.Generator().manual_seed(2)
    count = 0
    for at, module in net.named_modules():
        if state.kind_of(module) not in ("rms_norm", "layer_norm"):
            continue
        count += 1
        width = module.weight.shape[0]
        x = torch.randn(5, width, generator=generator) * 2e-3
        want = plain[at](x.double())
        assert (module(x).double() - want).abs().max() <= 1e-5 * want.abs().max(), at
    assert count >= 5


# ---- mutants ------------------------------------------------------------------------------------


def test_a_norm_that_is_left_is_noticed(monkeypatch):
    """The mutant: the last norm is passed over, and the report does not say so."""
    replaced = decisions._replacement

    def forgetful(part, facts):
        return None if part.name == "model.norm" else replaced(part, facts)

    monkeypatch.setattr(decisions, "_replacement", forgetful)
    net = families.model("llama")
    assert ck.patch(net).complete
    tokens = families.ids()
    with Watch() as watch:
        families.logits(net, tokens)
    assert "mean" in watch.found


def test_another_eps_is_noticed(monkeypatch):
    """The mutant: every norm gets ten times its eps."""
    rule_of = formula.norm_rule

    def larger(module):
        rule = rule_of(module)
        return rule._replace(eps=10 * rule.eps, eps_name=None)

    monkeypatch.setattr(formula, "norm_rule", larger)
    with pytest.raises(AssertionError):
        test_norms_compute_their_own_formula("llama")


def test_positions_that_follow_the_batch_are_noticed(monkeypatch):
    """The mutant: a table of positions counted from the batch's first one."""

    table = layers.rowwise.rotary_table
    monkeypatch.setattr(
        layers.rowwise,
        "rotary_table",
        lambda at, *rest: table(at - at.min() + at.shape[1], *rest),
    )
    net = families.model("llama")
    ck.patch(net)
    tokens = families.ids(1, seed=3)
    want = families.logits(net, tokens)
    found = [same_bytes(run(net, tokens), want) for run in families.SURROUNDINGS.values()]
    assert not all(found)
