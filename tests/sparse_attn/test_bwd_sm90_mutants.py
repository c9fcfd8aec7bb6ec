"""Defects put into the SM90 backwards on purpose: the simulator must notice each one.

A mutant counts as killed when a run differs by a byte from the intact kernels', fails in the
simulator (deadlock, wild access) or reports a race or a missing fence.  The same runs of the intact
kernels must all pass.
"""

from __future__ import annotations

import functools

import pytest
import torch

import ptxsim
from cute_kernels.runtime.caching import ByteCache
from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.masks.rules import Band
from cute_kernels.schedulers.order import kinds
from cute_kernels.sparse_attn import lowering, masks
from ptxsim import skips
from ptxsim.modes import ANY_CTA, RANDOM
from tests import certified, contract
from tests.kernels import ring_defects
from tests.kernels.ring_defects import LIMITS
from tests.oracles import sparse_attn as reference
from tests.sparse_attn import mutated, simulated

simulated_bwd = skips.import_module("tests.sparse_attn.simulated_bwd")
#: What runs at every commit while the kernels are proved.
pytestmark = certified.marks("sparse_attn", "test_mutants_are_killed")

#: The settings that find most missing waits, with few CTAs and with all, and races.
SETTINGS = [
    *ring_defects.SETTINGS,
    ANY_CTA | {"seed": 4},
    RANDOM | {"resident_ctas": 2, "seed": 5},
    RANDOM | {"check_races": 2, "seed": 6},
]


def of_bits() -> BlockMask:
    """Another one than its transpose; tails on both sides, that of the keys in full blocks."""
    allowed = torch.rand(1, 1, 200, 300, generator=torch.Generator().manual_seed(8)) < 0.4
    allowed[..., 256:] = True
    return BlockMask.from_dense(allowed)


def low(case):
    """Scores far below 0: weights of keys beyond the end, whose scores are 0, would be infinite."""
    q, k = case.q.abs() * 6, -case.k.abs() * 6
    out, lse = reference.attention(q, k, case.v, case.mask.to_dense(), scale=case.scale)
    assert lse.mean() < -100
    return case._replace(q=q, k=k, out=out.to(q.dtype), lse=lse.float())


@functools.cache
def cases(group: str) -> list[tuple]:
    """(case, schedule, gradients) of a head size, of "bits" and one, or of "holes" and one.

    Tails on both sides, groups of two heads and of one, tickets of even and of odd visits; cyclic
    visits, for which turns come late; a ticket without visits, whose zeros are stored where K and V
    come.
    """
    kind, _, head_dim = group.rpartition(" ")
    if kind == "holes":
        case, schedule = simulated_bwd.holes(int(head_dim))
        return [(case, schedule, simulated_bwd.backward(case, schedule))]
    inputs = [
        (BlockMask.full(330, 300), 2, kinds.left_to_right, "cyclic"),
        (BlockMask.full(300, 300), 1, kinds.left_to_right, "cyclic"),
        # Last: kernels of their own, which are compiled for mutants that live till then.
        (BlockMask.sliding_window(400, 330, left=200, right=0), 2, kinds.spt, "ascending"),
    ]
    if int(head_dim) > 128:
        unseen = BlockMask.from_rule(Band(None, 0), 200, 500)
        inputs.append((unseen, 1, kinds.left_to_right, "ascending"))
    if kind == "bits":
        inputs = [(of_bits(), 1, kinds.left_to_right, "cyclic")]
    out = []
    for mask, heads, order, walk in inputs:
        case = simulated_bwd.case(mask, head_dim=int(head_dim), heads=heads, kv_heads=1)
        case = low(case) if heads == 1 and walk == "cyclic" else case
        schedule = order(case.lowered.mask, heads=case.kv_heads, walk=walk)
        out.append((case, schedule, simulated_bwd.backward(case, schedule)))
        assert all(t.isfinite().all() for t in out[-1][2])
    return out


def survives(kernel, group: str) -> bool:
    """Whether every run under every setting is right."""
    changed = {"backward": kernel, "post": kernel}
    runs = (
        (functools.partial(simulated_bwd.backward, case, schedule, ctas=3, **changed), expected)
        for case, schedule, expected in cases(group)
    )
    return all(
        simulated.is_right(run, expected, **options, **LIMITS)
        for run, expected in runs
        for options in SETTINGS
    )


# ---- mutants -------------------------------------------------------------------------------------

_FENCE = 'cute.arch.fence_proxy("async.shared", space="cta")\n'
_DEEP, _IN, _FLAT = 16 * " ", 12 * " ", 8 * " "
SEEN = 'seen = cute.arch.load(semaphore, cutlass.Int32, sem="acquire", scope="gpu")\n'
RELEASE = (
    'cute.arch.red(semaphore, cutlass.Int32(1), op="add", dtype="s32", sem="release", scope="gpu")'
)
LOOP = f"    while seen != rank:\n        {SEEN}"
_FAR, _OWN = 20 * " ", "self.meet_own(consumer)\n"
_WAIT_0, _WAIT_1 = (f"warpgroup.wait_group({n})\n" for n in range(2))
_ARRIVE = "mbarrier_arrive(barriers.dq_full + buffer)"
_MEET = "cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=CONSUMER_THREADS)"
_EMPTY = "cute.arch.mbarrier_wait(cta.barriers.dq_empty + state.index, state.phase)"
_READ, _ALL = "cute.arch.cp_async_bulk_wait_group(0, read=True)", "cutlass.Int32(per_block)"
_O_WAIT = "rings.do.consumer_wait(state)\n"
_COMMIT = "    cute.arch.cp_async_bulk_commit_group()"
_STORE = '_bulk_copy("cp.async.bulk.global.shared::cta.bulk_group", destination, source, size)\n'
_OVER = "self.hand_over(barriers, lane, written)\n"
_V_FULL = "cute.arch.mbarrier_wait(barriers.v_full, kv_phase)"
_DO_WAIT = "rings.do.consumer_wait(do_state)\n"
_FREE_Q, _FREE_DO = "rings.q.consumer_release(state)\n", "rings.do.consumer_release(do_state)\n"


def rings_released_too_early(patch, module):
    """Q and dO are given back before the products that read them have ended."""
    warpgroup = module.cute.nvgpu.warpgroup
    true = warpgroup.wait_group
    patch.setattr(warpgroup, "wait_group", lambda n: true(3))


#: Module -> label -> (cases, every commit's / the night's; a piece of text, another, ..)
TEXTS: dict[str, dict[str, tuple[str, ...]]] = {
    "dsl.turnstile": {
        # The first mutant runs at every commit: it has one case.
        "the first adds": ("holes 128", "            store(dest", "            add(dest"),
        "others store": ("holes 128", f"rank == 0:\n{_IN}store", f"rank != 0:\n{_IN}store"),
        # The wait before the turn's end does not cover the store.
        "the first not committed": ("holes 128", _STORE + _COMMIT, _STORE),
        # A turn is over when its add is issued; it has landed before this thread's next turn.
        "released before landing": (
            "128, 192",
            'come after theirs."""\n',
            'come after theirs."""\n    cute.arch.cp_async_bulk_wait_group(0, read=False)\n',
            'add its own."""\n    land()\n',
            'add its own."""\n',
        ),
        "landing is a read": ("128", "wait_group(0, read=False)", "wait_group(0, read=True)"),
        "the turn not awaited": ("128, 256 / 64", f"    {SEEN}{LOOP}", ""),
        "the rank after": ("128, 192", "while seen != rank:", "while seen != rank + 1:"),
        "the rank before": ("64, 256", "seen != rank:", "seen != cutlass.max(rank - 1, 0):"),
        "no release": ("128, 192", RELEASE, "pass"),
    },
    "sparse_attn.kernel_bwd_sm90": {
        "the turn of another tile": ("128", "tor + row, visit.rank", "tor + row + 1, visit.rank"),
        "no fence behind dS": ("128 / 64", f"{_FENCE}{_DEEP}self", "self"),
        "no fence before hand over": ("64, 256 / 128", f"{_FENCE}{_FLAT}cute", "cute"),
        # Before other lanes have written their dQ.
        "handed over by lane 0": ("192", "cute.arch.sync_warp()", "pass"),
        "no fence before dK is stored": ("128", f"{_FENCE}{_FLAT}self", "self"),
        "another buffer given": ("64 / 128", _ARRIVE, _ARRIVE.replace("buffer", "(buffer ^ 1)")),
        "handed over before it is written": (
            "64",
            *(f"{_OVER}{_DEEP}elif", f"pass\n{_DEEP}elif", f"{_OVER}{_IN}else", f"pass\n{_IN}else"),
            "self.keep_dq(cta",
            f"self.hand_over(barriers, lane, dq_state.index)\n{_DEEP}self.keep_dq(cta",
        ),
        # The visits hand over what the visit before wrote; nobody does for a ticket's last.
        "last buffer not handed over": ("128 / 64", f"{_OVER}{_IN}else", f"pass\n{_IN}else"),
        "consumers do not meet": ("128 / 64", _MEET, "pass"),
        "a buffer of dQ not awaited": ("128", _EMPTY, "pass"),
        # Two stages of dQ by their barriers, in the memory of one.
        "a buffer of dQ too few": (
            "64 / 128",
            *("data_ptr() + buffer * self.dq_size", "data_ptr()"),
            *("data_ptr() + state.index * self.dq_size", "data_ptr()"),
        ),
        "K and V freed before dK is stored": ("128, 192", _READ, "pass"),
        # K is given back, and dS written over, while the other warpgroup may still multiply them.
        "no meeting before the store": ("64 / 128", "self.sync()  # both", "pass  # both"),
        # The consumers meet once a visit.
        "a stage of dS too few": ("64 / 128", "dq_stages, config.ds_stages", "dq_stages, 1"),
        "V not awaited": (
            "128 / 64",
            *(f"if written < 0:\n{24 * ' '}{_V_FULL}", "pass"),
            *(f"dp_first):\n{20 * ' '}{_V_FULL}", f"dp_first):\n{20 * ' '}pass"),
        ),
        "Q not awaited": ("128", f"rings.q.consumer_wait(state)\n{_DEEP}mma", "mma"),
        "dO not awaited": ("128", f"dp_first):\n{_FAR}{_O_WAIT}", "dp_first):\n"),
        "the last dK not awaited": ("128", f"    {_WAIT_1}{_DEEP}if", f"    pass\n{_DEEP}if"),
        "S not awaited": ("128", "warpgroup.wait_group(1)\n" + _DEEP + "# P", "# P"),
        "dP not awaited": ("128", "warpgroup.wait_group(0)\n" + _DEEP + "# dS", "# dS"),
        "dQ not awaited": ("128", "warpgroup.wait_group(1)\n" + _DEEP + "rings", "rings"),
        "a ticket's last dK not awaited": ("128", "warpgroup.wait_group(0)\n" + _IN + "if", "if"),
    },
    "sparse_attn.kernel_bwd_post_sm90": {
        "tiles without a visit are read": ("holes 128", "tile] != 0", "tile] >= 0"),
    },
    "sparse_attn.device.walk": {
        # Every entry is as many tiles as a whole block has.
        "a tile too many": ("128, 256", "cutlass.min(end - first, cutlass.Int32(per_block))", _ALL),
    },
    "sparse_attn.device.key_mask": {
        "nothing masked": ("64, 192", "if masked:", "if key < 0:"),
        "keys behind all seen": ("64, 256, bits 128 / 128", "= kv_len -", "= cutlass.Int32(FAR) -"),
        "bits of one key on": (
            "bits 64 / bits 128",
            "key + 8 * half, f",
            "(key ^ 1) + 8 * half, f",
        ),
        # In every tile of rows those of its block's first.
        "bits of the first rows": ("bits 128", "first = row // mask.WORD", "first = row * 0"),
    },
    "sparse_attn.kernel_bwd_wide_sm90": {
        "P told before it is written": (
            "192 / 256",
            "cute.autovec_copy(by_fours(rS), sP[None, lane, None])\n",
            f"arrive(P_BARRIER)\n{_DEEP}cute.autovec_copy(by_fours(rS), sP[None, lane, None])\n",
            f"{_DEEP}arrive(P_BARRIER)\n{_DEEP}rP",
            f"{_DEEP}rP",
        ),
        "dS told before it is written": (
            "256 / 192",
            "self.keep_ds(rdS, shared, 0, lane, 0)\n",
            f"arrive(DS_BARRIER)\n{_DEEP}self.keep_ds(rdS, shared, 0, lane, 0)\n",
            f"{_DEEP}arrive(DS_BARRIER)\n{_DEEP}# dQ",
            f"{_DEEP}# dQ",
        ),
        "dS multiplied too early": ("192 / 256", f"{_DEEP}self.meet_own(OF_DK)\n", ""),
        "no fence behind dS": ("256 / 192", f"{_FENCE}{_DEEP}self.meet_own", "self.meet_own"),
        "dK over K": ("192 / 256", f"{_IN}arrive(K_B", f"{_IN}str(K_B", "meet(K_B", "str(K_B"),
        "dV written too early": ("256 / 192", f"{_V_FULL}\n{_IN}self.store", "self.store"),
        "no fence before a sum is stored": ("192 / 256", _FENCE + _FLAT + _OWN, _OWN),
        "a sum stored too early": ("256 / 192", _FENCE + _FLAT + _OWN, _FENCE),
        "halves in the other order": ("192 / 256", "half, visit.rank", "half, visit.rank ^ 1"),
        "one rank": ("256 / 192", "half, visit.rank", "half, visit.rank // HALVES * HALVES"),
        "keys of the other half": ("192 / 256", "row(column.part *", "row(KEYS - column.part *"),
        "the other half's sums": ("256 / 192", "ors, column.part\n", "ors, column.part * 0\n"),
        "a buffer of dQ freed before it is read": (
            "192 / 256",
            "cute.arch.cp_async_bulk_wait_group(0, read=True)\n"
            f"{20 * ' '}cute.arch.mbarrier_arrive(freed)",
            "cute.arch.mbarrier_arrive(freed)",
        ),
        "dQ told too early": (
            "256 / 192",
            "CONSUMER_WARPS // HALVES",
            "3",
            "else CONSUMER_WARPS",
            "else 7",
        ),
        "dQ's place not free": ("192", "mbarrier_wait(barriers.dq_empty, bit ^ 1)", "lane_idx()"),
        "half not free": (
            "256",
            "mbarrier_wait(barriers.dq_empty + consumer, phase)",
            "lane_idx()",
        ),
        "both halves in one place": ("256", "+ half * self.half_size", "+ 0 * self.half_size"),
        "both halves with one turn": ("256", "(row * turns + half)", "row * turns"),
        "Q not awaited": ("256", f"rings.q.consumer_wait(state)\n{_DEEP}mma", "mma"),
        "dO not awaited by dV": ("192", f"{_DO_WAIT}{_DEEP}mma.extend", "mma.extend"),
        "dO not awaited by dP": ("256", f"{_DO_WAIT}{_DEEP}mma.start", "mma.start"),
        "S not awaited": ("256", f"{_WAIT_0}{_DEEP}{_FREE_Q}{_DEEP}#", f"{_FREE_Q}{_DEEP}#"),
        "dV not awaited": ("192", f"{_WAIT_1}{_DEEP}{_FREE_DO}", _FREE_DO),
        "dQ not awaited by dV": ("256", f"warpgroup.wait_group(0)\n{_DEEP}self", "self"),
        "dP not awaited": ("192", f"warpgroup.wait_group(0)\n{_DEEP}{_FREE_DO}", _FREE_DO),
        "dQ not awaited by dK": ("256", f"warpgroup.wait_group(1)\n{_DEEP}self", "self"),
        "dK in use": ("192", f"{_WAIT_0}{_DEEP}{_FREE_Q}{_DEEP}state", f"{_FREE_Q}{_DEEP}state"),
    },
}
MUTANTS = {
    f"{label}: {module.rpartition('.')[2]}": (groups, module, *pieces)
    for module, mutants in TEXTS.items()
    for label, (groups, *pieces) in mutants.items()
} | {
    "no_proxy_fence": ("128", ring_defects.no_proxy_fence),
    "rings_released_too_early": ("64", rings_released_too_early),
}
INTACT = ("64", "128", "192", "256", "bits 64", "bits 128", "bits 192", "bits 256", "holes 128")


@pytest.mark.parametrize("group", INTACT)
def test_the_intact_kernels_survive(group):
    assert survives(simulated.kernel, group)


@pytest.mark.parametrize(("name", "group"), list(mutated.by_group(MUTANTS)))
def test_mutants_are_killed(tmp_path, name, group):
    cases(group)
    assert not survives(mutated.kernels(tmp_path, *MUTANTS[name][1:]), group)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_words_that_are_not_transposed_are_noticed(monkeypatch, head_dim):
    """The backward reads the words of a key, which are not those of a query."""
    ((case, schedule, wanted),) = cases(f"bits {head_dim}")
    monkeypatch.setattr(lowering, "cache", ByteCache("of this test", lowering.cache.limit))
    again = case._replace(mask=of_bits())
    assert all(map(contract.same_bytes, simulated_bwd.backward(again, schedule), wanted))
    monkeypatch.setattr(lowering, "cache", ByteCache("of this test", lowering.cache.limit))
    monkeypatch.setattr(masks, "_transposed", lambda words: words)
    again = case._replace(mask=of_bits())
    grads = simulated_bwd.backward(again, schedule)
    assert not any(map(contract.same_bytes, grads, wanted))
    with pytest.raises(AssertionError):
        simulated_bwd.check(again, grads)


@pytest.mark.parametrize("which", ["lse2", "delta", "dq", "semaphore", "counter"])
def test_everything_that_the_first_kernel_writes_is_needed(which):
    """Its outputs start poisoned; what it leaves unwritten is noticed, each by itself.

    Zeros of dQ are for a pass without order.
    """
    case, schedule, expected = cases("128")[0]
    names = ("out", "dout", "lse", "dlse", "lse2", "delta", "dq", "semaphore", "counter")
    true = simulated.kernel

    def pre(*args):
        def run(*tensors):
            index = names.index(which)
            copy = tensors[index].clone()
            true(*args)(*tensors)
            tensors[index].copy_(copy)

        return run

    try:
        with ptxsim.options(**LIMITS):
            grads = simulated_bwd.backward(case, schedule, ordered=which != "dq", pre=pre)
    except (ptxsim.PtxsimError, AssertionError):
        return
    same_dk = contract.same_bytes(grads.dk, expected.dk)
    assert not torch.equal(grads.dq.isfinite(), expected.dq.isfinite()) or not same_dk
