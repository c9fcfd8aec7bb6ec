"""Few queries with long contexts in the simulator: two kernels have the bytes of one.

Over paged caches, and one query a sequence over a key buffer.  Keys of a buffer lie behind padding,
in caches of which slots are not filled yet or that dropped their oldest keys; a query sees one
range of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import ptxsim
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks.rules import Band
from cute_kernels.sparse_attn import config, launch, masks
from cute_kernels.sparse_attn.kv_ranges import launch as key_buffer
from cute_kernels.sparse_attn.paged import launch as paged
from ptxsim import modes
from tests import certified, contract
from tests.runtime.cached_calls import rewritten
from tests.sparse_attn import mutated, paged_cases, simulated
from tests.sparse_attn.paged_cases import other_layouts

#: What runs at every commit while the kernels are proved.
EACH_COMMIT = (
    "test_paged_bytes test_buffer_bytes test_the_choice_over_pages test_the_choice_over_a_buffer"
)
pytestmark = certified.marks("sparse_attn", EACH_COMMIT)

NIGHT = pytest.mark.nightly
#: Scores that rise block by block, so that each rescales; and that rarely do.
RISING, FALLING = 60.0, -12.0
Results = tuple[Tensor, Tensor]


def same(got: Results, want: Results) -> bool:
    return all(map(contract.same_bytes, got, want))


class Pages(paged_cases.Batch):
    """A batch over paged caches."""

    def run(self, sms: int = 132, planner: Callable = paged.plan_long) -> Results:
        """(out, lse) of the two kernels, with so many SMs."""
        with simulated.simulated(sms):
            return planner(*self.operands()).run(*self.operands())

    def chain(self) -> Results:
        """(out, lse) of the kernel that walks a row's keys in one CTA."""
        return self.run(planner=paged.plan_chain)


def pages(lengths, heads=(4, 1, 128), page: int = 16, **options) -> Pages:
    """Random batch, as `paged_cases.drawn`."""
    return Pages(**vars(paged_cases.drawn(lengths, heads, page, **options)))


@dataclasses.dataclass(frozen=True)
class Buffer:
    """q [B, 1, Hq, D], k and v [B, S, Hkv, D]; ``table``: spans int32 [B, 1, 1, 4], or a band."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None
    band: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def factors(self) -> tuple[float, float]:
        """(scale, softcap)."""
        return 1.5 * self.q.shape[3] ** -0.5, self.softcap

    def operands(self) -> tuple:
        """Operands of the launcher."""
        rule = self.table
        if rule is None:
            mask = BlockMask.from_rule(Band(*self.band), 1, self.k.shape[1])
            rule = masks.lower(mask)
        return self.q, self.k, self.v, rule, *self.factors, self.sinks

    def run(self, sms: int = 132, mutant: tuple[str, ...] = ()) -> Results:
        """(out, lse) of the two kernels, with so many SMs; mutant: texts of the planner."""
        keys = None if self.table is not None else key_buffer.keys_of(self.operands()[3])
        spans = None if self.table is None else self.table[:, 0].contiguous()
        with simulated.simulated(sms):
            plan = rewritten(key_buffer.plan, *mutant) if mutant else key_buffer.plan
            attend = plan(self.q, self.k, self.v, keys, *self.factors)
            return attend(self.q, self.k, self.v, self.sinks, spans)

    def chain(self) -> Results:
        """(out, lse) of the kernel whose CTAs walk all keys."""
        with simulated.simulated():
            return launch.plan_one_kernel(*self.operands()).run(*self.operands())


def buffer(
    rows: list[tuple[int, int, int, int]] | int,
    columns: int,
    heads: tuple[int, int, int] = (4, 1, 128),
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    slope: float = 0.0,
    with_sinks: bool = False,
    **options,
) -> Buffer:
    """Random inputs; rows: the span of each sequence, or how many sequences see all keys.

    slope: how much scores rise (fall if negative) from the first column to the last, on average.
    What no query sees is NaN in K and large in V.
    """
    (hq, hkv, width), generator = heads, torch.Generator().manual_seed(seed + columns)
    batch = rows if isinstance(rows, int) else len(rows)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = randn(batch, 1, hq, width), randn(batch, columns, hkv, width)
    v = randn(batch, columns, hkv, config.VALUE_DIMS[width]).to(dtype)
    if slope:
        ends = (0.0, slope) if slope > 0 else (-slope, 0.0)
        direction = q.view(batch, 1, hkv, hq // hkv, width).sum(3) / (1.5 * width**0.5)
        k += torch.linspace(*ends, columns)[:, None, None] * direction
    k, table = k.to(dtype), None
    if not isinstance(rows, int):
        table = torch.tensor(rows, dtype=torch.int32).view(batch, 1, 1, 4)
        column = torch.arange(columns)
        seen = (table[:, 0, 0, 2:3] <= column) & (column < table[:, 0, 0, 3:])
        k[~seen], v[~seen] = math.nan, 3e4
    sinks = torch.linspace(-1.0, 1.5, hq) if with_sinks else None
    return Buffer(q.to(dtype), k, v, table, sinks=sinks, **options)


#: Lengths end in each place of a batch of blocks, or at 0.
LENGTHS = [(1, 1700), (1, 640), (1, 513), (0, 77), (1, 1), (0, 0), (1, 130)]
#: Several queries or none, tokens of none: as many tokens as sequences.
QUERIES = [(3, 900), (0, 300), (0, 0), (2, 260), (0, 5), (1, 129), (0, 1)]
#: The spans of sequences in a buffer of 1300 columns.
SPANS = [
    (0, 0, 0, 1300),  # no padding
    (1, 0, 1, 1300),  # behind padding
    (127, 0, 127, 1200),  # slots that are not filled yet
    (128, 0, 128, 900),
    (300, 0, 300, 301),  # one key
    (5, 0, 5, 5),  # none
    (0, 60, 0, 1300),  # its 60 oldest keys were dropped
    (0, 640, 3, 1100),
    (37, 91, 500, 1171),  # a window, behind padding and dropped keys
    (700, 3, 1023, 1024),
    (260, 0, 260, 1300),
]
#: Windows of one query, to behind the last key as well; the fifth sees no key.
BANDS = [
    (1000, None),
    (77, 1171),
    (None, 512),
    (1269, 1280),
    (1400, None),
    (None, 1400),
    (100, 5000),
]
OPTIONS = [
    ({"with_sinks": True}, 16),
    ({"softcap": 20.0}, 3),
    ({"softcap": 5.0, "with_sinks": True}, 8),
    ({}, 1),
]
WINDOWS = [(700, 0), (40, 0), (900, None), (None, None)]


def by_pages() -> Iterator:
    """(what makes a batch, SMs): few SMs take more columns a CTA."""
    make = functools.partial(pages, seed=1)
    for slope, sms in itertools.product((0.0, RISING, FALLING), (132, 7)):
        yield functools.partial(make, LENGTHS, slope=slope), sms, ()
    for sms in (1, 132):
        yield functools.partial(make, QUERIES, padding=1), sms, ()
    lengths = [(1, 1500), (2, 800), (0, 3), (1, 17)]
    for slope, ((options, group), window) in itertools.product(
        (RISING, FALLING), zip(OPTIONS, WINDOWS, strict=True)
    ):
        heads, dtype = (2 * group, 2, 64), "fp16" if group == 16 else "bf16"
        chosen = options | {"window": window, "dtype": dtype, "slope": slope}
        yield functools.partial(make, lengths, heads, 32, **chosen), 132, NIGHT
    for width, page in itertools.product(config.HEAD_DIMS, config.PAGE_SIZES):
        for sms in (132, 7):
            yield functools.partial(make, [(1, 1400), (1, 300)], (6, 2, width), page), sms, NIGHT


def by_buffers() -> Iterator:
    for columns in (1700, 1, 127, 128, 129, 513, 640):
        yield functools.partial(buffer, 2, columns, slope=FALLING), 132, ()
    for slope, sms in itertools.product((FALLING, RISING, 0.0), (132, 7)):
        yield functools.partial(buffer, SPANS, 1300, slope=slope), sms, ()
    for band in BANDS:
        yield functools.partial(buffer, 2, 1300, slope=FALLING, band=band), 132, ()
    for slope, rows, (options, group) in itertools.product((RISING, FALLING), (SPANS, 2), OPTIONS):
        heads, dtype = (2 * group, 2, 64), torch.float16 if group == 16 else torch.bfloat16
        make = functools.partial(buffer, rows, 1300, heads, slope=slope, dtype=dtype, **options)
        yield make, 132, NIGHT
    for width, rows, sms in itertools.product(config.HEAD_DIMS, (SPANS, 2), (132, 7)):
        yield functools.partial(buffer, rows, 1300, (6, 2, width), slope=FALLING), sms, NIGHT


def listed(cases: Iterator) -> list:
    return [pytest.param(*case, marks=marks) for *case, marks in cases]


@pytest.mark.parametrize(("make", "sms"), listed(by_pages()))
def test_paged_bytes(make, sms):
    problem = make()
    assert same(problem.run(sms), problem.chain())


@pytest.mark.parametrize(("make", "sms"), listed(by_buffers()))
def test_buffer_bytes(make, sms):
    problem = make()
    assert same(problem.run(sms), problem.chain())


def in_modes() -> Iterator:
    """(what makes a problem, SMs, modes): rings that go round twice, few SMs, all head sizes."""
    long = [(1, 6300), (1, 900)], [(131, 0, 131, 6300), (0, 77, 40, 900)]
    few = [(1, 2300), (0, 300), (1, 900), (0, 0)]
    rows = [(131, 0, 131, 2300), (0, 77, 40, 900), (9, 0, 9, 9), (600, 0, 600, 2111)]
    makes = (
        functools.partial(pages, long[0], slope=FALLING),
        functools.partial(buffer, long[1], 6300, slope=FALLING),
    )
    for make in makes:
        yield make, 132, modes.QUICK_MODES, ()
        yield make, 132, modes.MODES, NIGHT
    for slope, sms in itertools.product((RISING, FALLING), (1, 2, 7)):
        options = {"slope": slope, "window": (1900, 0)}
        yield functools.partial(pages, few, (24, 2, 128), **options), sms, modes.MODES, NIGHT
        make = functools.partial(buffer, rows, 2300, (24, 2, 128), slope=slope)
        yield make, sms, modes.QUICK_MODES, NIGHT
    for width in config.HEAD_DIMS:
        make = functools.partial(pages, [(1, 3300), (1, 300)], (5, 1, width), 128, slope=FALLING)
        yield make, 132, modes.QUICK_MODES, NIGHT
        rows = [(131, 0, 131, 3300), (0, 5, 40, 300)]
        make = functools.partial(buffer, rows, 3300, (5, 1, width), slope=FALLING)
        yield make, 132, modes.QUICK_MODES, NIGHT


@pytest.mark.parametrize(("make", "sms", "chosen"), listed(in_modes()))
def test_modes(make, sms, chosen):
    """Late and early data, random warps, any order and residency."""
    problem = make()
    results = modes.run_modes(lambda: problem.run(sms), chosen)
    assert same(results["default"], problem.chain())


# ---- over pages ----------------------------------------------------------------------------------


@NIGHT
def test_other_layouts_of_pages():
    batch = pages([(1, 900), (1, 300)], (4, 2, 128), seed=6)
    want = batch.chain()
    assert all(same(other.run(), want) for other in other_layouts(batch))


@NIGHT
def test_scores_that_are_not_finite():
    """Inf and NaN among the keys of a sequence do to its rows what they do in the chain."""
    batch = pages([(1, 1700), (1, 600)], seed=7)
    table = batch.block_table
    batch.k_cache[table[0, 40], 3] = float("inf")
    batch.k_cache[table[0, 70]] = float("nan")
    for got, want in zip(batch.run(), batch.chain(), strict=True):
        # Payloads of NaN are not modelled.
        assert contract.same_bytes(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_the_choice_over_pages():
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


@NIGHT
def test_paged_attention_takes_either():
    """With a table of enough pages; the bytes of the chain."""
    batch = pages([(1, 700)], page=64, seed=8)
    table = torch.cat([batch.block_table, batch.block_table.new_full((1, 64), 10**6)], dim=1)
    batch = dataclasses.replace(batch, block_table=table)
    ptxsim.clear_launches()
    got = batch.run(planner=paged.plan_paged)
    entries = [launch["entry"] for launch in ptxsim.launches()]
    assert ["scores" in entries[0], "values" in entries[1], len(entries)] == [True, True, 2]
    assert same(got, batch.chain())


# ---- over a buffer -------------------------------------------------------------------------------


def test_first_keys_at_the_end_of_a_block():
    """Scores of 640 rows from key 0 on, 127 rows in front of the buffer: a block more than rows."""
    t = buffer([(0, 127, 0, 640), (0, 0, 0, 640)], 640, (2, 1, 64))
    want = t.chain()
    assert same(t.run(), want)
    mutant = "(rows + (BLOCK[1] - 1 if by_range else 0))", "rows"
    with pytest.raises((ptxsim.PtxsimError, AssertionError)):
        assert same(t.run(mutant=mutant), want)


def test_a_wrong_span_leaves_no_tensor():
    """Which nothing checks on a GPU.  Keys end with the buffer; other bytes are not promised."""
    t = buffer([(260, 0, 260, 700), (0, 60, 0, 700)], 700)
    want = t.run()
    t.table[..., 3] += 2**20
    assert same(t.run(), want)
    for span in ((-4000, 0, 0, 640), (1, 2, 1, 2**31 - 1)):
        t = buffer([(127, 127, 127, 640)], 640, (2, 1, 64), seed=3)
        table = torch.tensor(span, dtype=torch.int32).view(1, 1, 1, 4)
        dataclasses.replace(t, table=table, k=t.k.nan_to_num(0)).run()


def test_neighbours_may_hold_anything():
    """NaN in V of padding and of free slots reaches nothing; the kernel of tiles passes it on."""
    t = buffer(SPANS, 1300, seed=4)
    junk = t.v == 3e4
    assert junk.any()
    assert same(dataclasses.replace(t, v=torch.where(junk, math.nan, t.v)).run(), t.run())


@NIGHT
@pytest.mark.parametrize("rows", [SPANS, 2], ids=["spans", "all"])
def test_other_layouts_of_buffers(rows):
    """Head-major buffers, part of a longer cache, K and V of one buffer, rows that are copied."""
    t = buffer(rows, 1300, (4, 2, 64), seed=5)
    want = t.chain()
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (t.k, t.v)]
    cut = [torch.cat([x, x.new_full((len(x), 77, *x.shape[2:]), math.nan)], 1) for x in (t.k, t.v)]
    cut = [x[:, :1300] for x in cut]
    both = torch.stack([t.k, t.v], dim=2).unbind(2)
    odd = [torch.cat([x, x[..., :1]], -1)[..., :-1] for x in (t.k, t.v)]
    for k, v in (by_head, cut, both, odd):
        assert same(dataclasses.replace(t, k=k, v=v).run(), want)
    q = torch.cat([t.q, t.q], 3)[..., : t.q.shape[3]]
    assert same(dataclasses.replace(t, q=q).run(), want)


def test_the_choice_over_a_buffer():
    """By shapes alone: one query, few sequences, a long buffer; and by the rule of a mask."""

    def is_long(batch=1, queries=1, heads=(32, 8), width=128, columns=4096, sms=132):
        q = torch.empty(batch, queries, heads[0], width, device="meta")
        k = torch.empty(batch, columns, heads[1], width, device="meta")
        v = torch.empty(batch, columns, heads[1], config.VALUE_DIMS[width], device="meta")
        with simulated.simulated(sms):
            return key_buffer.is_long(q, k, v)

    assert is_long() and is_long(8) and is_long(width=192) and not is_long(9)
    assert not is_long(columns=4095) and not is_long(queries=2)
    assert is_long(sms=16) and not is_long(sms=15)
    assert is_long(heads=(32, 2)) and not is_long(heads=(34, 2))
    assert is_long(columns=2097152) and not is_long(columns=2097153)
    keys_of = lambda mask: key_buffer.keys_of(masks.lower(mask))  # noqa: E731
    assert keys_of(BlockMask.full(1, 700)) == keys_of(BlockMask.causal(1, 700)) == (0, 700)
    window = BlockMask.sliding_window(1, 700, left=99, right=0)
    assert keys_of(window) == (600, 700)
    ends = {(None, 700): (0, 600), (0, 640): (0, 600), (100, 5000): (100, 600), (-9, 20): (0, 21)}
    ends |= {(700, 800): (700, 700), (20, 10): (20, 20)}
    for band, keys in ends.items():
        assert keys_of(BlockMask.from_rule(Band(*band), 1, 600)) == keys, band
    lowered = masks.lower(window)
    restored = masks.restored(lowered.tensors(), lowered.numbers())
    assert key_buffer.keys_of(restored) is None
    dense = torch.arange(700)[None, None, None] % 3 == 0
    assert keys_of(BlockMask.from_dense(dense)) is None


@pytest.mark.parametrize("rows", [[(131, 0, 131, 4100)], 1], ids=["spans", "all"])
def test_the_launchers_take_either(rows):
    """Long buffers take two kernels, those of few SMs one; their bytes are the same."""
    t = buffer(rows, 4100, (2, 1, 128), seed=8)
    results = []
    for sms, kernels in ((132, ["buffer_scores", "buffer_values"]), (1, ["fwd"])):
        ptxsim.clear_launches()
        with simulated.simulated(sms):
            results.append(launch.forward(*t.operands()))
        entries = [one["entry"] for one in ptxsim.launches()]
        assert len(entries) == len(kernels)
        assert all(map(str.__contains__, entries, kernels)), entries
    assert same(*results)


# ---- mutants -------------------------------------------------------------------------------------

_VALUES = "sparse_attn.kernel_paged_values_sm90"
_LONG, _TILES, _BUFFER, _RANGES, _STATE, _EXCHANGE, _LOADS = (
    f"sparse_attn.device.{name}"
    for name in (
        *("long_tiles", "paged_tiles", "key_buffer", "kv_ranges", "values_state"),
        *("probability_exchange", "value_loads"),
    )
)
_KEYS = "cutlass.max(first, 0), cutlass.min(end, rows), column"
_COLUMN = "span[BEGIN] - span[POSITION] % BLOCK"
_NONE = "thread < 0"
_MAXIMA, _FULL = "before, after = self.maxima(", "v_ring.await_full(v_state)"
_ROWS = (
    "if isinstance(tile, BufferTile):\n        return cutlass.max(cutlass.min(row, rows - 1), 0)"
)
#: label -> (problems, every commit's / the night's; a module, a piece of its text, another, ..)
MUTANTS: dict[str, tuple[str, ...]] = {
    "P of another block": ("/ pages", _VALUES, "(pairs, slot, lane)", "(pairs, slot ^ 1, lane)"),
    # The running maximum forgets what came before the last four blocks.
    "the maximum starts anew": (
        *("/ pages", _VALUES, _MAXIMA),
        f"row_max.fill(-cutlass.Float32.inf)\n            {_MAXIMA}",
    ),
    "a sum in another order": (
        *("/ short", _EXCHANGE, "range_constexpr(1, cute.size(scores) // 2)"),
        "range_constexpr(cute.size(scores) // 2 - 1, 0, -1)",
    ),
    "columns of a neighbour": ("/ pages", _LOADS, "column + number", "(column ^ 16) + number"),
    "keys of the tail seen": ("pages", _TILES, "keep_between(scores, lane, first, last)", "pass"),
    "values not cleaned": ("/ pages, buffer", _TILES, "thread < first or thread >= end", _NONE),
    # P of a stage is written before the stage is free.
    "P overwritten": ("/ pages", _VALUES, "handover.await_empty(p_state)", "pass"),
    # A stage of V is given back when its products are issued.
    "V overwritten": (
        *("/ pages", _VALUES, _FULL, f"{_FULL}\n            v_ring.release(v_state)"),
        *("        v_ring.release(v_state)\n\n", "\n"),
    ),
    "never rescaled in a batch": ("pages", _VALUES, "whole & (changed == 0)", "whole"),
    "scores read early": ("/ pages", _VALUES, "cp_async_wait_group(stages - 1)", "lane_idx()"),
    "a segment of another head": ("/ pages", _LONG, "unit % kv_heads)", "unit % kv_heads * 0)"),
    "blocks of the buffer": ("buffer", _RANGES, _COLUMN, "span[BEGIN] * 0"),
    # A key's block follows from its column behind the first key, whatever its position.
    "blocks begin at the first key": ("/ buffer", _RANGES, _COLUMN, "span[BEGIN]"),
    "a row behind the last key": ("/ buffer", _BUFFER, _KEYS, _KEYS.replace("rows)", "rows) + 1")),
    "the last key left out": ("/ buffer", _BUFFER, _KEYS, _KEYS.replace("rows)", "rows) - 1")),
    "where keys begin ignored": ("/ buffer", _BUFFER, _KEYS, _KEYS.replace("first", "first * 0")),
    "rows of a neighbour": ("/ buffer", _LONG, "tile.sequence, cute", "tile.sequence * 0, cute"),
    "rows from column 0": ("/ buffer", _BUFFER, "return tile.column + (", "return ("),
    "rows outside read": ("/ buffer", _LONG, "cutlass.max(cutlass.min(row, rows - 1), 0)", "row"),
    "lse of another row": ("/ buffer", _STATE, "n token, q_head\n", "n q_head, token\n"),
}
PROBLEMS = {
    "pages": functools.partial(
        *(pages, [(1, 3900), (1, 700)], (8, 2, 128)), seed=9, slope=6.0, window=(3800, 0)
    ),
    # Rows with a small lse, which shows the last bits of a sum.
    "short": functools.partial(pages, [(1, keys) for keys in range(20, 60)], (16, 1, 128), seed=9),
    "buffer": functools.partial(
        buffer,
        [(131, 0, 131, 900), (60, 0, 60, 60), (0, 60, 0, 700), (300, 0, 400, 900)],
        *(900, (8, 2, 128)),
        seed=9,
        slope=6.0,
    ),
}


@pytest.mark.parametrize(("name", "group"), list(mutated.by_group(MUTANTS)))
def test_mutants(monkeypatch, tmp_path, name, group):
    """Each gives other bytes, in some mode, than the one kernel does, or an error."""
    problem = PROBLEMS[group]()
    want = problem.chain()
    if group == "buffer":
        problem = dataclasses.replace(problem, v=torch.where(problem.v == 3e4, math.nan, problem.v))
    assert same(problem.run(), want)
    monkeypatch.setattr(simulated, "kernel", mutated.kernels(tmp_path, *MUTANTS[name][1:]))
    with pytest.raises((modes.ModeFailure, AssertionError)):
        results = modes.run_modes(problem.run, modes.QUICK_MODES[:4])
        assert same(results["default"], want)
