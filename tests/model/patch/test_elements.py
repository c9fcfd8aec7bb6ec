"""Functions of elements in forwards of observed modules: complex, broadcast, looked up."""

from __future__ import annotations

import pytest
import torch
import transformers

import cute_kernels as ck
from cute_kernels.model import aten
from cute_kernels.model.batch_invariant.api import batch_invariant
from cute_kernels.model.patch.forwards import elements
from cute_kernels.model.patch.forwards.elements import Elements
from tests.contract import same_bytes
from tests.model.patch import all_causal_lms

COUNT = 1031


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    make = {"generator": generator, "dtype": torch.complex64}
    return torch.randn(COUNT, **make), torch.randn(COUNT, **make)


def bits(z: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(z).contiguous()


def near(mine: torch.Tensor, exact: torch.Tensor, bound: float = 1e-5) -> bool:
    return bool((mine - exact).abs().max() <= bound * exact.abs().max())


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
    assert all(near(a.grad, b.grad) for a, b in zip((*leaves, row, real), exact, strict=True))


def test_a_complex_product_is_exact_on_no_cpu():
    """A CPU contracts product and sum in whole vectors, and not behind them."""
    a, b = pair()
    for name in ("mul", "mul_", "div", "abs"):
        assert not aten.is_exact(name, (a, b), [a, b, a], {"cpu"})
        assert aten.is_exact(name, (a, b), [a, b, a], {"cuda"})
        assert aten.is_exact(name, (a.real, b.real), [a.real, b.real], {"cpu"})


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
    assert near(mine, exact) and same_bytes(mine[..., :3, :], rows)


@pytest.mark.parametrize("heads", [3, 16])
def test_a_sum_over_heads_of_latent_attention(heads):
    """The rotated part of a key is one for all heads: its gradient is a sum over them."""
    config = all_causal_lms.config_of("deepseek_v3").to_dict() | {
        "num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    net = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**config))
    net = net.to(torch.bfloat16).eval()
    assert ck.patch(net, strict=True).complete
    tokens = all_causal_lms.ids(1, 40, seed=3)
    beside = torch.cat((tokens, all_causal_lms.ids(3, 40, seed=8)))
    alone = all_causal_lms.gradient(net, tokens)
    assert alone.any() and same_bytes(all_causal_lms.gradient(net, beside), alone)


def _halves(g: torch.Tensor, dim: int) -> torch.Tensor:
    """Σ over a dimension by the tree of `ck.batch_invariant`: halves of the next power of two."""
    wide = g.float().movedim(dim, -1)
    room = 1 << (wide.shape[-1] - 1).bit_length()
    wide = torch.nn.functional.pad(wide, (0, room - wide.shape[-1]))
    while wide.shape[-1] > 1:
        wide = wide[..., : wide.shape[-1] // 2] + wide[..., wide.shape[-1] // 2 :]
    return wide[..., 0].to(g.dtype)


EXPANSIONS = {
    "expand": lambda t: t.expand(-1, 7, -1, -1),
    "a size": lambda t: t.expand(torch.Size((2, 7, 5, 8))),
    "expand_as": lambda t: t.expand_as(torch.empty(2, 7, 5, 8)),
    "broadcast_to": lambda t: torch.broadcast_to(t, (2, 7, 5, 8)),
    "a new dimension": lambda t: t[:, 0].expand(7, 2, 5, 8).transpose(0, 1),
}


@pytest.mark.parametrize("name", EXPANSIONS)
def test_the_gradient_of_what_is_expanded_is_one_tree(name):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 1, 5, 8, generator=generator).bfloat16().requires_grad_()
    g = torch.randn(2, 7, 5, 8, generator=generator).bfloat16()
    with batch_invariant(), Elements():
        out = EXPANSIONS[name](x * 1)
    out.backward(g)
    assert same_bytes(out, EXPANSIONS[name](x.detach()))
    assert same_bytes(x.grad, _halves(g, 1).unsqueeze(1))


def test_deviations_of_rows_and_quantiles():
    """Gemma 3n's sparsity: mean + std · quantile of each row, and its gradient."""

    def cut(x):
        quantile = torch.distributions.Normal(0, 1).icdf(torch.tensor(0.95)).type(x.dtype)
        spread = torch.std(x, dim=-1, keepdim=True, unbiased=False)
        return torch.relu(x - (x.mean(-1, keepdim=True) + spread * quantile))

    x = torch.randn(9, 37, generator=torch.Generator().manual_seed(0))
    grads = {}
    for rows, dtype in ((9, torch.float32), (3, torch.float32), (9, torch.float64)):
        leaf = x[:rows].to(dtype).requires_grad_()
        with batch_invariant(), Elements():
            out = cut(leaf * 1)
        out.backward(torch.ones_like(out).cumsum(-1))
        grads[rows, dtype] = out.detach(), leaf.grad
    for mine, few, exact in zip(*grads.values(), strict=True):
        assert same_bytes(mine[:3], few) and near(mine, exact)


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t.expand(4, 6),
        lambda t: t * torch.ones(4, 6),
        lambda t: t.repeat(4, 1),
        lambda t: t.std(-1),
        lambda t: torch.nn.functional.normalize(t, dim=-1),
    ],
    ids=["expand", "mul", "repeat", "std", "normalize"],
)
def test_sums_are_ours_where_elements_are_not(function, monkeypatch):
    """As on a GPU, which rounds an element anywhere alike, and not a sum."""
    monkeypatch.setattr(elements, "_by_place", lambda x: False)
    leaf = torch.rand(1, 6, requires_grad=True)
    with batch_invariant(), Elements():
        out = function(leaf * 1)
    names, ahead = set(), [out.grad_fn]
    while ahead:
        node = ahead.pop()
        names.add(type(node).__name__)
        ahead += [one for one, _ in node.next_functions if one is not None]
    # An op of ours that is called without its dispatcher is a DifferentiableBackward.
    assert names & {"_SpreadBackward", "DifferentiableBackward"}
    torchs = {"Expand", "Sum", "Mean", "Std", "Var", "Repeat", "LinalgVectorNorm"}
    assert not {name.partition("Backward")[0] for name in names} & torchs


@pytest.mark.parametrize("dtype", elements.DTYPES)
@pytest.mark.parametrize("kind", elements.SLOPES)
def test_an_element_has_the_same_bits_at_every_place(kind, dtype):
    x = (torch.rand(1025, generator=torch.Generator().manual_seed(0)) * 3 + 0.1).to(dtype)
    x = x / 4 if kind == "erfinv" else x  # inside of its domain
    whole = elements.element(x, kind, 0.3)
    alone = torch.cat([elements.element(x[i : i + 1], kind, 0.3) for i in range(len(x))])
    assert same_bytes(whole, alone) and same_bytes(elements.element(x[3:], kind, 0.3), whole[3:])
    exact = elements.compute(x.double(), kind, 0.3)
    assert (whole.double() - exact).abs().max() <= exact.abs().max() * torch.finfo(dtype).eps


@pytest.mark.parametrize("kind", elements.SLOPES)
def test_gradients_of_elements(kind):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(65, generator=generator) * 3 + 0.1
    x = (x / 4 if kind == "erfinv" else x).requires_grad_()
    exact = x.detach().double().requires_grad_()
    elements.element(x, kind, 0.3).sum().backward()
    elements.compute(exact, kind, 0.3).sum().backward()
    assert near(x.grad, exact.grad)


@pytest.mark.parametrize("shape", [(3, 5, 1), (5, 8), (8,), (1, 1, 8), (3, 1, 1), ()])
@pytest.mark.parametrize("function", [torch.mul, torch.add, torch.sub, torch.div])
def test_gradients_of_broadcasts(function, shape):
    """Within the bound of float32, whichever side is broadcast; leading ones as well."""
    generator = torch.Generator().manual_seed(0)
    for full in ((3, 5, 8), (1, 1, 8)):
        if full[0] == 1 and len(shape) == 3 and shape != full:
            continue
        leaves = [torch.rand(s, generator=generator).add(0.5) for s in (full, shape)]
        grads = []
        for dtype in (torch.float32, torch.float64):
            a, b = (t.detach().clone().to(dtype).requires_grad_() for t in leaves)
            with Elements():
                out = function(a * 1, b * 1) + function(b * 1, a * 1)
            out.backward(torch.ones_like(out).cumsum(-1))
            grads.append((a.grad, b.grad))
        assert all(
            mine.shape == exact.shape and near(mine, exact)
            for mine, exact in zip(*grads, strict=True)
        )


def test_topk_takes_the_lowest_index_of_equal_elements():
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-3, 3, (200, 12), generator=generator).float()
    x[::7, 3] = float("nan")
    x[::5, 4] = -0.0
    with Elements():
        values, places = x.topk(5, dim=-1)
        flat = torch.topk(x[0], 5)
    key = x.nan_to_num(nan=9.0)
    want = torch.stack([torch.tensor(sorted(range(12), key=lambda e: -row[e])[:5]) for row in key])
    assert same_bytes(places, want) and same_bytes(values, x.gather(1, want))
    assert same_bytes(flat.indices, want[0])
    highest = x.flip(1).topk(5, dim=-1).indices  # a rule that is none
    assert not same_bytes(11 - highest, want)


@pytest.mark.parametrize("dtype", elements.DTYPES)
def test_look_ups_and_their_gradients(dtype):
    """Repeated places add in their order in fp32, and are rounded once."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 9, generator=generator).to(dtype).requires_grad_()
    index = torch.randint(0, 9, (3, 5, 4), generator=generator)
    g = torch.randn(3, 5, 4, generator=generator).to(dtype)
    with Elements():
        out = x.gather(-1, index)
        top = torch.topk(x, 4, dim=-1)
        with pytest.raises(ck.errors.ArgumentValueError, match="expected 0 to 8"):
            x.gather(-1, index - 9)  # torch's error, by another name
    assert same_bytes(out, x.detach().gather(-1, index))
    out.backward(g)
    want = torch.zeros(3, 5, 9)
    for slot in range(4):
        place = index[..., slot : slot + 1]
        want.scatter_(-1, place, want.gather(-1, place) + g[..., slot : slot + 1].float())
    assert same_bytes(x.grad, want.to(dtype))
    x.grad = None
    top.values.backward(g)
    assert same_bytes(x.grad, torch.zeros_like(x).scatter(-1, top.indices, g))


def test_what_top_k_does_not_take_is_torchs():
    x = torch.randn(4, 6)
    with Elements():
        for args, options in (((2, 0), {}), ((2,), {"largest": False}), ((0,), {})):
            assert same_bytes(
                x.topk(*args, **options).values, torch.topk(x, *args, **options).values
            )
        assert torch.topk(x.double(), 2).values.dtype == torch.float64
        with pytest.raises(RuntimeError, match="out of range"):
            x.topk(7)
