"""Proxy-fence checks, and bulk stores that are pending when their CTA ends."""

import numpy as np
import pytest

from ptxsim.skips import requires_core

from .harness import SimError, entry, launch
from .snippets import BULK_DOUBLE, BULK_SHARED, FENCE, MODES, READ_WAIT, bulk, sm
from .wgmma import SMALL, run_small

pytestmark = requires_core

MISSING, PENDING = "missing proxy fence", "exit with pending bulk store"
WRITE = "st.shared.v4.u32 [%r3], {%r4, %r5, %r6, %r7};"
STMATRIX = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r3], {%r4, %r5, %r6, %r7};"
CP_ASYNC = "cp.async.cg.shared.global [%r3], [%d1], 16;"
RED = "red.shared.add.u32 [%r3], %r4;"
STORE = "cp.async.bulk.global.shared::cta.bulk_group [%d51], [%r2], 1024;"
REDUCE = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d51], [%r2], 1024;"
STORE_AGAIN = f"""mov.u32 %r9, 0;
L: add.u32 %r9, %r9, 1; {STORE} cp.async.bulk.commit_group; setp.lt.u32 %p2, %r9, 100; @%p2 bra L;
"""


def store(
    before="", write=WRITE, after=FENCE, first="", store=STORE, wait=READ_WAIT, end="", **options
):
    """64 threads write 16 bytes each; thread 0 stores them all.  What the report warns of.

    %p1: not thread 0; %p2: not thread 40.
    """
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, sm; mad.lo.u32 %r3, %r1, 16, %r2;
mul.wide.u32 %d1, %r1, 16; add.u64 %d1, %d1, %d50; ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%d1];
setp.ne.u32 %p1, %r1, 0; setp.ne.u32 %p2, %r1, 40;
{before}
{write}
{after}
bar.sync 0; {first} @%p1 bra E; {store} cp.async.bulk.commit_group; {wait} bra F;
E: {end}
F:"""
    data, out = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    text = entry(body, ["u64"] * 2, sm(1024))
    return launch(text, [data, out], block=(64, 1, 1), **options)["fence_warnings"]


def kinds(warnings):
    assert warnings["count"] == len(warnings["first"])
    return [w["kind"] for w in warnings["first"]]


FENCED = {
    "by each writer": {},
    "full": {"after": "fence.proxy.async;"},
    "cluster": {"after": "fence.proxy.async.shared::cluster;"},
    "after the barrier, by each writer": {"after": "", "first": FENCE + " bar.sync 0;"},
    "reduction": {"store": REDUCE},
    "written by red": {"write": RED},
    "written by stmatrix": {"write": STMATRIX},
    "written by cp.async": {"write": CP_ASYNC, "after": "cp.async.wait_all; " + FENCE},
    "written outside what is read": {
        "after": "",
        "store": STORE.replace("1024", "64"),
        "write": "@%p1 bra N; " + WRITE.replace("[%r3]", "[%r3+64]") + " N:",
    },
}
UNFENCED = {
    "absent": {"after": ""},
    "other state space": {"after": "fence.proxy.async.global;"},
    "other proxy": {"after": "fence.proxy.alias;"},
    "memory fences only": {"after": "fence.acq_rel.cta; membar.cta;"},
    "before the write": {"before": FENCE, "after": ""},
    "by the storing thread only": {"after": "", "first": "@!%p1 " + FENCE},
    "by all threads but one": {"after": "@%p2 " + FENCE},
    "then one thread writes again": {"after": FENCE + " @%p2 bra S; " + WRITE + " S:"},
    "reduction": {"after": "", "store": REDUCE},
    "written by red": {"after": "", "write": RED},
    "written by atom": {"after": "", "write": "atom.shared.exch.b32 %r9, [%r3], %r4;"},
    "written by stmatrix": {"after": "", "write": STMATRIX},
    "written by cp.async": {"after": "cp.async.wait_all;", "write": CP_ASYNC},
}


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("name", FENCED)
def test_fenced_store(name, options):
    assert kinds(store(**FENCED[name], **options)) == []


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("name", UNFENCED)
def test_unfenced_store(name, options):
    assert kinds(store(**UNFENCED[name], **options)) == [MISSING]


def test_cp_async_fence_before_its_wait():
    late = store(write=CP_ASYNC, after=FENCE + " cp.async.wait_all;", async_mode=1)
    assert kinds(late) == [MISSING]


def test_report_names_the_place():
    (w,) = store(after="@%p2 " + FENCE)["first"]
    assert (w["entry"], w["cta"], w["thread"], w["reading_thread"]) == ("k", [0, 0, 0], 40, 0)
    assert w["shared_offset"] == 640 and 0 < w["writer_line"] < w["line"]
    assert w["text"].startswith("cp.async.bulk.global.shared::cta")
    assert w["writer_text"].startswith("st.shared.v4.u32")


def test_levels():
    assert kinds(store(after="", wait="", check_fences=0)) == []
    assert kinds(store(after="", wait="", check_fences=1)) == [MISSING, PENDING]
    assert kinds(store(check_fences=2)) == []
    reader = r"line \d+.*entry k.*line \d+: cp.async.bulk.*thread 0"
    writer = r"missing proxy fence.*shared offset 0 of CTA \(0,0,0\).*thread 0 .*"
    with pytest.raises(SimError, match="(?s)" + writer + reader):
        store(after="", check_fences=2)
    pending = r"(?s)exit with pending bulk store.*entry k.*line \d+: cp.async.bulk.*thread 0"
    with pytest.raises(SimError, match=pending):
        store(wait="", check_fences=2)


CLEAR = """mov.u32 %r2, sm; mov.u32 %r1, %tid.x; mad.lo.u32 %r3, %r1, 16, %r2;
st.shared.v4.u32 [%r3+16], {%r1, %r1, %r1, %r1}; bar.sync 0;
"""


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize(
    "change, expected", [("", []), (BULK_DOUBLE + FENCE, []), (BULK_DOUBLE, [MISSING])]
)
def test_async_writes_replace_generic_ones(change, expected, options):
    """Stores without a fence, then (after a barrier) a bulk load over them, and a bulk store."""
    data, out = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    text = entry(CLEAR + bulk(change=change), ["u64"] * 2, BULK_SHARED)
    assert kinds(launch(text, [data, out], **options)["fence_warnings"]) == expected


@pytest.mark.parametrize(
    "fence, expected",
    [
        ("", [MISSING]),
        (FENCE, [MISSING]),
        ("fence.proxy.async.shared::cluster;", []),
        ("fence.proxy.async;", []),
    ],
)
def test_writes_into_another_cta(fence, expected):
    """Each CTA fills its neighbour's shared memory, which the neighbour stores; .shared::cta does
    not cover that."""
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, sm; mov.u32 %r3, %cluster_ctarank;
xor.b32 %r3, %r3, 1; mad.lo.u32 %r4, %r1, 4, %r2; mapa.shared::cluster.u32 %r4, %r4, %r3;
st.shared::cluster.u32 [%r4], %r1; {fence} barrier.cluster.arrive; barrier.cluster.wait;
setp.ne.u32 %p1, %r1, 0; @%p1 bra E; mov.u32 %r5, %ctaid.x;
mul.wide.u32 %d1, %r5, 128; add.u64 %d1, %d1, %d50;
cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r2], 128;
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; E:"""
    out = np.zeros((2, 32), np.uint32)
    report = launch(entry(body, ["u64"], sm(128)), [out], grid=(2, 1, 1), cluster=(2, 1, 1))
    assert (out == np.arange(32)).all() and kinds(report["fence_warnings"]) == expected
    for warning in report["fence_warnings"]["first"]:
        assert warning["cta"] in ([0, 0, 0], [1, 0, 0])


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize(
    "fence, expected",
    [
        (FENCE, []),
        ("fence.proxy.async;", []),
        ("", [MISSING]),
        ("setp.eq.u32 %p3, %r1, 0; @%p3 " + FENCE, [MISSING]),
    ],
)
@pytest.mark.parametrize("a_in_registers", [False, True])
def test_wgmma_operands(fence, expected, options, a_in_registers):
    mma = SMALL
    if a_in_registers:
        mma = mma.replace("%d10", "{%r20, %r21, %r22, %r23}").replace("1, 1, 0, 0", "1, 1, 0")
    warnings = run_small(mma, fence=fence, **options)[1]["fence_warnings"]
    assert kinds(warnings) == expected
    assert all(w["text"].startswith("wgmma.mma_async") for w in warnings["first"])


WAITED = {
    "read": READ_WAIT,
    "full": "cp.async.bulk.wait_group 0;",
    "after many": STORE_AGAIN + READ_WAIT,
}
UNWAITED = {
    "no wait": "",
    "one left in flight": "cp.async.bulk.wait_group.read 1;",
    "not committed": READ_WAIT + STORE,
    "two of many left": STORE_AGAIN + "cp.async.bulk.wait_group.read 2;",
}


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("name", WAITED)
def test_exit_after_the_wait(name, options):
    assert kinds(store(wait=WAITED[name], **options)) == []


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("name", UNWAITED)
def test_exit_with_pending_store(name, options):
    assert kinds(store(wait=UNWAITED[name], **options)) == [PENDING]


def test_wait_by_other_threads():
    assert kinds(store(wait="", end=READ_WAIT)) == [PENDING]
