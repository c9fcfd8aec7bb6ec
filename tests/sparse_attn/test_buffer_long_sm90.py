"""One query a sequence over a long key buffer in the simulator: the bytes of the kernel of tiles.

Two kernels share the keys between SMs there.  Keys lie behind padding, in caches of which slots are
not filled yet or that dropped their oldest keys; a query sees one range of them.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import cute_kernels as ck
import ptxsim
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks.rules import Band
from cute_kernels.sparse_attn import api, config, launch, masks
from cute_kernels.sparse_attn.kv_ranges import launch as key_buffer
from cute_kernels.sparse_attn.kv_ranges import ranges
from ptxsim import modes
from ptxsim.skips import import_module, requires_sim
from tests import contract
from tests.runtime.cached_calls import rewritten
from tests.runtime.pretended_sm90 import pretended
from tests.sparse_attn import simulated

scores = import_module("cute_kernels.sparse_attn.kernel_buffer_scores_sm90")
values = import_module("cute_kernels.sparse_attn.kernel_buffer_values_sm90")
long_tiles = import_module("cute_kernels.sparse_attn.device.long_tiles")
paged_tiles = import_module("cute_kernels.sparse_attn.device.paged_tiles")
device_buffer = import_module("cute_kernels.sparse_attn.device.key_buffer")
kv_ranges = import_module("cute_kernels.sparse_attn.device.kv_ranges")
values_state = import_module("cute_kernels.sparse_attn.device.values_state")

#: What runs at every commit while the kernels are proved.
EACH_COMMIT = "test_all_keys test_first_keys_at_the_end_of_a_block test_the_choice test_mutants"
pytestmark = [
    requires_sim,
    pytest.mark.sim,
    pytest.mark.simulates("sparse_attn", often=EACH_COMMIT),
]

HEADS = (4, 1, 128)
#: Scores that rise block by block, so that each rescales; and that rarely do.
RISING, FALLING = 60.0, -12.0


@dataclasses.dataclass(frozen=True)
class Inputs:
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
        """Operands of the launcher: `launch.forward` or `launch.forward_kv_ranges`."""
        rule = self.table
        if rule is None:
            mask = BlockMask.from_rule(Band(*self.band), 1, self.k.shape[1])
            rule = masks.lower(mask)
        return self.q, self.k, self.v, rule, *self.factors, self.sinks


def drawn(
    rows: list[tuple[int, int, int, int]] | int,
    columns: int,
    heads: tuple[int, int, int] = HEADS,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    slope: float = 0.0,
    with_sinks: bool = False,
    **options,
) -> Inputs:
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
    return Inputs(q.to(dtype), k, v, table, sinks=sinks, **options)


def run(t: Inputs, sms: int = 132, mutant: tuple[str, str] | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of the two kernels, with so many SMs; mutant: text of the planner, and another."""
    keys = None if t.table is not None else key_buffer.keys_of(t.operands()[3])
    ranges = None if t.table is None else t.table[:, 0].contiguous()
    with simulated.simulated(sms):
        plan = rewritten(key_buffer.plan, *mutant) if mutant else key_buffer.plan
        attend = plan(t.q, t.k, t.v, keys, *t.factors)
        return attend(t.q, t.k, t.v, t.sinks, ranges)


def chain(t: Inputs) -> tuple[Tensor, Tensor]:
    """(out, lse) of the kernel whose CTAs walk all keys."""
    planner = launch.plan_one_kernel if t.table is None else launch.plan_one_kernel_of_ranges
    with simulated.simulated():
        return planner(*t.operands()).run(*t.operands())


@pytest.mark.parametrize("span", [(-4000, 0, 0, 640), (1, 2, 1, 2**31 - 1)])
def test_a_wrong_span_stays_inside_the_scratch(span):
    """The simulator refuses an access outside of the launch's memory; bytes are not promised."""
    t = drawn([(127, 127, 127, 640)], 640, (2, 1, 64), seed=3)
    table = torch.tensor(span, dtype=torch.int32).view(1, 1, 1, 4)
    out, _ = run(dataclasses.replace(t, table=table, k=t.k.nan_to_num(0)))
    assert out.shape == t.q.shape


def require_chain(t: Inputs, sms: int = 132) -> None:
    """The two kernels have the bytes of the one."""
    assert all(map(contract.same_bytes, run(t, sms), chain(t)))


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


@pytest.mark.parametrize("sms", [132, 7])
@pytest.mark.parametrize("slope", [FALLING, RISING, 0.0])
def test_spans(slope, sms):
    require_chain(drawn(SPANS, 1300, slope=slope), sms)


@pytest.mark.parametrize("columns", [1700, 1, 127, 128, 129, 513, 640])
def test_all_keys(columns):
    require_chain(drawn(2, columns, slope=FALLING))


def test_first_keys_at_the_end_of_a_block():
    """Scores of 640 rows from key 0 on, 127 rows in front of the buffer: a block more than rows."""
    t = drawn([(0, 127, 0, 640), (0, 0, 0, 640)], 640, (2, 1, 64))
    want = chain(t)
    assert all(map(contract.same_bytes, run(t), want))
    mutant = "(rows + (BLOCK[1] - 1 if by_range else 0))", "rows"
    with pytest.raises((ptxsim.PtxsimError, AssertionError)):
        assert all(map(contract.same_bytes, run(t, mutant=mutant), want))


@pytest.mark.parametrize(
    "band",
    [(1000, None), (77, 1171), (None, 512), (1269, 1280), (1400, None), (None, 1400), (100, 5000)],
)
def test_bands(band):
    """Windows of one query, to behind the last key as well; the fifth sees no key."""
    require_chain(drawn(2, 1300, slope=FALLING, band=band))


def test_rows_of_each_sequence_alone():
    """Not from the kernel of tiles over spans: each sequence cut out of the buffer."""
    t = drawn(SPANS, 1300, seed=3, slope=FALLING)
    out, lse = run(t)
    for n, row in enumerate(SPANS):
        if row[3] <= row[2]:
            assert (out[n] == 0).all() and (lse[n] == -math.inf).all()
            continue
        (part,) = ranges.runs_of(t.table[n : n + 1].clone(), "cpu")
        keys = part.cut_keys(t.k[n : n + 1]), part.cut_keys(t.v[n : n + 1])
        with simulated.simulated():
            want = launch.forward(t.q[n : n + 1], *keys, part.lowered, *t.factors)
        assert contract.same_bytes(out[n : n + 1], want[0])
        assert contract.same_bytes(lse[n : n + 1], want[1])


def test_keys_end_with_the_buffer():
    """A wrong span, which nothing checks on a GPU, leaves no tensor."""
    t = drawn([(260, 0, 260, 700), (0, 60, 0, 700)], 700)
    beyond = dataclasses.replace(t, table=t.table.clone())
    beyond.table[..., 3] += 2**20
    assert all(map(contract.same_bytes, run(beyond), run(t)))


def test_neighbours_may_hold_anything():
    """NaN in V of padding and of free slots reaches nothing; the kernel of tiles passes it on."""
    t = drawn(SPANS, 1300, seed=4)
    junk = t.v == 3e4
    poisoned = dataclasses.replace(t, v=torch.where(junk, math.nan, t.v))
    assert junk.any()
    assert all(map(contract.same_bytes, run(poisoned), run(t)))


@pytest.mark.parametrize(
    "chosen", [modes.QUICK_MODES, pytest.param(modes.MODES, marks=pytest.mark.nightly)]
)
def test_modes(chosen):
    """Late and early data, random warps, any order and residency; rings that go round twice."""
    rows = [(131, 0, 131, 6300), (0, 77, 40, 900)]
    t = drawn(rows, 6300, (4, 1, 128), slope=FALLING)
    results = modes.run_modes(lambda: run(t), chosen)
    assert all(map(contract.same_bytes, results["default"], chain(t)))


@pytest.mark.nightly
@pytest.mark.parametrize("sms", [1, 2, 7])
@pytest.mark.parametrize("slope", [RISING, FALLING])
def test_modes_of_few_sms(sms, slope):
    rows = [(131, 0, 131, 2300), (0, 77, 40, 900), (9, 0, 9, 9), (600, 0, 600, 2111)]
    t = drawn(rows, 2300, (24, 2, 128), slope=slope)
    results = modes.run_modes(lambda: run(t, sms), modes.QUICK_MODES)
    assert all(map(contract.same_bytes, results["default"], chain(t)))


OPTIONS = [
    ({"softcap": 20.0}, 3),
    ({"with_sinks": True, "dtype": torch.float16}, 16),
    ({"with_sinks": True}, 9),
    ({"softcap": 5.0, "with_sinks": True}, 8),
    ({}, 1),
]


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [SPANS, 2], ids=["spans", "all"])
@pytest.mark.parametrize(("options", "group"), OPTIONS)
def test_options(options, group, rows):
    for slope in (RISING, FALLING):
        require_chain(drawn(rows, 1300, (2 * group, 2, 64), slope=slope, **options))


@pytest.mark.nightly
@pytest.mark.parametrize("sms", [132, 7])
@pytest.mark.parametrize("rows", [SPANS, 2], ids=["spans", "all"])
@pytest.mark.parametrize("width", config.HEAD_DIMS)
def test_head_sizes(width, rows, sms):
    require_chain(drawn(rows, 1300, (6, 2, width), slope=FALLING), sms)


@pytest.mark.nightly
@pytest.mark.parametrize("width", config.HEAD_DIMS)
def test_head_sizes_in_all_modes(width):
    t = drawn([(131, 0, 131, 3300), (0, 5, 40, 300)], 3300, (5, 1, width), slope=FALLING)
    results = modes.run_modes(lambda: run(t), modes.QUICK_MODES)
    assert all(map(contract.same_bytes, results["default"], chain(t)))


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [SPANS, 2], ids=["spans", "all"])
def test_other_layouts(rows):
    """Head-major buffers, part of a longer cache, K and V of one buffer, rows that are copied."""
    t = drawn(rows, 1300, (4, 2, 64), seed=5)
    want = chain(t)
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (t.k, t.v)]
    cut = [torch.cat([x, x.new_full((len(x), 77, *x.shape[2:]), math.nan)], 1) for x in (t.k, t.v)]
    cut = [x[:, :1300] for x in cut]
    both = torch.stack([t.k, t.v], dim=2).unbind(2)
    odd = [torch.cat([x, x[..., :1]], -1)[..., :-1] for x in (t.k, t.v)]
    for k, v in (by_head, cut, both, odd):
        assert all(map(contract.same_bytes, run(dataclasses.replace(t, k=k, v=v)), want))
    q = torch.cat([t.q, t.q], 3)[..., : t.q.shape[3]]
    assert all(map(contract.same_bytes, run(dataclasses.replace(t, q=q)), want))


def test_the_choice():
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
    t = drawn(rows, 4100, (2, 1, 128), seed=8)
    attend = launch.forward if t.table is None else launch.forward_kv_ranges
    results = []
    for sms, kernels in ((132, ["buffer_scores", "buffer_values"]), (1, ["fwd"])):
        ptxsim.clear_launches()
        with simulated.simulated(sms):
            results.append(attend(*t.operands()))
        entries = [one["entry"] for one in ptxsim.launches()]
        assert len(entries) == len(kernels)
        assert all(map(str.__contains__, entries, kernels)), entries
    assert all(map(contract.same_bytes, *results))


def attended(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of the public op."""
    return ck.block_sparse_attention(q, k, v, causal=True, scale=0.2, return_lse=True)


@pytest.mark.nightly
def test_gradients_and_graphs(monkeypatch):
    """Public ops, eager, differentiated and in full graphs, on a pretended GPU."""
    t, other = (drawn([(131, 0, 131, 4100)], 4100, (2, 1, 128), seed=n) for n in (10, 11))
    t, other = (dataclasses.replace(x, k=x.k.nan_to_num(0.0)) for x in (t, other))
    results = []
    for sms, kernels in ((132, ["scores", "values"]), (1, ["fwd"])):
        with pretended(monkeypatch), simulated.simulated(sms):
            ptxsim.clear_launches()
            parts = []
            for x in (t, other):
                parts += attended(x.q, x.k, x.v)
                parts.append(api.sequence_attention(x.q, x.k, x.v, t.table, scale=0.2))
            entries = [one["entry"] for one in ptxsim.launches()]
            assert all(map(str.__contains__, entries, 4 * kernels)), entries
            leaves = [x.clone().requires_grad_() for x in (t.q, t.k, t.v)]
            out, lse = attended(*leaves)
            loss = out.float().square().sum() + lse.sum()
            parts += [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]
            graph = torch.compile(attended, fullgraph=True, backend="aot_eager")
            parts += graph(t.q, t.k, t.v)
            graph = torch.compile(
                lambda q: api.sequence_attention(q, t.k, t.v, t.table, scale=0.2) * 2,
                fullgraph=True,
                backend="aot_eager",
            )
            parts += [graph(t.q), graph(other.q)]
        results.append(parts)
    assert all(map(contract.same_bytes, *results))
    assert not contract.same_bytes(results[0][0], results[0][3])


# ---- mutants ------------------------------------------------------------------------------------


def _blocks_of_the_buffer(patch):
    patch.setattr(kv_ranges, "column_of_key_0", lambda ranges: ranges[0, 0] * 0)


def _blocks_begin_at_the_first_key(patch):
    """A key's block follows from its column behind the first key, whatever its position."""
    patch.setattr(kv_ranges, "column_of_key_0", lambda ranges: ranges[0, kv_ranges.BEGIN])


def _keys(change):
    """Mutant of (first, end, column)."""

    def mutant(patch):
        true = device_buffer.keys_of
        patch.setattr(device_buffer, "keys_of", lambda *args: change(*true(*args)))

    return mutant


def _rows_of_a_neighbour(patch):
    true = long_tiles.place

    def other(tile, *args):
        page, row = true(tile, *args)
        return page * 0, row

    patch.setattr(long_tiles, "place", other)


def _rows_of_the_sequence_before_column_0(patch):
    patch.setattr(
        device_buffer,
        "rows_of",
        lambda tile, block: (block + scores.cute.arch.lane_idx()) * paged_tiles.BLOCK,
    )


def _rows_outside_are_read(patch):
    patch.setattr(long_tiles, "row_of", lambda tile, row, rows: row)


def _values_not_cleaned(patch):
    patch.setattr(paged_tiles, "clean", lambda *args: None)


def _lse_of_another_row(patch):
    true = values_state.Results.lse_coord
    patch.setattr(values_state.BufferResults, "lse_coord", true)


MUTANTS = {
    "blocks of the buffer": _blocks_of_the_buffer,
    "blocks begin at the first key": _blocks_begin_at_the_first_key,
    "a row behind the last key": _keys(lambda first, end, column: (first, end + 1, column)),
    "the last key left out": _keys(lambda first, end, column: (first, end - 1, column)),
    "where keys begin is ignored": _keys(lambda first, end, column: (first * 0, end, column)),
    "rows of a neighbour": _rows_of_a_neighbour,
    "rows from column 0": _rows_of_the_sequence_before_column_0,
    "rows outside are read": _rows_outside_are_read,
    "values not cleaned": _values_not_cleaned,
    "lse of another row": _lse_of_another_row,
}
#: Each with every commit.
OFTEN = ("blocks of the buffer",)


@pytest.mark.parametrize(
    "mutant", [m if m in OFTEN else pytest.param(m, marks=pytest.mark.nightly) for m in MUTANTS]
)
def test_mutants(mutant):
    """Each gives other bytes than the kernel of tiles does, or an error."""
    rows = [(131, 0, 131, 900), (60, 0, 60, 60), (0, 60, 0, 700), (300, 0, 400, 900)]
    t = drawn(rows, 900, (8, 2, 128), seed=9, slope=6.0)
    want = chain(t)
    t = dataclasses.replace(t, v=torch.where(t.v == 3e4, math.nan, t.v))
    assert all(map(contract.same_bytes, run(t), want))
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[mutant](patch)
        patch.setattr(simulated, "kernel", simulated.compiling())
        with pytest.raises((ptxsim.PtxsimError, AssertionError)):
            assert all(map(contract.same_bytes, run(t), want))
