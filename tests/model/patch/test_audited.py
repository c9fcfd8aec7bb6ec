"""``ck.audit`` of patched families: no byte differs, and in the unpatched ones some do."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.model.patch import decisions
from tests.model.patch import families

pytestmark = pytest.mark.nightly
each = pytest.mark.parametrize("name", families.FAMILIES)


def sequences() -> list[torch.Tensor]:
    return [families.ids(1, length, seed=length)[0] for length in (19, 40, 26)]


@each
def test_rows(name):
    net = families.model(name)
    ck.patch(net, strict=True)
    report = ck.audit(net, sequences(), gradients=False)
    assert report.ok, str(report)


@each
def test_unpatched(name):
    """What audit finds there, it finds at modules that a patch replaces, or at attention."""
    report = ck.audit(families.model(name), sequences(), gradients=False)
    assert not report.ok and report.first is not None


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox"])
def test_every_gradient_into_main_grad(name):
    """Sequences of any length: the audit pads micro-batches to what the patched norms ask for."""
    net = families.model(name)
    report = ck.patch(net, strict=True, main_grad=True)
    for key, parameter in net.named_parameters():
        if key in (*report.main_grad_left, *report.main_grad_shared):
            parameter.requires_grad_(False)
        else:
            parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32)
    found = ck.audit(net, sequences(), transforms=["micro_batches", "gradient_repeat"])
    assert found.ok, str(found)


def test_a_shared_main_grad_follows_the_micro_batches():
    """What the report says of tied embeddings is so."""
    net = families.model("gemma3")
    report = ck.patch(net, strict=True, main_grad=True)
    assert report.main_grad_shared == ("model.embed_tokens.weight",)
    for key, parameter in net.named_parameters():
        parameter.requires_grad_(key in report.main_grad_shared)
        parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32)
    found = ck.audit(net, sequences(), transforms=["micro_batches", "gradient_repeat"])
    assert found.ok, str(found)
    assert {one.transform for one in found.information} == {"micro_batches"}
    assert {one.name for one in found.information} == {"model.embed_tokens.weight.main_grad"}


def test_an_activation_that_is_left_is_named(monkeypatch):
    """The mutant: torch's GELU stays in the second layer; the report and the audit both see it."""
    replaced, spared = decisions._replacement, "model.layers.1.mlp.act_fn"

    def forgetful(part, facts):
        return None if part.name == spared else replaced(part, facts)

    monkeypatch.setattr(decisions, "_replacement", forgetful)
    net = families.model("gemma3", intermediate_size=161)
    # Between -20 and 20: one in a thousand of torch's values there follows its place in memory.
    with torch.no_grad():
        net.model.layers[1].mlp.gate_proj.weight *= 20
    (left,) = ck.patch(net).moving
    assert left.name == spared and "gelu" in left.known
    report = ck.audit(net, sequences(), gradients=False)
    assert not report.ok and report.first.module == spared
