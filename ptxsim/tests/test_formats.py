"""f16, bf16, tf32 and fp8 arithmetic and conversions of the core, against numpy."""

import numpy as np
import pytest

from ptxsim.skips import requires_core

from .floats import X, Y, run
from .lanes import N, run_lanes

pytestmark = [requires_core, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

F16 = {
    "add.f16": (2, lambda a, b, c: a + b),
    "mul.f16": (2, lambda a, b, c: a * b),
    "sub.f16": (2, lambda a, b, c: a - b),
    "min.f16": (2, lambda a, b, c: np.fmin(a, b)),
    "max.f16": (2, lambda a, b, c: np.fmax(a, b)),
    "fma.rn.f16": (3, lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float16)),
    "neg.f16": (1, lambda a, b, c: -a),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", F16)
def test_f16(op, packed):
    count, f = F16[op]
    halves = [np.random.default_rng(i).standard_normal((N, 2)).astype(np.float16) for i in range(3)]
    halves = [v * np.float16(3) for v in halves]
    patterns = [v.view(np.uint32)[:, 0].astype(np.uint64) for v in halves]
    kind, suffix = ("r", "x2") if packed else ("h", "")
    operands = ", ".join(f"%{kind}{i}" for i in (10, 1, 2, 3)[: count + 1])
    found = run_lanes(f"{op}{suffix} {operands};", *patterns, kind)
    expected = f(*halves)
    if packed:
        assert np.array_equal(found.astype(np.uint32).view(np.float16).reshape(N, 2), expected)
    else:
        assert np.array_equal(found.astype(np.uint16).view(np.float16), expected[:, 0])


def bf16_round(x):
    """float32 to bf16 bits, to nearest even; every NaN is 0x7FFF."""
    u = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint32)
    return np.where((u & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, rounded).astype(np.uint16)


def bf16_value(h):
    return (np.asarray(h).astype(np.uint32) << 16).view(np.float32)


def test_pack_bf16():
    found = run("cvt.rn.bf16x2.f32 %r10, %f1, %f2;", X, result="r").astype(np.uint32)
    assert np.array_equal(found, bf16_round(X).astype(np.uint32) << 16 | bf16_round(Y))


def test_pack_bf16_relu():
    found = run("cvt.rn.relu.bf16x2.f32 %r10, %f1, %f2;", X, result="r").astype(np.uint32)
    high, low = (bf16_round(np.where(np.isnan(v), v, np.maximum(v, 0))) for v in (X, Y))
    signless = np.uint32(0x7FFF7FFF)  # the sign of a zero is free
    assert np.array_equal(found & signless, (high.astype(np.uint32) << 16 | low) & signless)


def test_pack_f16():
    found = run("cvt.rn.f16x2.f32 %r10, %f1, %f2;", X, result="r").astype(np.uint32)
    high, low = X.astype(np.float16).view(np.uint16), Y.astype(np.float16).view(np.uint16)
    equal = (found >> 16 == high) & (found & 0xFFFF == low)
    assert (equal | np.isnan(X) | np.isnan(Y)).all()


def test_bf16_arithmetic():
    halves = bf16_round(np.random.default_rng(0).standard_normal((3, N)).astype(np.float32))
    a, b, c = bf16_value(halves)
    patterns = [h.astype(np.uint64) for h in halves]
    found = run_lanes("fma.rn.bf16 %h10, %h1, %h2, %h3;", *patterns, "h").astype(np.uint16)
    assert np.array_equal(found, bf16_round((a.astype(np.float64) * b + c).astype(np.float32)))
    found = run_lanes("cvt.f32.bf16 %f10, %h1;", *patterns, "f").astype(np.uint32)
    assert np.array_equal(found.view(np.float32), a)


def test_tf32():
    found = run("cvt.rna.tf32.f32 %r10, %f1;", X, result="r").astype(np.uint32)
    finite = np.isfinite(X)
    expected = X.view(np.uint32) + 0x1000 & 0xFFFFE000
    assert np.array_equal(found[finite], expected[finite])


@pytest.mark.parametrize("ty, bits", [("s32", 32), ("u32", 32), ("s16", 16), ("u8", 8)])
def test_f32_to_integer(ty, bits):
    """Toward zero, clamped; NaN is zero."""
    code = f"cvt.rzi.{ty}.f32 %r10, %f1;"
    if bits == 16:
        code = f"cvt.rzi.{ty}.f32 %h10, %f1; cvt.u32.u16 %r10, %h10;"
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if ty[0] == "s" else (0, 2**bits - 1)
    mask = 2**bits - 1
    found = run(code, X, result="r")
    for x, o in zip(X, found.tolist(), strict=True):
        whole = 0 if np.isnan(x) else x if np.isinf(x) else int(np.trunc(x))
        assert o & mask == int(max(low, min(high, whole))) & mask, (x, o)


def fp8_table(ty):
    """The value of each of the 256 patterns."""
    mantissa, bias = (2, 15) if ty == "e5m2" else (3, 7)
    pattern = np.arange(128)
    e, m = pattern >> mantissa, pattern & (1 << mantissa) - 1
    values = (m / 2**mantissa + (e > 0)) * 2.0 ** (np.maximum(e, 1) - bias)
    if ty == "e5m2":
        values[0x7C], values[0x7D:] = np.inf, np.nan
    else:
        values[0x7F] = np.nan
    return np.concatenate([values, -values])


@pytest.mark.parametrize("ty", ["e4m3", "e5m2"])
def test_fp8_to_f16(ty):
    table, pattern = fp8_table(ty), np.arange(256, dtype=np.uint64)
    operand = pattern | pattern[::-1] << np.uint64(8)
    found = run_lanes(f"cvt.rn.f16x2.{ty}x2 %r10, %h1;", operand, operand, operand, "r")
    values = found.astype(np.uint32).view(np.float16).reshape(-1, 2).astype(np.float64)
    assert np.array_equal(values[:, 0], table, equal_nan=True)
    assert np.array_equal(values[:, 1], table[::-1], equal_nan=True)


@pytest.mark.parametrize("ty", ["e4m3", "e5m2"])
def test_f32_to_fp8(ty):
    """The nearest finite value, saturating."""
    table = fp8_table(ty)
    finite = np.sort(np.unique(table[np.isfinite(table)]))
    x = np.where(np.isnan(X), np.float32(1), X)
    x[40:] = np.random.default_rng(0).standard_normal(N - 40) * 50
    code = f"cvt.rn.satfinite.{ty}x2.f32 %h10, %f1, %f2; cvt.u32.u16 %r10, %h10;"
    for v, o in zip(x, run(code, x, result="r").tolist(), strict=True):
        clipped = np.clip(np.float64(v), finite[0], finite[-1])
        error = abs(table[o >> 8] - clipped)
        assert error <= np.abs(finite - clipped).min() * (1 + 1e-12), (v, table[o >> 8])
