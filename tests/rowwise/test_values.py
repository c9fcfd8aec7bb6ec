"""Values of the CPU backend against float64, with random data and random cotangents."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

import cute_kernels as ck
from cute_kernels.cpu import elementary
from cute_kernels.rowwise import config, cpu, op
from tests.contract import same_bytes
from tests.oracles import rowwise as reference

from . import triton_cases
from .cases import ACTIVATIONS, BF16, DTYPES, FP32, GATED, SOFTMAXES, drawn, indices, spread, within

ELEMENTS = [(kind, False) for kind in config.KINDS] + [(kind, True) for kind in GATED]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "gated"), ELEMENTS)
def test_functions_of_elements(kind, gated, dtype):
    """f(x), or f(x) up, and their gradients."""
    x, up = (spread(40, 301, seed=s, dtype=dtype).requires_grad_() for s in (0, 1))
    dy = drawn(40, 301, seed=2, dtype=dtype)
    y = GATED[kind](x, up) if gated else ACTIVATIONS[kind](x)
    y.backward(dy)
    v, u, d = (t.detach().double() for t in (x, up, dy))
    u = u if gated else torch.ones_like(u)
    value, slope = reference.value(kind, v), reference.slope(kind, v)
    assert y.dtype == dtype and within(y.detach(), value * u) <= 1
    # A slope is a sum of terms of at most 1 + |x|.
    terms = (d * u).abs() * (1 + v.abs()) * (slope.abs() > 2.0**-20)
    assert within(x.grad, slope * d * u, terms) <= 1
    assert not gated or within(up.grad, value * d) <= 1


@pytest.mark.parametrize("kind", config.KINDS)
def test_every_bf16_number(kind):
    """All 65,536 of them."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(BF16)
    y, finite = ACTIVATIONS[kind](x), x.isfinite()
    assert within(y[finite], reference.value(kind, x[finite])) <= 1
    assert y[x.isnan()].isnan().all()


SAME = [(dtype, dtype) for dtype in DTYPES]


@pytest.mark.parametrize("dtypes", [*SAME, (BF16, FP32), (FP32, BF16)], ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 37, 1024, 1025, 3001])
@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmax(name, width, dtypes):
    """Of (x's dtype, the result's)."""
    x, dy = drawn(9, width, dtype=dtypes[0]) * 5, drawn(9, width, seed=1, dtype=dtypes[1])
    leaf = x.clone().requires_grad_()
    options = {} if dtypes[0] == dtypes[1] else {"dtype": dtypes[1]}
    y = SOFTMAXES[name](leaf, **options)
    y.backward(dy)
    assert (leaf.grad.dtype, y.dtype) == dtypes
    # x - max is exact in fp64; its sum with the logarithm is a sum.
    exact = getattr(x.double(), name)(-1)
    assert within(y.detach(), exact, x.double().abs().amax() + 8.0) <= 1
    if name == "softmax":
        want = reference.softmax_gradient(dy, y.detach())
    else:
        want = reference.log_softmax_gradient(dy, x)
    assert within(leaf.grad, want, dy.double().abs().sum(1, keepdim=True)) <= 1


@pytest.mark.parametrize("check", ["gated_in_steps", "gated_rows", "cuts", "rows_alone"])
def test_checks_of_launchers(check):
    triton_cases.CHECKS[check](cpu)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_tables(dtype):
    positions = torch.cat([indices(2**20, 200), torch.arange(200), indices(2**24, 100, seed=1)])
    inverse = 1.0 / 10000.0 ** (torch.arange(0, 64, 2) / 64)
    for scaling in (1.0, 1.2079441541679836):
        cos, sin = ck.rotary_table(positions.view(5, 100), inverse, scaling, dtype)
        assert cos.shape == sin.shape == (5, 100, 64) and cos.dtype == dtype
        angle = (positions[:, None].float() * inverse).double()
        rounded = torch.tensor(scaling, dtype=FP32).double()
        for got, function in ((cos, torch.cos), (sin, torch.sin)):
            want = function(angle) * rounded
            assert within(got.view(500, 64)[:, :32], want) <= 1
            assert same_bytes(got[..., :32].contiguous(), got[..., 32:].contiguous())


def test_a_table_of_int32_and_of_no_positions():
    inverse = torch.rand(8, generator=torch.Generator().manual_seed(1))
    positions = indices(5000, 3, 7)
    for one, other in zip(
        ck.rotary_table(positions.int(), inverse), ck.rotary_table(positions, inverse), strict=True
    ):
        assert same_bytes(one, other)
    assert ck.rotary_table(positions[:0], inverse)[0].shape == (0, 7, 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 24])
def test_rotary(width, dtype):
    """Whole and partial; halves of the tables that differ; grouped heads."""
    q = drawn(2, 4, 9, 24, dtype=dtype).requires_grad_()
    k = drawn(2, 2, 9, 24, seed=1, dtype=dtype).requires_grad_()
    cos, sin = (drawn(2, 9, width, seed=s) for s in (2, 3))
    made = ck.apply_rotary(q, k, cos, sin)
    for x, y in ((q, made[0]), (k, made[1])):
        leaf = x.detach().double().requires_grad_()
        want = reference.rotary(leaf, cos[:, None], sin[:, None])
        terms = 8.0 * x.detach().double().abs().amax()
        assert y.dtype == dtype and within(y.detach(), want.detach(), terms) <= 1
        dy = drawn(*x.shape, seed=4, dtype=dtype)
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        (want_dx,) = torch.autograd.grad(want, leaf, dy.double())
        assert within(dx, want_dx, 8.0 * dy.double().abs().amax()) <= 1
        assert same_bytes(
            y.detach()[..., width:].contiguous(), x.detach()[..., width:].contiguous()
        )


def test_rotary_of_other_layouts():
    """[B, S, H, D] with its tables, one row of tables for the batch, and no batch."""
    q, k = drawn(2, 4, 9, 24), drawn(2, 2, 9, 24, seed=1)
    cos, sin = (drawn(1, 9, 16, seed=s) for s in (2, 3))
    want = ck.apply_rotary(q, k, cos, sin)
    other = ck.apply_rotary(q.mT.mT.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    each = [ck.apply_rotary(a, b, cos[0], sin[0], unsqueeze_dim=0) for a, b in zip(q, k)]  # noqa: B905
    for i in range(2):
        assert same_bytes(other[i].transpose(1, 2).contiguous(), want[i])
        assert same_bytes(torch.stack([pair[i] for pair in each]), want[i])


def test_rotary_is_differentiable_twice():
    q, cos, sin = drawn(2, 3, 8).requires_grad_(), drawn(3, 8, seed=1), drawn(3, 8, seed=2)

    def turned(x):
        return ck.apply_rotary(x, x[:1], cos, sin, unsqueeze_dim=0)[0]

    v, w = drawn(2, 3, 8, seed=3).requires_grad_(), drawn(2, 3, 8, seed=4)
    (dq,) = torch.autograd.grad(turned(q), q, v, create_graph=True)
    (back,) = torch.autograd.grad(dq, v, w)
    assert same_bytes(back, turned(w))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding", [None, 3])
def test_embedding(dtype, padding):
    """The lookup is exact; the gradient is the chain of the oracle, byte for byte."""
    ids, weight = indices(40, 5, 60), drawn(40, 33, seed=1, dtype=dtype).requires_grad_()
    ids[:, ::7] = 3
    y, dy = ck.embedding(ids, weight, padding_idx=padding), spread(5, 60, 33, dtype=dtype)
    assert same_bytes(y.detach(), weight.detach()[ids])
    y.backward(dy)
    start = torch.zeros(40, 33)
    entry = -1 if padding is None else padding
    want = reference.embedding_chain(dy, ids, entry, start)
    assert same_bytes(weight.grad, want.to(dtype))
    state = drawn(40, 33, seed=2)
    begun = state.clone()
    ck.embedding(ids.int(), weight, padding_idx=padding, main_grad=state).backward(dy)
    assert same_bytes(state, reference.embedding_chain(dy, ids, entry, begun))
    exact = begun.double().index_add_(
        0, ids.flatten()[ids.flatten() != entry], dy.double().view(-1, 33)[ids.flatten() != entry]
    )
    assert (state - exact).abs().max() <= 2.0**-20 * dy.double().abs().amax() * 60


def test_a_main_grad_of_strides():
    ids, dy = indices(9, 50), drawn(50, 8, seed=1)
    weight = drawn(9, 8, seed=2).requires_grad_()
    plain = drawn(9, 8, seed=3)
    wide = torch.zeros(9, 20)
    strided, column = wide[:, 2:18:2].copy_(plain), plain.mT.contiguous().mT
    for state in (plain, strided, column):
        ck.embedding(ids, weight, main_grad=state).backward(dy)
    assert same_bytes(strided.contiguous(), plain) and same_bytes(column.contiguous(), plain)
    assert not wide[:, :2].any() and not wide[:, 3::2].any()


# ---- orders --------------------------------------------------------------------------------------


def inexact(*shape: int, seed: int) -> torch.Tensor:
    """Numbers of 53 bits: sums of fp32 numbers are exact in fp64, whatever their order."""
    return spread(*shape, seed=seed).double() * math.pi


@pytest.mark.parametrize("width", [1, 2, 3, 5, 37, 1023, 1024, 1025, 2500])
def test_the_order_of_a_sum(width):
    """`_lane_sums` against a loop of Python's floats."""
    v = inexact(3, width, seed=width)
    got = cpu._lane_sums(v)
    want = [reference.lane_sum(row, config.LANES) for row in v.tolist()]
    assert same_bytes(got[:, 0], torch.tensor(want, dtype=torch.float64))


def test_an_order_has_been_seen():
    """The same numbers in another order have another sum: the comparison above is of orders."""
    v = inexact(40, 2500, seed=1)
    plain = torch.tensor([math.fsum(row) for row in v.tolist()], dtype=torch.float64)
    assert not same_bytes(cpu._lane_sums(v)[:, 0], plain)
    assert not same_bytes(cpu._lane_sums(v.flip(1)), cpu._lane_sums(v))


@pytest.mark.parametrize("count", [1, 1000, config.SQUARES - 1, config.SQUARES, 2 * 10**5])
def test_the_order_of_squares(count):
    x = spread(count, seed=2)
    squares = [v * v for v in x.double().tolist()]
    chunks = [
        reference.lane_sum(squares[i : i + config.SQUARES], config.LANES)
        for i in range(0, count, config.SQUARES)
    ]
    want = reference.lane_sum(chunks, config.LANES)
    assert op.square_sum(x).item() == want
    assert count < 10**4 or want != sum(squares)


# ---- the pieces in fp64 --------------------------------------------------------------------------


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).abs() / want.abs()).max().item()


def test_functions_of_fp64():
    x = torch.rand(20000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert relative(elementary.exp(x * 1300 - 650), (x * 1300 - 650).exp()) < 2.0**-41
    powers = ((x - 0.5) * 1000).exp2() + 1e-300
    away = (powers - 1).abs() > 0.01
    assert relative(elementary.log(powers)[away], powers.log()[away]) < 2.0**-44
    angle = ((x - 0.5) * 2**25).float().double()
    cos, sin = elementary.cos_sin(angle)
    assert relative(cos, angle.cos()) < 2.0**-36 and relative(sin, angle.sin()) < 2.0**-36
    tail = -(x * 8)
    normal = 0.5 * torch.special.erfc(-tail / math.sqrt(2.0))
    assert relative(elementary._normal(tail), normal) < 2.0**-37


@pytest.mark.parametrize("kind", config.KINDS)
def test_the_oracles_slope_is_the_derivative(kind):
    class Oracle(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return reference.value(kind, x)

        @staticmethod
        def backward(ctx, dy):
            return reference.slope(kind, ctx.saved_tensors[0]) * dy

    x = (drawn(50, seed=3) * 2).double().requires_grad_()
    assert gradcheck(Oracle.apply, (x,))


def test_the_oracles_of_softmax_and_rotary():
    x = drawn(3, 7).double().requires_grad_()
    dy = drawn(3, 7, seed=1).double()
    y = x.softmax(-1)
    (want,) = torch.autograd.grad(y, x, dy)
    assert torch.allclose(reference.softmax_gradient(dy, y.detach()), want, rtol=1e-12)
    (want,) = torch.autograd.grad(x.log_softmax(-1), x, dy)
    assert torch.allclose(reference.log_softmax_gradient(dy, x.detach()), want, rtol=1e-12)
    cos, sin = (drawn(3, 4, seed=s).double() for s in (2, 3))
    assert gradcheck(lambda t: reference.rotary(t, cos, sin), (x,))


# ---- numbers that are none -----------------------------------------------------------------------


ODD = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 2.0**-126, 3e38, -3e38, 104.0]


@pytest.mark.parametrize("kind", config.KINDS)
def test_odd_numbers(kind):
    """As torch has them: the same NaN, infinities and signs of zero, subnormals that survive."""
    x = torch.tensor(ODD, dtype=FP32)
    theirs = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
    }[kind]
    got, want = ACTIVATIONS[kind](x), theirs(x.double()).float()
    assert same_bytes(got.isnan(), want.isnan()) and same_bytes(got.isinf(), want.isinf())
    kept = ~got.isnan()
    assert same_bytes(got.signbit()[kept], want.signbit()[kept])
    assert within(got[kept & got.isfinite()], want.double()[kept & got.isfinite()]) <= 1.5
    with_flush = ACTIVATIONS[kind]
    torch.set_flush_denormal(True)
    try:
        assert same_bytes(with_flush(x), got)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_rows(dtype):
    """-inf masks; a row of them is NaN, and so is one of +inf or NaN: torch's, with one NaN."""
    inf = math.inf
    rows = [
        [0.5, -inf, 1.0, -inf],
        [-inf] * 4,
        [inf, 0.0, 1.0, 2.0],
        [inf, -inf, inf, 0.0],
        [math.nan, 0.0, 1.0, 2.0],
        [-1e4, 1e4, 6e4, -6e4],
    ]
    x = torch.tensor(rows, dtype=FP32).to(dtype)
    for name, function in SOFTMAXES.items():
        got, want = function(x), getattr(x.double(), name)(-1)
        assert same_bytes(got.isnan(), want.isnan())
        kept = ~want.isnan() & want.isfinite()
        assert within(got[kept], want[kept], 2.0**17) <= 1
        assert same_bytes(got[~kept & ~want.isnan()].double(), want[~kept & ~want.isnan()])
        nans = got[want.isnan()]
        assert len(nans) > 8 and same_bytes(nans, torch.full_like(nans, math.nan))
    assert ck.softmax(x)[0, 1].item() == 0.0


def test_nothing():
    for shape in ((0,), (0, 5), (3, 0), (2, 0, 4)):
        x = torch.empty(shape).requires_grad_()
        for function in (*ACTIVATIONS.values(), *SOFTMAXES.values()):
            y = function(x)
            assert y.shape == x.shape
            y.sum().backward()
    weight = drawn(4, 3).requires_grad_()
    ck.embedding(torch.empty(0, dtype=torch.long), weight).sum().backward()
    assert same_bytes(weight.grad, torch.zeros(4, 3))
    assert ck.silu(torch.tensor(0.25)).shape == ()
    q = torch.empty(2, 3, 0, 8)
    assert ck.apply_rotary(q, q, torch.empty(2, 0, 8), torch.empty(2, 0, 8))[0].shape == q.shape
