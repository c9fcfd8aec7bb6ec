"""Products of complex numbers and gradients of broadcasts, in forwards of observed modules."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import PatchError
from cute_kernels.model.batch_invariant.api import batch_invariant
from cute_kernels.model.observe import ops
from cute_kernels.model.patch.forwards.elements import Elements
from tests.contract import same_bytes
from tests.model.patch import all_causal_lms
from tests.model.patch.stepping import llama

COUNT = 1031


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    make = {"generator": generator, "dtype": torch.complex64}
    return torch.randn(COUNT, **make), torch.randn(COUNT, **make)


def bits(z: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(z).contiguous()


def test_a_complex_product_has_the_same_bits_at_every_place():
    a, b = pair()
    with Elements():
        whole = a * b
        alone = torch.cat([a[i : i + 1] * b[i : i + 1] for i in range(COUNT)])
        shifted = torch.mul(a[3:], b[3:])
        scaled = [a * 0.3, 0.3 * a, a * torch.tensor(0.3)]
    assert same_bytes(bits(whole), bits(alone)) and same_bytes(bits(shifted), bits(whole[3:]))
    assert (whole - a.to(torch.complex128) * b).abs().max() <= 1e-6 * whole.abs().max()
    assert all(same_bytes(bits(z), bits(a) * 0.3) for z in scaled)


def test_gradients_of_complex_products():
    a, b = pair()
    row, real = b[:1].detach().clone().requires_grad_(), a.real[:1].clone().requires_grad_()
    leaves = [t.detach().clone().requires_grad_() for t in (a, b)]
    exact = [t.detach().to(torch.complex128).requires_grad_() for t in (*leaves, row)]
    exact.append(real.detach().double().requires_grad_())
    with Elements():
        out = leaves[0] * leaves[1] + (row * 1.0) * leaves[0] + leaves[1] * (real * 1.0)
    want = exact[0] * exact[1] + exact[2] * exact[0] + exact[1] * exact[3]
    out.backward(torch.ones_like(out))
    want.backward(torch.ones_like(want))
    for mine, wide in zip((*leaves, row, real), exact, strict=True):
        assert (mine.grad - wide.grad).abs().max() <= 1e-5 * wide.grad.abs().max()


def test_a_complex_product_is_exact_on_no_cpu():
    """A CPU contracts product and sum in whole vectors, and not behind them."""
    a, b = pair()
    for name in ("mul", "mul_", "div", "abs"):
        assert not ops.is_exact(name, (a, b), [a, b, a], {"cpu"})
        assert ops.is_exact(name, (a, b), [a, b, a], {"cuda"})
        assert ops.is_exact(name, (a.real, b.real), [a.real, b.real], {"cpu"})

    def turned(x):
        z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(z * (0.6 + 0.8j) ** 1 * z.abs().sign()).flatten(-2).to(x.dtype)

    with pytest.raises(PatchError, match=r"abs \(test_elements"):
        ck.patch(llama(turned), strict=True)


def test_polar_and_powers_of_a_number():
    angle = torch.rand(COUNT, generator=torch.Generator().manual_seed(0)) * 50
    with Elements():
        whole = torch.polar(torch.ones_like(angle), angle)
        alone = torch.cat([torch.polar(torch.ones(1), angle[i : i + 1]) for i in range(COUNT)])
        powers = [1e4 ** angle[:50], torch.pow(1e4, angle[:50]), (1e4 ** angle.float())[:50]]
    assert same_bytes(bits(whole), bits(alone))
    assert same_bytes(powers[0], powers[1]) and same_bytes(powers[0], powers[2])


@pytest.mark.parametrize("shape", [(3, 5, 8), (5, 8)])
def test_gradients_of_repeats_and_of_broadcasts_in_place(shape):
    """Within the bound of float32; the sums have our tree, whatever the batch."""

    def run(x, dtype):
        leaf = x.detach().clone().to(dtype).requires_grad_()
        t = leaf * 1
        wide = t.repeat(2, *(1,) * (t.dim() - 1)) if t.dim() == 3 else t.repeat(3, 1, 1)
        wide = wide * 2
        wide += t[..., :1] * torch.arange(8, dtype=dtype) if t.dim() == 2 else 0
        wide.backward(torch.ones_like(wide).cumsum(-1))
        return leaf.grad

    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.5
    with batch_invariant(), Elements():
        mine = run(x, torch.float32)
        rows = run(x[..., :3, :], torch.float32)
    exact = run(x, torch.float64)
    assert (mine - exact).abs().max() <= 1e-5 * exact.abs().max()
    assert same_bytes(mine[..., :3, :], rows)


def test_a_line_may_reduce_rows_of_several_widths():
    """Each width is the same in every pass; a sum over tokens is not."""

    def widths(x):
        for columns in (32, 64):
            x = x + x[..., :columns].mean(-1, keepdim=True)
        return x

    net = llama(widths)
    assert ck.patch(net, strict=True).complete and all_causal_lms.differing(net) == []
    with pytest.raises(PatchError, match="reduces over the sequence"):
        ck.patch(llama(lambda x: x + x.mean(1, keepdim=True)), strict=True)
