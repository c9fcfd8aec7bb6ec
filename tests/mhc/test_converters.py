"""Other libraries' weights: the same streams come out, by their formulas in float64."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch

from cute_kernels import mhc
from cute_kernels.errors import ArgumentValueError
from tests.contract import same_bytes
from tests.mhc import cases

C = 24
N = {2: 8, 4: 24}


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(n: int, rows: int | None = None, gates: int = 3) -> dict[str, torch.Tensor]:
    """phi, alpha, beta, norm_weight; logits of H_res differ by about 1."""
    rows = N[n] if rows is None else rows
    phi = drawn(rows, n * C, seed=1) * (n * C) ** -0.5
    alpha = 0.5 + drawn(gates, seed=2).abs()
    return {
        "phi": phi,
        "alpha": alpha,
        "beta": drawn(rows, seed=3),
        "norm_weight": 1 + 0.2 * drawn(n * C, seed=4),
    }


def logits(x, phi, alpha, beta, norm_weight, eps) -> torch.Tensor:
    """z = α H / r + β in float64."""
    x, phi, alpha, beta, w = (t.double() for t in (x, phi, alpha, beta, norm_weight))
    rows, n = x.flatten(1), min(x.shape[1:])
    r = (rows.square().mean(-1, keepdim=True) + eps).sqrt()
    sizes = [n, n, n * n] if len(alpha) == 3 else [n]
    each = alpha.repeat_interleave(torch.tensor(sizes))
    return each * (rows @ (phi * w).T) / r + beta.view(-1)


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Errors of fp32: a tenth of a number of the options, or streams in another order, are more."""
    return bool((got.double() - want).abs().max() <= 2e-5 * want.abs().max())


def transformer_engine(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """y of f = tanh, in the log form: x [M, C, n]."""
    n = x.shape[2]
    pre, post = z[:, :n].sigmoid(), 2 * z[:, n : 2 * n].sigmoid()
    log_p = z[:, 2 * n :].view(-1, n, n)
    for _ in range(20):
        log_p = log_p - log_p.logsumexp(2, keepdim=True)
        log_p = log_p - log_p.logsumexp(1, keepdim=True)
    f = torch.einsum("mcn,mn->mc", x, pre).tanh()
    return f[:, :, None] * post[:, None] + torch.einsum("mci,mij->mcj", x, log_p.exp())


def tilekernels(x: torch.Tensor, z: torch.Tensor, numbers) -> torch.Tensor:
    """y of f = tanh, with an epsilon in each sum: x [M, n, C]."""
    _, post_mult_value, pre_eps, sinkhorn_eps, repeat = numbers
    n = x.shape[1]
    pre, post = z[:, :n].sigmoid() + pre_eps, z[:, n : 2 * n].sigmoid() * post_mult_value
    comb = z[:, 2 * n :].view(-1, n, n).softmax(-1) + sinkhorn_eps
    comb = comb / (comb.sum(-2, keepdim=True) + sinkhorn_eps)
    for _ in range(repeat - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + sinkhorn_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + sinkhorn_eps)
    f = torch.einsum("mnc,mn->mc", x, pre).tanh()
    return f[:, None] * post[:, :, None] + torch.einsum("mic,mij->mjc", x, comb)


def module(state: dict, options: mhc.Options, n: int) -> mhc.HyperConnection:
    out = mhc.HyperConnection(torch.tanh, C, n, norm_weight=True, options=options)
    out.load_state_dict(state)
    return out


@pytest.mark.parametrize("layout", ["cn", "nc"])
@pytest.mark.parametrize("n", [2, 4])
@torch.no_grad()
def test_transformer_engines_weights_give_its_streams(n, layout):
    inputs = weights(n)
    x = drawn(40, C, n, seed=5)
    state, options = mhc.from_transformer_engine(
        inputs["phi"],
        inputs["alpha"],
        inputs["beta"][None],  # [1, N] there
        norm_weight=inputs["norm_weight"],
        layout=layout,
    )
    assert options == mhc.Options(layout, "bf16x2", 2.0**-23, 0.0, 2.0, 20, "log")
    y = module(state, options, n)(x if layout == "cn" else x.mT.contiguous())
    got = y if layout == "cn" else y.mT
    want = transformer_engine(x.double(), logits(x, *inputs.values(), 2.0**-23))
    assert near(got, want) and not near(got.flip(-1), want)


@pytest.mark.parametrize("layout", ["cn", "nc"])
@pytest.mark.parametrize("n", [2, 4])
@torch.no_grad()
def test_tilekernels_weights_give_its_streams(n, layout):
    """With numbers that are nobody's default, so that each must arrive where it belongs."""
    inputs = weights(n)
    fn, scale, base, norm_weight = inputs.values()
    x = drawn(40, n, C, seed=6)
    numbers = (0.3, 1.7, 0.05, 0.02, 3)
    names = ("norm_eps", "post_mult_value", "pre_eps", "sinkhorn_eps", "sinkhorn_repeat")
    state, options = mhc.from_tilekernels(
        fn,
        scale,
        base,
        norm_weight=norm_weight,
        layout=layout,
        **dict(zip(names, numbers, strict=True)),
    )
    y = module(state, options, n)(x if layout == "nc" else x.mT.contiguous())
    got = y if layout == "nc" else y.mT

    def as_with(numbers) -> bool:
        return near(got, tilekernels(x.double(), logits(x, *inputs.values(), numbers[0]), numbers))

    assert as_with(numbers)
    for position in range(5):
        # Each number is seen: one that is off by a tenth, or an iteration more, is not near.
        off = list(numbers)
        off[position] += 1 if position == 4 else 0.1 * off[position]
        assert not as_with(off), names[position]


def test_tilekernels_defaults_are_those_of_mhc_pre():
    state, options = mhc.from_tilekernels(*list(weights(4).values())[:3])
    assert options == mhc.Options("nc", "bf16x2", 1e-6, 1e-6, 1.0, 10, "epsilon", 1e-6)
    assert sorted(state) == ["alpha", "beta", "phi"]


@pytest.mark.parametrize("layout", ["cn", "nc"])
@pytest.mark.parametrize("n", [2, 4])
@torch.no_grad()
def test_a_head_of_tilekernels_gives_its_collapse(n, layout):
    fn, scale, base, norm_weight = weights(n, rows=n, gates=1).values()
    x = drawn(40, n, C, seed=7)
    state, options = mhc.from_tilekernels(
        fn, scale.view(()), base, norm_weight=norm_weight, pre_eps=0.05, layout=layout
    )
    head = mhc.HyperHead(C, n, norm_weight=True, options=options)
    head.load_state_dict(state)
    got = head(x if layout == "nc" else x.mT.contiguous())
    z = logits(x, fn, scale, base, norm_weight, 1e-6)
    want, other = (
        torch.einsum("mnc,mn->mc", x.double(), (z + off).sigmoid() + 0.05) for off in (0.0, 0.01)
    )
    assert near(got, want) and not near(got, other)


@pytest.mark.parametrize("n", [2, 4])
def test_columns_follow_the_elements_of_a_row(n):
    """k = c n + i beside k = i C + c: each column goes with the element that it multiplies."""
    names = torch.arange(N[n] * n * C).view(N[n], n * C)
    moved = mhc.permute_columns(names, n, source="cn", target="nc")
    for c in range(C):
        for i in range(n):
            assert same_bytes(moved[:, i * C + c], names[:, c * n + i])
    back = mhc.permute_columns(moved, n, source="nc", target="cn")
    assert same_bytes(back, names) and not same_bytes(moved, names)
    copy = mhc.permute_columns(names, n, source="nc", target="nc")
    assert same_bytes(copy, names) and copy.data_ptr() != names.data_ptr()
    assert same_bytes(mhc.permute_columns(names[1], n, source="cn", target="nc"), moved[1])


def test_a_state_is_of_its_own_memory_and_keeps_dtypes():
    inputs = weights(4)
    inputs["phi"] = inputs["phi"].bfloat16().requires_grad_()
    for layout in ("cn", "nc"):
        state, _ = mhc.from_transformer_engine(**inputs, layout=layout)
        addresses = {t.untyped_storage().data_ptr() for t in inputs.values()}
        assert not addresses & {t.untyped_storage().data_ptr() for t in state.values()}
        assert {name: t.dtype for name, t in state.items()} == {
            n: t.dtype for n, t in inputs.items()
        }
        assert all(t.is_contiguous() and not t.requires_grad for t in state.values())


@pytest.mark.parametrize("field, value", [("layout", "cn"), ("post_scale", 2.0)])
@pytest.mark.parametrize("saved", [False, True])
def test_a_state_of_other_options_is_refused(saved, field, value):
    """Converted, and saved by a module and loaded again, inside another module."""
    fn, scale, base = (cases.normal(*shape, seed=81) for shape in ((24, 20), (3,), (24,)))
    state, options = mhc.from_tilekernels(fn, scale, base)

    def module(options):
        return torch.nn.ModuleList([mhc.HyperConnection(torch.tanh, 5, options=options)])

    source = module(options)
    source[0].load_state_dict(state)
    assert same_bytes(source[0].phi, fn)
    wrong = module(dataclasses.replace(options, **{field: value}))
    same = module(dataclasses.replace(options, precision="bf16x3"))
    if saved:
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    else:
        wrong, same = wrong[0], same[0]
    same.load_state_dict(state)
    with pytest.raises(ArgumentValueError, match=f"^options.{field}: expected"):
        wrong.load_state_dict(state)
