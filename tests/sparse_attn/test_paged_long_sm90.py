"""The two SM90 kernels of long contexts in the simulator: the bytes of the kernel of one chain."""

from __future__ import annotations

import dataclasses

import cutlass
import pytest
import torch
from cutlass import cute

import ptxsim
from cute_kernels.sparse_attn import config
from cute_kernels.sparse_attn.paged import launch as paged
from ptxsim import modes
from ptxsim.skips import import_module, requires_sim
from tests import contract
from tests.sparse_attn import simulated
from tests.sparse_attn.paged_cases import Batch, drawn
from tests.sparse_attn.paged_rows import require_rows

scores = import_module("cute_kernels.sparse_attn.kernel_paged_scores_sm90")
values = import_module("cute_kernels.sparse_attn.kernel_paged_values_sm90")
paged_tiles = import_module("cute_kernels.sparse_attn.device.paged_tiles")
long_tiles = import_module("cute_kernels.sparse_attn.device.long_tiles")
exchange = import_module("cute_kernels.sparse_attn.device.probability_exchange")
values_state = import_module("cute_kernels.sparse_attn.device.values_state")

#: What runs at every commit while the kernels are proved.
EACH_COMMIT = "test_bytes test_the_choice test_mutants"
pytestmark = [
    requires_sim,
    pytest.mark.sim,
    pytest.mark.simulates("sparse_attn", often=EACH_COMMIT),
]

HEADS, PAGE = (4, 1, 128), 16
#: Scores that rise block by block, so that each rescales; and that rarely do.
RISING, FALLING = 60.0, -12.0


def run(batch: Batch, planner=paged.plan_long, sms: int = 132):
    """(out, lse) of a planner in the simulator, with so many SMs."""
    with simulated.simulated(sms):
        return planner(*batch.operands()).run(*batch.operands())


def chain(batch: Batch):
    """(out, lse) of the kernel that walks a row's keys in one CTA."""
    return run(batch, paged.plan_chain)


def require_chain(batch: Batch, sms: int = 132) -> None:
    """The two kernels have the bytes of the one."""
    assert all(map(contract.same_bytes, run(batch, sms=sms), chain(batch)))


@pytest.mark.parametrize("sms", [132, 7])
@pytest.mark.parametrize("slope", [0.0, RISING, FALLING])
def test_bytes(slope, sms):
    """Few SMs take more columns a CTA; lengths end in each place of a batch of blocks, or at 0."""
    lengths = [(1, 1700), (1, 640), (1, 513), (0, 77), (1, 1), (0, 0), (1, 130)]
    require_chain(drawn(lengths, HEADS, PAGE, seed=1, slope=slope), sms)


def test_rows_of_the_dense_forward():
    batch = drawn([(1, 1300), (1, 700)], (8, 2, 128), 64, seed=2, slope=FALLING)
    require_rows(batch, *run(batch))


@pytest.mark.parametrize(
    "chosen", [modes.QUICK_MODES, pytest.param(modes.MODES, marks=pytest.mark.nightly)]
)
def test_modes(chosen):
    """Late and early data, random warps, any order and residency; rings that go round twice."""
    batch = drawn([(1, 6300), (1, 900)], HEADS, PAGE, seed=3, slope=FALLING)
    results = modes.run_modes(lambda: run(batch), chosen)
    assert all(map(contract.same_bytes, results["default"], chain(batch)))


@pytest.mark.nightly
@pytest.mark.parametrize("sms", [1, 2, 7])
@pytest.mark.parametrize("slope", [RISING, FALLING])
def test_modes_of_few_sms(sms, slope):
    lengths = [(1, 2300), (0, 300), (1, 900), (0, 0)]
    batch = drawn(lengths, (24, 2, 128), PAGE, seed=4, slope=slope, window=(1900, 0))
    results = modes.run_modes(lambda: run(batch, sms=sms))
    assert all(map(contract.same_bytes, results["default"], chain(batch)))


@pytest.mark.parametrize("sms", [1, 132])
def test_any_queries(sms):
    """Sequences with several queries or none, tokens of none: as many tokens as sequences."""
    lengths = [(3, 900), (0, 300), (0, 0), (2, 260), (0, 5), (1, 129), (0, 1)]
    batch = drawn(lengths, HEADS, PAGE, seed=5, padding=1)
    assert len(batch.q) == len(batch.seqlens_k)
    require_chain(batch, sms)


OPTIONS = [
    ({"window": (700, 0)}, 1),
    ({"window": (40, 0), "softcap": 20.0}, 3),
    ({"with_sinks": True, "dtype": "fp16"}, 16),
    ({"window": (900, None), "with_sinks": True}, 9),
    ({"window": (None, None), "softcap": 5.0, "with_sinks": True}, 8),
]


@pytest.mark.nightly
@pytest.mark.parametrize("slope", [RISING, FALLING])
@pytest.mark.parametrize(("options", "group"), OPTIONS)
def test_options(options, group, slope):
    lengths = [(1, 1500), (2, 800), (0, 3), (1, 17)]
    require_chain(drawn(lengths, (2 * group, 2, 64), 32, seed=group, slope=slope, **options))


@pytest.mark.nightly
@pytest.mark.parametrize("sms", [132, 7])
@pytest.mark.parametrize("page", config.PAGE_SIZES)
@pytest.mark.parametrize("width", config.HEAD_DIMS)
def test_head_sizes_and_pages(width, page, sms):
    require_chain(drawn([(1, 1400), (1, 300)], (6, 2, width), page, seed=width), sms)


@pytest.mark.nightly
@pytest.mark.parametrize("width", config.HEAD_DIMS)
def test_head_sizes_in_all_modes(width):
    batch = drawn([(1, 3300), (1, 300)], (5, 1, width), 128, seed=width, slope=FALLING)
    results = modes.run_modes(lambda: run(batch), modes.QUICK_MODES)
    assert all(map(contract.same_bytes, results["default"], chain(batch)))


@pytest.mark.nightly
def test_other_layouts():
    """Head-major pages, and views of one buffer of keys and values."""
    batch = drawn([(1, 900), (1, 300)], (4, 2, 128), PAGE, seed=6)
    want = chain(batch)
    by_head = [
        t.transpose(1, 2).contiguous().transpose(1, 2) for t in (batch.k_cache, batch.v_cache)
    ]
    both = torch.stack([batch.k_cache, batch.v_cache], dim=1)
    for k_cache, v_cache in (by_head, (both[:, 0], both[:, 1])):
        got = run(dataclasses.replace(batch, k_cache=k_cache, v_cache=v_cache))
        assert all(map(contract.same_bytes, got, want))


@pytest.mark.nightly
def test_scores_that_are_not_finite():
    """Inf and NaN among the keys of a sequence do to its rows what they do in the chain."""
    batch = drawn([(1, 1700), (1, 600)], HEADS, PAGE, seed=7)
    table = batch.block_table
    batch.k_cache[table[0, 40], 3] = float("inf")
    batch.k_cache[table[0, 70]] = float("nan")
    for got, want in zip(run(batch), chain(batch), strict=True):
        # Payloads of NaN are not modelled.
        assert contract.same_bytes(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_the_choice():
    """By shapes alone: few tokens, one for each sequence on average, over a large capacity."""

    def is_long(tokens=1, heads=(32, 8), width=128, sequences=1, pages=64, sms=132):
        q = torch.empty(tokens, heads[0], width, device="meta")
        cache = torch.empty(9, 64, heads[1], width, device="meta")
        value = torch.empty(9, 64, heads[1], config.VALUE_DIMS[width], device="meta")
        table = torch.empty(sequences, pages, dtype=torch.int32, device="meta")
        with simulated.simulated(sms):
            return paged.is_long(q, cache, value, table)

    assert is_long() and is_long(8, sequences=8) and is_long(width=192)
    assert not is_long(9, sequences=9) and not is_long(sms=15) and is_long(sms=16)
    assert not is_long(pages=63) and not is_long(2) and not is_long(sequences=2)
    assert is_long(heads=(32, 2)) and not is_long(heads=(34, 2))
    assert is_long(pages=32768) and not is_long(pages=32769)
    assert is_long(4, width=256, sequences=4) and not is_long(5, width=256, sequences=5)


@pytest.mark.nightly
def test_the_op_takes_either():
    """`paged_attention` of the launcher, with a table of enough pages; the bytes of the chain."""
    batch = drawn([(1, 700)], HEADS, 64, seed=8)
    table = torch.cat([batch.block_table, batch.block_table.new_full((1, 64), 10**6)], dim=1)
    batch = dataclasses.replace(batch, block_table=table)
    ptxsim.clear_launches()
    got = run(batch, paged.plan_paged)
    entries = [launch["entry"] for launch in ptxsim.launches()]
    assert ["scores" in entries[0], "values" in entries[1], len(entries)] == [True, True, 2]
    assert all(map(contract.same_bytes, got, chain(batch)))


# ---- mutants ------------------------------------------------------------------------------------


def _p_of_another_block(patch):
    kernel, true = exchange.ProbabilityExchange, exchange.ProbabilityExchange.give
    patch.setattr(kernel, "give", lambda self, rP, slot, lane: true(self, rP, slot ^ 1, lane))


def _maximum_starts_anew(patch):
    """The running maximum forgets what came before the last four blocks."""
    true = values.PagedValuesSm90.maxima

    def anew(self, row_max, near, lane):
        row_max.fill(-cutlass.Float32.inf)
        return true(self, row_max, near, lane)

    patch.setattr(values.PagedValuesSm90, "maxima", anew)


def _sum_in_another_order(patch):
    @cute.jit
    def ascending(scores: cute.Tensor, shift: cutlass.Float32, c: cutlass.Float32):
        total = cutlass.Float32(0.0)
        for index in cutlass.range_constexpr(cute.size(scores)):
            power = cute.math.fma(scores[index], c, shift)
            scores[index] = cute.math.exp2(power, fastmath=True)
            total = total + scores[index]
        return total

    patch.setattr(values, "exponentiate", ascending)


def _columns_of_a_neighbour(patch):
    loads = import_module("cute_kernels.sparse_attn.device.value_loads").ValueLoads
    true = loads.copy_block
    patch.setattr(loads, "copy_block", lambda self, *args: true(self, *args[:-1], args[-1] ^ 16))


def _tail_keys_not_masked(patch):
    patch.setattr(paged_tiles, "keep_between", lambda *args: None)


def _tail_values_not_cleaned(patch):
    patch.setattr(paged_tiles, "clean", lambda *args: None)


def _p_overwritten(patch):
    """P of a stage is written before the stage is free."""
    patch.setattr(exchange.ProbabilityExchange, "await_empty", lambda *args: None)


def _values_overwritten(patch):
    """A stage of V is given back when its products are issued."""
    true = values_state.ValueRing.await_full

    def early(self, state):
        true(self, state)
        self.release(state)

    patch.setattr(values_state.ValueRing, "await_full", early)
    patch.setattr(
        values.PagedValuesSm90, "give_back", lambda self, handover, p, ring, v: handover.release(p)
    )


def _never_rescaled_in_a_batch(patch):
    def whole(self, handover, tile, first, slot):
        return (first * 128 >= tile.first_key) & (first * 128 + 512 <= tile.end_key)

    patch.setattr(values.PagedValuesSm90, "is_plain", whole)


def _scores_read_early(patch):
    patch.setattr(cute.arch, "cp_async_wait_group", lambda count: None)


def _segment_of_another_head(patch):
    true = long_tiles.segment_of

    def other(batch, kv_heads, cursor):
        segment = true(batch, kv_heads, cursor)
        return dataclasses.replace(segment, head=segment.head * 0)

    patch.setattr(long_tiles, "segment_of", other)


MUTANTS = [
    _p_of_another_block,
    _maximum_starts_anew,
    _sum_in_another_order,
    _columns_of_a_neighbour,
    _tail_keys_not_masked,
    _tail_values_not_cleaned,
    _p_overwritten,
    _values_overwritten,
    _never_rescaled_in_a_batch,
    _scores_read_early,
    _segment_of_another_head,
]
#: Each with every commit's kind: in the products' kernel, in its handover, in the scores.
OFTEN = (_never_rescaled_in_a_batch, _tail_keys_not_masked)


@pytest.mark.parametrize(
    "mutant",
    [m if m in OFTEN else pytest.param(m, marks=pytest.mark.nightly) for m in MUTANTS],
)
def test_mutants(mutant):
    """Each gives other bytes, in some mode, than the chain does, or an error."""
    batch = drawn([(1, 3900), (1, 700)], (8, 2, 128), PAGE, seed=9, slope=6.0, window=(3800, 0))
    if mutant is _sum_in_another_order:
        # Rows with a small lse, which shows the last bits of a sum.
        batch = drawn([(1, keys) for keys in range(20, 60)], (16, 1, 128), PAGE, seed=9)
    want = chain(batch)
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        patch.setattr(simulated, "kernel", simulated.compiling())
        with pytest.raises((modes.ModeFailure, AssertionError)):
            results = modes.run_modes(lambda: run(batch), modes.QUICK_MODES[:4])
            assert all(map(contract.same_bytes, results["default"], want))
