"""Shuffles, votes, matrix loads and stores, and mma.sync of the core."""

import numpy as np
import pytest

from ptxsim.skips import requires_core

from .harness import entry, launch
from .snippets import sm

pytestmark = requires_core


@pytest.mark.parametrize(
    "mode, ref",
    [
        ("up.b32", lambda l, b, w: l - b if l % w >= b else None),
        ("down.b32", lambda l, b, w: l + b if l % w + b < w else None),
        ("bfly.b32", lambda l, b, w: l ^ b if (l ^ b) // w <= l // w else None),
        ("idx.b32", lambda l, b, w: l // w * w + b % w),
    ],
)
@pytest.mark.parametrize("b, width", [(1, 32), (3, 8), (16, 32), (5, 16)])
def test_shfl(mode, ref, b, width):
    c = (32 - width) << 8 | (0 if mode[0] == "u" else 31)
    body = f"""mov.u32 %r1, %tid.x; mul.lo.u32 %r2, %r1, 10;
shfl.sync.{mode} %r3|%p1, %r2, {b}, {c}, -1; selp.u32 %r4, 1, 0, %p1;
mul.wide.u32 %d1, %r1, 8; add.u64 %d1, %d1, %d50; st.global.v2.u32 [%d1], {{%r3, %r4}};"""
    out = np.zeros((32, 2), np.uint32)
    launch(entry(body, ["u64"]), [out])
    for lane in range(32):
        source = ref(lane, b, width)
        expected = [lane * 10, 0] if source is None else [source * 10, 1]
        assert out[lane].tolist() == expected, lane


def test_votes_match_redux_elect():
    body = """mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 7; setp.lt.u32 %p1, %r1, 20;
vote.sync.any.pred %p2, %p1, -1; vote.sync.all.pred %p3, %p1, -1; vote.sync.uni.pred %p4, %p1, -1;
vote.sync.ballot.b32 %r3, %p1, -1;
match.any.sync.b32 %r4, %r2, -1; match.all.sync.b32 %r5|%p5, %r2, -1;
redux.sync.add.s32 %r6, %r1, -1; redux.sync.max.u32 %r7, %r2, -1; redux.sync.or.b32 %r8, %r1, -1;
elect.sync %r9|%p6, -1;
selp.u32 %r10, 1, 0, %p2; selp.u32 %r11, 2, 0, %p3; selp.u32 %r12, 4, 0, %p4;
selp.u32 %r13, 8, 0, %p5; selp.u32 %r14, 16, 0, %p6;
or.b32 %r10, %r10, %r11; or.b32 %r10, %r10, %r12; or.b32 %r10, %r10, %r13; or.b32 %r10, %r10, %r14;
mul.wide.u32 %d1, %r1, 32; add.u64 %d1, %d1, %d50; st.global.v4.u32 [%d1], {%r3, %r4, %r5, %r6};
st.global.v4.u32 [%d1+16], {%r7, %r8, %r9, %r10};"""
    out = np.zeros((32, 8), np.uint32)
    launch(entry(body, ["u64"]), [out])
    for t in range(32):
        flags = 1 + (16 if t == 0 else 0)  # some vote true, lane 0 elected
        assert out[t].tolist() == [0xFFFFF, 0x01010101 << (t & 7), 0, 496, 7, 31, 0, flags]


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_ldmatrix_stmatrix(n, trans):
    regs = ", ".join(f"%r{10 + i}" for i in range(n))
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, sm; and.b32 %r3, %r1, {8 * n - 1};
mul.wide.u32 %d1, %r1, 16; add.u64 %d2, %d50, %d1; ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%d2];
mad.lo.u32 %r8, %r1, 16, %r2; st.shared.v4.u32 [%r8], {{%r4, %r5, %r6, %r7}};
bar.sync 0; xor.b32 %r3, %r3, 5; mad.lo.u32 %r8, %r3, 16, %r2;
ldmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16 {{{regs}}}, [%r8];
mul.wide.u32 %d3, %r1, {4 * n}; add.u64 %d3, %d3, %d51;
{"".join(f"st.global.u32 [%d3+{4 * i}], %r{10 + i};" for i in range(n))}
bar.sync 0; add.u32 %r8, %r8, 512;
stmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16 [%r8], {{{regs}}}; bar.sync 0;
mad.lo.u32 %r8, %r1, 16, %r2; ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r8+512];
add.u64 %d2, %d52, %d1; st.global.v4.u32 [%d2], {{%r4, %r5, %r6, %r7}};"""
    data = np.arange(256, dtype=np.uint16).reshape(32, 8) + 7
    frag, back = np.zeros((32, n), np.uint32), np.zeros((32, 8), np.uint16)
    launch(entry(body, ["u64"] * 3, sm(1024)), [data, frag, back])
    f = frag.view(np.uint16).reshape(32, n, 2)
    for lane in range(32):
        for k in range(n):
            for j in range(2):
                r, c = lane // 4, 2 * (lane % 4) + j
                if trans:
                    r, c = c, r
                assert f[lane, k, j] == data[(8 * k + r) ^ 5, c]
    assert np.array_equal(back[: 8 * n], data[: 8 * n])


MMA_TYPES = {"bf16": (2, None), "f16": (2, np.float16), "tf32": (4, np.float32), "s8": (1, np.int8)}


def encode(values, ty):
    if ty == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(MMA_TYPES[ty][1])


def mma_fragments(a, b, c, ty):
    """Registers [lane, register, part] of A (16 x k), B (k x 8) and C (16 x 8)."""
    per, k = 4 // MMA_TYPES[ty][0], a.shape[1]
    lane = np.arange(32)[:, None, None]
    part = np.arange(per) + lane % 4 * per
    reg_a = np.arange(k // (2 * per))[None, :, None]
    reg_b = np.arange(k // (4 * per))[None, :, None]
    frag_a = encode(a, ty)[lane // 4 + 8 * (reg_a & 1), part + reg_a // 2 * 4 * per]
    frag_b = encode(b, ty)[part + reg_b * 4 * per, lane // 4]
    reg_c = np.arange(4)[None, :]
    lane = lane[:, :, 0]
    frag_c = c[lane // 4 + 8 * (reg_c // 2), 2 * (lane % 4) + reg_c % 2]
    return [np.ascontiguousarray(x) for x in (frag_a, frag_b, frag_c)]


@pytest.mark.parametrize(
    "ty, k", [("bf16", 16), ("bf16", 8), ("f16", 16), ("tf32", 8), ("tf32", 4), ("s8", 32)]
)
def test_mma_sync(ty, k):
    rng = np.random.default_rng(0)
    a, b = rng.integers(-4, 5, (16, k)), rng.integers(-4, 5, (k, 8))
    c = rng.integers(-9, 9, (16, 8)).astype(np.int32 if ty == "s8" else np.float32)
    frag_a, frag_b, frag_c = mma_fragments(a, b, c, ty)
    acc = "s32" if ty == "s8" else "f32"
    regs_a = [f"%r{10 + i}" for i in range(frag_a.shape[1])]
    regs_b = [f"%r{20 + i}" for i in range(frag_b.shape[1])]
    loads = [
        " ".join(f"ld.global.b32 {r}, [%d1+{4 * i}];" for i, r in enumerate(regs))
        for regs in (regs_a, regs_b)
    ]
    vec_a, vec_b = ("{" + ", ".join(regs) + "}" for regs in (regs_a, regs_b))
    vec_d = "{%r30, %r31, %r32, %r33}" if ty == "s8" else "{%f10, %f11, %f12, %f13}"
    body = f"""mov.u32 %r1, %tid.x;
mul.wide.u32 %d1, %r1, {4 * len(regs_a)}; add.u64 %d1, %d1, %d50; {loads[0]}
mul.wide.u32 %d1, %r1, {4 * len(regs_b)}; add.u64 %d1, %d1, %d51; {loads[1]}
mul.wide.u32 %d1, %r1, 16; add.u64 %d1, %d1, %d52; ld.global.v4.{acc} {vec_d}, [%d1];
mma.sync.aligned.m16n8k{k}.row.col.{acc}.{ty}.{ty}.{acc} {vec_d}, {vec_a}, {vec_b}, {vec_d};
st.global.v4.{acc} [%d1], {vec_d};"""
    launch(entry(body, ["u64"] * 3), [frag_a, frag_b, frag_c])
    expected = mma_fragments(a, b, (a @ b + c).astype(c.dtype), ty)[2]
    assert np.array_equal(frag_c, expected)
