"""The model's clock: by hand, against a second way to compute it, and against published ratios."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cute_kernels.errors import ScheduleError
from cute_kernels.schedulers.model import simulation as module
from cute_kernels.schedulers.model.machines import machine
from cute_kernels.schedulers.model.programs import exact_for
from cute_kernels.schedulers.model.simulation import Simulation, simulate
from cute_kernels.schedulers.order import kinds
from tests.schedulers.usual import full


def causal(seqlen: int) -> np.ndarray:
    """Blocks of 64 x 128 at a length."""
    row = np.arange(seqlen // 64)[:, None] * 64
    column = np.arange(seqlen // 128)[None] * 128
    return np.where(row >= column + 127, 2, np.where(row + 63 >= column, 1, 0)).astype(np.uint8)


SMALL = machine(
    slots=2, full_ns=10, partial_ns=14, reduce_ns=3, handoff_ns=5, tile_start_ns=2, tile_end_ns=1
)


def timeline(told: Simulation) -> list[tuple[int, int, int, int, int]]:
    """(slot, head, kv_block, start_ns, end_ns) of each ticket, in launch order."""
    parts = (told.slot, *told.order.T, told.start_ns, told.end_ns)
    return list(zip(*(part.tolist() for part in parts), strict=True))


TWO_BUFFERS = replace(SMALL, dq_stages=2)
#: By hand: (blocks, machine, computed, landed, waits of slot, from and to).
BY_HAND = {
    # Start 2, partial 14, full 10 each, the last reduction 3, end 1; reductions hide.
    "one ticket": (np.array([[1], [2], [2]], np.uint8), SMALL, [16, 26, 36], [19, 29, 39], []),
    # Both start at 0.  Row 0 is computed at 12 by both; the first lands at 15, the handoff ends
    # at 20, the second lands at 23, and its one dQ buffer holds up row 1 from 22 to 23.
    "a second writer": (
        full(2, 2),
        SMALL,
        [12, 22, 12, 23],
        [15, 25, 23, 33],
        [(1, 22, 23), (1, 23, 30)],
    ),
    "a second buffer": (full(2, 2), TWO_BUFFERS, [12, 22, 12, 22], [15, 25, 23, 33], [(1, 22, 30)]),
    # Reductions land at 42, 72, 102; the third compute could end at 32, the fourth at 52, and the
    # last reduction begins when the third ends.
    "no free buffer": (
        full(4, 1),
        replace(TWO_BUFFERS, reduce_ns=30),
        [12, 22, 42, 72],
        [42, 72, 102, 132],
        [(0, 32, 42), (0, 52, 72), (0, 72, 102)],
    ),
    # A reduction longer than the compute holds up the ticket's own next one: that is no wait.
    "alone": (
        full(3, 1),
        replace(SMALL, reduce_ns=30),
        [12, 42, 72],
        [42, 72, 102],
        [],
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    blocks, gpu, computed, landed, waits = BY_HAND[name]
    simulation = simulate(kinds.left_to_right(blocks), gpu)
    assert simulation.computed_ns.tolist() == computed
    assert simulation.landed_ns.tolist() == landed
    assert simulation.waits() == waits
    assert simulation.makespan_ns == max(landed) + gpu.tile_end_ns == simulation.end_ns.max()


def test_a_free_slot_takes_the_next_ticket_in_order():
    blocks = np.array([[2, 2, 2, 2], [2, 0, 0, 0], [2, 0, 0, 0]], np.uint8)
    quick = replace(SMALL, reduce_ns=0, handoff_ns=0, tile_start_ns=0, tile_end_ns=0)
    simulation = simulate(kinds.left_to_right(blocks), quick)
    assert timeline(simulation) == [
        (0, 0, 0, 0, 30),
        (1, 0, 1, 0, 10),
        (1, 0, 2, 10, 20),
        (1, 0, 3, 20, 30),
    ]


def test_tickets_without_visits():
    blocks = np.array([[0, 2, 0], [0, 2, 0]], np.uint8)
    simulation = simulate(kinds.left_to_right(blocks), SMALL)
    assert simulation.end_ns.tolist() == [3, 26, 6]
    simulation = simulate(kinds.left_to_right(np.zeros((2, 3), np.uint8)), machine())
    assert (simulation.makespan_ns, simulation.unordered_ns, simulation.ratio) == (0, 0, 1.0)
    assert simulate(kinds.spt(np.zeros((2, 0), np.uint8)), machine()).makespan_ns == 0


def drawn(seed: int):
    """A drawn schedule that follows its launch, and a drawn machine that the fast clock takes."""
    random = np.random.default_rng(seed)
    rows, columns = random.integers(1, 12, 2)
    masks = int(random.choice([1, 1, 2, 3]))
    heads = masks * int(random.integers(1, 5))
    present = random.random((masks, rows, columns)) < random.choice([0.1, 0.3, 0.6, 1])
    blocks = (present * random.integers(1, 3, present.shape)).astype(np.uint8)
    schedule = kinds.permutation(
        blocks,
        order=random.permuted(np.tile(np.arange(columns), (heads, 1)), axis=1),
        heads=heads,
        heads_in_flight=int(random.integers(1, heads + 1)),
        walk=str(random.choice(kinds.WALKS)),
    )
    stages = int(random.integers(1, 4))
    gpu = machine(
        slots=int(random.integers(1, 14)),
        full_ns=int(random.choice([2200, 1700])),
        partial_ns=int(random.choice([2200, 2700, 1300])),
        reduce_ns=int(random.choice([0, 1200, 1300] if stages > 1 else [0, 1200, 3000])),
        handoff_ns=int(random.choice([0, 2000, 9000])),
        tile_start_ns=int(random.choice([0, 300])),
        tile_end_ns=int(random.choice([0, 500])),
        dq_stages=stages,
    )
    size = (64 * int(random.integers(1, 4)), 128)
    return replace(schedule, block_size=size), gpu


@pytest.mark.parametrize("seed", range(60))
def test_the_two_clocks_agree_to_the_nanosecond(seed):
    """Every other one with several query heads to a ticket, some of those with several tiles."""
    schedule, gpu = drawn(seed)
    gpu, tiles = gpu.for_blocks(schedule.block_size)
    group = 1 if seed % 2 else 2 + seed // 2 % 3
    assert exact_for(gpu)
    fast = module._lockstep(schedule, gpu, tiles, module._sections(schedule), group)
    slow = module._event_loop(module._work(schedule, gpu, tiles, group), gpu)
    for name in ("start", "end", "slot", "computed", "landed"):
        assert np.array_equal(fast[name], slow[name]), name


@pytest.mark.parametrize("seed", range(20))
def test_any_launch_that_the_ranks_follow_is_timed_as_the_event_loop_times_it(seed):
    """Heads interleaved at random, their own columns in order: seldom section by section."""
    schedule, gpu = drawn(seed + 3000)
    random, sequence = np.random.default_rng(seed), schedule.order[:, 0].copy()
    random.shuffle(sequence[: random.integers(0, len(sequence) + 1)])
    order = np.empty_like(schedule.order)
    for head in range(schedule.heads):
        order[sequence == head] = schedule.order[schedule.order[:, 0] == head]
    mixed = replace(schedule, order=order)
    simulated = simulate(mixed, gpu)
    assert simulated.safety.any_residency
    gpu, tiles = gpu.for_blocks(mixed.block_size)
    slow = module._event_loop(module._work(mixed, gpu, tiles), gpu)
    for name in ("start", "end", "computed", "landed"):
        assert np.array_equal(getattr(simulated, f"{name}_ns"), slow[name]), name


def test_large_times_do_not_overflow():
    """A thousand seconds in nanoseconds, with a tick of 1 ns: beyond 32 bits."""
    slow = machine(full_ns=10**9 + 1, partial_ns=10**9, handoff_ns=10**9 - 1, slots=2)
    schedule = kinds.left_to_right(full(30, 20), heads=2)
    simulation = simulate(schedule, slow)
    assert simulation.makespan_ns > 2**39
    loop = module._event_loop(module._work(schedule, slow, 1), slow)
    assert simulation.makespan_ns == loop["end"].max()


def test_query_heads_of_a_ticket_are_walked_one_after_another():
    """As the mask repeated once per query head, in lists that go through it copy by copy."""
    blocks = np.random.default_rng(4).integers(0, 3, (7, 5)).astype(np.uint8)
    for walk in ("ascending", "descending", "by_rank"):
        one = kinds.spt(blocks, heads=3, heads_in_flight=2, walk=walk)
        visited = [visits for _, column, visits in sorted(one.tickets()) if column < 5][:5]
        keys = np.full((5, 3 * 7), 99)
        for column, visits in enumerate(visited):
            for position, (row, _, _) in enumerate(visits):
                for member in range(3):
                    keys[column, member * 7 + row] = member * 7 + position
        tall = kinds.spt(np.tile(blocks, (3, 1)), heads=3, heads_in_flight=2, walk=keys)
        simulation, other = (
            simulate(one, machine(slots=4), group=3),
            simulate(tall, machine(slots=4)),
        )
        assert np.array_equal(simulation.landed_ns, other.landed_ns), walk
        assert np.array_equal(simulation.end_ns, other.end_ns)
        assert simulation.unordered_ns == other.unordered_ns


@pytest.mark.parametrize("size", [4, 6, 8])
def test_schedules_that_need_residents_are_timed_too(size):
    """DASH: shift is free of waits on a full mask, with a slot for each column: no row is reduced
    by two at a time.  Symmetric shift is on a causal one, with N / 2 slots for N (N + 1) / 2 tiles.
    """
    shift = simulate(kinds.shift(full(size, size), heads=3), machine(slots=size, handoff_ns=0))
    assert str(shift.safety) == f"needs({size})" and shift.ratio == 1.0
    gpu = machine(slots=size // 2, handoff_ns=0, reduce_ns=0)
    symmetric = simulate(kinds.symmetric_shift(np.tril(full(size, size)), heads=4), gpu)
    assert symmetric.makespan_ns == 4 * (size + 1) * 2200 and symmetric.stall_share == 0.0
    with pytest.raises(ScheduleError, match=rf"machine.slots: expected at least {size}"):
        simulate(kinds.shift(full(size, size)), machine(slots=size - 1))


@pytest.mark.parametrize(
    ("mask", "tokens", "flight", "kind", "walk", "ratio"),
    [
        ("full", 4096, 1, "left_to_right", "ascending", 1.28),
        ("full", 4096, 16, "left_to_right", "ascending", 1.02),
        ("full", 8192, 1, "left_to_right", "ascending", 1.13),
        ("causal", 8192, 4, "left_to_right", "ascending", 1.45),
        ("causal", 8192, 4, "left_to_right", "descending", 1.21),
        ("causal", 8192, 1, "spt", "ascending", 1.00),
    ],
)
def test_the_ratios_that_the_constants_were_fitted_to(mask, tokens, flight, kind, walk, ratio):
    """FA3 on H800, 2 x 16 heads: full 4k 1.28 fits the handoff, the others follow from it."""
    blocks = causal(tokens) if mask == "causal" else full(tokens // 64, tokens // 128)
    schedule = kinds.KINDS[kind](blocks, heads=32, heads_in_flight=flight, walk=walk)
    assert simulate(schedule).ratio == pytest.approx(ratio, abs=0.015)
