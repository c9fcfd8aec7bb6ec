"""Results are contiguous whatever the layout of the operands, as the fake kernels say."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from tests.contract import same_bytes

M, D = 6, 16
LAYOUTS = {
    "column-major": lambda t: t.mT.contiguous().mT,
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "expanded": lambda t: t[:1].expand(t.shape),
}
OPS = {
    "rms_norm": lambda x, r: ck.rms_norm(x, x[0].detach().contiguous()),
    "rms_norm residual": lambda x, r: ck.rms_norm(x, None, residual=r),
    "layer_norm residual": lambda x, r: ck.layer_norm(x, residual=r),
    "softmax": lambda x, r: ck.softmax(x),
    "linear": lambda x, r: ck.linear(x, r),
    "skinny_linear": lambda x, r: ck.skinny_linear(x, r),
    "skinny_linear, K = 0": lambda x, r: ck.skinny_linear(x[:, :0], x.new_empty(D, 0), r),
    "silu_mul": lambda x, r: ck.silu_mul(x, r),
}


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(M, D, generator=torch.Generator().manual_seed(seed))


def results(function, x, r, layout):
    x = x.detach().requires_grad_()
    out = function(x, r)
    out = out if isinstance(out, tuple) else (out,)
    upstream = [layout(torch.arange(float(y.numel())).view(y.shape)) for y in out]
    return [*out, *torch.autograd.grad(out, x, upstream, allow_unused=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPS)
def test_results_are_contiguous(name, layout):
    x, r = LAYOUTS[layout](drawn(1)), LAYOUTS[layout](drawn(2))
    got = results(OPS[name], x, r, LAYOUTS[layout])
    want = results(OPS[name], x.contiguous(), r.contiguous(), LAYOUTS[layout])
    for a, b in zip(got, want, strict=True):
        assert a is b is None or (a.is_contiguous() and same_bytes(a, b))
