"""cp.async, bulk copies and bulk reductions of the core, and what a missing wait does."""

import numpy as np
import pytest

from ptxsim.skips import requires_core

from .harness import entry, launch
from .snippets import (
    BULK_ADD,
    BULK_SHARED,
    BULK_STORE,
    FENCE,
    MODES,
    READ_WAIT,
    bulk,
    cp_async_module,
    mbar_wait,
    sm,
)

pytestmark = requires_core


@pytest.mark.parametrize("options", MODES)
def test_cp_async(options):
    """Sizes that fill with zeros, two groups, and a wait for all but the last."""
    body = """mov.u32 %r1, %tid.x; mov.u32 %r2, sm; mad.lo.u32 %r3, %r1, 16, %r2;
mul.wide.u32 %d1, %r1, 16; add.u64 %d2, %d50, %d1;
and.b32 %r4, %r1, 15; cp.async.cg.shared.global [%r3], [%d2], 16, %r4; cp.async.commit_group;
cp.async.ca.shared.global [%r3+512], [%d2], 4; cp.async.ca.shared.global [%r3+520], [%d2+8], 8, 0;
cp.async.commit_group;
cp.async.wait_group 1; bar.sync 0; ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r3];
cp.async.wait_all; bar.sync 0; ld.shared.u32 %r14, [%r3+512]; ld.shared.u32 %r15, [%r3+520];
add.u64 %d3, %d51, %d1; add.u64 %d3, %d3, %d1; st.global.v4.u32 [%d3], {%r10, %r11, %r12, %r13};
st.global.v2.u32 [%d3+16], {%r14, %r15};"""
    data = np.arange(128, dtype=np.uint32).reshape(32, 4) + 100
    out = np.full((32, 8), 7, np.uint32)
    launch(entry(body, ["u64"] * 2, sm(1024)), [data, out], **options)
    raw = data.view(np.uint8).reshape(32, 16).copy()
    for t in range(32):
        raw[t, t & 15 :] = 0
    assert np.array_equal(out[:, :4], raw.view(np.uint32))
    assert np.array_equal(out[:, 4], data[:, 0]) and not out[:, 5].any()


def test_cp_async_missing_wait_shows():
    data, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    launch(cp_async_module(""), [data, out], async_mode=1)
    assert (out == 0xFFFFFFFF).all()
    launch(cp_async_module(""), [data, out], async_mode=0)
    assert np.array_equal(out, data)


@pytest.mark.parametrize("noinc", ["", ".noinc"])
@pytest.mark.parametrize("options", MODES)
def test_cp_async_mbarrier(options, noinc):
    arrive = "" if noinc else "mbarrier.arrive.shared.b64 %d5, [%r2];"
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, sm; setp.ne.u32 %p1, %r1, 0; @%p1 bra I;
mbarrier.init.shared.b64 [%r2], 32; I: bar.sync 0;
mad.lo.u32 %r3, %r1, 16, %r2; mul.wide.u32 %d1, %r1, 16; add.u64 %d2, %d50, %d1;
cp.async.cg.shared.global [%r3+16], [%d2], 16;
cp.async.mbarrier.arrive{noinc}.shared.b64 [%r2]; {arrive} {mbar_wait("%r2", "0", "a")}
xor.b32 %r4, %r1, 7; mad.lo.u32 %r3, %r4, 16, %r2;
ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r3+16]; add.u64 %d3, %d51, %d1;
st.global.v4.u32 [%d3], {{%r10, %r11, %r12, %r13}};"""
    data, out = np.arange(128, dtype=np.uint32), np.zeros((32, 4), np.uint32)
    launch(entry(body, ["u64"] * 2, sm(544)), [data, out], **options)
    assert np.array_equal(out, data.reshape(32, 4)[np.arange(32) ^ 7])


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("store, start", [(BULK_STORE, 0), (BULK_ADD, 3)])
def test_bulk_copy_and_reduce(store, start, options):
    data, out = np.arange(128, dtype=np.float32), np.full(128, 3, np.float32)
    report = launch(entry(bulk(store), ["u64"] * 2, BULK_SHARED), [data, out], **options)
    expected = data.copy()
    expected[::4] *= 2
    assert np.array_equal(out, start + expected)
    assert report["counts"]["bulk_load_bytes"] == 512


@pytest.mark.parametrize("options", MODES)
def test_bulk_reduce_of_halves(options):
    data, out = np.arange(128, dtype=np.float32), np.full(256, 2, np.float16)
    store = BULK_ADD.replace("add.f32", "add.noftz.f16")
    launch(entry(bulk(store, change=FENCE), ["u64"] * 2, BULK_SHARED), [data, out], **options)
    assert np.array_equal(out, np.float16(2) + data.view(np.float16), equal_nan=True)


def test_bulk_load_without_a_wait_shows():
    data, out = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    text = entry(bulk(wait=""), ["u64"] * 2, BULK_SHARED)
    report = launch(text, [data, out], async_mode=1)
    assert np.isnan(out).any() and any("never waited" in w for w in report["warnings"])


@pytest.mark.parametrize("options", MODES)
def test_shared_memory_is_free_after_the_read_wait(options):
    out = overwritten_after(READ_WAIT, **options)
    assert np.array_equal(out, np.arange(128))


def test_shared_memory_overwritten_too_early_shows():
    assert overwritten_after("", async_mode=1).tolist() == [9, *range(1, 128)]


def overwritten_after(wait, **options):
    """A bulk store of 0 to 127 whose first word thread 0 overwrites after `wait`."""
    again = "mov.f32 %f9, 0f41100000; st.shared.f32 [%r2+16], %f9;"
    store = f"{BULK_STORE} cp.async.bulk.commit_group; {wait} {again}"
    data, out = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    text = entry(bulk(store, change=FENCE), ["u64"] * 2, BULK_SHARED)
    launch(text, [data, out], **options)
    return out


@pytest.mark.parametrize("mode, expected", [(0, [1, 1]), (1, [-5, 1])])
def test_bulk_store_lands_at_the_full_wait(mode, expected):
    """After wait_group.read the storing thread may still see old values in global memory."""
    after = """ld.global.f32 %f10, [%d51+4]; st.global.f32 [%d52], %f10;
cp.async.bulk.wait_group 0; ld.global.f32 %f10, [%d51+4]; st.global.f32 [%d52+4], %f10;"""
    text = entry(bulk(after=after), ["u64"] * 3, BULK_SHARED)
    data, out = np.arange(128, dtype=np.float32), np.full(128, -5, np.float32)
    seen = np.zeros(2, np.float32)
    launch(text, [data, out, seen], async_mode=mode)
    assert seen.tolist() == expected
