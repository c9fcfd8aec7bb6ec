"""Accesses that the core refuses, poison, and shared-memory races."""

import numpy as np
import pytest

from ptxsim.skips import requires_core

from .harness import SimError, entry, launch
from .snippets import BULK_SHARED, BULK_WAIT, bulk, cp_async_module, mbar_wait, sm

pytestmark = requires_core


def test_write_past_the_end_names_the_place():
    body = """mov.u32 %r1, %tid.x; mul.wide.u32 %d1, %r1, 4; add.u64 %d1, %d1, %d50;
st.global.u32 [%d1], %r1;"""
    place = r"write of 4 bytes.*offset 64 in region 'arg0'.*entry k.*line \d+: st.global.u32"
    with pytest.raises(SimError, match=rf"(?s){place}.*CTA \(0,0,0\).*lane 16"):
        launch(entry(body, ["u64"]), [np.zeros(16, np.uint32)])


@pytest.mark.parametrize(
    "body, says",
    [
        ("ld.global.u32 %r1, [%d50+2];", "misaligned"),
        ("st.shared.u32 [%r2+64], %r2;", r"offset 64 outside the CTA's 64 bytes"),
        ("mbarrier.arrive.shared.b64 _, [%r2];", "not initialised"),
        (
            "mbarrier.init.shared.b64 [%r2], 1; mbarrier.arrive.shared.b64 _, [%r2], 2;",
            "more bytes completed|arrivals pending",
        ),
        ("trap;", "trap"),
    ],
)
def test_bad_instructions(body, says):
    with pytest.raises(SimError, match=says):
        launch(entry("mov.u32 %r2, sm;" + body, ["u64"], sm(64)), [np.zeros(16, np.uint32)])


def test_step_limit():
    with pytest.raises(SimError, match="hang"):
        launch(entry("L: add.u32 %r1, %r1, 1; bra L;", []), [], max_steps=100000, check=False)


def test_unknown_instruction_is_an_error_only_when_executed():
    with pytest.raises(SimError, match="not supported"):
        launch(entry("frobnicate.u32 %r1, %r2;", []), [], check=False)
    launch(entry("bra S; frobnicate.u32 %r1, %r2; S:", []), [], check=False)


def test_poison():
    body = "ld.shared.u32 %r1, [sm]; st.global.u32 [%d50], %r1; st.global.u32 [%d50+4], %r2;"
    out = np.zeros(2, np.uint32)
    launch(entry(body, ["u64"], sm(16)), [out], block=(1, 1, 1), poison_shared=1)
    assert (out == 0xFFFFFFFF).all()


@pytest.mark.parametrize("sync, races", [("bar.sync 0;", False), ("", True)])
def test_race_between_warps(sync, races):
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, sm; mad.lo.u32 %r3, %r1, 4, %r2;
st.shared.u32 [%r3], %r1; {sync}
xor.b32 %r4, %r1, 32; mad.lo.u32 %r3, %r4, 4, %r2; ld.shared.u32 %r5, [%r3];
mul.wide.u32 %d1, %r1, 4; add.u64 %d1, %d1, %d50; st.global.u32 [%d1], %r5;"""
    text = entry(body, ["u64"], sm(256))
    report = launch(text, [np.zeros(64, np.uint32)], block=(64, 1, 1), check_races=1)
    assert report["race_checking"] and (report["races"] > 0) == races
    kinds = ("read after write", "write after read")
    assert races == any(kind in w for w in report["warnings"] for kind in kinds)


BY_LANES = """mov.u32 %r1, %tid.x; mov.u32 %r2, sm; mad.lo.u32 %r3, %r1, 4, %r2;
st.shared.u32 [%r3], %r1; SYNC
xor.b32 %r4, %r1, 1; mad.lo.u32 %r3, %r4, 4, %r2; ld.shared.u32 %r5, [%r3];"""
MET = "bar.warp.sync 0xffffffff;"


@pytest.mark.parametrize(
    "sync, races",
    [
        (MET, False),
        ("bar.sync 0;", False),
        ("", True),
        # It makes lanes meet, and publishes no store.
        ("shfl.sync.idx.b32 %r9, %r1, 0, 31, -1;", True),
        # Half of the warp: lanes 16 to 31 are not among those that meet.
        ("setp.ge.u32 %p1, %r1, 16; @%p1 bra L; bar.warp.sync 0xffff; L:", True),
    ],
)
def test_race_between_lanes(sync, races):
    text = entry(BY_LANES.replace("SYNC", sync), [], sm(128))
    assert (launch(text, [], check_races=2)["races"] > 0) == races
    assert launch(text, [], check_races=1)["races"] == 0


@pytest.mark.parametrize("sync", ["", MET])
def test_neighbours_in_a_word_and_equal_stores_are_no_races_of_lanes(sync):
    own = """mov.u32 %r1, %tid.x; mov.u32 %r2, sm; mad.lo.u32 %r3, %r1, 2, %r2;
cvt.u16.u32 %h1, %r1; st.shared.b16 [%r3], %h1; ld.shared.b16 %h2, [%r3];
st.shared.b16 [%r3], %h2; st.shared.b32 [sm+64], %r2;"""
    report = launch(entry(own + sync, [], sm(128)), [], check_races=2)
    assert report["races"] == 0


@pytest.mark.parametrize(
    "meet, races",
    [
        (MET, False),
        ("shfl.sync.idx.b32 %r9, %r5, 0, 31, -1;", False),
        ("setp.eq.u32 %p3, %r5, 7; vote.sync.any.pred %p4, %p3, -1;", False),
        ("redux.sync.or.b32 %r9, %r5, -1;", False),
        ("elect.sync _|%p3, -1;", True),
        ("", True),
    ],
)
def test_values_that_lanes_hand_over_have_been_read(meet, races):
    """All lanes read a word, and lane 0 stores another one."""
    body = f"""mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; @%p1 st.shared.u32 [sm], 7;
bar.sync 0; ld.shared.u32 %r5, [sm]; {meet} @%p1 st.shared.u32 [sm], 8;"""
    assert (launch(entry(body, [], sm(16)), [], check_races=2)["races"] > 0) == races


ARRIVE = "setp.ne.u32 %p2, %r1, 0; @!%p2 mbarrier.arrive.shared.b64 _, [sm+256];"


@pytest.mark.parametrize("sync, races", [(MET, False), ("", True)])
def test_lane_0_arrives_for_its_warp(sync, races):
    """It releases what it knows of: its own stores, and others' after a meeting of the warp."""
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, sm; mad.lo.u32 %r3, %r1, 4, %r2;
setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared.b64 [sm+256], 1; bar.sync 0;
setp.ge.u32 %p1, %r1, 32; @%p1 bra R; st.shared.u32 [%r3], %r1; {sync} {ARRIVE} bra E;
R: {mbar_wait("sm+256", "0", "r")} ld.shared.u32 %r5, [%r3-128]; E:"""
    report = launch(entry(body, [], sm(512)), [], block=(64, 1, 1), check_races=2)
    assert (report["races"] > 0) == races


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(
    "arrive, races",
    [
        ("barrier.cluster.arrive.aligned;", False),
        ("barrier.cluster.arrive.release.aligned;", False),
        ("fence.acq_rel.cluster; barrier.cluster.arrive.relaxed.aligned;", False),
        ("fence.acq_rel.gpu; barrier.cluster.arrive.relaxed.aligned;", False),
        ("barrier.cluster.arrive.relaxed.aligned;", True),
        ("fence.acq_rel.cta; barrier.cluster.arrive.relaxed.aligned;", True),
        ("fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned;", True),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        "ld.shared::cluster.u32 %r5, [%r4];",
        "red.relaxed.cluster.shared::cluster.add.u32 [%r4], 1;",
        "st.shared::cluster.u32 [%r4], 1;",
    ],
)
def test_stores_before_a_relaxed_cluster_barrier_need_a_fence(arrive, races, use, lanes):
    """A neighbour's use of them, by the thread of the same number."""
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, sm; mad.lo.u32 %r3, %r1, 4, %r2;
st.shared.u32 [%r3], %r1; {arrive} barrier.cluster.wait.aligned;
mov.u32 %r6, %cluster_ctarank; xor.b32 %r6, %r6, 1; mapa.shared::cluster.u32 %r4, %r3, %r6; {use}
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
    report = launch(
        entry(body, [], sm(128)), [], grid=(2, 1, 1), cluster=(2, 1, 1), check_races=lanes
    )
    assert (report["races"] > 0) == races


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("wait, races", [(BULK_WAIT, False), ("", True)])
def test_race_with_a_bulk_load(wait, races, mode):
    data, out = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    text = entry(bulk(wait=wait), ["u64"] * 2, BULK_SHARED)
    report = launch(text, [data, out], async_mode=mode, check_races=1)
    assert (report["races"] > 0) == races


@pytest.mark.parametrize("wait, races", [("cp.async.wait_all;", False), ("", True)])
def test_race_with_cp_async(wait, races):
    data, out = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    report = launch(cp_async_module(wait), [data, out], check_races=1)
    assert (report["races"] > 0) == races
