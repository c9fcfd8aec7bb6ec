"""Integer, logic, bit-field and conversion instructions of the core, against Python's integers."""

import itertools
import operator

import numpy as np
import pytest

from ptxsim.skips import requires_core

from .lanes import N, run_lanes

pytestmark = requires_core

M32 = 0xFFFFFFFF
BITS = {"h": 16, "r": 32, "d": 64, "p": 1}
KIND = {16: "h", 32: "r", 64: "d"}
EDGES = [0, 1, 2, 3, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, 100, 127, 128, 255, 256]
EDGES += [0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, M32, 0x100000000]
EDGES += [0xDEADBEEF, 0x12345678, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF]
EDGES += [0x123456789ABCDEF0]


def signed(value, bits):
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def view(bits, sign):
    """The function that reads a 64-bit pattern as an integer of this type."""
    if sign == "s":
        return lambda value: signed(value, bits)
    return lambda value: value & ((1 << bits) - 1)


def quotient(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def typed_cases(bits, sign):
    """Instructions whose result depends on the sign of the type."""
    k, t, r = view(bits, sign), f"{sign}{bits}", f"%{KIND[bits]}"
    two, three = f"{r}10, {r}1, {r}2;", f"{r}10, {r}1, {r}2, {r}3;"
    odd = f"or.b{bits} {r}2, {r}2, 1;"  # no division by zero
    own = {
        f"add.{t} {two}": lambda a, b, c: a + b,
        f"sub.{t} {two}": lambda a, b, c: a - b,
        f"min.{t} {two}": lambda a, b, c: min(a, b),
        f"max.{t} {two}": lambda a, b, c: max(a, b),
        f"mul.lo.{t} {two}": lambda a, b, c: a * b,
        f"mul.hi.{t} {two}": lambda a, b, c: a * b >> bits,
        f"mad.lo.{t} {three}": lambda a, b, c: a * b + c,
        f"sad.{t} {three}": lambda a, b, c: c + abs(a - b),
        f"{odd} div.{t} {two}": lambda a, b, c: quotient(a, k(b | 1)),
        f"{odd} rem.{t} {two}": lambda a, b, c: a - quotient(a, k(b | 1)) * k(b | 1),
    }
    if t == "s32":
        own[f"min.relu.{t} {two}"] = lambda a, b, c: max(0, min(a, b))
        own[f"max.relu.{t} {two}"] = lambda a, b, c: max(0, a, b)
    if bits > 16:
        own[f"mad.hi.{t} {three}"] = lambda a, b, c: (a * b >> bits) + c
    cases = {code: (KIND[bits], on_views(f, k)) for code, f in own.items()}
    cases[f"shr.{t} {r}10, {r}1, %r2;"] = KIND[bits], lambda a, b, c: k(a) >> min(b & M32, bits)
    if bits < 64:
        wide, w = KIND[2 * bits], f"%{KIND[2 * bits]}"
        cases[f"mul.wide.{t} {w}10, {r}1, {r}2;"] = wide, lambda a, b, c: k(a) * k(b)
        cases[f"mad.wide.{t} {w}10, {r}1, {r}2, {w}3;"] = wide, lambda a, b, c: k(a) * k(b) + c
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        compare = on_views(lambda a, b, c, f=getattr(operator, name): int(f(a, b)), k)
        cases[f"setp.{name}.{t} %p1, {r}1, {r}2;"] = "p", compare
    return cases


def on_views(f, k):
    return lambda a, b, c: f(k(a), k(b), k(c))


def untyped_cases(bits):
    """Logic, shifts to the left and signs."""
    kind, r = KIND[bits], f"%{KIND[bits]}"
    two = f"{r}10, {r}1, {r}2;"
    return {
        f"shl.b{bits} {r}10, {r}1, %r2;": (kind, lambda a, b, c: a << min(b & M32, bits)),
        f"and.b{bits} {two}": (kind, lambda a, b, c: a & b),
        f"or.b{bits} {two}": (kind, lambda a, b, c: a | b),
        f"xor.b{bits} {two}": (kind, lambda a, b, c: a ^ b),
        f"not.b{bits} {r}10, {r}1;": (kind, lambda a, b, c: ~a),
        f"neg.s{bits} {r}10, {r}1;": (kind, lambda a, b, c: -a),
        f"abs.s{bits} {r}10, {r}1;": (kind, lambda a, b, c: abs(signed(a, bits))),
    }


def bit_field_extract(a, b, c, bits, sign):
    position, length = b & 255, c & 255
    fill = a >> min(position + length - 1, bits - 1) & 1 if sign == "s" and length else 0
    inside = [i < length and position + i < bits for i in range(bits)]
    return sum((a >> position + i & 1 if inside[i] else fill) << i for i in range(bits))


def bit_field_insert(a, b, c, bits):
    position, length = c & 255, c >> 8 & 255
    for i in range(min(length, bits - position)):
        b = b & ~(1 << position + i) | (a >> i & 1) << position + i
    return b


def bit_cases(bits):
    """Counts, reversals and bit fields, of 32 or 64 bits."""
    kind, r, mask = KIND[bits], f"%{KIND[bits]}", (1 << bits) - 1

    def top(a, b, c):
        value = signed(a, bits)
        return (value if value >= 0 else ~value).bit_length() - 1

    cases = {
        f"popc.b{bits} %r10, {r}1;": ("r", lambda a, b, c: bin(a & mask).count("1")),
        f"clz.b{bits} %r10, {r}1;": ("r", lambda a, b, c: bits - (a & mask).bit_length()),
        f"brev.b{bits} {r}10, {r}1;": (
            kind,
            lambda a, b, c: int(format(a & mask, f"0{bits}b")[::-1], 2),
        ),
        f"bfind.u{bits} %r10, {r}1;": ("r", lambda a, b, c: (a & mask).bit_length() - 1),
        f"bfind.s{bits} %r10, {r}1;": ("r", top),
        f"bfind.shiftamt.u{bits} %r10, {r}1;": (
            "r",
            lambda a, b, c: bits - (a & mask).bit_length() if a & mask else -1,
        ),
        f"shr.u32 %r4, %r3, 8; bfi.b{bits} {r}10, {r}1, {r}2, %r3, %r4;": (
            kind,
            lambda a, b, c: bit_field_insert(a, b, c, bits),
        ),
    }
    for sign in "us":
        cases[f"bfe.{sign}{bits} {r}10, {r}1, %r2, %r3;"] = (
            kind,
            lambda a, b, c, sign=sign: bit_field_extract(a & mask, b, c, bits, sign),
        )
    return cases


def pair(a, b):
    return (b & M32) << 32 | a & M32


def permute(a, b, c):
    out = 0
    for i in range(4):
        selector = c >> 4 * i & 15
        byte = pair(a, b) >> 8 * (selector & 7) & 255
        if selector & 8:
            byte = 255 if byte & 128 else 0
        out |= byte << 8 * i
    return out


def lookup(table, a, b, c):
    index = [(a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(32)]
    return sum((table >> index[i] & 1) << i for i in range(32))


def part(value, i, bits, is_signed):
    piece = value >> i * bits & (1 << bits) - 1
    return piece - (1 << bits) if is_signed and piece >> bits - 1 else piece


def dot_cases():
    """Dot products of bytes, and of halves with bytes, signed or not."""
    out = {}
    for name, number, first in (("dp4a", 4, 0), ("dp2a.lo", 2, 0), ("dp2a.hi", 2, 2)):
        for types in itertools.product(("u32", "s32"), repeat=2):

            def dot(a, b, c, number=number, first=first, types=types):
                of_a, of_b = (name == "s32" for name in types)
                terms = (
                    part(a, i, 32 // number, of_a) * part(b, first + i, 8, of_b)
                    for i in range(number)
                )
                return c + sum(terms)

            out[f"{name}.{'.'.join(types)} %r10, %r1, %r2, %r3;"] = "r", dot
    return out


def shift_cases():
    """Funnel shifts, permutations, look-up tables, carries and masks of 32 bits."""
    r = "%r10, %r1, %r2, %r3;"
    out = {
        f"shf.l.wrap.b32 {r}": lambda a, b, c: pair(a, b) << (c & 31) >> 32,
        f"shf.l.clamp.b32 {r}": lambda a, b, c: pair(a, b) << min(c & M32, 32) >> 32,
        f"shf.r.wrap.b32 {r}": lambda a, b, c: pair(a, b) >> (c & 31),
        f"shf.r.clamp.b32 {r}": lambda a, b, c: pair(a, b) >> min(c & M32, 32),
        f"prmt.b32 {r}": permute,
        "add.cc.u32 %r10, %r1, %r2; addc.u32 %r10, %r3, 0;": (
            lambda a, b, c: c + ((a & M32) + (b & M32) >> 32)
        ),
        "sub.cc.u32 %r10, %r1, %r2; subc.u32 %r10, %r3, 0;": (
            lambda a, b, c: c - int((a & M32) < (b & M32))
        ),
        "bmsk.clamp.b32 %r10, %r1, %r2;": (
            lambda a, b, c: (1 << min(b & M32, 32)) - 1 << min(a & M32, 32)
        ),
        "and.b32 %r2, %r2, 31; fns.b32 %r10, %r1, %r2, 2;": (
            lambda a, b, c: [*[i for i in range(b & 31, 32) if a >> i & 1], -1, -1][1]
        ),
    }
    for table in (0x96, 0xE8, 0xCA, 0x1B, 0x80):
        out[f"lop3.b32 %r10, %r1, %r2, %r3, {table};"] = lambda a, b, c, t=table: lookup(t, a, b, c)
    return {code: ("r", f) for code, f in out.items()}


def clamp(value, low, high):
    return max(low, min(high, value))


def selection_cases():
    """Saturation, selection, predicates and packing."""

    def s32(value):
        return signed(value, 32)

    less = "setp.ge.s32 %p2, %r3, 0; setp.lt."
    return {
        "add.sat.s32 %r10, %r1, %r2;": (
            "r",
            lambda a, b, c: clamp(s32(a) + s32(b), -(2**31), 2**31 - 1),
        ),
        "mul24.lo.s32 %r10, %r1, %r2;": ("r", lambda a, b, c: signed(a, 24) * signed(b, 24)),
        "setp.gt.s32 %p2, %r3, 0; selp.b32 %r10, %r1, %r2, %p2;": (
            "r",
            lambda a, b, c: a if s32(c) > 0 else b,
        ),
        "slct.u32.s32 %r10, %r1, %r2, %r3;": ("r", lambda a, b, c: a if s32(c) >= 0 else b),
        f"{less}and.u32 %p1|%p3, %r1, %r2, %p2;": (
            "p",
            lambda a, b, c: int((a & M32) < (b & M32) and s32(c) >= 0),
        ),
        f"{less}or.u32 %p3|%p1, %r1, %r2, !%p2;": (
            "p",
            lambda a, b, c: int(not (a & M32) < (b & M32) or s32(c) < 0),
        ),
        "mov.b64 {%r10, %r11}, %d1; mov.b64 %d10, {%r11, %r10};": (
            "d",
            lambda a, b, c: (a & M32) << 32 | a >> 32,
        ),
        "mov.b32 {%h4, %h5}, %r1; mov.b32 %r10, {%h5, %h4};": (
            "r",
            lambda a, b, c: (a & 0xFFFF) << 16 | a >> 16 & 0xFFFF,
        ),
        "cvt.sat.s8.s32 %r10, %r1;": ("r", lambda a, b, c: clamp(s32(a), -128, 127)),
        "cvt.sat.u8.s32 %r10, %r1;": ("r", lambda a, b, c: clamp(s32(a), 0, 255)),
        "cvt.pack.sat.s16.s32 %r10, %r1, %r2;": (
            "r",
            lambda a, b, c: (
                (clamp(s32(a), -32768, 32767) & 0xFFFF) << 16
                | clamp(s32(b), -32768, 32767) & 0xFFFF
            ),
        ),
    }


def conversion_cases():
    """Integer conversions to types at least as wide."""
    cases = {}
    for source in (8, 16, 32):
        register = "%h1" if source == 16 else "%r1"
        for target in (16, 32, 64):
            for sign in "us" if target >= source else "":
                kind = KIND[target]
                code = f"cvt.{sign}{target}.{sign}{source} %{kind}10, {register};"
                cases[code] = kind, lambda a, b, c, k=view(source, sign): k(a)
    return cases


CASES = (
    dot_cases()
    | shift_cases()
    | selection_cases()
    | conversion_cases()
    | bit_cases(32)
    | bit_cases(64)
)
for _bits in (16, 32, 64):
    CASES |= untyped_cases(_bits) | typed_cases(_bits, "u") | typed_cases(_bits, "s")


def words(seed):
    """Random 64-bit patterns, with every edge, some small numbers, in random places."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**64, N, dtype=np.uint64)
    values[: len(EDGES)] = rng.permutation(np.array(EDGES, np.uint64))
    values[len(EDGES) : len(EDGES) + 20] = rng.integers(0, 40, 20)
    return values


@pytest.mark.parametrize("code", CASES)
def test_integer(code):
    kind, f = CASES[code]
    a, b, c = words(1), words(2), words(3)
    for operand in (b, c):  # shifts and positions in range
        operand[100:200] %= 80
    found = run_lanes(code, a, b, c, kind)
    mask = (1 << BITS[kind]) - 1
    for x, y, z, o in zip(*(v.tolist() for v in (a, b, c, found)), strict=True):
        assert o & mask == f(x, y, z) & mask, (code, hex(x), hex(y), hex(z), hex(o))
