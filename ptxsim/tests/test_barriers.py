"""Named barriers and mbarriers of the core, and what deadlocks say."""

import numpy as np
import pytest

from ptxsim.skips import requires_core

from .harness import SimError, entry, launch
from .snippets import MODES, mbar_wait, sm

pytestmark = requires_core


@pytest.mark.parametrize("options", [{}, {"warp_order": 1, "seed": 5}])
def test_named_barriers_and_reduction(options):
    body = """mov.u32 %r1, %tid.x; mov.u32 %r2, sm; setp.ge.u32 %p1, %r1, 64; @%p1 bra CONS;
mad.lo.u32 %r3, %r1, 4, %r2; mul.lo.u32 %r4, %r1, 7; st.shared.u32 [%r3], %r4; bar.arrive 3, 128;
bra ALL;
CONS: bar.sync 3, 128; sub.u32 %r5, 127, %r1; mad.lo.u32 %r3, %r5, 4, %r2; ld.shared.u32 %r4, [%r3];
ALL: setp.gt.u32 %p2, %r4, 200; barrier.cta.red.popc.aligned.u32 %r6, 0, %p2;
bar.red.and.pred %p3, 0, %p2; bar.red.or.pred %p4, 0, %p2;
selp.u32 %r7, 1, 0, %p3; selp.u32 %r8, 2, 0, %p4; or.b32 %r7, %r7, %r8;
mul.wide.u32 %d1, %r1, 16; add.u64 %d1, %d1, %d50; st.global.v4.u32 [%d1], {%r4, %r6, %r7, %r1};"""
    out = np.zeros((128, 4), np.uint32)
    launch(entry(body, ["u64"], sm(256)), [out], block=(128, 1, 1), **options)
    values = [7 * t if t < 64 else 7 * (127 - t) for t in range(128)]
    assert out[:, 0].tolist() == values
    assert (out[:, 1] == sum(x > 200 for x in values)).all()
    assert (out[:, 2] == 2).all()  # not all of them, but some


@pytest.mark.parametrize("options", MODES)
def test_mbarrier_phases(options):
    """64 producers arrive three times; 64 consumers wait, phase by phase, for a shared counter."""
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, sm; setp.ne.u32 %p1, %r1, 0; @%p1 bra I;
mbarrier.init.shared.b64 [%r2], 64; mbarrier.init.shared.b64 [%r2+8], 64;
mov.u32 %r3, 0; st.shared.u32 [%r2+16], %r3;
I: bar.sync 0; mov.u32 %r4, 0; setp.ge.u32 %p2, %r1, 64; @%p2 bra C;
PL: xor.b32 %r5, %r4, 1; and.b32 %r5, %r5, 1; {mbar_wait("%r2+8", "%r5", "p")}
atom.shared.add.u32 %r6, [%r2+16], %r4; mbarrier.arrive.shared.b64 %d1, [%r2];
add.u32 %r4, %r4, 1; setp.lt.u32 %p3, %r4, 3; @%p3 bra PL; bra E;
C: mov.u32 %r10, 0;
CL: and.b32 %r5, %r4, 1; {mbar_wait("%r2", "%r5", "c")}
ld.shared.u32 %r6, [%r2+16]; mad.lo.u32 %r10, %r10, 1000, %r6;
mbarrier.arrive.shared.b64 _, [%r2+8]; add.u32 %r4, %r4, 1; setp.lt.u32 %p3, %r4, 3; @%p3 bra CL;
mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d2, %d50; st.global.u32 [%d2], %r10;
E:"""
    out = np.zeros(128, np.uint32)
    launch(entry(body, ["u64"], sm(32)), [out], block=(128, 1, 1), **options)
    assert (out[64:] == (0 * 1000 + 64) * 1000 + 192).all()


def test_mbarrier_state_and_transactions():
    body = """mov.u32 %r2, sm; mbarrier.init.shared.b64 [%r2], 2;
mbarrier.arrive.expect_tx.shared.b64 %d1, [%r2], 96; mbarrier.pending_count.b64 %r4, %d1;
mbarrier.test_wait.shared.b64 %p1, [%r2], %d1; selp.u32 %r10, 1, 0, %p1;
mbarrier.arrive.shared.b64 %d2, [%r2]; mbarrier.pending_count.b64 %r5, %d2;
mbarrier.test_wait.parity.shared.b64 %p1, [%r2], 0; selp.u32 %r11, 1, 0, %p1;
mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r2], 64;
mbarrier.test_wait.shared.b64 %p1, [%r2], %d1; selp.u32 %r12, 1, 0, %p1;
mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r2], 32;
mbarrier.test_wait.shared.b64 %p1, [%r2], %d1; selp.u32 %r13, 1, 0, %p1;
mbarrier.test_wait.parity.shared.b64 %p1, [%r2], 0; selp.u32 %r14, 1, 0, %p1;
mbarrier.test_wait.parity.shared.b64 %p1, [%r2], 1; selp.u32 %r15, 1, 0, %p1;
mbarrier.arrive_drop.shared.b64 %d3, [%r2]; mbarrier.arrive.shared.b64 %d3, [%r2];
mbarrier.arrive.shared.b64 %d4, [%r2]; mbarrier.pending_count.b64 %r16, %d4;
mbarrier.test_wait.parity.shared.b64 %p1, [%r2], 0; selp.u32 %r17, 1, 0, %p1;
mbarrier.inval.shared.b64 [%r2];
st.global.v4.u32 [%d50], {%r4, %r5, %r10, %r11};
st.global.v4.u32 [%d50+16], {%r12, %r13, %r14, %r15}; st.global.v2.u32 [%d50+32], {%r16, %r17};"""
    out = np.zeros(10, np.uint32)
    launch(entry(body, ["u64"], sm(32)), [out], block=(1, 1, 1))
    assert out.tolist() == [2, 1, 0, 0, 0, 1, 1, 0, 1, 1]


def test_mbarrier_deadlock_report():
    body = f"""mov.u32 %r2, sm; mov.u32 %r1, %tid.x; setp.ne.u32 %p2, %r1, 0; @%p2 bra I;
mbarrier.init.shared.b64 [%r2], 3; mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 64;
I: bar.sync 0; {mbar_wait("%r2", "0", "a")}"""
    with pytest.raises(SimError) as caught:
        launch(entry(body, [], sm(32)), [], block=(64, 1, 1))
    text = str(caught.value)
    for part in (
        "deadlock",
        "mbarrier.try_wait.parity.shared.b64",
        "phase parity 0",
        "pending arrivals 2 of 3",
        "tx-count 64",
        "warp 0",
        "warp 1",
    ):
        assert part in text, text


def test_barrier_deadlock_report():
    body = "mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 32; @%p1 bra E; bar.sync 1, 96; E:"
    with pytest.raises(SimError, match=r"barrier 1: 32 of 96 threads arrived"):
        launch(entry(body, []), [], block=(64, 1, 1))
