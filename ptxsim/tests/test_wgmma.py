"""WGMMA of the core: layouts, types, groups, timing and accumulation models, against numpy."""

from fractions import Fraction

import numpy as np
import pytest

from ptxsim.skips import requires_core

from .harness import SimError
from .wgmma import (
    COMMIT,
    ELEMENT_BYTES,
    SMALL,
    WAIT,
    ZERO_SMALL_A,
    encode,
    product,
    run_small,
    small_operands,
)

pytestmark = requires_core


def check(n, types=("bf16", "bf16", "f32"), seed=0, signs=(1, 1), accumulate=True, **names):
    """A product of small integers, which every accumulation model computes exactly."""
    rng, k = np.random.default_rng(seed), 32 // ELEMENT_BYTES[types[0]]
    a, b = (
        rng.integers(0 if ty == "u8" else -4, 5, (rows, k))
        for ty, rows in zip(types[:2], (64, n), strict=True)
    )
    c = rng.integers(-8, 9, (64, n))
    found = product(a, b, c, types, signs=signs, accumulate=accumulate, **names)
    expected = a @ b.T * signs[0] * signs[1] + (c if accumulate else 0)
    assert np.array_equal(found.astype(np.float64), expected)


@pytest.mark.parametrize("mode_a", [0, 1, 2, 3])
@pytest.mark.parametrize("mode_b", [0, 1, 2, 3])
@pytest.mark.parametrize("major_a", ["k", "m"])
@pytest.mark.parametrize("major_b", ["k", "m"])
def test_layouts(mode_a, mode_b, major_a, major_b):
    check(64, modes=(mode_a, mode_b), majors=(major_a, major_b))


@pytest.mark.parametrize("n", [8, 16, 24, 96, 128, 192, 256])
@pytest.mark.parametrize("major", ["k", "m"])
def test_sizes(n, major):
    mode = 3 if n % 64 and major == "m" else 1
    check(n, ("f16", "f16", "f32"), seed=n, modes=(1, mode), majors=("k", major))


@pytest.mark.parametrize(
    "types",
    [
        ("f16", "f16", "f16"),
        ("tf32", "tf32", "f32"),
        ("e4m3", "e4m3", "f32"),
        ("e5m2", "e4m3", "f32"),
        ("e4m3", "e5m2", "f16"),
        ("s8", "s8", "s32"),
        ("u8", "s8", "s32"),
    ],
    ids="-".join,
)
@pytest.mark.parametrize("a_in_registers", [False, True])
def test_types(types, a_in_registers):
    check(32, types, a_in_registers=a_in_registers)
    check(32, types, a_in_registers=a_in_registers, accumulate=False, modes=(0, 2))


def test_signs_and_registers():
    check(64, a_in_registers=True, signs=(-1, 1))
    check(64, signs=(1, -1), accumulate=False)
    check(64, a_in_registers=True, signs=(-1, -1), majors=("k", "m"))


@pytest.mark.parametrize(
    "options",
    [
        {"wgmma_mode": 1},
        {"wgmma_mode": 2, "warp_order": 1, "seed": 1},
        {"wgmma_mode": 2, "warp_order": 1, "seed": 2},
    ],
)
def test_lazy_modes(options):
    check(64, **options)
    check(128, a_in_registers=True, **options)


def small_expected(times):
    a, b, c = small_operands()
    return c + times * (a @ b.T)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("between", ["", f"{COMMIT} {WAIT} wgmma.fence.sync.aligned; "])
def test_chained_accumulation(mode, between):
    found, _ = run_small(SMALL + between + SMALL, wgmma_mode=mode)
    assert np.array_equal(found, small_expected(2))


def test_accumulators_read_before_the_wait():
    """NaN when WGMMA is lazy.  When it is immediate it runs as the last warp issues it, so that
    warp sees the result and the others what they had."""
    late, _ = run_small(SMALL + SMALL, wait="", wgmma_mode=1)
    now, _ = run_small(SMALL + SMALL, wait="", wgmma_mode=0)
    assert np.isnan(late).all()
    assert np.array_equal(now[48:], small_expected(2)[48:])
    assert np.array_equal(now[:48], small_expected(0)[:48])


def test_accumulators_of_a_group_in_flight():
    """A wait that leaves one group in flight does not make its accumulators readable."""
    wait = "wgmma.wait_group.sync.aligned 1;"
    found, _ = run_small(SMALL + COMMIT + SMALL, wait=wait, wgmma_mode=1)
    assert np.isnan(found).all()


def test_operand_overwritten_before_the_wait():
    """Shared operands are read at the wait: zeroing A before it changes the lazy result only."""
    now, _ = run_small(after=ZERO_SMALL_A, wgmma_mode=0)
    late, _ = run_small(after=ZERO_SMALL_A, wgmma_mode=1)
    assert np.array_equal(now, small_expected(1)) and np.array_equal(late, small_expected(0))


#: A of ones in registers, and zeros written over it.
ONES = "".join(f"mov.b32 %r{r}, 0x3f803f80; " for r in range(20, 24))
ZEROS = "".join(f"mov.b32 %r{r}, 0; " for r in range(20, 24))
FROM_REGISTERS = SMALL.replace("%d10", "{%r20, %r21, %r22, %r23}").replace("0, 0;", "0;")


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_registers_of_operand_a_overwritten_after_the_wait(mode):
    _, b, c = small_operands()
    found, report = run_small(ONES + FROM_REGISTERS, after=WAIT + ZEROS, wgmma_mode=mode)
    assert np.array_equal(found, c + b.sum(1)) and not report["warnings"]


@pytest.mark.parametrize("mode", [1, 2])
@pytest.mark.parametrize("register", range(20, 24))
def test_registers_of_operand_a_overwritten_before_the_wait(mode, register):
    """PTX lets it read them until the wait: NaN in every warp's rows, and a warning."""
    for after in (f"mov.b32 %r{register}, 0;", f"@%p1 add.u32 %r{register}, %r{register}, 1;"):
        found, report = run_small(ONES + FROM_REGISTERS, after=after, wgmma_mode=mode)
        assert np.isnan(found).all()
        (warning,) = report["warnings"]
        assert "registers of operand A were written before a wait that retires it" in warning


def test_registers_of_operand_a_are_not_looked_at_in_immediate_products():
    _, b, c = small_operands()
    found, report = run_small(ONES + FROM_REGISTERS, after=ZEROS, wgmma_mode=0)
    assert np.array_equal(found, c + b.sum(1)) and not report["warnings"]


OTHERS = "".join(f"mov.b32 %r{r + 4}, %r{r}; " for r in range(20, 24))
FROM_OTHERS = FROM_REGISTERS.replace("{%r20, %r21, %r22, %r23}", "{%r24, %r25, %r26, %r27}")


@pytest.mark.parametrize("register, wrong", [(20, False), (24, True)])
def test_registers_of_operand_a_of_a_group_in_flight(register, wrong):
    """A wait that leaves one group in flight frees the registers of the older one only."""
    _, b, c = small_operands()
    both = ONES + OTHERS + FROM_REGISTERS + COMMIT + FROM_OTHERS
    after = f"wgmma.wait_group.sync.aligned 1; mov.b32 %r{register}, 0; "
    found, report = run_small(both, after=after, wgmma_mode=1)
    assert np.isnan(found).all() if wrong else np.array_equal(found, c + 2 * b.sum(1))
    assert bool(report["warnings"]) == wrong


def test_descriptor_out_of_range():
    with pytest.raises(SimError, match=r"matrix descriptor .* outside the CTA"):
        run_small(leading_a=8192)


@pytest.mark.parametrize("wait, races", [("", True), (WAIT, False)])
def test_race_with_operand_reads(wait, races):
    _, report = run_small(after=wait + ZERO_SMALL_A, check_races=1)
    assert (report["races"] > 0) == races, report["warnings"]


def stored_again(where: str) -> str:
    """16 bytes of an operand, loaded and stored by each thread; %r9: the place of its own row of
    A, of which each warp multiplies 16."""
    return f"""shr.u32 %r9, %r1, 5; shl.b32 %r9, %r9, 4; and.b32 %r8, %r1, 15;
add.u32 %r9, %r9, %r8; {where} mad.lo.u32 %r8, %r9, 16, %r2;
ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r8]; st.shared.v4.u32 [%r8], {{%r4, %r5, %r6, %r7}};
fence.proxy.async; """


OWN_ROWS, OTHER_ROWS = "add.u32 %r9, %r9, 64;", "xor.b32 %r9, %r9, 16; add.u32 %r9, %r9, 64;"
ROWS_OF_B = "and.b32 %r9, %r1, 7; add.u32 %r9, %r9, 384;"
MEET = "bar.sync 0; "


@pytest.mark.parametrize(
    ("where", "between", "races"),
    [
        (OWN_ROWS, "", False),
        (OTHER_ROWS, "", True),
        (OTHER_ROWS, "bar.warp.sync -1; ", True),
        (OTHER_ROWS, MEET, False),
        ("setp.lt.u32 %p2, %r1, 8; @!%p2 bra ON; " + ROWS_OF_B, "ON: ", True),
        ("setp.lt.u32 %p2, %r1, 8; @!%p2 bra ON; " + ROWS_OF_B, "ON: " + MEET, False),
    ],
)
def test_race_of_the_warps_of_a_warpgroup(where, between, races):
    """Each multiplies when it comes: what another one has written is there behind a barrier."""
    found, report = run_small(stored_again(where) + between + SMALL, check_races=1)
    assert np.array_equal(found, small_expected(1))
    assert (report["races"] > 0) == races, report["warnings"]


def truncate_f32(x):
    """Fraction to float32, toward zero (normal range)."""
    if x == 0:
        return 0.0
    sign, x = (-1, -x) if x < 0 else (1, x)
    e = x.numerator.bit_length() - x.denominator.bit_length()
    e = e if Fraction(2) ** e <= x else e - 1
    unit = Fraction(2) ** (e - 23)
    return float(sign * (x // unit) * unit)


def exponent(x):
    return int(np.floor(np.log2(abs(x)))) if x else -(10**6)


def sequential_f32(products, start):
    for p in products:
        start = float(np.float32(float(Fraction(start) + p)))
    return start


def hopper_f32(products, start, exponents):
    """Terms cut toward zero at 25 bits below the largest exponent, and their sum at 24 bits."""
    unit = Fraction(2) ** (max(*exponents, exponent(start)) - 25)
    return truncate_f32(sum(int(p / unit) for p in [*products, Fraction(start)]) * unit)


def test_math_models():
    rng = np.random.default_rng(7)
    bits = [
        encode(rng.standard_normal((rows, 16)) * 2.0 ** rng.integers(-9, 9, (rows, 16)), "bf16")
        for rows in (64, 16)
    ]
    a, b = ((x.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for x in bits)
    c = rng.standard_normal((64, 16)).astype(np.float32)
    exact, fma, hopper = (product(a, b, c, wgmma_math=m) for m in (0, 1, 2))
    for i, j in np.ndindex(64, 16):
        start = float(c[i, j])
        products = [Fraction(x) * Fraction(y) for x, y in zip(a[i], b[j], strict=True)]
        total = sum(products) + Fraction(start)
        half_ulp = abs(total) * Fraction(1001, 1000) / 2**24
        assert abs(Fraction(float(exact[i, j])) - total) <= half_ulp
        reference = sequential_f32(products, start)  # rounded twice
        assert abs(reference - fma[i, j]) <= abs(reference) * 2.0**-23
        exponents = [exponent(x) + exponent(y) for x, y in zip(a[i], b[j], strict=True)]
        assert float(hopper[i, j]) == hopper_f32(products, start, exponents), (i, j)


@pytest.mark.parametrize("math", [0, 1, 2])
def test_special_values(math):
    rng = np.random.default_rng(3)
    a, b = rng.integers(-3, 4, (64, 16)).astype(float), rng.integers(1, 4, (16, 16)).astype(float)
    c = np.zeros((64, 16), np.float32)
    a[:6] = 0
    a[0, 0] = a[1, 0] = np.inf
    a[1, 1], a[2, 3], a[3, 0], c[5] = -np.inf, np.nan, -1.5, np.inf
    found = product(a, b, c, wgmma_math=math)
    assert np.isposinf(found[[0, 5]]).all() and np.isnan(found[1:3]).all()
    assert np.array_equal(found[3:5], a[3:5] @ b.T) and np.array_equal(found[6:], a[6:] @ b.T)
