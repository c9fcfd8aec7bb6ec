"""Defects of the SM90 backward of wide heads, as in test_bwd_sm90_mutants.py: those of its own."""

from __future__ import annotations

import functools

import pytest

import ptxsim
from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.masks.rules import Band
from cute_kernels.schedulers.order import kinds
from ptxsim import skips
from tests.kernels.edited import changed
from tests.sparse_attn import simulated, waits

simulated_bwd = skips.import_module("tests.sparse_attn.simulated_bwd")
common = skips.import_module("tests.sparse_attn.bwd_defects")
module = skips.import_module("cute_kernels.sparse_attn.kernel_bwd_wide_sm90")
#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_the_text_of_each_is_there test_mutants_are_killed"
pytestmark = [
    skips.requires_sim,
    pytest.mark.sim,
    pytest.mark.simulates("sparse_attn", often=EACH_COMMIT),
]

_FENCE = 'cute.arch.fence_proxy("async.shared", space="cta")\n'
_DEEP, _FLAT = 16 * " ", 8 * " "

#: (head sizes, what is replaced, by what, ..)
BOTH, OF_192, OF_256 = (192, 256), (192,), (256,)
MUTANTS = {
    "P told before it is written": (
        BOTH,
        "cute.autovec_copy(by_fours(rS), sP[None, lane, None])\n",
        f"arrive(P_BARRIER)\n{_DEEP}cute.autovec_copy(by_fours(rS), sP[None, lane, None])\n",
        f"{_DEEP}arrive(P_BARRIER)\n{_DEEP}rP",
        f"{_DEEP}rP",
    ),
    "dS told before it is written": (
        BOTH,
        "self.keep_ds(rdS, shared, 0, lane, 0)\n",
        f"arrive(DS_BARRIER)\n{_DEEP}self.keep_ds(rdS, shared, 0, lane, 0)\n",
        f"{_DEEP}arrive(DS_BARRIER)\n{_DEEP}# dQ",
        f"{_DEEP}# dQ",
    ),
    "dS multiplied before all of it is written": (BOTH, f"{_DEEP}self.meet_own(OF_DK)\n", ""),
    "no fence behind dS": (
        BOTH,
        f"{_DEEP}{_FENCE}{_DEEP}self.meet_own(OF_DK)",
        f"{_DEEP}self.meet_own(OF_DK)",
    ),
    "dK written over K that is multiplied": (
        BOTH,
        f"{12 * ' '}arrive(K_BARRIER)\n",
        "",
        f"{12 * ' '}meet(K_BARRIER)\n",
        "",
    ),
    "dV written before V has come": (
        BOTH,
        f"{12 * ' '}cute.arch.mbarrier_wait(barriers.v_full, kv_phase)\n{12 * ' '}self.store_sum",
        f"{12 * ' '}self.store_sum",
    ),
    "no fence before a sum is stored": (
        BOTH,
        f"{_FLAT}{_FENCE}{_FLAT}self.meet_own(consumer)",
        f"{_FLAT}self.meet_own(consumer)",
    ),
    "a sum stored before all of it is written": (
        BOTH,
        f"{_FENCE}{_FLAT}self.meet_own(consumer)",
        _FENCE.rstrip("\n"),
    ),
    "halves in the other order": (
        BOTH,
        "* turns + half, visit.rank)",
        "* turns + half, visit.rank ^ 1)",
    ),
    "halves at the same rank": (
        BOTH,
        "* turns + half, visit.rank)",
        "* turns + half, visit.rank // HALVES * HALVES)",
    ),
    "keys of the other half": (
        BOTH,
        "first_row(column.part * KEYS",
        "first_row(KEYS - column.part * KEYS",
    ),
    "sums of the other half": (
        BOTH,
        "cta.tensors, column.part\n",
        "cta.tensors, column.part * 0\n",
    ),
    "a buffer of dQ freed before it is read": (
        BOTH,
        "cute.arch.cp_async_bulk_wait_group(0, read=True)\n"
        f"{20 * ' '}cute.arch.mbarrier_arrive(freed)",
        "cute.arch.mbarrier_arrive(freed)",
    ),
    "dQ told by a warp too few": (
        BOTH,
        "CONSUMER_WARPS // HALVES if self.by_halves else CONSUMER_WARPS",
        "3 if self.by_halves else 7",
    ),
    "the buffer of dQ not awaited": (
        OF_192,
        "cute.arch.mbarrier_wait(barriers.dq_empty, bit ^ 1)",
        "pass",
    ),
    "half a buffer of dQ not awaited": (
        OF_256,
        "cute.arch.mbarrier_wait(barriers.dq_empty + consumer, phase)",
        "pass",
    ),
    "both halves in one place": (OF_256, "+ half * self.half_size", "+ 0 * self.half_size"),
    "both halves with one turn": (OF_256, "(row * turns + half)", "row * turns"),
}
NIGHT = pytest.mark.nightly
KERNEL = "sparse_attn.kernel_bwd_wide_sm90"


def listed():
    """Each once for every commit, at one of its head sizes, and with the other by night."""
    for index, (name, (dims, *_)) in enumerate(MUTANTS.items()):
        for n, dim in enumerate(dims):
            yield pytest.param(name, dim, marks=() if n == index % len(dims) else NIGHT)


@functools.cache
def without_visits(head_dim: int) -> tuple:
    """Columns that no query sees: zeros are stored where K and V come."""
    mask = BlockMask.from_rule(Band(None, 0), 200, 500)
    case = simulated_bwd.case(mask, head_dim=head_dim)
    schedule = kinds.left_to_right(case.lowered.mask, heads=1)
    assert schedule.offset[2] == schedule.offset[-1]
    return case, schedule, simulated_bwd.backward(case, schedule)


def survives(kernel, head_dim: int, form: str = "rule") -> bool:
    return common.survives(kernel, head_dim, form, (without_visits(head_dim),))


@pytest.mark.parametrize("form", ["rule", pytest.param("bits", marks=NIGHT)])
@pytest.mark.parametrize("head_dim", BOTH)
def test_the_intact_kernel_survives(head_dim, form):
    assert survives(simulated.kernel, head_dim, form)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_text_of_each_is_there(tmp_path, name):
    """Those of the night too: a changed kernel takes its mutants along."""
    changed(tmp_path, KERNEL, *MUTANTS[name][1:])


@pytest.mark.parametrize(("name", "head_dim"), list(listed()))
def test_mutants_are_killed(tmp_path, name, head_dim):
    mutant = changed(tmp_path, KERNEL, *MUTANTS[name][1:])
    kernel = functools.cache(lambda chosen: mutant.build(chosen, compile=ptxsim.compile))
    common.cases(head_dim)
    without_visits(head_dim)
    assert not survives(kernel, head_dim)


def here(mutant):
    """A mutant of ``waits``, on this kernel."""

    def mine(patch):
        mutant(patch, module)

    mine.__name__ = mutant.__name__
    return mine


@pytest.mark.parametrize(
    ("mutant", "head_dim"),
    [
        (common.release_before_landing, 192),
        (common.kv_freed_before_it_has_left, 192),
        (common.no_fence_before_hand_over, 256),
        (common.handed_over_by_lane_0, 192),
        (common.no_wait_for_the_turn, 256),
        (common.wrong_rank, 192),
        (common.rank_not_reached, 256),
        (common.no_release, 192),
        (common.out_of_range_tile_visited, 256),
        (common.nothing_masked, 192),
        (common.keys_beyond_the_end_seen, 256),
        # Q and lse2, dO of the first warpgroup; dO of the second, whose Q has come with P.
        *((here(waits.no_wait_for(n)), (192, 256)[n % 2]) for n in (1, 2, 3)),
        # S, dV and dQ; dP, dQ and dK.
        *((here(waits.no_wait_for_products(n)), (192, 256)[n % 2]) for n in range(1, 7)),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_common_mutants_are_killed(monkeypatch, mutant, head_dim):
    @functools.cache
    def kernel(config):
        with monkeypatch.context() as patch:
            mutant(patch)
            return module.build(config, compile=ptxsim.compile)

    common.cases(head_dim)
    without_visits(head_dim)
    assert not survives(kernel, head_dim)
