"""Triton kernels of l2norm and of the decay: sm_90 code in ptxsim, source in the interpreter."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

import numpy as np
import torch

from cute_kernels.linear_attn import cpu_gate
from cute_kernels.linear_attn.triton import gate as launcher
from tests.contract import same_bytes
from tests.runtime.cached_calls import drawn
from tests.triton_runner import (
    ENGINES,
    INTERPRETER,
    LATE,
    SM90,
    TARGETS,
    case,
    complaints,
    device_guard,  # noqa: F401  (a fixture)
    mutants,
)

from .cases import BF16, FP32, GATES, WIDTHS, Case, decay, gate_operands, l2norm, norm_rows
from .triton_engine import GATE as RUNNER

pytestmark = pytest.mark.simulates("linear_attn.triton")


def close(actual: torch.Tensor, expected: torch.Tensor, eps, scale=None) -> bool:
    """Whether the error is at most eps of the expected value, or of ``scale``."""
    least = torch.finfo(actual.dtype).smallest_normal
    actual, expected = actual.double(), expected.double()
    scale = expected.abs() if scale is None else scale
    return bool(((actual - expected).abs() <= eps * (scale + least)).all())


# ---- l2norm --------------------------------------------------------------------------------------


def norms(launch, width: int, dtype: torch.dtype = BF16) -> None:
    """Both passes against the CPU backend, which test_gate.py holds to float64."""
    x, dy = norm_rows(width, dtype)
    eps = max(torch.finfo(dtype).eps, 2.0**-21)
    y, dx = l2norm(launch, x, dy)
    want_y, want_dx = l2norm(cpu_gate, x, dy)
    assert close(y, want_y, eps)
    assert close(dx, want_dx, eps, want_dx.double().abs().amax(-1, keepdim=True))


def tree(launch, width: int) -> None:
    """Sums of fp32 rows have the bytes of the order that is written."""
    x, _ = norm_rows(width, FP32)
    y = torch.full(x.shape, float("nan"))
    launch.l2norm(x, 1e-6, y)
    room = 1 << (width - 1).bit_length()
    total = torch.nn.functional.pad(x * x, (0, room - width))
    while total.shape[-1] > 1:
        total = total[..., ::2] + total[..., 1::2]
    rstd = np.float32(1) / np.sqrt(total.numpy() + np.float32(1e-6))  # torch's root is not IEEE's
    assert same_bytes(y, x * torch.from_numpy(rstd))


def norm_rows_alone(launch) -> None:
    """A row has the bytes that it has alone, beside NaN, and in dense memory; more than a tile."""
    x, dy = norm_rows(64, rows=11)
    want = l2norm(launch, x, dy)
    beside = torch.full_like(x, float("nan"))
    beside[4, 1] = x[4, 1]
    for got in (
        l2norm(launch, x.contiguous(), dy.mT.contiguous().mT),
        l2norm(launch, x.mT.contiguous().mT, dy),
    ):
        assert all(map(same_bytes, got, want))
    alone = l2norm(launch, x[4:5, 1:2], dy[4:5, 1:2])
    for a, b, c in zip(want, l2norm(launch, beside, dy), alone, strict=True):
        assert same_bytes(a[4, 1], b[4, 1]) and same_bytes(a[4, 1], c[0, 0])


# ---- decay ---------------------------------------------------------------------------------------


def decays(launch, name: str) -> None:
    """Both passes against the CPU backend, within errors of e^x."""
    given, o = GATES[name], gate_operands(GATES[name])
    g, da, *sums = decay(launch, given, o)
    want_g, want_da, *want_sums = decay(cpu_gate, given, o)
    x = o.a.double() if o.dt_bias is None else o.a.double() + o.dt_bias
    if given.bound is not None:
        x = x * o.A_log.double().exp().repeat_interleave(given.each)
    eps = (4 + x.abs().clamp(max=110)) * 2.0**-23  # the rounding of x shows in e^x
    assert close(g, want_g, eps) and not torch.isnan(g).any()
    assert close(da, want_da, eps + torch.finfo(given.dtype).eps)
    of_heads = (o.dg * want_g).abs().sum(0).view(given.channels, -1).sum(1)
    scales = of_heads, (o.dg * want_g[:, :1].abs().max()).abs().sum(0)
    assert all(close(*each) for each in zip(sums, want_sums, [2.0**-19] * 2, scales, strict=True))


def pack_is_alone(launch, name: str = "pack") -> None:
    """A sequence's rows and chunks have the bytes that they have alone; what is behind is 0."""
    given = GATES[name]
    o, behind = gate_operands(given), slice(sum(given.lengths), None)
    sizes = given.channels, given.channels * given.each
    mains = [[drawn(size, seed=i, dtype=FP32) for i, size in enumerate(sizes)] for _ in "ab"]
    a, dg = o.a.clone(), o.dg.clone()
    a[behind], dg[behind] = float("nan"), float("nan")
    g, da, *_ = decay(launch, given, o._replace(a=a, dg=dg), mains[0])
    for first, end in given.sequences.bounds():
        if end > first:
            part = o._replace(a=o.a[first:end], dg=o.dg[first:end])
            one = given._replace(lengths=(end - first,), batch=1, behind=0)
            alone = decay(launch, one, part, mains[1])
            assert same_bytes(alone[0], g[first:end]) and same_bytes(alone[1], da[first:end])
    assert all(map(same_bytes, *mains))
    assert not g[behind].view(torch.int32).any() and not da[behind].view(torch.int16).any()


def micro_batches(launch) -> None:
    """main_grads of one micro-batch and of two, cut between sequences; strides of a, too."""
    lengths = 70, 64, 1, 65
    given, o = Case(lengths, channels=6), gate_operands(Case(lengths, channels=6))
    wide = torch.cat([o.a, o.a], 1)[:, 6:]
    mains = [[drawn(6, seed=i, dtype=FP32) for i in (5, 6)] for _ in "ab"]
    decay(launch, given, o, mains[0])
    for part, rows in ((Case(lengths[:2], channels=6), slice(134)), (
        Case(lengths[2:], channels=6), slice(134, None)
    )):  # fmt: skip
        decay(launch, part, o._replace(a=wide[rows], dg=o.dg[rows]), mains[1])
    assert all(map(same_bytes, *mains))


def chain(launch) -> None:
    """The sum over a chunk's rows is one chain of multiply-adds, the first row first."""
    given = Case((64,), batch=1, channels=3, dtype=FP32, bias=False)
    o = gate_operands(given)
    a = torch.full_like(o.a, 30.0)  # g = -30 e^A_log, exact slopes of -e^A_log
    _, da, total, _ = decay(launch, given, o._replace(a=a, A_log=torch.zeros(3)))
    want = torch.zeros(3, dtype=FP32)
    for row in o.dg:  # one rounding of row · -30 + want, by way of fp64
        want = (want.double() - 30.0 * row.double()).float()
    assert same_bytes(total, want) and same_bytes(da, -o.dg)
    given = given._replace(each=24)  # then halves of a head's channels
    o = gate_operands(given)
    a = torch.full_like(o.a, 30.0)
    _, _, total, _ = decay(launch, given, o._replace(a=a, A_log=torch.zeros(3)))
    want = torch.zeros(3, 32, dtype=FP32)
    for row in torch.nn.functional.pad(o.dg.view(-1, 3, 24), (0, 8)):
        want = (want.double() - 30.0 * row.double()).float()
    while want.shape[1] > 1:
        want = sum(want.chunk(2, 1))
    assert same_bytes(total, want[:, 0])


CHECKS = [
    *(case(engine, norms, width) for engine, width in itertools.product(ENGINES, WIDTHS)),
    *(case(engine, norms, 24, dtype) for engine in ENGINES for dtype in (torch.float16, FP32)),
    *(case(engine, tree, width) for engine in ENGINES for width in (24, 128)),
    *(case(engine, norm_rows_alone) for engine in ENGINES),
    *(case(engine, decays, name) for engine, name in itertools.product(ENGINES, GATES)),
    *(case(engine, check) for engine in ENGINES for check in (pack_is_alone, micro_batches, chain)),
    *(case(engine, pack_is_alone, "channels") for engine in ENGINES),
    case(SM90, norms, 200, **LATE),
    case(SM90, decays, "pack", **LATE),
]


@pytest.mark.parametrize(("engine", "check", "options"), CHECKS)
def test_values(engine, check, options):
    with RUNNER.running(engine, **options) as launch:
        check(launch)


MUTANTS = {
    "halves": (
        *(INTERPRETER, tree, 128),
        ("pairs(x * x, ROWS, BLOCK_K) + eps", "tl.sum(x * x, axis=1) + eps"),
    ),
    "eps_outside_of_the_root": (
        *(INTERPRETER, norms, 64, FP32),
        ("tl.sqrt_rn(pairs(x * x, ROWS, BLOCK_K) + eps)",
         "(tl.sqrt_rn(pairs(x * x, ROWS, BLOCK_K)) + eps)"),
    ),
    "the_first_head": (
        *(INTERPRETER, norms, 64),
        ("row // H * x_row + row % H * x_head", "row // H * x_row"),
    ),
    "rows_without_gaps": (
        *(INTERPRETER, norms, 64),
        ("row // H * x_row + row % H * x_head", "row // H * H * x_head + row % H * x_head"),
    ),
    "dx_of_y": (
        *(INTERPRETER, norms, 64, FP32),
        ("dx = (dy - x_hat *", "dx = (dy - x *"),
    ),
    "softplus_everywhere": (
        *(INTERPRETER, decays, "pack"),
        ("tl.where(x > _LINEAR, x, tl.where", "tl.where(x > 400.0, x, tl.where"),
        ("tl.where(x > 0.0, x, 0.0) + series", "tl.where((x > 0.0) & (x < 25.0), x, 0.0) + series"),
    ),
    "a_short_series": (
        *(INTERPRETER, decays, "two chunks"),
        ("range(_TERMS - 1):", "range(_TERMS - 4):"),
    ),
    "rows_behind": (
        *(INTERPRETER, pack_is_alone),
        ("row < N, row < end", "row < N, row < N"),
    ),
    "zeros_by_a_product": (
        *(INTERPRETER, pack_is_alone),
        ("tl.where(inside, g, 0.0)", "g * inside.to(tl.float32)"),
    ),
    "the_last_row_first": (
        *(INTERPRETER, chain),
        ("for row in range(start, tl.minimum(start + ROWS, end)):\n        _g, slope",
         "for back in range(start, tl.minimum(start + ROWS, end)):\n"
         "        row = tl.minimum(start + ROWS, end) - 1 - (back - start)\n        _g, slope"),
    ),
    "no_multiply_add": (
        *(INTERPRETER, chain),
        ("of_A_log = tl.fma(factor, dg, of_A_log)", "of_A_log = of_A_log + factor * dg"),
    ),
    "one_sum_of_both": (
        *(INTERPRETER, decays, "batch"),
        ("of_bias = tl.fma(slope,", "of_bias = tl.fma(factor,"),
    ),
    "neighbours": (
        *(INTERPRETER, chain),
        ("lane_sum(tl.where(mask, of_A_log, 0.0), CHANNELS)",
         "tl.sum(pairs(tl.where(mask, of_A_log, 0.0)[None, :], 1, CHANNELS), axis=0)"),
    ),
    "the_first_heads_rate": (
        *(INTERPRETER, decays, "channels"), ("A_log_ptr + channel // EACH", "A_log_ptr + channel"),
    ),
    "no_bound": (
        *(INTERPRETER, decays, "bounded"),
        ("return activation_value(y,", "return activation_value(x,"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("engine", "check", "edits"), mutants(MUTANTS))
def test_killed(engine, check, edits):
    RUNNER.kill(engine, check, *edits)


def everything(dtype: torch.dtype, width: int, given: Case):
    def call() -> None:
        l2norm(launcher, *norm_rows(width, dtype))
        decay(launcher, given, gate_operands(given))

    return call


@pytest.mark.parametrize("name", ["batch", "pack", "two chunks", "bounded"])
@pytest.mark.parametrize("target", TARGETS)
def test_code(target, name):
    """No atomics, nothing fused, IEEE divisions and roots, offsets of 64 bits, in every target."""
    given = GATES[name]
    call = everything(given.dtype, {"batch": 128, "pack": 24}.get(name, 256), given)
    kernels = RUNNER.compiled(target, call)
    assert {kernel.name: complaints(kernel) for kernel in kernels} == {
        kernel.name: [] for kernel in kernels
    }
    assert len(kernels) >= 6
