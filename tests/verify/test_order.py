"""R1 and R2 on hand-written PTX: each way to write a turnstile, and single edits that break it.

No compiler is needed: what a compiler makes of CuTe kernels is in test_certificate_kernels.py.
"""

import pytest

from verify import ptx, ptx_paths
from verify.certificate import Turnstile

HEAD = """
.version 9.0
.target sm_90a
.address_size 64
.visible .entry turns(.param .u64 total, .param .u64 semaphore, .param .u32 rows)
.reqntid 128, 1, 1
{
  .reg .pred %p<20>;
  .reg .b32 %r<40>;
  .reg .b64 %rd<20>;
  ld.param.u64 %rd1, [total];
  ld.param.u64 %rd2, [semaphore];
  ld.param.u32 %r1, [rows];
  mov.u32 %r2, %tid.x;
  mov.u32 %r3, %laneid;
  mov.u32 %r4, %ctaid.x;
  mov.b32 %r10, 0;
ROW:
"""
TAIL = """
NEXT:
  bar.sync 0;
  add.s32 %r10, %r10, 1;
  setp.lt.s32 %p10, %r10, %r1;
  @%p10 bra ROW;
  ret;
}
"""
ADD = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r20], 256;"
SPIN = """
SPIN:
  ld.acquire.gpu.global.b32 %r5, [%rd2];
  setp.ne.b32 %p2, %r5, %r4;
  @%p2 bra SPIN;
"""
THREAD = f"""
  setp.ne.b32 %p1, %r2, 0;
  @%p1 bra NEXT;
{SPIN}
  {ADD}
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
  red.release.gpu.global.add.s32 [%rd2], 1;
"""
LANES = f"""
  setp.ne.b32 %p1, %r3, 0;
  @%p1 bra HELD;
{SPIN}
HELD:
  bar.warp.sync -1;
  elect.sync %r6|%p3, -1;
  not.pred %p4, %p3;
  @%p4 bra ADDED;
  {ADD}
  cp.async.bulk.commit_group;
ADDED:
  cp.async.bulk.wait_group 0;
  bar.warp.sync -1;
  setp.ne.s32 %p5, %r3, 0;
  @%p5 bra NEXT;
  red.release.gpu.global.add.s32 [%rd2], 1;
"""
ONE_PREDICATE = f"""
  setp.ne.b32 %p1, %r3, 0;
  @%p1 bra HELD;
{SPIN}
HELD:
  setp.eq.b32 %p3, %r3, 0;
  @!%p3 bra ADDED;
  {ADD}
  cp.async.bulk.commit_group;
ADDED:
  setp.eq.b32 %p5, %r3, 0;
  @%p5 cp.async.bulk.wait_group 0;
  @%p5 red.release.gpu.global.add.s32 [%rd2], 1;
"""
PLAIN = f"""
  setp.ne.b32 %p1, %r2, 0;
  @%p1 bra HELD;
{SPIN}
HELD:
  bar.sync 0;
  red.global.add.f32 [%rd1], 0f3F800000;
  bar.sync 0;
  setp.ne.b32 %p3, %r2, 0;
  @%p3 bra NEXT;
  red.release.gpu.global.add.s32 [%rd2], 1;
"""
FENCE = f"""
  setp.ne.b32 %p1, %r2, 0;
  @%p1 bra NEXT;
{SPIN}
  {ADD}
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
  fence.acq_rel.gpu;
  st.relaxed.gpu.global.b32 [%rd2], %r4;
"""
PEELED = f"""
  setp.ne.b32 %p1, %r2, 0;
  @%p1 bra NEXT;
  ld.acquire.gpu.global.b32 %r5, [%rd2];
  setp.eq.b32 %p6, %r5, %r4;
  @%p6 bra HELD;
{SPIN}
HELD:
  {ADD}
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
  red.release.gpu.global.add.s32 [%rd2], 1;
"""
RANK_0 = PEELED.replace("ld.acquire.gpu.global.b32 %r5, [%rd2];\n  setp.eq.b32 %p6, %r5, %r4", "")
RANK_0 = RANK_0.replace("@%p6 bra HELD", "setp.eq.b32 %p6, %r4, 0;\n  @%p6 bra HELD")
WATCHDOG = (
    THREAD.replace(
        "  ld.acquire",
        """  add.s32 %r7, %r7, 1;
  setp.gt.s32 %p7, %r7, 1000000;
  @%p7 bra STUCK;
  ld.acquire""",
    ).replace(SPIN.strip().splitlines()[0], "SPIN:")
    + "  bra NEXT;\nSTUCK:\n  trap;\n"
)
TWO_GROUPS = THREAD.replace(ADD, f"{ADD}\n  cp.async.bulk.commit_group;\n  {ADD}")
LATE = f"""
  setp.ne.b32 %p1, %r2, 0;
  @%p1 bra NEXT;
{SPIN}
  {ADD}
  cp.async.bulk.commit_group;
{SPIN.replace("SPIN", "AGAIN")}
  {ADD}
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 1;
  red.release.gpu.global.add.s32 [%rd2], 1;
  cp.async.bulk.wait_group 0;
  red.release.gpu.global.add.s32 [%rd2], 1;
"""
RELAY = f"""
  setp.ne.b32 %p1, %r2, 0;
  @%p1 bra HELD;
{SPIN}
HELD:
  bar.sync 0;
  red.global.add.f32 [%rd1], 0f3F800000;
  bar.sync 0;
  @%p1 bra HELD2;
  red.release.gpu.global.add.s32 [%rd2], 1;
{SPIN.replace("SPIN", "AGAIN")}
HELD2:
  bar.sync 0;
  red.global.add.f32 [%rd1], 0f3F000000;
  bar.sync 0;
  @%p1 bra NEXT;
  red.release.gpu.global.add.s32 [%rd2], 1;
"""
RIGHT = {
    "thread": THREAD,
    "lanes": LANES,
    "one predicate": ONE_PREDICATE,
    "plain": PLAIN,
    "fence": FENCE,
    "peeled": PEELED,
    "rank 0": RANK_0,
    "watchdog": WATCHDOG,
    "two groups": TWO_GROUPS,
    "late": LATE,
    "relay": RELAY,
}
RELEASE = "red.release.gpu.global.add.s32 [%rd2], 1;"
WAIT = "cp.async.bulk.wait_group 0;"
COMMIT = "cp.async.bulk.commit_group;"
BRANCH = "  @%p2 bra SPIN;\n"
WRONG = [
    ("thread", BRANCH, "", "R1"),  # one load, no spin
    ("thread", "acquire.gpu", "relaxed.gpu", "R1"),
    ("thread", "acquire.gpu", "acquire.cta", "R1"),
    ("thread", "acquire.gpu.global", "global", "R1"),
    ("thread", "%p2, %r5, %r4", "%p2, %r6, %r4", "R1"),  # waits for something else
    ("thread", "@%p1 bra NEXT;", "@%p1 bra AFTER;", "R1"),  # other threads add too
    ("thread", f"{WAIT}\n", "", "R2"),
    ("thread", WAIT, "cp.async.bulk.wait_group.read 0;", "R2"),
    ("thread", WAIT, "cp.async.bulk.wait_group 1;", "R2"),
    ("thread", f"{COMMIT}\n", "", "R2"),
    ("thread", f"{COMMIT}\n  {WAIT}", f"{WAIT}\n  {COMMIT}", "R2"),
    ("thread", f"{WAIT}\n  {RELEASE}", f"{RELEASE}\n  {WAIT}", "R2"),
    ("thread", RELEASE, "", "R2"),
    ("thread", "red.release.gpu", "red.release.cta", "R2"),
    ("thread", "red.release.gpu", "red.release.cluster", "R2"),
    ("thread", "red.release.gpu.global", "red.release.gpu.shared::cta", "R2"),
    ("thread", "red.release.gpu", "red.relaxed.gpu", "R2"),
    ("thread", RELEASE, f"setp.gt.s32 %p9, %r10, 3;\n  @%p9 {RELEASE}", "R2"),
    ("thread", RELEASE, f"{RELEASE}\n  {ADD}", "R1"),  # adds after its turn
    ("two groups", WAIT, "cp.async.bulk.wait_group 1;", "R2"),
    ("lanes", "HELD:\n  bar.warp.sync -1;", "HELD:", "R1"),
    ("lanes", f"{WAIT}\n  bar.warp.sync -1;", WAIT, "R2"),
    ("lanes", f"{WAIT}\n  bar.warp.sync -1;", f"bar.warp.sync -1;\n  {WAIT}", "R2"),
    ("lanes", "%p1, %r3, 0", "%p1, %r1, 0", "R1"),  # the spin depends on data
    ("lanes", "%p1, %r3, 0", "%p1, %r2, 32", "R1"),  # another warp's thread, a warp's barrier
    ("lanes", RELEASE, "", "R2"),
    ("one predicate", "setp.eq.b32 %p3, %r3, 0", "setp.eq.b32 %p3, %r3, 1", "R1"),
    ("one predicate", "setp.eq.b32 %p5, %r3, 0", "setp.eq.b32 %p5, %r3, 1", "R2"),
    ("plain", "HELD:\n  bar.sync 0;", "HELD:", "R1"),
    ("plain", "HELD:\n  bar.sync 0;", "HELD:\n  bar.warp.sync -1;", "R1"),
    ("plain", "bar.sync 0;\n  setp", "setp", "R2"),
    ("plain", "bar.sync 0;\n  setp", "bar.arrive 0, 128;\n  setp", "R2"),
    ("fence", "fence.acq_rel.gpu;\n", "", "R2"),
    ("fence", "fence.acq_rel.gpu", "fence.acq_rel.cta", "R2"),
    ("fence", "fence.acq_rel.gpu", "fence.proxy.async.global", "R2"),
    ("fence", f"{WAIT}\n  fence.acq_rel.gpu;", f"fence.acq_rel.gpu;\n  {WAIT}", "R2"),
    ("fence", "st.relaxed.gpu.global", "st.global", "R2"),
    ("peeled", "ld.acquire.gpu.global.b32 %r5, [%rd2];\n  setp.eq", "setp.eq", "R1"),
    ("rank 0", "setp.eq.b32 %p6, %r4, 0", "setp.ne.b32 %p6, %r4, 0", "R1"),
    ("rank 0", "setp.eq.b32 %p6, %r4, 0", "setp.eq.b32 %p6, %r4, 1", "R1"),
    ("rank 0", "setp.eq.b32 %p6, %r4, 0", "setp.eq.b32 %p6, %r1, 0", "R1"),
    ("watchdog", "  trap;", "  bra HELD;", "R1"),
    ("late", "cp.async.bulk.wait_group 1;", "cp.async.bulk.wait_group 2;", "R2"),
    ("late", f"{WAIT}\n  {RELEASE}", WAIT, "R2"),
    ("relay", "HELD2:\n  bar.sync 0;", "HELD2:", "R1"),
    ("relay", "bar.sync 0;\n  @%p1 bra HELD2;", "@%p1 bra HELD2;", "R2"),
    ("relay", f"{RELEASE}\n", "", "R2"),
]


def findings(body: str):
    (function,) = ptx.parse(HEAD + body + TAIL)
    return Turnstile(function, {}).findings()


@pytest.mark.parametrize("style", RIGHT)
def test_a_right_turnstile_has_no_finding(style):
    assert findings(RIGHT[style]) == []


@pytest.mark.parametrize("style, old, new, rule", WRONG)
def test_one_edit_breaks_the_rule_it_should(style, old, new, rule):
    assert old in RIGHT[style]
    body = RIGHT[style].replace(old, new, 1)
    body = body.replace(ADD, f"AFTER:\n  {ADD}", 1) if "AFTER" in new else body
    body = body.replace(ADD, f"HELD:\n  {ADD}", 1) if "bra HELD" in new else body
    out = findings(body)
    assert {finding.rule for finding in out} == {rule}, out
    assert all("PTX line" in finding.where for finding in out)


def test_one_spin_before_a_loop_of_reductions_is_not_enough():
    """The spin dominates every reduction, but only the first one has a turn."""
    body = THREAD.replace(SPIN, "")
    spin_first = HEAD.replace("ROW:", f"{SPIN}ROW:")
    (function,) = ptx.parse(spin_first + body + TAIL)
    assert {finding.rule for finding in Turnstile(function, {}).findings()} == {"R1"}


def test_a_call_that_could_release_is_not_followed():
    call = THREAD.replace(RELEASE, "call.uni releases, ();")
    callee = f".func releases() {{ .reg .b64 %rd<3>; {RELEASE} ret; }}"
    function, released = ptx.parse(HEAD + call + TAIL + callee)
    out = Turnstile(function, {released.name: released}).findings()
    assert {finding.rule for finding in out} == {"R1", "R2"}


def test_too_many_paths_are_refused_not_passed(monkeypatch):
    monkeypatch.setattr(ptx_paths, "MAX_STATES", 5)
    (finding,) = findings(THREAD)
    assert "not proved" in finding.text
