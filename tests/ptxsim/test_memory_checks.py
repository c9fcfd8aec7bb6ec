"""Accesses that the core refuses, poison, and shared-memory races."""

import numpy as np
import pytest

from .available import requires_core
from .harness import SimError, entry, launch
from .snippets import BULK_SHARED, BULK_WAIT, bulk, cp_async_module, sm

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
