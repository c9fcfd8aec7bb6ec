"""Each family, patched: parts, values, bytes among other surroundings, what runs, the way back."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import cute_kernels as ck
from cute_kernels.model.patch import classes, decisions, state
from cute_kernels.model.patch.forwards import layers
from tests.contract import same_bytes
from tests.model.patch import all_causal_lms, families
from tests.model.patch.families import HOLDERS, POSITIONS, TOKENS, Watch, agree, step

each = pytest.mark.parametrize("name", families.FAMILIES)
#: A layer with a window and one without; other families have layers of one kind.
LAYERS = {"gemma2": 2, "gemma3": 2}


def tiny(name: str) -> torch.nn.Module:
    return families.model(name, num_hidden_layers=LAYERS.get(name, 1))


@pytest.fixture(scope="module")
def patched():
    return families.patched_once(tiny)


def watched(net: torch.nn.Module) -> Watch:
    """The ops of a pass, and of two with a cache."""
    tokens = families.ids()
    with Watch() as watch:
        families.logits(net, tokens)
        all_causal_lms.cached(net, tokens, [30])
    return watch


@each
def test_parts_and_ops(patched, name):
    """Whatever the bytes say on this machine: nothing that sums, multiplies matrices, or is e^x."""
    net, report = patched(name)
    assert report.complete and report.left == () and report.family is not None
    linears = [m for m in net.modules() if isinstance(m, torch.nn.Linear)]
    assert all(state.kind_of(m) in ("linear", "head") for m in linears)
    assert "embedding" in state.kind_of(net.get_input_embeddings())
    assert net.config._attn_implementation == "cute_kernels"
    watch = watched(net)
    assert watch.found == set() and len(watch.ours) >= 5
    for kind, (op, having) in HOLDERS.items():
        count = sum(one.by == classes.FORWARDS[kind].by for one in report.replaced)
        assert count == LAYERS.get(name, 1) * (name in having), kind
        assert (op in watch.ours) == (name in having), kind
    net, tokens = tiny(name).train(), families.ids()
    ck.patch(net)
    with Watch() as watch:
        net(tokens, labels=tokens, use_cache=False).loss.backward()
    assert watch.found == set()


@each
def test_rows_keep_their_bytes(patched, name):
    """Of logits, and of the gradient of embeddings."""
    assert all_causal_lms.differing(patched(name)[0]) == []


SCORED = families.ids(2, 19)


def labels() -> torch.Tensor:
    targets = SCORED.clone()
    targets[0, :6] = -100
    return targets


@each
def test_values(patched, name):
    """Loss, logits and gradients: about as near to float64 as those of the model in bf16."""
    plain, results, every = tiny(name), {}, families.ids()
    nets = {"ours": patched(name)[0], "torch's": plain, "exact": families.exact(plain)}
    for kind, net in nets.items():
        logits = families.logits(net, every).double()
        scores = families.logits(net, SCORED).double()[:, :-1].flatten(0, 1)
        tokens = F.cross_entropy(scores, labels()[:, 1:].flatten(), reduction="none")
        net.zero_grad()
        out = net.train()(SCORED, labels=labels(), use_cache=False)
        out.loss.backward()
        assert (out.logits is None) == (kind == "ours")
        gradients = {n: p.grad.double() for n, p in net.named_parameters()}
        results[kind] = logits, tokens, out.loss.double(), gradients
        net.eval()
    ours, torchs = (results[kind][0] - results["exact"][0] for kind in ("ours", "torch's"))
    assert 0 < ours.norm() <= 1.1 * torchs.norm()
    assert ours.abs().max() <= 2 * torchs.abs().max()
    want, near = results["exact"][1], results["torch's"][1]
    distance = (near - want)[want != 0].abs().mean()
    assert (results["ours"][2] - results["exact"][2]).abs() <= 1.25 * distance
    for parameter, exact in results["exact"][3].items():
        errors = [
            (results[kind][3][parameter] - exact).norm() / exact.norm()
            for kind in ("ours", "torch's")
        ]
        assert errors[0] <= 1.25 * errors[1] + 5e-3, parameter


@each
def test_one_launch_has_the_bytes_of_its_steps(name, monkeypatch):
    """With holders' forwards and without; attention that nothing is packed for, and of spans."""
    calls = families.calls_of(monkeypatch, *families.ATTENDING)
    net, other = (families.model(name, num_hidden_layers=1) for _ in range(2))
    ck.patch(net, strict=True)
    for kind in HOLDERS:
        monkeypatch.setitem(decisions.CONDITIONS, kind, lambda *_: False)
    ck.patch(other, strict=True)
    assert not {op for op, _ in HOLDERS.values()} & watched(other).ours
    calls.clear()
    got, want = step(net), step(other)
    assert agree(got, want) and {*calls} == {"causal_attention"}
    calls.clear()
    assert agree(step(net, **POSITIONS), want) and {*calls} == {"sequence_attention"}
    mask = torch.ones_like(TOKENS)
    mask[0, :5] = 0
    assert agree(step(net, attention_mask=mask), step(other, attention_mask=mask))
    decoded = [all_causal_lms.cached(m, TOKENS, [9, 10]) for m in (net, other)]
    assert same_bytes(*decoded)


@each
def test_state_and_back(name):
    """Keys, order, bytes and parameters' identity, patched; classes and logits, unpatched."""
    net = tiny(name)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    parameters = {n: id(p) for n, p in net.named_parameters()}
    kinds = [type(m) for m in net.modules()]
    want, implementation = families.logits(net, TOKENS), net.config._attn_implementation
    attributes = [set(vars(m)) for m in net.modules()]
    ck.patch(net)
    after = net.state_dict()
    assert list(before) == list(after) and all(same_bytes(before[n], after[n]) for n in before)
    assert parameters == {n: id(p) for n, p in net.named_parameters()}
    assert all(isinstance(m, c) for m, c in zip(net.modules(), kinds, strict=True))
    assert [type(m).__qualname__ for m in net.modules()] == [c.__qualname__ for c in kinds]
    assert any(type(m) is not c for m, c in zip(net.modules(), kinds, strict=True))
    ck.unpatch(net)
    assert [type(m) for m in net.modules()] == kinds
    hooks = {"_output_capturing_hooks_installed"}
    assert [set(vars(m)) - hooks for m in net.modules()] == [a - hooks for a in attributes]
    assert net.config._attn_implementation == implementation
    assert same_bytes(families.logits(net, TOKENS), want)


# ---- the audit ----------------------------------------------------------------------------------


def sequences() -> list[torch.Tensor]:
    return [families.ids(1, length, seed=length)[0] for length in (19, 40, 26)]


@pytest.mark.nightly
@each
def test_audits(patched, name):
    """What is found in the unpatched model is at modules that a patch replaces, or at attention."""
    report = ck.audit(patched(name)[0], sequences(), gradients=False)
    assert report.ok, str(report)
    report = ck.audit(tiny(name), sequences(), gradients=False)
    assert not report.ok and report.first is not None


@pytest.mark.nightly
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox"])
def test_every_gradient_into_main_grad(name, shared):
    """Sequences of any length: the audit pads micro-batches to what the patched norms ask for.

    shared: what the report says of tied embeddings is so.
    """
    net = families.model(name)
    report = ck.patch(net, strict=True, main_grad=True)
    for key, parameter in net.named_parameters():
        left = key in report.main_grad_left or (key in report.main_grad_shared) != shared
        parameter.requires_grad_(not left)
        if not left:
            parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32)
    if shared and not report.main_grad_shared:
        return
    audit = ck.audit(net, sequences(), transforms=["micro_batches", "gradient_repeat"])
    assert audit.ok, str(audit)
    named = {(one.transform, one.name) for one in audit.information}
    want = [f"{one}.main_grad" for one in report.main_grad_shared] if shared else []
    assert named == set(itertools.product(["micro_batches"], want))


# ---- mutants ------------------------------------------------------------------------------------


def leave(monkeypatch, spared: str) -> None:
    """A part is passed over, and the report does not say so."""
    replaced = decisions._replacement
    monkeypatch.setattr(
        decisions,
        "_replacement",
        lambda part, facts: None if part.name == spared else replaced(part, facts),
    )


def test_parts_that_are_left_are_noticed(monkeypatch):
    """The mutants: the last norm, and nothing is patched."""
    assert {"mm", "cos", "sin"} <= watched(families.model("llama")).found
    leave(monkeypatch, "model.norm")
    net = families.model("llama")
    assert ck.patch(net).complete and "mean" in watched(net).found


@pytest.mark.nightly
def test_an_activation_that_is_left_is_named(monkeypatch):
    """The mutant: torch's GELU stays in the second layer; the report and the audit both see it."""
    spared = "model.layers.1.mlp.act_fn"
    leave(monkeypatch, spared)
    net = families.model("gemma3", intermediate_size=161)
    # Between -20 and 20: one in a thousand of torch's values there follows its place in memory.
    with torch.no_grad():
        net.model.layers[1].mlp.gate_proj.weight *= 20
    (left,) = ck.patch(net).moving
    assert left.name == spared and "gelu" in left.known
    report = ck.audit(net, sequences(), gradients=False)
    assert not report.ok and report.first.module == spared


def test_positions_that_follow_the_batch_are_noticed(monkeypatch):
    """The mutant: a table of positions counted from the batch's first one."""
    table = layers.rowwise.rotary_table
    monkeypatch.setattr(
        layers.rowwise,
        "rotary_table",
        lambda positions, *rest: table(positions - positions.min() + positions.shape[1], *rest),
    )
    net = families.model("llama")
    ck.patch(net)
    assert {*all_causal_lms.SURROUNDINGS} & {*all_causal_lms.differing(net)}
