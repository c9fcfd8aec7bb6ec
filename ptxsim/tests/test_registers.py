"""setmaxnreg: registers that warps give back to their CTA's pool and wait for, and its misuse."""

import re
import subprocess

import numpy as np
import pytest

from ptxsim.skips import requires_core

from .harness import SimError, entry, find_tool, launch
from .snippets import MODES

pytestmark = requires_core

BOUNDS = ".reqntid 384, 1, 1 .minnctapersm 1"
BUSY = "mov.u32 %r2, 0; L: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 5000; @%p2 bra L;"


def roles(dec: int, inc: int, bounds: str = BOUNDS, early: str = "") -> str:
    """Warpgroup 0 gives registers back, the others take some; then each thread stores its index.

    early: what warpgroup 0 does before.
    """
    body = f"""mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 128; @%p1 bra C;
{early} setmaxnreg.dec.sync.aligned.u32 {dec}; bra E;
C: setmaxnreg.inc.sync.aligned.u32 {inc};
E: mul.wide.u32 %d1, %r1, 4; add.u64 %d1, %d1, %d50; st.global.u32 [%d1], %r1;"""
    return entry(body, ["u64"], bounds=bounds)


def run(text: str, threads: int = 384, grid: int = 1, **options) -> dict:
    out = np.full(threads, 2**32 - 1, np.uint32)
    report = launch(text, [out], grid=(grid, 1, 1), block=(threads, 1, 1), **options)
    assert (out == np.arange(threads, dtype=np.uint32)).all()
    return report


def said(text: str, threads: int = 384, **options) -> str:
    with pytest.raises(SimError) as caught:
        run(text, threads, **options)
    return str(caught.value)


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("dec, inc", [(24, 240), (40, 232), (56, 224), (168, 168)])
def test_roles_that_fit_run(dec, inc, options):
    report = run(roles(dec, inc), grid=3, **options)
    assert report["registers"] == 168 and report["warnings"] == []


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("dec, inc, missing", [(32, 240, 32), (24, 248, 64), (168, 176, 64)])
def test_roles_that_do_not_fit_wait_for_ever(dec, inc, missing, options):
    """However the warps take turns: 12 x 168 = 2016 registers for each lane, `missing` too few."""
    text = said(roles(dec, inc), **options)
    more = inc - 168
    free = 4 * (168 - dec) % more
    for part in (
        "deadlock",
        f"setmaxnreg.inc.sync.aligned.u32 {inc}",
        f"waits for {more} registers per thread: it holds 168, the CTA's pool has {free}",
        f"12 warps started with 168 each, 2016 in all; held now: {dec} {dec} {dec} {dec} ",
        f"with what is waited for {2016 + missing}",
    ):
        assert part in text, text


def test_registers_come_back_from_a_warpgroup_that_is_late():
    """The consumers wait while warpgroup 0 still counts."""
    assert run(roles(24, 240, early=BUSY))["instructions"]["setmaxnreg.u32"] == 12


def test_each_cta_has_its_own_pool():
    """The first CTA gives 4 x 144 back and takes nothing; the second takes and gives nothing."""
    body = """mov.u32 %r1, %tid.x; mov.u32 %r3, %ctaid.x; setp.ge.u32 %p1, %r1, 128;
setp.eq.u32 %p2, %r3, 0; @%p2 bra Z; @%p1 bra C; bra E; Z: @%p1 bra E;
setmaxnreg.dec.sync.aligned.u32 24; bra E; C: setmaxnreg.inc.sync.aligned.u32 240;
E: mul.wide.u32 %d1, %r1, 4; add.u64 %d1, %d1, %d50; st.global.u32 [%d1], %r1;"""
    text = said(entry(body, ["u64"], bounds=BOUNDS), grid=2)
    assert "CTA (1,0,0)" in text and "the CTA's pool has 0" in text
    assert "CTA (0,0,0)" not in text


def test_dec_then_inc_of_one_warpgroup():
    body = """mov.u32 %r1, %tid.x; setmaxnreg.dec.sync.aligned.u32 24; bar.sync 0;
setmaxnreg.inc.sync.aligned.u32 128; bar.sync 0; setmaxnreg.inc.sync.aligned.u32 168;
mul.wide.u32 %d1, %r1, 4; add.u64 %d1, %d1, %d50; st.global.u32 [%d1], %r1;"""
    run(entry(body, ["u64"], bounds=BOUNDS))


def test_exited_warps_keep_their_registers():
    """Warpgroup 0 leaves with 168 registers per thread, which nobody else can have."""
    body = """mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 128; @%p1 exit;
setmaxnreg.inc.sync.aligned.u32 176;"""
    text = said(entry(body, ["u64"], bounds=BOUNDS))
    assert "waits for 8 registers per thread: it holds 168, the CTA's pool has 0" in text


CHECKED = {"check": False}  # ptxas refuses these or drops what is dead


@pytest.mark.parametrize(
    "dec, inc, says",
    [
        (176, 240, "setmaxnreg.dec to 176 registers, above the 168 that the warp holds"),
        (24, 160, None),
        (16, 240, "register count 16 is not a multiple of 8 from 24 to 256"),
        (28, 240, "register count 28 is not a multiple of 8"),
        (24, 264, "register count 264 is not a multiple of 8 from 24 to 256"),
        (264, 240, "register count 264 is not"),
    ],
)
def test_counts_that_are_wrong(dec, inc, says):
    text = roles(dec, inc)
    if says is None:  # ptxas starts the kernel with no more than its largest inc
        assert run(text)["registers"] == inc
    else:
        assert says in said(text, **CHECKED)


def test_inc_below_what_a_warp_holds():
    body = """setmaxnreg.inc.sync.aligned.u32 168; bar.sync 0;
setmaxnreg.inc.sync.aligned.u32 160;"""
    text = said(entry(body, ["u64"], bounds=BOUNDS))
    assert "setmaxnreg.inc to 160 registers, below the 168 that the warp holds" in text


@pytest.mark.parametrize(
    "body, says",
    [
        (  # warp 3 leaves first
            f"setp.ge.u32 %p1, %r1, 96; @%p1 exit; {BUSY} setmaxnreg.dec.sync.aligned.u32 24;",
            "warp 3 of the warpgroup has exited without executing it",
        ),
        (  # warp 3 leaves last
            "setp.ge.u32 %p1, %r1, 96; @%p1 bra W; setmaxnreg.dec.sync.aligned.u32 24; "
            "W: bar.sync 0;",
            "the warp exits without executing this setmaxnreg",
        ),
        (
            "setp.ge.u32 %p1, %r1, 96; @%p1 bra W; setmaxnreg.dec.sync.aligned.u32 24; bra X; "
            "W: setmaxnreg.dec.sync.aligned.u32 24; X: bar.sync 0;",
            "another warp of the warpgroup executed line",
        ),
        (
            "setp.ge.u32 %p1, %r1, 96; @%p1 bra W; X: setmaxnreg.dec.sync.aligned.u32 40; "
            "setmaxnreg.dec.sync.aligned.u32 24; bar.sync 0; exit; W: bar.sync 0; bra X;",
            "has not executed the setmaxnreg before this one",
        ),
        (
            "and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 0; "
            "@%p1 setmaxnreg.dec.sync.aligned.u32 24;",
            "executed by lanes 55555555 of ffffffff",
        ),
    ],
)
def test_all_threads_of_a_warpgroup_execute_the_same(body, says):
    bounds = ".reqntid 128, 1, 1 .minnctapersm 1"
    text = entry("mov.u32 %r1, %tid.x; " + body, ["u64"], bounds=bounds)
    assert says in said(text, 128, **CHECKED)


@pytest.mark.parametrize("bounds", ["", ".reqntid 384, 1, 1", ".minnctapersm 1"])
def test_without_bounds_it_has_no_effect(bounds):
    report = run(roles(32, 240, bounds))
    assert report["registers"] == 0
    assert "setmaxnreg has no effect" in report["warnings"][0]


RULE = [
    *((f".reqntid {n}, 1, 1 .minnctapersm 1", n) for n in (32, 128, 160, 256, 288, 384, 400, 640)),
    *((f".maxntid {n} .minnctapersm {m}", n) for n in (128, 160, 288, 416, 1024) for m in (2, 3)),
    (".reqntid 96, 4, 1 .minnctapersm 1", 384),
    (".maxnreg 160", 384),
    (".reqntid 384, 1, 1 .minnctapersm 1 .maxnreg 165", 384),
    (".reqntid 384, 1, 1 .minnctapersm 1 .maxnreg 240", 384),
    (".reqntid 384, 1, 1", 384),
    (".minnctapersm 1", 384),
]


@pytest.mark.parametrize("inc", [48, 160, 256])
@pytest.mark.parametrize("bounds, threads", RULE)
def test_the_registers_at_the_start_are_those_of_ptxas(bounds, threads, inc, tmp_path):
    """`start_registers` of csrc/core_registers.cpp; 0 where ptxas drops the instructions."""
    tool = find_tool("ptxas")
    if tool is None:
        pytest.skip("no ptxas")
    body = f"""mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 0; @%p1 exit;
setmaxnreg.dec.sync.aligned.u32 24; bar.sync 0; setmaxnreg.inc.sync.aligned.u32 {inc};
st.global.u32 [%d50], %r1;"""
    text = entry(body, ["u64"], bounds=bounds)
    path = tmp_path / "k.ptx"
    path.write_text(text)
    command = [tool, "-v", "-arch=sm_90a", str(path), "-o", str(tmp_path / "k.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    heard = done.stdout + done.stderr
    used = int(re.search(r"Used (\d+) registers", heard).group(1))
    block = (96, 4, 1) if "96, 4" in bounds else (threads, 1, 1)
    # the instructions are there but no CTA comes to them
    report = launch(
        text.replace("@%p1 exit", "exit"), [np.zeros(1, np.uint32)], block=block, check=False
    )
    assert report["registers"] == (0 if "'setmaxnreg' ignored" in heard else used)
