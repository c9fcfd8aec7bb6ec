"""CUTE_KERNELS_WATCHDOG_MS in the simulator, whose timer counts warp instructions as nanoseconds.

A turn that does not come is named, with the one whose turn it is, in place of a hang; turns that
come leave every bit as it was.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import NamedTuple

import pytest
import torch

from cute_kernels import settings
from cute_kernels.errors import SettingError, WatchdogError
from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.order.schedule import Schedule
from cute_kernels.sparse_attn import config, launch, masks, watchdog
from tests import certified, contract, ptxsim
from tests.ptxsim import available

simulated_bwd = available.import_module("tests.sparse_attn.simulated_bwd")
order = available.import_module("tests.sparse_attn.test_bwd_sm90_order")
module = available.import_module("cute_kernels.sparse_attn.kernel_bwd_sm90")
#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_one_resident_too_few_is_named test_whose_turn_it_is_follows_the_lists"
pytestmark = [
    available.requires_sim,
    pytest.mark.sim,
    pytest.mark.simulates("sparse_attn", often=EACH_COMMIT),
]

#: Milliseconds: more than any wait here for a turn that comes.
LIMIT = 4
#: The simulator calls it a hang when nothing has changed for this long: later than that.
PATIENT = {"stall_steps": 1_000_000}
MESSAGE = re.compile(
    rf"gave up after {LIMIT} ms \(CUTE_KERNELS_WATCHDOG_MS\): at query head (\d+), row tile (\d+), "
    r"(.*) waits for rank (\d+); (\d+) have landed, and the turn of rank (\d+) is that of (.*)"
)


@pytest.fixture
def limit(monkeypatch):
    """Sets the milliseconds; tests read settings at every use."""

    def set_to(ms: object) -> None:
        monkeypatch.setenv(f"{settings.PREFIX}WATCHDOG_MS", str(ms))

    return set_to


class Stuck(NamedTuple):
    """What a message says: who waits for which rank where, what has landed, whose turn it is."""

    head: int
    tile: int
    who: str
    rank: int
    landed: int
    whose: str


def stuck(case, schedule, kernel=None, **options) -> Stuck:
    """What the watchdog says, which fits the schedule."""
    given_up = pytest.raises(WatchdogError)
    with ptxsim.options(**PATIENT, **options), given_up as caught:
        simulated_bwd.backward(case, schedule, backward=kernel)
    head, tile, who, rank, landed, again, whose = MESSAGE.search(str(caught.value)).groups()
    out = Stuck(int(head), int(tile), who, int(rank), int(landed), whose)
    assert int(again) == out.landed != out.rank
    tile_m = config.configure("bf16", case.q.shape[3], "none", True).tile_m
    for rank, named in ((out.rank, who), (out.landed, whose)):
        having = [
            f"key block {column} (ticket {t})"
            for t, (h, column, listed) in enumerate(schedule.tickets())
            if h == out.head // (case.q.shape[2] // case.k.shape[2])
            and (out.tile * tile_m // 128, rank) in {(m, r) for m, _, r in listed}
        ]
        assert named == " and ".join(having or ["nobody"])
    return out


@pytest.mark.parametrize(
    ("name", "head_dim", "heads", "kv_heads"),
    [("shift", 64, 2, 1), pytest.param("chained", 128, 1, 1, marks=pytest.mark.nightly)],
)
def test_one_resident_too_few_is_named(limit, name, head_dim, heads, kv_heads):
    """The turn of a ticket that is not running; and nothing with as many residents as it needs."""
    limit(LIMIT)
    block_mask, kind, residents = order.NEEDY[name]
    case = simulated_bwd.case(block_mask, head_dim=head_dim, heads=heads, kv_heads=kv_heads)
    schedule, needed = kind(case.lowered.mask, heads=kv_heads), residents[heads // kv_heads]
    stuck_ctas = stuck(case, schedule, resident_ctas=needed - 1)
    assert stuck_ctas.landed < stuck_ctas.rank
    if needed == 2:
        assert (stuck_ctas.who, stuck_ctas.whose) == (
            "key block 0 (ticket 0)",
            "key block 1 (ticket 1)",
        )
    with ptxsim.options(resident_ctas=needed, **PATIENT):
        simulated_bwd.check(case, simulated_bwd.backward(case, schedule))


def misranked(mask: BlockMask) -> Schedule:
    """Two KV heads with lists of their own; in the second's, key block 0 has rank 5 in place of 1
    among the writers of the second query block."""
    schedule = kinds.permutation(mask, order=[[0, 1], [1, 0]], heads=2)
    first = schedule.offset[schedule.list_of_head[1] * schedule.num_kv_blocks]
    (index,) = (i for i in range(first, first + 2) if schedule.q_block[i] == 1)
    assert schedule.rank[index] == 1
    ranks = schedule.rank.copy()
    ranks[index] = 5
    return dataclasses.replace(schedule, rank=ranks)


@pytest.mark.parametrize(("head_dim", "tiles"), [(64, (1,)), (96, (2, 3)), (128, (2, 3))])
def test_a_wrong_rank_is_named(limit, head_dim, tiles):
    """Whatever the timing: of two KV heads and four query heads the first that waits for it."""
    limit(LIMIT)
    case = simulated_bwd.case(BlockMask.full(256, 256), head_dim=head_dim, heads=4, kv_heads=2)
    schedule = misranked(case.lowered.mask)
    ticket = schedule.order.tolist().index([1, 0])
    for options in ({}, {"async_mode": "random", "warp_order": "random", "cta_order": "random"}):
        stuck_ctas = stuck(case, schedule, **options)
        assert stuck_ctas.tile in tiles
        assert stuck_ctas._replace(tile=0) == Stuck(
            2, 0, f"key block 0 (ticket {ticket})", 5, 1, "nobody"
        )


def test_a_lost_release_is_named(limit, monkeypatch):
    limit(LIMIT)

    @functools.cache
    def kernel(chosen):
        with monkeypatch.context() as patch:
            patch.setattr(
                module.turnstile, "finish_turn", lambda semaphore: module.turnstile.land()
            )
            return module.build(chosen, compile=ptxsim.compile)

    case = simulated_bwd.case(BlockMask.full(128, 256), head_dim=64)
    schedule = kinds.permutation(case.lowered.mask, order=[1, 0])
    who, whose = "key block 0 (ticket 1)", "key block 1 (ticket 0)"
    assert stuck(case, schedule, kernel) == Stuck(0, 0, who, 1, 0, whose)


@pytest.mark.parametrize("name", ["causal 64", pytest.param("full 128", marks=pytest.mark.nightly)])
def test_turns_that_come_keep_their_bits(limit, name):
    head_dim, heads, kv_heads, mask, kind = order.CASES[name]
    case = simulated_bwd.case(mask, head_dim=head_dim, heads=heads, kv_heads=kv_heads)
    schedule = kind(case.lowered.mask, heads=case.kv_heads)
    want = simulated_bwd.backward(case, schedule)
    limit(LIMIT)
    for mode in order.MODES:
        if mode.name in ("default", "late", "any-1", "any-7"):
            with ptxsim.options(**mode.options):
                grads = simulated_bwd.backward(case, schedule)
            for a, b in zip(grads, want, strict=True):
                assert contract.same_bytes(a, b), mode.name


@pytest.mark.parametrize("parts", [1, 2])
def test_whose_turn_it_is_follows_the_lists(parts):
    """Each visit of a schedule in turn, as the holder and as the one that waits; of halves too."""
    mask = BlockMask.causal(384, 384)
    schedule = kinds.permutation(mask, order=[[2, 0, 1], [0, 1, 2]], heads=2)
    lists = masks.order_of(masks.lower(mask), schedule)
    tiles, tile_m, group = 6, 64, 2
    generator = torch.Generator().manual_seed(parts)

    def said(head: int, tile: int, rank: int, landed: int) -> str:
        part = torch.randint(parts, (2,), generator=generator).tolist()
        both = rank * parts + part[0], landed * parts + part[1]
        record = torch.tensor([1, head * tiles + tile, *both])
        with pytest.raises(WatchdogError) as caught:
            watchdog.require_turns(record, lists, tiles, tile_m, group, parts, 7)
        return str(caught.value).split("): ", 1)[1]

    visits = 0
    for t, (head, block, entries) in enumerate(schedule.tickets()):
        who = f"key block {block} (ticket {t})"
        for q_block, _, rank in entries:
            visits += 1
            place = head * group + 1, 2 * q_block + 1
            row = "at query head {}, row tile {}, ".format(*place)
            assert said(*place, rank, 9) == (
                f"{row}{who} waits for rank {rank}; 9 have landed, and the turn of rank 9 is that "
                "of nobody"
            )
            assert said(*place, 9, rank) == (
                f"{row}nobody waits for rank 9; {rank} have landed, and the turn of rank {rank} is "
                f"that of {who}"
            )
    assert visits == 12
    nothing = torch.zeros(watchdog.FIELDS, dtype=torch.int32)
    watchdog.require_turns(nothing, lists, tiles, tile_m, group, parts, 7)


def test_the_unordered_kernel_has_no_turns_to_watch(limit):
    kernel_config = config.configure("bf16", 64, "band", False, watchdog_ms=5)
    assert kernel_config == config.configure("bf16", 64, "band", False)
    assert config.configure("bf16", 64, "band", True, watchdog_ms=5).watchdog_ms == 5
    limit(5)
    case = simulated_bwd.case(BlockMask.full(128, 128), head_dim=64)
    simulated_bwd.backward(case, kinds.spt(case.lowered.mask, heads=1), ordered=False)


def test_it_reads_a_timer_and_keeps_its_turns():
    """Which class B forbids: that is why it is not among the kernels that have certificates."""
    plain = config.configure("bf16", 128, "band", True)
    (expect,) = (e for k, _, e in launch.catalogue() if k == launch.backward_entry(plain))
    watched = launch.backward_entry(dataclasses.replace(plain, watchdog_ms=1000))
    rules = {finding.rule for finding in certified.certify(watched, "B", expect).findings}
    assert "A2" in rules and not rules & {"A1", "R1", "R2", "R5", "R6"}, rules
    assert watched not in {kernel for kernel, _, _ in launch.catalogue()}


def test_what_is_not_taken(limit, monkeypatch):
    limit("-1")
    with pytest.raises(SettingError, match="WATCHDOG_MS: expected a whole number"):
        settings.watchdog_ms()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(WatchdogError, match="CUDA graph"):
        watchdog.record(torch.device("cuda:0"))
