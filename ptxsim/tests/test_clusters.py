"""Clusters of the core: distributed shared memory, multicast, remote arrivals and stores."""

import numpy as np
import pytest

from ptxsim.skips import requires_core

from .harness import entry, launch
from .snippets import MODES, mbar_wait, sm

pytestmark = requires_core

# Each CTA writes into its neighbour, arrives there, and multicasts a bulk copy to the cluster.
NEIGHBOUR = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, sm; mov.u32 %r20, %ctaid.x;
mov.u32 %r3, %cluster_ctarank; mov.u32 %r4, %cluster_nctarank;
setp.ne.u32 %p1, %r1, 0; @%p1 bra I;
mbarrier.init.shared.b64 [%r2], 32; mbarrier.init.shared.b64 [%r2+8], 1;
fence.mbarrier_init.release.cluster; mbarrier.arrive.expect_tx.shared.b64 _, [%r2+8], 64;
I: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
add.u32 %r5, %r3, 1; rem.u32 %r5, %r5, %r4; mad.lo.u32 %r6, %r1, 4, %r2;
mapa.shared::cluster.u32 %r7, %r6, %r5; mapa.shared::cluster.u32 %r8, %r2, %r5;
mad.lo.u32 %r9, %r20, 100, %r1; st.shared::cluster.u32 [%r7+16], %r9;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];
@%p1 bra J; mul.wide.u32 %d3, %r20, 16; add.u64 %d3, %d3, %d51;
mad.lo.u32 %r15, %r3, 16, %r2; mov.u16 %h1, 15;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
  [%r15+256], [%d3], 16, [%r2+8], %h1;
J: {mbar_wait("%r2", "0", "a")} {mbar_wait("%r2+8", "0", "b")}
ld.shared.u32 %r10, [%r6+16];
and.b32 %r16, %r1, 15; mad.lo.u32 %r6, %r16, 4, %r2; ld.shared.u32 %r11, [%r6+256];
mov.u64 %d6, sm; cvta.shared.u64 %d6, %d6; mapa.u64 %d7, %d6, %r5;
getctarank.u64 %r12, %d7; ld.u32 %r13, [%d7+16];
mad.lo.u32 %r14, %r20, 32, %r1; mul.wide.u32 %d1, %r14, 16; add.u64 %d1, %d1, %d50;
st.global.v4.u32 [%d1], {{%r10, %r11, %r12, %r13}};
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""


@pytest.mark.parametrize("options", MODES)
def test_neighbours_and_multicast(options):
    out, data = np.zeros((8, 32, 4), np.uint32), np.arange(32, dtype=np.uint32) + 500
    text = entry(NEIGHBOUR, ["u64"] * 2, sm(512))
    launch(text, [out, data], grid=(8, 1, 1), cluster=(4, 1, 1), **options)
    for cta in range(8):
        base, rank = cta // 4 * 4, cta % 4
        received, multicast, owner, remote = out[cta].T
        assert received.tolist() == [(base + (rank + 3) % 4) * 100 + t for t in range(32)]
        assert multicast.tolist() == [500 + base * 4 + t % 16 for t in range(32)]
        assert (owner == (rank + 1) % 4).all() and (remote == cta * 100).all()


def test_red_async_and_st_async():
    """Each of two CTAs adds to and stores into the other, counted by the other's mbarrier."""
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, sm; mov.u32 %r3, %cluster_ctarank;
setp.ne.u32 %p1, %r1, 0; @%p1 bra I;
mbarrier.init.shared.b64 [%r2], 1; mov.u32 %r4, 0; st.shared.u32 [%r2+8], %r4;
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 384;
I: barrier.cluster.arrive; barrier.cluster.wait;
xor.b32 %r5, %r3, 1; mapa.shared::cluster.u32 %r6, %r2, %r5; mad.lo.u32 %r7, %r1, 8, %r6;
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r6+8], %r1, [%r6];
add.u32 %r9, %r1, 70;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r7+16], {{%r9, %r3}}, [%r6];
{mbar_wait("%r2", "0", "a")}
ld.shared.u32 %r10, [%r2+8];
mad.lo.u32 %r7, %r1, 8, %r2; ld.shared.v2.u32 {{%r11, %r12}}, [%r7+16]; mov.u32 %r13, 0;
mad.lo.u32 %r14, %r3, 32, %r1; mul.wide.u32 %d1, %r14, 16; add.u64 %d1, %d1, %d50;
st.global.v4.u32 [%d1], {{%r10, %r11, %r12, %r13}}; barrier.cluster.arrive; barrier.cluster.wait;"""
    out = np.zeros((2, 32, 4), np.uint32)
    launch(entry(body, ["u64"], sm(512)), [out], grid=(2, 1, 1), cluster=(2, 1, 1))
    for cta in range(2):
        added, stored, sender, _ = out[cta].T
        assert (added == sum(range(32))).all()
        assert stored.tolist() == list(range(70, 102)) and (sender == 1 - cta).all()
