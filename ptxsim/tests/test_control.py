"""Control flow, special registers, parameters, local and constant memory of the core."""

import numpy as np
import pytest

from ptxsim.native import library
from ptxsim.skips import requires_core

from .harness import HEADER, SimError, entry, launch

pytestmark = requires_core


def test_divergence_and_reconvergence():
    body = """
mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 3; mov.u32 %r3, 0; mov.u32 %r10, 0;
LOOP: setp.ge.u32 %p1, %r3, %r2; @%p1 bra OUT; add.u32 %r10, %r10, %r1; add.u32 %r3, %r3, 1;
bra LOOP;
OUT: activemask.b32 %r4;
setp.eq.u32 %p2, %r2, 2; @%p2 bra T; mul.lo.u32 %r10, %r10, 3; bra E;
T: add.u32 %r10, %r10, 1000;
E: bar.warp.sync -1; vote.sync.ballot.b32 %r5, %p2, -1;
add.u32 %r10, %r10, %r5; mul.wide.u32 %d1, %r1, 4; add.u64 %d1, %d1, %d50;
st.global.u32 [%d1], %r10; st.global.u32 [%d1+256], %r4;
"""
    out = np.zeros(128, np.uint32)
    launch(entry(body, ["u64"]), [out], block=(64, 1, 1))
    for t in range(64):
        looped = t * (t & 3)
        branched = looped + 1000 if t & 3 == 2 else 3 * looped
        assert out[t] == (branched + 0x44444444) & 0xFFFFFFFF
    assert (out[64:128] == 0xFFFFFFFF).all()  # all lanes are together again after the loop


def test_indirect_branch():
    body = """
mov.u32 %r1, %tid.x; rem.u32 %r2, %r1, 3;
TAB: .branchtargets L0, L1, L2;
brx.idx %r2, TAB;
L0: mov.u32 %r3, 10; bra J;
L1: mov.u32 %r3, 20; bra J;
L2: mov.u32 %r3, 30;
J: mul.wide.u32 %d1, %r1, 4; add.u64 %d1, %d1, %d50; st.global.u32 [%d1], %r3;
"""
    out = np.zeros(32, np.uint32)
    launch(entry(body, ["u64"]), [out])
    assert out.tolist() == [10 + 10 * (t % 3) for t in range(32)]


PARAMETERS = """
.visible .entry k(.param .align 16 .b8 p0[32], .param .u8 p1, .param .f32 p2, .param .u64 p3)
{ .reg .b32 %r<20>; .reg .b64 %rd<10>; .reg .b16 %rs<4>; .reg .f32 %f<3>;
ld.param.u64 %rd1, [p3]; ld.param.v4.b32 {%r1, %r2, %r3, _}, [p0+16];
ld.param.s8 %rs1, [p1]; ld.param.f32 %f1, [p2];
mov.u32 %r4, %tid.x; mov.u32 %r5, %tid.y; mov.u32 %r6, %ctaid.y; mov.u32 %r7, %nctaid.x;
mov.u32 %r8, %ntid.y; mov.u32 %r9, %laneid; mov.u32 %r10, %warpid;
mad.lo.u32 %r11, %r5, 8, %r4; mad.lo.u32 %r12, %r6, 48, %r11;
mul.wide.u32 %rd2, %r12, 48; add.u64 %rd1, %rd1, %rd2;
cvt.s32.s16 %r13, %rs1; mov.b32 %r14, %f1;
st.global.v4.u32 [%rd1], {%r1, %r3, %r13, %r14};
st.global.v4.u32 [%rd1+16], {%r4, %r5, %r6, %r7};
st.global.v4.u32 [%rd1+32], {%r8, %r9, %r10, %r11};
ret; }
"""


def test_special_registers_and_params():
    struct = np.arange(8, dtype=np.uint32).view("V32")[0]  # 32 bytes, by value
    out = np.zeros((2, 48, 12), np.uint32)
    args = [struct, np.int8(-5), np.float32(1.5), out]
    launch(HEADER + PARAMETERS, args, grid=(1, 2, 1), block=(8, 6, 1))
    for c in range(2):
        for t in range(48):
            params = [4, 6, 0xFFFFFFFB, 0x3FC00000]
            place = [t % 8, t // 8, c, 1, 6, t % 32, t // 32, t]
            assert out[c, t].tolist() == params + place


def test_module_lists_its_entries_and_parameters():
    lib = library()
    module = lib.ptxsim_load((HEADER + PARAMETERS).encode(), b"parameters")
    try:
        assert lib.ptxsim_entry_count(module) == 1
        assert lib.ptxsim_entry_name(module, 0) == b"k"
        count = lib.ptxsim_param_count(module, b"k")
        sizes = [lib.ptxsim_param_size(module, b"k", i) for i in range(count)]
        assert sizes == [32, 1, 4, 8]
    finally:
        lib.ptxsim_unload(module)


def test_vector_registers_local_and_const():
    text = """
.const .align 4 .u32 table[4] = {11, 22, 33, 44};
.global .align 4 .f32 scale = 0f40000000;
.visible .entry k(.param .u64 p0)
{ .reg .b32 %r<10>; .reg .b64 %rd<10>; .reg .f32 %f<4>; .reg .v2 .u32 vv; .reg .pred %p1;
.local .align 16 .b8 depot[32];
ld.param.u64 %rd1, [p0]; mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 3; mul.wide.u32 %rd2, %r2, 4;
mov.u64 %rd3, table; add.u64 %rd3, %rd3, %rd2; ld.const.u32 vv.x, [%rd3]; mov.u32 vv.y, 7;
mov.u64 %rd4, depot; cvta.local.u64 %rd5, %rd4; add.u64 %rd4, %rd4, %rd2; st.local.u32 [%rd4], %r1;
add.u64 %rd5, %rd5, %rd2; ld.u32 %r3, [%rd5];
ld.global.f32 %f1, [scale]; cvt.rzi.u32.f32 %r4, %f1;
add.u32 vv.x, vv.x, %r3; add.u32 vv.x, vv.x, %r4;
mul.wide.u32 %rd6, %r1, 8; add.u64 %rd1, %rd1, %rd6; st.global.v2.u32 [%rd1], vv; ret; }
"""
    out = np.zeros((32, 2), np.uint32)
    launch(HEADER + text, [out])
    assert out[:, 0].tolist() == [11 * (1 + t % 4) + t + 2 for t in range(32)]
    assert (out[:, 1] == 7).all()


def test_lanes_that_cannot_meet():
    body = """mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 16; @%p1 bra A;
shfl.sync.idx.b32 %r2, %r1, 0, 31, -1; bra E;
A: shfl.sync.idx.b32 %r3, %r1, 1, 31, -1; E:"""
    with pytest.raises(SimError, match=r"wait at \.sync instructions for each other"):
        launch(entry(body, []), [])


def test_sync_waits_for_lanes():
    """Half of the lanes arrive at the shuffle through a detour that lies after it."""
    body = """mov.u32 %r1, %tid.x; mov.u32 %r5, %r1; setp.lt.u32 %p1, %r1, 16; @%p1 bra D;
B: shfl.sync.bfly.b32 %r2, %r5, 16, 31, -1; mul.wide.u32 %d1, %r1, 4; add.u64 %d1, %d1, %d50;
st.global.u32 [%d1], %r2; bra E;
D: add.u32 %r5, %r5, 100; bra B; E:"""
    out = np.zeros(32, np.uint32)
    launch(entry(body, ["u64"]), [out])
    assert out.tolist() == [t + 16 for t in range(16)] + [t + 100 for t in range(16)]
