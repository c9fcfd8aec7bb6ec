"""clip_grad_norm_: norm and factor against float64, its order, what must not show in it."""

from __future__ import annotations

import contextlib
import math
import platform

import pytest
import torch

import cute_kernels as ck
from cute_kernels.cpu import c_library
from cute_kernels.errors import AliasError, ArgumentValueError, NonfiniteError
from cute_kernels.rowwise import config, cpu, op
from tests.contract import same_bytes

from .cases import BF16, DTYPES, FP16, FP32, drawn, threads

SHAPES = ((70, 1000), (3,), (1, 1), (257, 300), (0, 4))


def parameters(dtype: torch.dtype = FP32, scale: float = 1.0) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for seed, parameter in enumerate(made):
        parameter.grad = (drawn(*parameter.shape, seed=seed) * scale).to(dtype)
    return made


def gradients(given: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad.clone() for p in given]


def norm(given: list[torch.Tensor]) -> float:
    return math.sqrt(math.fsum(v * v for t in given for v in t.double().flatten().tolist()))


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 3.0, 1e9, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype, max_norm):
    given = parameters(dtype)
    before = gradients(given)
    total = ck.clip_grad_norm_(given, max_norm)
    exact = norm(before)
    assert total.dtype == FP32 and total.shape == () and abs(total - exact) <= 2.0**-24 * exact
    factor = torch.tensor(min(1.0, max_norm / (exact + 1e-6)), dtype=torch.float64).float()
    for parameter, one in zip(given, before, strict=True):
        assert same_bytes(parameter.grad, (one.float() * factor).to(dtype))


def test_of_mixed_dtypes_and_of_some():
    given = [*parameters(BF16), *parameters(FP16), *parameters(FP32)]
    given.insert(1, torch.nn.Parameter(torch.zeros(4)))  # has no gradient
    found = [p.grad.clone() for p in given if p.grad is not None]
    total = ck.clip_grad_norm_(iter(given), 1.0)
    assert abs(total - norm(found)) <= 2.0**-24 * norm(found)
    assert given[1].grad is None
    alone = given[0]
    alone.grad = drawn(*alone.shape, seed=9).to(BF16)
    assert same_bytes(ck.clip_grad_norm_(alone, 1.0), cpu.square_sum(found_of(9)).sqrt().float())


def found_of(seed: int) -> torch.Tensor:
    return drawn(*SHAPES[0], seed=seed).to(BF16).flatten()


def test_no_gradient():
    assert ck.clip_grad_norm_([], 1.0).item() == 0.0
    assert ck.clip_grad_norm_([torch.nn.Parameter(torch.zeros(3))], 1.0).item() == 0.0


def test_squares_do_not_overflow():
    """1e30² is no fp32 number; the norm is."""
    given = parameters(FP32, 1e30)
    exact = norm(gradients(given))
    assert abs(ck.clip_grad_norm_(given, 1.0) - exact) <= 2.0**-24 * exact
    assert abs(norm(gradients(given)) - 1.0) < 1e-5


def test_main_grad():
    given = parameters()
    given[0].grad = given[0].grad.mT.contiguous().mT
    for p in given[:3]:
        p.main_grad, p.grad = p.grad.clone(), None
    found = [p.main_grad.clone() if p.grad is None else p.grad.clone() for p in given]
    total = ck.clip_grad_norm_(given, 1.0, main_grad=True)
    assert abs(total - norm(found)) <= 2.0**-24 * norm(found)
    assert same_bytes(
        given[0].main_grad.contiguous(), cpu_scaled(found[0], norm(found)).contiguous()
    )


def cpu_scaled(t: torch.Tensor, exact: float) -> torch.Tensor:
    return t * torch.tensor(1.0 / (exact + 1e-6), dtype=torch.float64).float()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_none(value):
    given = parameters()
    given[3].grad[5, 7] = value
    before = gradients(given)
    with pytest.raises(NonfiniteError, match="finite"):
        ck.clip_grad_norm_(given, 1.0, error_if_nonfinite=True)
    assert all(map(same_bytes, gradients(given), before))
    total = ck.clip_grad_norm_(given, 1.0)
    assert total.isnan() if math.isnan(value) else total.isinf()
    assert given[0].grad.isnan().all() if math.isnan(value) else (given[0].grad == 0).all()


# ---- what must not show --------------------------------------------------------------------------


def total_of(given: list[torch.Tensor]) -> torch.Tensor:
    """fp64: rounding to fp32 would hide an order."""
    return op.total_norm(tuple(given), False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_strides_and_calls(dtype):
    made = gradients(parameters(dtype))
    want = total_of(made)
    for count in (1, 2, 3):
        with threads(count):
            assert same_bytes(total_of(made), want)
    assert same_bytes(total_of([t.mT.contiguous().mT for t in made[:1]] + made[1:]), want)
    wide = made[0].new_zeros(70, 1003)
    wide[:, 3:] = made[0]
    assert same_bytes(total_of([wide[:, 3:], *made[1:]]), want)


#: x86-64's and AArch64's rounding modes of <fenv.h>.
UPWARD, DOWNWARD = (0x800, 0x400) if platform.machine() == "x86_64" else (0x400000, 0x800000)


@contextlib.contextmanager
def environment(mode: int | None):
    """A rounding mode of this thread; None: it takes subnormals for zero."""
    torch.set_flush_denormal(mode is None)
    c_library.functions().fesetround(mode or 0)
    try:
        yield
    finally:
        c_library.functions().fesetround(0)
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("mode", [UPWARD, DOWNWARD, None])
def test_the_threads_environment_does_not_show(mode):
    """The norm that is returned, too, is rounded to nearest and is not flushed."""
    scale = 1e-42 if mode is None else 1.0
    plain, other = parameters(FP32, scale), parameters(FP32, scale)
    want = ck.clip_grad_norm_(plain, 0.5)
    with environment(mode):
        got = ck.clip_grad_norm_(other, 0.5)
    assert want > 0 and same_bytes(got, want)
    assert all(map(same_bytes, gradients(other), gradients(plain)))


def test_chunks_by_threads_are_killed(monkeypatch):
    made = [drawn(70, 1000) * (drawn(70, 1000, seed=1) * 4).exp2()]
    totals = []
    for count in (1, 2):
        with threads(count):
            monkeypatch.setattr(cpu, "SQUARES", -(-70000 // torch.get_num_threads()))
            totals.append(total_of(made))
    assert not same_bytes(*totals)


def test_another_order_of_tensors_has_other_bits():
    """What the tests above compare are sums whose order can be seen."""
    made = [drawn(50, seed=s) * 2.0**s for s in range(30)]
    assert not same_bytes(total_of(made), total_of(made[::-1]))
    assert config.SQUARES < 70 * 1000


def overlapping():
    buffer = drawn(60)
    return [drawn(9), buffer[:40], buffer[30:]]


REFUSED = {
    "overlapping": (overlapping, AliasError),
    "expanded": (lambda: [drawn(9), drawn(4, 1).expand(4, 5)], AliasError),
    "negated": (lambda: [drawn(9), torch._neg_view(drawn(5))], ArgumentValueError),
}


@pytest.mark.parametrize("case", REFUSED)
def test_all_gradients_are_checked_before_one_is_scaled(case):
    make, error = REFUSED[case]
    parts = make()
    given = [torch.nn.Parameter(torch.zeros(t.shape)) for t in parts]
    for parameter, part in zip(given, parts, strict=True):
        parameter.grad = part
    before = gradients(given)
    with pytest.raises(error, match=r"parameters\[\d\]"):
        ck.clip_grad_norm_(given, 1e-3)
    grads = [p.grad.resolve_neg() for p in given]
    wanted = [t.resolve_neg() for t in before]
    assert all(same_bytes(a, b) for a, b in zip(grads, wanted, strict=True))


def test_interleaved_columns_of_one_buffer_are_clipped():
    buffer = drawn(6, 10)
    given = [torch.nn.Parameter(torch.zeros(6, 5)) for _ in range(2)]
    given[0].grad, given[1].grad = buffer[:, :5], buffer[:, 5:]
    apart = [torch.nn.Parameter(torch.zeros(6, 5)) for _ in range(2)]
    for parameter, one in zip(apart, gradients(given), strict=True):
        parameter.grad = one.contiguous()
    ck.clip_grad_norm_(given, 0.1)
    ck.clip_grad_norm_(apart, 0.1)
    assert all(same_bytes(a.grad, b.grad) for a, b in zip(given, apart, strict=True))
