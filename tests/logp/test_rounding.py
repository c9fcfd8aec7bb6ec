"""The rounding mode of the calling thread does not change the CPU backend."""

from __future__ import annotations

import platform

import pytest
import torch

import cute_kernels as ck
from cute_kernels import c_library
from tests.contract import same_bytes
from tests.logp.test_cpu import drawn


@pytest.mark.parametrize("temperature", ["number", "tensor"])
def test_the_rounding_mode_of_the_thread_does_not_show(temperature):
    upward = 0x800 if platform.machine() == "x86_64" else 0x400000
    tau = torch.linspace(0.3, 1.7, 64) if temperature == "tensor" else 0.7
    hidden, weight, target = drawn(64, 48), drawn(250, 48) * 0.3, torch.arange(64)
    logits = drawn(64, 250) * 3

    def results():
        out = []
        for function, inputs in ((ck.linear_logp, (hidden, weight)), (ck.log_probs, (logits,))):
            leaves = [t.clone().requires_grad_() for t in inputs]
            values = function(*leaves, target, temperature=tau, return_entropy=True)
            out += [*values, *torch.autograd.grad(sum(v.sum() for v in values), leaves)]
        return out

    want, c = results(), c_library.functions()
    c.fesetround(upward)
    try:
        got = results()
    finally:
        c.fesetround(0)
    assert all(same_bytes(a, b) for a, b in zip(got, want, strict=True))
