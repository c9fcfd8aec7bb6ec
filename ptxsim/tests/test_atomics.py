"""Atomics and reductions of the core, and what CTAs build from them."""

import numpy as np
import pytest

from ptxsim.skips import requires_core

from .harness import entry, launch
from .snippets import sm

pytestmark = requires_core


@pytest.mark.parametrize(
    "options",
    [{}, {"resident_ctas": 3}, {"warp_order": 1, "cta_order": 1, "seed": 9}, {"cta_order": 2}],
)
def test_spin_lock_between_ctas(options):
    body = """mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra W;
L: atom.global.acquire.gpu.cas.b32 %r2, [%d50], 0, 1; setp.ne.u32 %p2, %r2, 0; @%p2 bra L;
W: bar.sync 0; mul.wide.u32 %d1, %r1, 4; add.u64 %d1, %d1, %d51; ld.global.u32 %r3, [%d1];
add.u32 %r3, %r3, 1; st.global.u32 [%d1], %r3;
membar.gl; bar.sync 0; @%p1 bra E; st.release.gpu.global.u32 [%d50], 0; E:"""
    lock, data = np.zeros(1, np.uint32), np.zeros(64, np.uint32)
    launch(entry(body, ["u64"] * 2), [lock, data], grid=(20, 1, 1), block=(64, 1, 1), **options)
    assert (data == 20).all()


@pytest.mark.parametrize(
    "options", [{}, {"warp_order": 1, "seed": 2}, {"cta_order": 1, "seed": 3}, {"resident_ctas": 5}]
)
def test_turnstile_semaphore(options):
    """CTA i waits until the counter reaches i; in ascending order few resident CTAs are enough."""
    if options.get("cta_order"):
        options = dict(options, resident_ctas=16)
    body = """mov.u32 %r1, %ctaid.x; mov.u32 %r5, %tid.x; setp.ne.u32 %p3, %r5, 0; @%p3 bra W;
L: ld.global.acquire.gpu.u32 %r2, [%d50]; setp.ne.u32 %p1, %r2, %r1; @%p1 bra L;
W: bar.sync 0; ld.global.u32 %r3, [%d51]; bar.sync 0; mad.lo.u32 %r3, %r3, 3, %r1; @%p3 bra E;
st.global.u32 [%d51], %r3; red.release.gpu.global.add.u32 [%d50], 1; E:"""
    sem, acc = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    r = launch(entry(body, ["u64"] * 2), [sem, acc], grid=(16, 1, 1), block=(64, 1, 1), **options)
    expected = 0
    for i in range(16):
        expected = (3 * expected + i) & 0xFFFFFFFF
    assert acc[0] == expected and r["counts"]["red.global.add.u32"] == 16


ATOMS = [
    ("add.u32", [5] * 32, 7, 7 + 160),
    ("min.s32", [10 - t for t in range(32)], 3, -21),
    ("max.u32", list(range(32)), 3, 31),
    ("inc.u32", [9] * 32, 0, 2),
    ("dec.u32", [9] * 32, 0, 8),
    ("and.b32", [~(1 << t) for t in range(4, 32)] + [0xFF] * 4, 0xFFFFFFFF, 0xF),
    ("or.b32", [1 << t for t in range(32)], 0, 0xFFFFFFFF),
    ("xor.b32", list(range(32)), 1, 1),
]


@pytest.mark.parametrize("op, values, start, expected", ATOMS)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics(op, values, start, expected, space):
    target, before, after = "[%d50]", "", ""
    if space == "shared":
        target, before = "[sm]", "st.shared.u32 [sm], %r4;"
        after = "ld.shared.u32 %r5, [sm]; st.global.u32 [%d50], %r5;"
    body = f"""mov.u32 %r1, %tid.x; mul.wide.u32 %d1, %r1, 4; add.u64 %d1, %d1, %d51;
ld.global.u32 %r2, [%d1]; ld.global.u32 %r4, [%d50];
{before} bar.sync 0;
atom.{space}.{op} %r3, {target}, %r2; bar.sync 0;
{after} st.global.u32 [%d1], %r3;"""
    memory = np.array([start], np.uint32)
    operands = np.array([x & 0xFFFFFFFF for x in values], np.uint32)
    launch(entry(body, ["u64"] * 2, sm(16)), [memory, operands])
    assert memory[0] == expected & 0xFFFFFFFF and start in operands  # one lane saw the start


def test_float_and_vector_reductions():
    body = """mov.u32 %r1, %tid.x; cvt.rn.f32.u32 %f1, %r1; mov.f32 %f2, 0f3F800000;
red.global.add.f32 [%d50], %f1; red.global.add.v4.f32 [%d50+16], {%f1, %f2, %f1, %f2};
mov.b32 %r2, 0x3C003C00; red.global.add.noftz.f16x2 [%d50+32], %r2; mov.b32 %r3, 0x3F803F80;
red.global.add.noftz.bf16x2 [%d50+36], %r3; mov.f64 %g1, 0d3FF0000000000000;
atom.global.add.f64 %g2, [%d50+40], %g1;
atom.global.exch.b64 %d1, [%d50+48], 77; atom.global.cas.b64 %d2, [%d50+56], 5, 9;"""
    mem = np.zeros(16, np.uint32)
    mem[14] = 5
    launch(entry(body, ["u64"]), [mem])
    f = mem.view(np.float32)
    assert f[0] == 496 and f[4:8].tolist() == [496, 32, 496, 32]
    assert mem[8:9].view(np.float16).tolist() == [32, 32] and mem[9] == 0x42004200
    assert mem[10:12].view(np.float64)[0] == 32
    assert mem[12] == 77 and mem[14] == 9
