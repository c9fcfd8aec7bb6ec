"""f32 and f64 instructions of the core, against numpy and exact fractions."""

from fractions import Fraction

import numpy as np
import pytest

from ptxsim.skips import requires_core
from ptxsim.tests.floats import X, Y, Z, run

from .lanes import N, run_lanes

pytestmark = [requires_core, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def run_f32(code, x, y=Y, z=Z):
    return run(code, x, y, z).astype(np.uint32).view(np.float32)


def assert_same(found, expected):
    """Equal bits, except that every NaN is as good as another."""
    expected = np.asarray(expected, np.float32)
    equal = found.view(np.uint32) == expected.view(np.uint32)
    wrong = np.nonzero(~(equal | np.isnan(found) & np.isnan(expected)))[0]
    assert not len(wrong), [(X[i], Y[i], Z[i], found[i], expected[i]) for i in wrong[:5]]


def flush(v):
    v = np.asarray(v, np.float32)
    return np.where(np.abs(v) < np.float32(2.0**-126), np.copysign(np.float32(0), v), v)


def saturate(v):
    return np.where(np.isnan(v), 0, np.clip(v, 0, 1)) + np.float32(0)


F32 = {
    "add.f32 %f10, %f1, %f2;": lambda: X + Y,
    "sub.rn.f32 %f10, %f1, %f2;": lambda: X - Y,
    "mul.f32 %f10, %f1, %f2;": lambda: X * Y,
    "div.rn.f32 %f10, %f1, %f2;": lambda: X / Y,
    "sqrt.rn.f32 %f10, %f1;": lambda: np.sqrt(X),
    "rcp.rn.f32 %f10, %f1;": lambda: np.float32(1) / X,
    "neg.f32 %f10, %f1;": lambda: -X,
    "abs.f32 %f10, %f1;": lambda: np.abs(X),
    "copysign.f32 %f10, %f1, %f2;": lambda: np.copysign(Y, X),
    "min.f32 %f10, %f1, %f2;": lambda: np.fmin(X, Y),
    "max.NaN.f32 %f10, %f1, %f2;": lambda: np.maximum(X, Y),
    "add.ftz.f32 %f10, %f1, %f2;": lambda: flush(flush(X) + flush(Y)),
    "mul.ftz.f32 %f10, %f1, %f2;": lambda: flush(flush(X) * flush(Y)),
    "add.sat.f32 %f10, %f1, %f2;": lambda: saturate(X + Y),
    "cvt.rni.f32.f32 %f10, %f1;": lambda: np.rint(X),
    "cvt.rmi.f32.f32 %f10, %f1;": lambda: np.floor(X),
    "cvt.rzi.f32.f32 %f10, %f1;": lambda: np.trunc(X),
    "cvt.rn.f32.s32 %f10, %r1;": lambda: X.view(np.int32).astype(np.float32),
    "cvt.rn.f32.u32 %f10, %r1;": lambda: X.view(np.uint32).astype(np.float32),
}


@pytest.mark.parametrize("code", F32)
def test_f32(code):
    assert_same(run_f32(code, X), F32[code]())


def round_f32(v, mode):
    """Rounds float64 values to float32 toward zero (rz), down (rm) or up (rp)."""
    nearest = v.astype(np.float32)
    high, low = nearest.astype(np.float64) > v, nearest.astype(np.float64) < v
    down = high & {"rz": v > 0, "rm": True, "rp": False}[mode]
    up = low & {"rz": v < 0, "rm": False, "rp": True}[mode]
    out = np.where(down, np.nextafter(nearest, np.float32(-np.inf)), nearest)
    return np.where(up, np.nextafter(out, np.float32(np.inf)), out)


@pytest.mark.parametrize("op", ["add.rz", "mul.rm", "mul.rp"])
def test_directed_rounding(op):
    x, y = (
        np.where((np.abs(v) < 1e3) & (np.abs(v) > 1e-3), v, other).astype(np.float32)
        for v, other in ((X, 1.25), (Y, 3.1))
    )
    exact = x.astype(np.float64) + y if op[:3] == "add" else x.astype(np.float64) * y
    assert_same(run_f32(f"{op}.f32 %f10, %f1, %f2;", x, y), round_f32(exact, op[-2:]))


def test_fma_is_rounded_once():
    found = run_f32("fma.rn.f32 %f10, %f1, %f2, %f3;", X)
    checked = 0
    for x, y, z, o in zip(X, Y, Z, found, strict=True):
        if not np.isfinite([x, y, z, o]).all():
            continue
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        error = abs(Fraction(float(o)) - exact)
        for side in (np.float32(-3e38), np.float32(3e38)):
            neighbour = np.nextafter(o, side, dtype=np.float32)
            assert error <= abs(Fraction(float(neighbour)) - exact)
        checked += 1
    assert checked > N // 2


APPROXIMATE = {
    "ex2.approx.ftz.f32": np.exp2,
    "lg2.approx.f32": np.log2,
    "rcp.approx.ftz.f32": np.reciprocal,
    "rsqrt.approx.f32": lambda x: 1 / np.sqrt(x),
    "sin.approx.f32": np.sin,
    "cos.approx.f32": np.cos,
    "tanh.approx.f32": np.tanh,
    "sqrt.approx.f32": np.sqrt,
}


@pytest.mark.parametrize("op", APPROXIMATE)
def test_approximate(op):
    x = np.linspace(0.01, 20, N).astype(np.float32)
    expected = APPROXIMATE[op](x.astype(np.float64))
    assert np.allclose(run_f32(f"{op} %f10, %f1;", x), expected, rtol=1e-6, atol=1e-7)


COMPARISONS = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: (x < y) | (x > y),
    "lt": lambda x, y: x < y,
    "ge": lambda x, y: x >= y,
    "equ": lambda x, y: ~((x < y) | (x > y)),
    "neu": lambda x, y: x != y,
    "ltu": lambda x, y: ~(x >= y),
    "geu": lambda x, y: ~(x < y),
    "num": lambda x, y: ~np.isnan(x) & ~np.isnan(y),
    "nan": lambda x, y: np.isnan(x) | np.isnan(y),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_compare(name):
    y = np.where(np.arange(N) % 3 == 0, X, Y)
    found = run(f"setp.{name}.f32 %p1, %f1, %f2;", X, y, result="p")
    assert np.array_equal(found.astype(bool), COMPARISONS[name](X, y))


F64 = {
    "add.f64 %g10, %g1, %g2;": np.add,
    "mul.f64 %g10, %g1, %g2;": np.multiply,
    "div.rn.f64 %g10, %g1, %g2;": np.divide,
    "max.f64 %g10, %g1, %g2;": np.maximum,
}


@pytest.mark.parametrize("code", F64)
def test_f64(code):
    values = np.random.default_rng(1).standard_normal((3, N))
    found = run_lanes(code, *(v.view(np.uint64) for v in values), "g")
    assert np.array_equal(found, F64[code](values[0], values[1]).view(np.uint64))


def test_f64_to_f32():
    values = np.random.default_rng(1).standard_normal((3, N))
    code = "cvt.rn.f32.f64 %f10, %g1;"
    found = run_lanes(code, *(v.view(np.uint64) for v in values), "f")
    assert np.array_equal(found, values[0].astype(np.float32).view(np.uint32))
