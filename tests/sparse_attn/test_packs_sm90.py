"""SM90 kernels on packs, in the simulator: one launch a pass, the bytes of each sequence alone.

They read packs where they lie; the same kernels without a pack, which read a copy of it, say what
is right.  Lists, ranks and tickets follow from offsets, which nobody has looked at, by formulas.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import DeviceError
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import api, config, launch, lowering
from cute_kernels.sparse_attn import op as attention_op
from cute_kernels.sparse_attn.kv_ranges import ranges
from cute_kernels.sparse_attn.varlen import layout
from tests import certified
from tests.contract import same_bytes
from tests.kernels.ring_defects import LIMITS, SETTINGS
from tests.sparse_attn import mutated, pack_tables, simulated
from tests.sparse_attn import pack_cases as known

#: What runs at every commit while the kernels are proved.
EACH_COMMIT = (
    "test_a_pack test_nothing_is_read_from_the_host_but_offsets "
    "test_offsets_on_the_cpu_are_refused_in_a_graph "
    "test_offsets_on_a_gpu_are_left_there_where_kernels_read_them"
)
pytestmark = certified.marks("sparse_attn", EACH_COMMIT)

LENGTHS = [130, 0, 1, 61, 128]
#: Of tests that are not of a head size: the kernels of `test_a_pack`, compiled once a process.
DIM = 64
NIGHT = pytest.mark.nightly
ANY = SETTINGS[-1] | {"seed": 4}
CAUSAL, FULL = known.RULES[:2]


def packs():
    """(lengths, rule, CTAs, inputs, options): each head size and each rule at every commit."""
    day = ((64, 1), (96, 2), (128, 0), (128, 3), (192, 2), (256, 1))
    for dim in config.HEAD_DIMS:
        for i, rule in enumerate(known.RULES):
            marks = () if (dim, i) in day else NIGHT
            yield pytest.param(LENGTHS, rule, 7, {"dim": dim}, {}, marks=marks)
    # fp16, groups of query heads, a scale and a softcap.
    inputs = {"seed": 3, "dtype": torch.float16, "heads": (4, 2)}
    yield pytest.param([40, 160], CAUSAL, 7, inputs, {"scale": 0.2, "softcap": 7.0}, marks=NIGHT)
    for seed in range(20):
        dim, ctas = config.HEAD_DIMS[seed % len(config.HEAD_DIMS)], (1, 2, 7, 132)[seed % 4]
        inputs = {"seed": seed, "heads": (4, 2), "dim": dim}
        drawn = known.lengths_of(seed), known.RULES[seed % 4], ctas, inputs, {}
        yield pytest.param(*drawn, marks=NIGHT)


@pytest.mark.parametrize(("lengths", "rule", "ctas", "inputs", "options"), list(packs()))
def test_a_pack(lengths, rule, ctas, inputs, options):
    tensors = known.drawn(sum(lengths), **inputs)
    with known.on_sm90(ctas=ctas):
        out = known.packed(tensors, lengths, *rule, **options)
        assert known.differing(out, known.alone(tensors, lengths, *rule, **options)) == []


def test_one_launch_a_pass(monkeypatch):
    """And one before it, and no copies."""
    calls = []
    monkeypatch.setattr(layout.Layout, "pad", lambda of, t, fill=0.0: pytest.fail("a copy"))
    true = launch.bind

    def bind(device, kernel, flatten=()):
        run = true(device, kernel, flatten)
        return lambda *args: (calls.append(kernel), run(*args))

    monkeypatch.setattr(launch, "bind", bind)
    with known.on_sm90():
        known.packed(known.drawn(sum(LENGTHS), dim=DIM), LENGTHS)
    # A backward is three kernels, and before each pass one says where sequences lie.
    assert len(calls) == (1 + 1) + (1 + 3)


def test_nothing_is_read_from_the_host_but_offsets(monkeypatch):
    """No list, no order and no mask is made for a pack, nor kept."""
    for owner, name in ((layout, "layout"), (layout, "_on_host"), (lowering, "admitted")):
        monkeypatch.setattr(owner, name, lambda *a, name=name: pytest.fail(name))
    monkeypatch.setattr(lowering.cache, "get", lambda key, make: pytest.fail(str(key)))
    lengths = [256, 128, 77]
    tensors = known.drawn(sum(lengths), dim=DIM)
    with known.on_sm90():
        out = known.packed(tensors, lengths)
        assert known.differing(out, known.trusted(tensors, known.offsets(lengths))) == []


def test_offsets_on_the_cpu_are_refused_in_a_graph(monkeypatch):
    """Whose replays would read what was in that memory."""
    monkeypatch.setattr(attention_op, "capturing", lambda: True)
    with known.on_sm90(), pytest.raises(DeviceError, match=r"cu_seqlens: .* CUDA graph"):
        known.packed(known.drawn(100), [60, 40])


def test_offsets_on_a_gpu_are_left_there_where_kernels_read_them(monkeypatch):
    """Else they come to the CPU, which waits; those on the CPU are looked at."""
    on_gpu, on_cpu = (SimpleNamespace(is_cuda=flag) for flag in (True, False))
    monkeypatch.setattr(
        attention_op, "varlen_offsets", lambda given, rows: ("looked at", given, rows)
    )
    q = torch.empty(1, 90, 2, 64)
    for reads in (True, False):
        monkeypatch.setattr(attention_op, "reads_keys_on_device", lambda device, reads=reads: reads)
        looked_at = "looked at", on_gpu, 90
        assert attention_op.offsets_of(on_gpu, q) == (on_gpu if reads else looked_at)
        assert attention_op.offsets_of(on_cpu, q) == ("looked at", on_cpu, 90)
    monkeypatch.undo()
    assert not attention_op.reads_keys_on_device("cpu")


#: (row, first, end) of sequences in columns.
PADDED = ((0, 0, 130), (1, 61, 200), (2, 199, 200))


def padded(left: int | None = None) -> list[torch.Tensor]:
    """(out, dq, dk, dv) of a batch of 200 columns."""
    real = torch.zeros(3, 200, dtype=torch.bool)
    for row, first, end in PADDED:
        real[row, first:end] = True
    position, recorded = torch.arange(200), None
    if left is not None:
        dense = (position <= position[:, None]) & (position >= position[:, None] - left)
        recorded = api.seen_columns(dense & real[:, None, None] & real[:, None, :, None])
    spans = api.kv_ranges(recorded, real, 0, 0, (len(real), 200, 200))
    g = torch.Generator().manual_seed(4)
    sizes = [(len(real), 200, n, DIM) for n in (2, 1, 1, 2)]
    *leaves, dout = (torch.randn(size, generator=g).bfloat16() for size in sizes)
    leaves = [t.requires_grad_() for t in leaves]
    with known.on_sm90():
        out = api.sequence_attention(*leaves, spans)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("left", [None, 30])
def test_padded_batches_take_one_launch(monkeypatch, left):
    """With the bytes of a launch for each sequence."""
    calls = []
    true = attention_op._attend_run
    monkeypatch.setattr(attention_op, "_attend_run", lambda *a: (calls.append(1), true(*a))[1])
    out = padded(left)
    assert not calls
    monkeypatch.setattr(ranges, "documents_of", lambda kv_ranges: None)
    assert all(map(same_bytes, out, padded(left)))
    assert len(calls) == len(PADDED)
    assert not out[0][0, 130:].any() and out[0][0, :130].any()


# ---- in place ------------------------------------------------------------------------------------

#: Ends in both halves of a block, between boxes of 64 rows, and none; a tile of 192 rows of three.
ENDS = [70, 130, 128, 1, 190]
#: All but the third sequence, which is NaN: what the next one, and the second's tiles, begin with.
KEPT = torch.cat((torch.arange(200), torch.arange(328, sum(ENDS))))
RACES = SETTINGS[-1] | {"check_races": 1}
MODES = [*SETTINGS, *(SETTINGS[-1] | {"resident_ctas": n} for n in (1, 2, 7)), RACES]


def attended(dim: int, rule=FULL, **options) -> list[torch.Tensor]:
    """(out, lse, dq, dk, dv) of the pack, without the sequence of NaN."""
    tensors = known.drawn(sum(ENDS), seed=dim, heads=(2, 1), dim=dim)
    for t in tensors[:4]:
        t[200:328] = torch.nan
    with known.on_sm90(ctas=3, **options):
        return known.cut(known.packed(tensors, ENDS, *rule), KEPT)


@functools.cache
def of_copies(dim: int, rule) -> list[torch.Tensor]:
    with mock.patch.object(known, "IN_PLACE", False):
        out = attended(dim, rule)
    assert all(t.isfinite().all() for t in out)
    return out


def stands(dim: int, rule=FULL, modes=MODES, **kernels) -> bool:
    """Whether every run has the right bytes, and the simulator nothing to report."""
    want = of_copies(dim, rule)
    return all(
        simulated.is_right(lambda: attended(dim, rule, **kernels), want, **mode, **LIMITS)
        for mode in modes
    )


@pytest.mark.parametrize(
    ("dim", "rule", "modes"),
    [
        *((dim, FULL, MODES[-1:]) for dim in (64, 192)),
        *((dim, known.RULES[2], MODES[-1:]) for dim in (128, 256)),
        *(pytest.param(d, r, MODES, marks=NIGHT) for d in config.HEAD_DIMS for r in known.RULES),
    ],
)
def test_random_orders(dim, rule, modes):
    """With races reported; by night every mode."""
    assert stands(dim, rule, modes)


# ---- lists, ranks and tickets --------------------------------------------------------------------

#: Three blocks and more, so that a window has columns on both sides; one token behind a block.
LONG = [300, 129, 0, 500]
#: Tokens behind them: more than a block, and no whole one.
BEHIND = 150
WINDOWS = {"window": (140, 100), "causal": (None, 0), "full": (None, None), "cut": (126, 126)}


def drawn(dim: int, behind: int = 0, heads: tuple[int, int] = (2, 1)) -> list[torch.Tensor]:
    """NaN in all that lies behind the sequences."""
    out = known.drawn(sum(LONG) + behind, seed=dim, heads=heads, dim=dim)
    for t in out[:4]:
        t[sum(LONG) :] = torch.nan
    return out


@pytest.mark.parametrize(
    ("dim", "window", "heads"),
    [
        (64, WINDOWS["window"], (4, 2)),
        (128, (None, 0), (2, 2)),
        pytest.param(96, (None, None), (2, 1), marks=NIGHT),
        pytest.param(128, (300, None), (8, 2), marks=NIGHT),
        pytest.param(64, (None, 130), (3, 3), marks=NIGHT),
    ],
    ids=str,
)
def test_tokens_behind_the_last_sequence(dim, window, heads):
    """Are rows that see nothing; the sequences have their bytes, and so have sinks their sums."""
    tensors, offsets, end = drawn(dim, BEHIND, heads), known.offsets(LONG), sum(LONG)
    inside = known.cut(tensors, slice(end))
    sinks = torch.linspace(-1, 1, heads[0]) if dim == 64 else None
    with known.on_sm90(ctas=5):
        out = known.trusted(tensors, offsets, window, sinks)
        want = known.trusted(inside, offsets, window, sinks)
        options = {} if sinks is None else {"sinks": sinks}
        assert known.differing(want, known.alone(inside, LONG, False, window, **options)) == []
    assert known.differing(known.cut(out, slice(end)), want) == []
    out, lse, *grads = known.cut(out, slice(end, None))
    assert not any(t.view(torch.int16).any() for t in (out, *grads))
    assert (lse == -torch.inf).all()


def test_sinks_of_tokens_of_no_sequence_have_no_gradient():
    tensors, offsets = drawn(64, BEHIND), known.offsets(LONG)
    tensors[4][:, sum(LONG) :] = 1.0
    grads = []
    for q, k, v, dout, dlse in (tensors, known.cut(tensors, slice(sum(LONG)))):
        sinks = torch.tensor([0.5, -1.0], requires_grad=True)
        with known.on_sm90():
            args = [t[None] for t in (q, k, v)]
            out, lse = attention_op.varlen_attention(*args, offsets, None, 0, 0.125, 0.0, sinks)
            grads.append(torch.autograd.grad((out[0], lse[0]), sinks, (dout, dlse))[0])
    assert grads[0].isfinite().all() and torch.allclose(*grads, rtol=1e-6)


def test_no_sequence():
    for offsets in (torch.zeros(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)):
        with known.on_sm90():
            out, lse, *grads = known.trusted(drawn(64, BEHIND), offsets)
        assert not any(t.view(torch.int16).any() for t in (out, *grads))
        assert (lse == -torch.inf).all()


def test_sequences_that_are_none_cost_nothing_but_blocks():
    """As offsets have them that are padded to a number: most blocks are not in use."""
    tensors, lengths, window = drawn(64, BEHIND), LONG + [0] * 60, WINDOWS["window"]
    with known.on_sm90(ctas=3) as used:
        out = known.trusted(tensors, known.offsets(lengths), window)
    assert known.differing(out, right("window")) == []
    (space,) = used
    blocks = space.total.shape[2]
    assert blocks == pack_tables.Case(torch.zeros(len(lengths), 2), 1079, window).blocks
    rows = space.lse2[0, 0].isnan().any(dim=1), space.total[0, 0].isnan().all(dim=1)
    # dQ of blocks that no visit has, those of the tokens left over among them, is not written.
    assert not rows[0].any() and rows[1].sum() == blocks - (3 + 2 + 4)


@pytest.mark.parametrize("count", [8, pytest.param(64, marks=NIGHT)])
def test_wild_offsets_stay_inside(count):
    """No access outside of a tensor, no hang, and the same bytes again."""
    for seed in range(count):
        g = torch.Generator().manual_seed(seed)
        low, high = (-500, 1100) if seed % 2 else (-(2**31), 2**31 - 1)
        offsets = torch.randint(low, high, (int(torch.randint(1, 7, (1,), generator=g)),))
        offsets = offsets.to((torch.int32, torch.int64)[seed // 2 % 2])
        tensors = known.drawn(600, seed, dim=64)
        window = pack_tables.WINDOWS[seed % len(pack_tables.WINDOWS)]
        with known.on_sm90(ctas=3):
            one, two = (known.trusted(tensors, offsets, window) for _ in range(2))
        assert known.differing(one, two) == []


@pytest.mark.parametrize("dim", [64, pytest.param(96, marks=NIGHT), pytest.param(128, marks=NIGHT)])
def test_any_number_of_resident_ctas(dim):
    """Also with CTAs in any order, groups of query heads, and more heads than alternate."""
    tensors, offsets = drawn(dim, 20, (10, 5)), known.offsets(LONG)
    out = []
    for n in (1, 2, 7, 132):
        with known.on_sm90(ctas=132, resident_ctas=n, **ANY):
            out.append(known.trusted(tensors, offsets, WINDOWS["window"]))
    assert all(known.differing(one, out[0]) == [] for one in out[1:])


@functools.cache
def right(window: str) -> list[torch.Tensor]:
    with known.on_sm90(ctas=7):
        return known.trusted(drawn(64, BEHIND), known.offsets(LONG), WINDOWS[window])


def follows(window: str, **kernels) -> bool:
    """Whether the bytes are right, few CTAs resident."""
    tensors, offsets, want = drawn(64, BEHIND), known.offsets(LONG), right(window)
    options = ANY | {"cta_order": "ascending", "max_steps": 20_000_000, "resident_ctas": 2}

    def run() -> list[torch.Tensor]:
        with known.on_sm90(ctas=3, **kernels):
            return known.trusted(tensors, offsets, WINDOWS[window])

    return simulated.is_right(run, want, **options)


# ---- mutants -------------------------------------------------------------------------------------

VARLEN, WALK = "sparse_attn.device.varlen", "sparse_attn.device.walk"
KERNELS = ("forward", "pre", "backward", "post")
SIZES = "all 64 / all 96, all 128, all 192, all 256"
_ALSO_FORWARD, _ALSO_BACKWARD = (f"{SIZES}, {name} 128" for name in ("forward", "backward"))
_START, _STORED = "cutlass.max(first, cutlass.Int32(0))", "(thread, end * chunks"
_FENCE = 'cute.arch.fence_proxy("async.shared", space="cta")'
_LANDED = "cute.arch.mbarrier_wait(tail.barrier, tail.phase[0])"
_LEFT, _RIGHT = "(BLOCK - 1 - lo) // BLOCK", "(hi + BLOCK - 1) // BLOCK"
_CUTS = "(distance - (BLOCK - 1) < lo) | (distance + (BLOCK - 1) > hi)"
_ONE_OFF = _CUTS.replace("lo)", "lo - 1)").replace("hi)", "hi + 1)")
_RANK = "cutlass.min(base.last, index + varlen.reach(self.lo, self.hi)[1]) - base.block"
_OF_TABLE = "cutlass.min(block, table.shape[0] - 1)\n    record"
#: label -> (groups, every commit's / the night's: kernels, and a head size or a window; a module, a
#: piece of its text, another, ..)
MUTANTS: dict[str, tuple[str, ...]] = {
    "neighbours not overwritten": (
        "all 64, backward 128 / all 96, all 128, all 192, all 256, forward 128",
        *(VARLEN, _START, "cutlass.Int32(shape.rows)"),
    ),
    "a row too few zeroed": (SIZES, VARLEN, _START, _START.replace("first", "first + 1")),
    "a row too many zeroed": (SIZES, VARLEN, _START, _START.replace("first", "first - 1")),
    # What WGMMA reads may be what was there before.
    "zeros not fenced": (SIZES, VARLEN, _FENCE, "pass"),
    # TMA writes over them.
    "zeros before the tile": (SIZES, VARLEN, _LANDED, "pass"),
    "whole tiles stored": (_ALSO_FORWARD, VARLEN, _STORED, "(thread, shape.rows * chunks"),
    "the last row not stored": (_ALSO_BACKWARD, VARLEN, _STORED, "(thread, (end - 1) * chunks"),
    "rows of the next block": (
        f"{SIZES}, pre 128, post 128",
        *(VARLEN, _OF_TABLE, _OF_TABLE.replace("(block", "(block + 1")),
    ),
    # As if a sequence ended where its last block does.
    "the end of the block": (
        "all 64, pre 128, post 128 / all 96, all 128, all 192, all 256",
        *(VARLEN, "RowRange(record[0], record[1])"),
        "RowRange(record[0], (record[1] + 127) // 128 * 128)",
    ),
    "a block too few before": ("forward window, pack window", VARLEN, _LEFT, f"{_LEFT} - 1"),
    "a block too few after": ("forward window, pack window", VARLEN, _RIGHT, f"{_RIGHT} - 1"),
    "a block too many after": ("pack window, backward window", VARLEN, _RIGHT, f"{_RIGHT} + 1"),
    "ranks ascending": (
        *("backward causal", WALK, f"return {_RANK}"),
        "first = varlen.sequence_of(self.table, base.block)[0]\n"
        "        left = index - varlen.reach(self.lo, self.hi)[0]\n"
        "        return base.block - cutlass.max(first, left)",
    ),
    "ranks of the neighbour": (
        *("backward full", WALK, "last = varlen.sequence_of(self.table, block)"),
        "last = varlen.sequence_of(self.table, block + 1)",
    ),
    "lists of the neighbour": ("forward full", VARLEN, "(table, m)", "(table, m + 1)"),
    "a ticket too few": (
        *("backward window", WALK, "return self.ticket[self.ticket.shape[0] - 1, 0]"),
        "return self.ticket[self.ticket.shape[0] - 1, 0] - 1",
    ),
    "nothing is partial": ("backward window", VARLEN, _CUTS, "cutlass.Boolean(False)"),
    # A block whose last pair is hidden is taken for a full one.
    "partial one off": ("backward cut", VARLEN, _CUTS, _ONE_OFF),
    "rows see more": ("forward window", VARLEN, "+ lo, below + lo", "+ lo - 1, below + lo - 1"),
    "rows see beyond their end": (
        *("forward full", VARLEN, "(row + hi, end - 1), cutlass.min(below + hi, end - 1)"),
        "(row + hi, end), cutlass.min(below + hi, end)",
    ),
    # Of a column's rows, the last.
    "a tile too few": ("backward full", WALK, "// tile_m, end", "// tile_m - 1, end"),
}


def survives(group: str, kernel) -> bool:
    """group: kernels, and a head size or a window."""
    name, case = group.split()
    kernels = dict.fromkeys(KERNELS if name == "all" else (name,), kernel)
    return stands(int(case), **kernels) if case.isdigit() else follows(case, **kernels)


@pytest.mark.parametrize("group", [f"all {window}" for window in WINDOWS])
def test_the_intact_kernels_survive(group):
    assert survives(group, simulated.kernel)


@pytest.mark.parametrize(("name", "group"), list(mutated.by_group(MUTANTS)))
def test_mutants_are_killed(tmp_path, name, group):
    assert not survives(group, mutated.kernels(tmp_path, *MUTANTS[name][1:], packed=True))


def test_one_mask_for_the_pack_is_killed():
    """Blocks counted from the start of the pack: other bits."""
    lengths = [61, 130]
    tensors = known.drawn(191, dim=DIM)
    mask = BlockMask.from_cu_seqlens(known.offsets(lengths), causal=True)

    def at_once(q, k, v):
        inputs = (t[None] for t in (q, k, v))
        out, lse = ck.block_sparse_attention(*inputs, mask, return_lse=True)
        return out[0], lse[0]

    with known.on_sm90():
        want = known.alone(tensors, lengths)
        assert known.differing(known.differentiated(at_once, tensors), want)
        assert known.differing(known.packed(tensors, lengths), want) == []
