"""Pieces of PTX that several tests of the core share, and the timings they run under."""

from __future__ import annotations

from .harness import entry

LATE = {"async_mode": 1, "wgmma_mode": 1}
RANDOM = {"async_mode": 2, "wgmma_mode": 2, "warp_order": 1}
MODES = [{}, LATE, RANDOM | {"seed": 3}, RANDOM | {"seed": 4}]

FENCE = "fence.proxy.async.shared::cta;"
READ_WAIT = "cp.async.bulk.wait_group.read 0;"


def sm(nbytes: int) -> str:
    """A declaration of shared memory `sm`."""
    return f".shared .align 16 .b8 sm[{nbytes}];"


def mbar_wait(barrier: str, parity: str, tag: str) -> str:
    """Waits for a phase of an mbarrier; `tag` makes its labels unique."""
    return f"""{{ .reg .pred P1;
W{tag}: mbarrier.try_wait.parity.shared.b64 P1, [{barrier}], {parity};
@P1 bra.uni D{tag}; bra.uni W{tag};
D{tag}: }}
"""


BULK_SHARED = sm(544)
BULK_STORE = "cp.async.bulk.global.shared::cta.bulk_group [%d51], [%r2+16], 512;"
BULK_ADD = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d51], [%r2+16], 512;"
BULK_WAIT = mbar_wait("%r2", "0", "a")
BULK_DOUBLE = """mad.lo.u32 %r3, %r1, 16, %r2; ld.shared.v4.f32 {%f1, %f2, %f3, %f4}, [%r3+16];
mul.f32 %f1, %f1, 0f40000000; st.shared.v4.f32 [%r3+16], {%f1, %f2, %f3, %f4};
"""


def bulk(
    store: str = BULK_STORE, wait: str = BULK_WAIT, change: str | None = None, after=""
) -> str:
    """Loads 512 bytes of argument 0 by a bulk copy, changes them with 32 threads (by default
    doubles the first of four floats, and fences), and stores them to argument 1."""
    change = BULK_DOUBLE + FENCE if change is None else change
    return f"""mov.u32 %r1, %tid.x; mov.u32 %r2, sm; setp.ne.u32 %p1, %r1, 0; @%p1 bra I;
mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 512;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+16], [%d50], 512, [%r2];
I: bar.sync 0;
{wait}
{change}
bar.sync 0; @%p1 bra E; {store} cp.async.bulk.commit_group; {READ_WAIT} {after} E:"""


def cp_async_module(wait: str) -> str:
    """Each of 32 threads copies 16 bytes of argument 0 through shared memory to argument 1."""
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, sm; mad.lo.u32 %r3, %r1, 16, %r2;
mul.wide.u32 %d1, %r1, 16; add.u64 %d2, %d50, %d1;
cp.async.cg.shared.global [%r3], [%d2], 16; cp.async.commit_group; {wait}
bar.sync 0; ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r3];
add.u64 %d3, %d51, %d1; st.global.v4.u32 [%d3], {{%r10, %r11, %r12, %r13}};"""
    return entry(body, ["u64"] * 2, sm(512))
