"""The thread's rounding mode shows in no bit of a log-probability or its gradient."""

from __future__ import annotations

import contextlib

import pytest
import torch

import cute_kernels as ck
from cute_kernels.cpu.c_library import functions
from cute_kernels.logp import op

#: fesetround's numbers on x86-64.
NEAREST, DOWN, UP = 0, 0x400, 0x800


@contextlib.contextmanager
def rounding(mode: int):
    functions().fesetround(mode)
    try:
        yield
    finally:
        functions().fesetround(NEAREST)


def results(name: str, mode: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(64, 48, generator=generator)
    weight = torch.randn(80, 48, generator=generator)
    target = torch.randint(80, (64,), generator=generator)
    temperature = 0.5 + torch.rand(64, generator=generator)
    upstream = torch.randn(64, generator=generator)
    operand = (hidden if name == "linear_logp" else 3 * hidden).requires_grad_()
    with rounding(mode):
        if name == "linear_logp":
            out = ck.linear_logp(operand, weight, target, temperature=temperature)
        else:
            out = ck.log_probs(operand, target % 48, temperature=temperature)
        (gradient,) = torch.autograd.grad(out, operand, upstream)
    return [t.detach().view(torch.uint8) for t in (out, gradient)]


@pytest.mark.parametrize("name", ["linear_logp", "log_probs"])
@pytest.mark.parametrize("mode", [DOWN, UP])
def test_no_bit_follows_the_rounding_mode(name, mode):
    for one, other in zip(results(name, NEAREST), results(name, mode), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["linear_logp", "log_probs"])
def test_without_the_environment_it_does(monkeypatch, name):
    monkeypatch.setattr(op, "ieee_on", lambda t: contextlib.nullcontext())
    pairs = zip(results(name, NEAREST), results(name, UP), strict=True)
    assert not all(torch.equal(one, other) for one, other in pairs)
