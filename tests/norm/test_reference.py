"""The oracle itself: torch's float64 autograd, with random cotangents."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cute_kernels.norm.config import LAYER
from tests.norm import cases
from tests.norm.cases import Case
from tests.oracles import norm as reference


def theirs(case: Case, given: cases.Inputs) -> tuple[torch.Tensor, ...]:
    """Gradients of torch in float64: y, dh, dweight and dbias."""
    h = given.x.double()
    if given.residual is not None:
        h = (h + given.residual.double()).to(case.dtype).double()
    h.requires_grad_()
    weight, bias = (torch.full((case.width,), v, dtype=torch.float64) for v in (1.0, 0.0))
    weight = weight if given.scale.weight is None else given.scale.weight.double()
    bias = bias if given.scale.bias is None else given.scale.bias.double()
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    if case.rule.kind == LAYER:
        y = F.layer_norm(h, (case.width,), weight, bias, case.rule.eps)
    else:
        y = F.rms_norm(h, (case.width,), weight + case.rule.offset, case.rule.eps) + bias
    out = [y, h] if given.upstream.dh is not None else [y]
    grads = [g.double() for g in given.upstream if g is not None]
    return y.detach(), *torch.autograd.grad(out, (h, weight, bias), grads)


@pytest.mark.parametrize("case", cases.kinds(), ids=str)
def test_values_are_torchs(case):
    if case.weight is None:
        case = case._replace(rule=case.rule._replace(offset=0.0))
    inputs = cases.inputs_of(case)
    y, dh, d_weight, d_bias = theirs(case, inputs)
    h = inputs.x
    if inputs.residual is not None:
        h = (h.double() + inputs.residual.double()).to(case.dtype)
    of_y, _ = reference.forward(h, inputs.scale, case.rule)
    grads = reference.backward(inputs.upstream, h, inputs.scale, case.rule)
    for got, want in zip((of_y, *grads), (y, dh, d_weight, d_bias), strict=True):
        torch.testing.assert_close(got.value, want, rtol=1e-11, atol=1e-11)


def test_a_bound_is_no_licence():
    """Of fp32 rows it is some hundred units in the last place, and all of dweight's terms."""
    case = Case(33, 4096, dtype=torch.float32, weight=torch.float32)
    inputs = cases.inputs_of(case)
    y, x_hat = reference.forward(inputs.x, inputs.scale, case.rule)
    assert float((y.error / y.value.abs()).max()) < 128 * 2.0**-24
    _, d_weight, _ = reference.backward(inputs.upstream, inputs.x, inputs.scale, case.rule)
    terms = (inputs.upstream.dy.double() * x_hat.value).abs().sum(0)
    assert float((d_weight.error / terms).max()) < 256 * 2.0**-24
