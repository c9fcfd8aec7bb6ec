"""Which gradients of a partly patched model are information: judged by parameter."""

from __future__ import annotations

import torch
from torch import nn

import cute_kernels as ck

#: Ids of three sequences of one length.
TOKENS = torch.randint(0, 50, (3, 32), generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    """Two linears of bf16, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 50, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.embed(ids))))


def net() -> Net:
    torch.manual_seed(0)
    return Net().to(torch.bfloat16)


def names(findings) -> set[str]:
    return {one.tensor for one in findings}


def audit(model: nn.Module):
    return ck.audit(model, TOKENS, transforms=["micro_batches"])


def test_one_patched_module_excuses_itself_alone():
    model = net()
    everything = names(audit(model).findings)
    assert {"first.weight", "second.weight", "embed.weight"} <= everything
    ck.patch(model.first)
    report = audit(model)
    patched = {"first.weight", "first.bias"}
    assert not report.ok and "first.weight" in names(report.information) <= patched
    assert {"second.weight", "embed.weight"} <= names(report.findings)
    assert not names(report.findings) & patched
    ck.patch(model)
    report = audit(model)
    assert report.ok and not report.findings and "second.weight" in names(report.information)
    assert {one.transform for one in report.information} == {"micro_batches"}


def test_a_parameter_that_an_unpatched_module_holds_as_well_is_not_excused():
    model = net()
    model.head.weight = model.embed.weight
    ck.patch(model.embed)
    report = audit(model)
    assert "embed.weight" in names(report.findings) and not report.information
    ck.patch(model, main_grad=True)
    model.embed.weight.main_grad = torch.zeros(model.embed.weight.shape, dtype=torch.float32)
    report = audit(model)
    assert report.ok and "embed.weight.main_grad" in names(report.information)


def test_a_main_grad_of_a_patched_module_is_promised(monkeypatch):
    """The mutant: an order of sums that follows the split is a finding, not information."""
    model = net()
    ck.patch(model, main_grad=True)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32)
    assert audit(model).ok
    backward, weight = torch.autograd.backward, model.first.weight

    def rounded(*args):
        backward(*args)
        weight.main_grad.copy_(weight.main_grad.bfloat16().float())

    monkeypatch.setattr(torch.autograd, "backward", rounded)
    assert names(audit(model).findings) == {"first.weight.main_grad"}
