"""Bits of the SM90 backward: the same under every timing, grid and residency; the schedule's own.

Tiles come from a ticket counter, so a schedule that `check` calls any_residency may run with CTAs
dispatched in any order and with any number of them resident; one that needs P hangs below P.  A
group of query heads to a ticket sometimes needs more.
"""

from __future__ import annotations

import dataclasses
import functools
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch

import ptxsim
from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.order.safety import check
from cute_kernels.schedulers.order.schedule import Schedule
from cute_kernels.sparse_attn import config
from ptxsim import modes, skips
from ptxsim.modes import ANY_CTA
from tests import certified, contract
from tests.sparse_attn import mutated, simulated

simulated_bwd = skips.import_module("tests.sparse_attn.simulated_bwd")
#: What runs at every commit while the kernels are proved.
EACH_COMMIT = "test_every_mode_gives_the_same_bits test_every_grid_gives_the_same_bits"
pytestmark = certified.marks("sparse_attn", EACH_COMMIT)

NIGHT = pytest.mark.nightly
_ANY = {"async_mode": "random", "wgmma_mode": "random", "warp_order": "random", "seed": 5}
MODES = [
    *modes.MODES,
    modes.Mode("resident-7", _ANY | {"resident_ctas": 7}),
    *(
        modes.Mode(f"any-{n}", _ANY | {"cta_order": "random", "resident_ctas": n})
        for n in (1, 2, 7)
    ),
]


def a_document(length: int) -> BlockMask:
    ids = torch.randint(0, 4, (1, length), generator=torch.Generator().manual_seed(2))
    return BlockMask.document(ids.sort(dim=1).values)


#: head_dim, query heads, KV heads, mask, schedule
CASES = {
    "causal 64": (64, 4, 2, BlockMask.causal(384, 384), kinds.spt),
    "causal 96": (96, 2, 1, BlockMask.causal(330, 330), kinds.spt),
    "causal 128": (128, 2, 1, BlockMask.causal(330, 330), kinds.spt),
    "full 128": (128, 1, 1, BlockMask.full(256, 512), kinds.left_to_right),
    "causal 192": (192, 2, 1, BlockMask.causal(330, 330), kinds.spt),
    "full 256": (256, 1, 1, BlockMask.full(200, 384), kinds.left_to_right),
    "window 192": (192, 2, 2, BlockMask.sliding_window(400, 400, left=150, right=0), kinds.lpt),
    "causal 256": (256, 4, 2, BlockMask.causal(330, 330), kinds.spt),
    "window 64": (64, 2, 2, BlockMask.sliding_window(400, 400, left=150, right=0), kinds.lpt),
    "document 128": (128, 1, 1, a_document(400), kinds.lpt),
}


#: One of each head size for every commit, with groups and without; the others are nightly.
OFTEN = ("causal 64", "causal 96", "full 128", "causal 192", "full 256")


def modes_of(name: str) -> list[modes.Mode]:
    """All but races, which are slow to look for, or these alone."""
    return [
        m
        for m in MODES
        if (m.name in ("default", "races") if name == "races" else m.name != "races")
    ]


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        *(
            pytest.param(n, "timing", marks=() if n in OFTEN else pytest.mark.nightly)
            for n in CASES
        ),
        *((n, "races") for n in CASES if n.startswith("causal") or "256" in n),
    ],
)
def test_every_mode_gives_the_same_bits(name, chosen):
    head_dim, heads, kv_heads, mask, kind = CASES[name]
    case = simulated_bwd.case(mask, head_dim=head_dim, heads=heads, kv_heads=kv_heads)
    schedule = kind(case.lowered.mask, heads=case.kv_heads)
    assert check(schedule, case.lowered.mask).any_residency
    run = lambda: tuple(simulated_bwd.backward(case, schedule))  # noqa: E731
    results = modes.run_modes(run, modes_of(chosen))
    simulated_bwd.check(case, simulated_bwd.Gradients(*results["default"]))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_every_grid_gives_the_same_bits(head_dim):
    case = simulated_bwd.case(BlockMask.causal(400, 400), head_dim=head_dim, heads=2, kv_heads=2)
    schedule = kinds.spt(case.lowered.mask, heads=2, heads_in_flight=2)
    first = simulated_bwd.backward(case, schedule)
    for ctas in (1, 2, 3, 5, 7):
        grads = simulated_bwd.backward(case, schedule, ctas=ctas)
        assert all(map(contract.same_bytes, first, grads)), ctas


def relaunched(schedule: Schedule, order: np.ndarray) -> Schedule:
    """The same visits and ranks, with tickets in another order."""
    return dataclasses.replace(schedule, order=order.astype(np.int32), name="relaunched")


@pytest.mark.parametrize("head_dim", config.HEAD_DIMS)
def test_the_launch_order_is_not_in_the_bits_and_the_write_order_is(head_dim):
    case = simulated_bwd.case(BlockMask.full(256, 512), head_dim=head_dim)
    mask = case.lowered.mask
    schedule = kinds.left_to_right(mask, heads=1)
    first = simulated_bwd.backward(case, schedule)
    shuffled = relaunched(schedule, schedule.order[[2, 0, 3, 1]])
    assert not check(shuffled, mask).any_residency
    assert all(map(contract.same_bytes, first, simulated_bwd.backward(case, shuffled)))

    # Only the ranks differ: dQ has other bits, dK and dV, whose visits are the same, have not.
    other = kinds.permutation(mask, order=[0, 1, 2, 3], write_order=[2, 0, 3, 1])
    assert (other.q_block == schedule.q_block).all() and (other.order == schedule.order).all()
    grads = simulated_bwd.backward(case, other)
    assert not contract.same_bytes(grads.accumulator, first.accumulator)
    assert contract.same_bytes(grads.dk, first.dk)
    assert contract.same_bytes(grads.dv, first.dv)
    simulated_bwd.check(case, grads)

    # Only the visits differ: the other way round.
    other = kinds.left_to_right(mask, walk="descending")
    grads = simulated_bwd.backward(case, other)
    assert contract.same_bytes(grads.accumulator, first.accumulator)
    assert not contract.same_bytes(grads.dk, first.dk)
    assert not contract.same_bytes(grads.dv, first.dv)


def chained(mask: BlockMask, heads: int) -> Schedule:
    """Three columns of two rows.  The first waits for the start of the second only, whose end waits
    for the third: two residents do, unless the first comes back for another query head."""
    straight = kinds.left_to_right(mask, heads=heads)
    assert straight.q_block.tolist() == [0, 1] * 3
    return dataclasses.replace(straight, rank=np.array([1, 0, 0, 2, 2, 1], np.int32))


#: mask, schedule, residents by group of query heads
NEEDY = {
    "shift": (BlockMask.full(512, 512), kinds.shift, {1: 4, 2: 4}),
    "chained": (BlockMask.full(256, 384), chained, {1: 2, 2: 3, 3: 3}),
}


@pytest.mark.parametrize(
    ("name", "head_dim", "heads", "kv_heads"),
    [
        *(("shift", *sizes) for sizes in ((128, 1, 1), (128, 2, 1), (64, 2, 1), (64, 4, 2))),
        *(
            ("chained", *sizes)
            for sizes in ((128, 1, 1), (128, 2, 1), (64, 1, 1), (64, 3, 1), (96, 2, 1))
        ),
    ],
)
def test_a_schedule_that_needs_residents_hangs_below_them_only(name, head_dim, heads, kv_heads):
    """`check` says how many, with a group of query heads to a ticket too."""
    block_mask, kind, residents = NEEDY[name]
    case = simulated_bwd.case(block_mask, head_dim=head_dim, heads=heads, kv_heads=kv_heads)
    mask, group = case.lowered.mask, heads // kv_heads
    schedule = kind(mask, heads=kv_heads)
    needed = check(schedule, mask, group=group).residents
    assert (check(schedule, mask).residents, needed) == (residents[1], residents[group])
    expected = simulated_bwd.backward(case, schedule)
    for options in (_ANY, _ANY | {"cta_order": "random", "seed": 6}, {"async_mode": "late"}):
        with ptxsim.options(resident_ctas=needed, **options):
            grads = simulated_bwd.backward(case, schedule)
        assert all(map(contract.same_bytes, grads, expected))
        hangs = pytest.raises(ptxsim.PtxsimError, match="deadlock")
        with ptxsim.options(resident_ctas=needed - 1, **options), hangs:
            simulated_bwd.backward(case, schedule)


def test_a_ticket_in_reserve_needs_more_residents(tmp_path):
    """Why the next ticket is taken only when all turns of the last one have come."""
    block_mask, kind, residents = NEEDY["shift"]
    case = simulated_bwd.case(block_mask, head_dim=128, heads=2, kv_heads=1)
    schedule = kind(case.lowered.mask, heads=1)

    def in_reserve(patch, module):
        dispatch = lambda self, counter, total, done: self.dispatch(counter, total)  # noqa: E731
        patch.setattr(module.ticket_device.TicketRing, "dispatch_one_by_one", dispatch)

    kernel = mutated.kernels(tmp_path, in_reserve)
    hangs = pytest.raises(ptxsim.PtxsimError, match="deadlock")
    with ptxsim.options(resident_ctas=residents[2], **_ANY), hangs:
        simulated_bwd.backward(case, schedule, backward=kernel)


def test_the_last_turn_is_that_of_the_last_query_head(tmp_path):
    """A ticket of two query heads is done with the turns of the second, not with the first's.

    Three residents: one has a long column that nobody waits for, and takes the last ticket when it
    is done.  The columns of the other two are as in `chained`: the first one's second head waits
    for the second one, which waits for the last ticket.  Taken in reserve by the first, that waits
    for ever.
    """
    allowed = torch.zeros(1, 1, 1280, 512, dtype=torch.bool)
    allowed[..., 256:, :128] = allowed[..., :256, 128:] = True
    case = simulated_bwd.case(BlockMask.from_dense(allowed), head_dim=128, heads=2, kv_heads=1)
    straight = kinds.left_to_right(case.lowered.mask, heads=1)
    assert straight.q_block.tolist() == [*range(2, 10), *([0, 1] * 3)]
    ranks = np.array([0] * 8 + [1, 0, 0, 2, 2, 1], np.int32)
    schedule = dataclasses.replace(straight, rank=ranks)
    expected = simulated_bwd.backward(case, schedule)
    entry = "visit.index == column.end - 1"
    last = f"({entry}) & (visit.member == work.sizes.group - 1)"
    for pieces in ((), (last, entry)):
        kernel = mutated.kernels(tmp_path, "sparse_attn.kernel_bwd_sm90", *pieces)
        hangs = pytest.raises(ptxsim.PtxsimError, match="deadlock") if pieces else nullcontext()
        with ptxsim.options(resident_ctas=3, **_ANY), hangs:
            grads = simulated_bwd.backward(case, schedule, backward=kernel)
    assert all(map(contract.same_bytes, grads, expected))


def test_unordered_bits_depend_on_timing():
    """What the turns are for: without them dQ changes from run to run, dK and dV do not."""
    case = simulated_bwd.case(BlockMask.full(256, 512), head_dim=128)
    schedule = kinds.left_to_right(case.lowered.mask, heads=1)
    results = modes.run_modes(
        lambda: tuple(simulated_bwd.backward(case, schedule, ordered=False)),
        [m for m in modes.QUICK_MODES if "wgmma_math" not in m.options and m.name != "races"],
        same_bits=False,
    )
    runs = [simulated_bwd.Gradients(*tensors) for tensors in results.values()]
    assert any(not contract.same_bytes(runs[0].accumulator, r.accumulator) for r in runs)
    assert all(contract.same_bytes(runs[0].dk, r.dk) for r in runs)
    assert all(contract.same_bytes(runs[0].dv, r.dv) for r in runs)


# ---- first writers, and the order of loads -------------------------------------------------------

#: The visit of rank 0 stores its tile of dQ where others add theirs; its bytes are those of an add;
#: rows come before keys.
OPTIONS = ("pdl", "rows_first", "first_stores")
#: Of tiles of 64 rows: dP is asked for behind S, before dQ of the visit before is handed over.
MORE = (*OPTIONS, "dp_first")
OFF = dict.fromkeys(MORE, False)


def backward(case, schedule, **options):
    """Gradients with these options of the configuration."""
    settings = {name: options.pop(name) for name in MORE if name in options}
    true = config.configure

    def configure(*args, **kwargs):
        return dataclasses.replace(true(*args, **kwargs), **settings)

    with mock.patch.object(config, "configure", configure):
        return simulated_bwd.backward(case, schedule, **options)


@functools.cache
def problem(head_dim: int, name: str):
    """(case, schedule) of a mask with empty rows and columns, or of one with groups."""
    if name == "holes":
        return simulated_bwd.holes(head_dim)
    case = simulated_bwd.case(BlockMask.causal(330, 330), head_dim=head_dim, heads=2, kv_heads=1)
    return case, kinds.spt(case.lowered.mask, heads=case.kv_heads)


def subnormal(head_dim: int):
    """One block of keys so small that all of dQ is below 2^-126."""
    case = simulated_bwd.case(BlockMask.full(130, 100), head_dim=head_dim)
    return case._replace(k=case.k * 2.0**-130), kinds.left_to_right(case.lowered.mask, heads=1)


def same(a, b) -> bool:
    """Whether dq, dk and dv have the same bytes; the workspace of tiles without a visit may not."""
    return all(map(contract.same_bytes, a[:3], b[:3]))


@pytest.mark.parametrize(
    ("head_dim", "name", "options"),
    [
        (128, "holes", MORE),
        pytest.param(64, "causal", OPTIONS, marks=NIGHT),
        pytest.param(96, "holes", MORE, marks=NIGHT),
        *(pytest.param(d, "holes", (o,), marks=NIGHT) for d in (64, 128) for o in OPTIONS),
        *(pytest.param(d, "causal", ("pdl", "rows_first"), marks=NIGHT) for d in (192, 256)),
    ],
)
def test_options_change_no_byte(head_dim, name, options):
    case, schedule = problem(head_dim, name)
    want = backward(case, schedule, **OFF)
    for settings in ({}, ANY_CTA | {"seed": 2, "resident_ctas": 2}):
        results = backward(case, schedule, **OFF | dict.fromkeys(options, True), **settings)
        assert same(results, want)


@pytest.mark.parametrize("head_dim", [128, pytest.param(64, marks=NIGHT)])
def test_what_is_stored_is_what_a_bulk_add_to_zero_makes(tmp_path, head_dim):
    """+0 of a subnormal number, which bulk adds of fp32 flush; stored as it is, it would be kept.

    The simulator's bulk adds flush nothing, so the kernel without stores is no reference here.
    """
    case, schedule = subnormal(head_dim)
    assert not simulated_bwd.backward(case, schedule).dq.view(torch.int16).any()

    pieces = "turnstile.add_zero(rdQ)", "pass"
    kernel = mutated.kernels(tmp_path, "sparse_attn.kernel_bwd_sm90", *pieces)
    assert simulated_bwd.backward(case, schedule, backward=kernel).dq.view(torch.int16).any()


@pytest.mark.parametrize("head_dim", [128, pytest.param(96, marks=NIGHT)])
def test_many_key_blocks_take_zeros_and_the_same_bytes(monkeypatch, head_dim):
    """The mask has 6 of 16 blocks: 1.5 key blocks a query block."""
    case, schedule = problem(head_dim, "holes")
    taken = []

    def kernel(chosen):
        taken.append(chosen.first_stores)
        return simulated.kernel(chosen)

    results = []
    for few in (1.5, 1.49):
        monkeypatch.setattr(config, "FEW_KEY_BLOCKS", few)
        results.append(backward(case, schedule, backward=kernel))
    assert taken == [True, False]
    assert same(*results)
