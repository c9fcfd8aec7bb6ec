"""Barriers of a warp before a lane acts for it: each dropped one is a race between lanes.

What lane 0 stores, or reads, and another lane, or another warp, uses after a lane's arrival.
"""

from __future__ import annotations

import contextlib

import pytest

import ptxsim
from ptxsim import modes, skips
from tests import certified
from tests.kernels.ring_defects import LIMITS
from tests.sparse_attn import simulated
from tests.sparse_attn.simulated_fwd import LISTS, listed, run

edited = skips.import_module("tests.kernels.dropped")
common = skips.import_module("tests.sparse_attn.test_bwd_sm90_mutants")
long_caches = skips.import_module("tests.sparse_attn.test_long_sm90")
packs = skips.import_module("tests.sparse_attn.test_packs_sm90")
#: What runs at every commit while the kernels are proved.
pytestmark = certified.marks("sparse_attn", "test_a_dropped_meeting_is_a_race")

OPTIONS = {**modes.RACES[0].options, **LIMITS}


def three_consumers() -> None:
    """Lists of blocks that differ by consumer, with masks."""
    run(listed(LISTS["alternate"], bits=True), ctas=2, forward=simulated.compiling(), **OPTIONS)


def pack() -> None:
    """Sequences that end anywhere."""
    kernels = dict.fromkeys(("forward", "backward"), simulated.compiling())
    packs.attended(64, **kernels, **OPTIONS)


def backward() -> None:
    """Its dQ goes to the adding thread through a buffer."""
    case, schedule, _ = common.cases("128")[0]
    with ptxsim.options(**OPTIONS):
        common.simulated_bwd.backward(case, schedule, ctas=3, backward=simulated.compiling())


def long_cache() -> None:
    """P and V go between the warps of the products' kernel through stages."""
    batch = long_caches.pages([(1, 1300)], seed=9, slope=6.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated, "kernel", simulated.compiling())
        with ptxsim.options(**OPTIONS):
            batch.run()


#: (the run, the end of the file's path, the function in it; None: any).
SITES = [
    (three_consumers, "device/output.py", "publish"),
    (three_consumers, "device/output.py", "store"),
    (three_consumers, "device/block_union.py", "step"),
    (three_consumers, "device/tile_scheduler.py", "write"),
    (pack, "device/varlen.py", None),
    (backward, "kernel_bwd_sm90.py", "hand_over"),
    (long_cache, "device/values_state.py", "publish"),
    (long_cache, "device/values_state.py", "release"),
]


def races(call, dropped) -> int:
    """Number of races that the simulator reports, also of a run that then fails."""
    ptxsim.clear_launches()
    with dropped as lines, contextlib.suppress(ptxsim.PtxsimError):
        call()
    assert lines, "nothing was dropped"
    return sum(launch["report"].get("races", 0) for launch in ptxsim.launches())


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(c, marks=pytest.mark.nightly if c in (pack, long_cache) else ())
        for c in (three_consumers, pack, backward, long_cache)
    ],
)
def test_the_intact_kernels_have_no_race(call):
    assert races(call, contextlib.nullcontext(["nothing"])) == 0


@pytest.mark.parametrize(("call", "file", "function"), SITES)
def test_a_dropped_meeting_is_a_race(call, file, function):
    assert races(call, edited.dropped("sync_warp", file, function)) > 0


def test_the_backward_awaits_the_initialised_barriers():
    """Its warps part at once: without the CTA's barrier some wait on mbarriers that are none."""
    with (
        edited.dropped("sync_threads", "kernel_bwd_sm90.py", "kernel") as lines,
        pytest.raises(ptxsim.PtxsimError, match="mbarrier that is not initialised"),
    ):
        backward()
    assert len(lines) == 1
