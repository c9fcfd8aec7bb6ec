"""The record of hybrid layers on a CPU: any pieces have the bytes of one pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import ArgumentValueError, DtypeError, ShapeError
from cute_kernels.linear_attn import cache as module
from cute_kernels.linear_attn import rings
from tests.anchors import planted
from tests.contract import same_bytes
from tests.runtime.cached_calls import drawn

from . import ssd_cases
from .delta_cases import BF16, FP32, Case, operands

HEADS, CHANNELS = (1, 2), 48
#: K and V, or N and P, of a device.
SIZES = {"cpu": (8, 16), "cuda": (128, 64)}
LENGTH = 195
DELTA, KDA, MAMBA2, MAMBA = "gated_delta_rule", "kda", "mamba2", "mamba"
#: Rows of a chunk; Mamba has none.
CHUNKS = {DELTA: 64, KDA: 64, MAMBA2: 128, MAMBA: 64}
#: Operands of a scan that are no rows.
OF_HEADS = -torch.tensor([0.4, 1.5]), drawn(2, seed=92), drawn(2, seed=93, dtype=FP32)
STEPS = {"dt_softplus": True, "dt_limit": (0.02, 2.0)}


def applied(rule: str, of: object, rows: list[torch.Tensor], **options: object) -> torch.Tensor:
    """What a rule, of a layer of a cache or whole, gives for rows [B, T, ...]."""
    if rule in (DELTA, KDA):
        if isinstance(of, module.LayerCache):
            return of.gated_delta_rule(*rows, **options)
        return (ck.chunk_kda if rule == KDA else ck.chunk_gated_delta_rule)(*rows, **options)[0]
    x, dt, B, C, z = rows
    A, D, bias = (t.to(x.device) for t in OF_HEADS)
    if rule == MAMBA:
        x, dt, B, C, z = (t.movedim(1, -1) for t in rows)
        A = A[:, None] * torch.arange(1, 9, device=x.device) / 8
        options |= {"D": D, "z": z, "delta_bias": bias, "delta_softplus": True}
        return of.selective_scan(x, dt, A, B, C, **options).mT
    options |= {"D": D, "z": z, "dt_bias": bias, **STEPS}
    return of.mamba_chunk_scan_combined(x, dt, A, B, C, **options)


def sizes() -> tuple[int, int]:
    return SIZES[torch.get_default_device().type]


class Sequence:
    """Operands of one sequence, [T, ...], and its rows in one pass."""

    def __init__(self, rule: str, seed: int, length: int = LENGTH):
        self.rule = rule
        if rule in (DELTA, KDA):
            case = Case((length,), heads=HEADS, sizes=sizes(), initial=False, channels=rule == KDA)
            q, k, v, g, beta, _ = operands(case, seed)
            self.rows = q, k, v, g * 0.1, beta
        else:
            of_mamba = {"sizes": (1, 8), "selective": True} if rule == MAMBA else {}
            options = {"heads": HEADS, "sizes": sizes()[::-1], "initial": False} | of_mamba
            o = ssd_cases.operands(ssd_cases.Case((length,), **options), seed)
            self.rows = o.x, o.dt, o.B, o.C, o.z
        self.x = drawn(length, CHANNELS, seed=seed + 7, dtype=BF16)
        self.out = applied(rule, ck, [t[None] for t in self.rows])[0]
        self.conv = ck.causal_conv1d_fn(self.x.T[None], *taps(), activation="silu")[0].T

    def part(self, first: int, end: int) -> list[torch.Tensor]:
        return [t[first:end] for t in (*self.rows, self.x)]


def taps() -> tuple[torch.Tensor, torch.Tensor]:
    return drawn(CHANNELS, 4, seed=90, dtype=BF16), drawn(CHANNELS, seed=91, dtype=BF16)


def new_cache(rule: str, slots: int, drafts: int = 0) -> ck.LinearAttentionCache:
    cls = ck.LinearAttentionCache
    make = {DELTA: cls, KDA: cls.of_kda, MAMBA2: cls.of_mamba2, MAMBA: cls.of_mamba}[rule]
    of_rule = {"heads": HEADS, "sizes": (8, 1) if rule == MAMBA else sizes()}
    return make(2, slots, **of_rule, conv=(CHANNELS, 4), drafts=drafts, dtype=BF16)


def step(
    rule: str, cache, parts: list[list[torch.Tensor]], slots=None
) -> list[tuple[torch.Tensor, ...]]:
    """(conv, o) of the next rows of some sequences, given as a pack."""
    lengths = [len(part[0]) for part in parts]
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    *rows, x = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    options = {"cu_seqlens": offsets, "slots": slots}
    conv = cache[1].causal_conv1d(x.T[None], *taps(), "silu", **options)[0].T
    out = applied(rule, cache[1], [t[None] for t in rows], **options)[0]
    return list(zip(conv.split(lengths), out.split(lengths), strict=True))


def check(sequence: Sequence, got: tuple[torch.Tensor, ...], first: int, end: int) -> None:
    conv, out = got
    assert same_bytes(out, sequence.out[first:end]), (first, end)
    assert same_bytes(conv, sequence.conv[first:end]), (first, end)


def pieces(rule: str, drafts: int = 0) -> None:
    """Prefill of other lengths, then pieces of 0 to 70 rows side by side, in permuted slots."""
    sequences, at = [Sequence(rule, seed) for seed in (0, 20, 40)], [0, 0, 0]
    cache, slots = new_cache(rule, 4, drafts), torch.tensor([2, 0, 3])
    more = CHUNKS[rule] - 64
    for sizes in (
        (64 + more, 1, 70), (1, 63 + more, 0), (20, 1, 1), (1, 64, 15 + more), (63, 2, 1), (1, 1, 1)
    ):  # fmt: skip
        ends = [a + n for a, n in zip(at, sizes, strict=True)]
        parts = [s.part(a, b) for s, a, b in zip(sequences, at, ends, strict=True)]
        for sequence, got, first, end in zip(
            sequences, step(rule, cache, parts, slots), at, ends, strict=True
        ):
            check(sequence, got, first, end)
        at = ends


def drafts(rule: str) -> None:
    """Drafts across blocks and chunks are dropped in part, and other rows follow."""
    true, other = Sequence(rule, 0), Sequence(rule, 60)
    cache, length = new_cache(rule, 1, drafts=20), 0
    first = CHUNKS[rule] - 14
    accepted = (first, 0), (9, 3), (20, 6), (1, 1), (20, 20), (17, 0), (20, 13), (5, 2)
    for offered, dropped in accepted:
        keep = offered - dropped
        pairs = zip(true.part(length, length + keep), other.part(0, dropped), strict=True)
        part = [torch.cat(pair) for pair in pairs]
        conv, out = step(rule, cache, [part])[0]
        check(true, (conv[:keep], out[:keep]), length, length + keep)
        cache[0].spare.fill_(dropped)  # the layer that is not called
        cache.rollback(dropped)
        length += keep
    assert length > CHUNKS[rule] and int(cache[1].length[0]) == length == int(
        cache[1].conv_length[0]
    )


def copies(rule: str) -> None:
    """A copied slot goes on as its source does, and a reset one from the start."""
    a, b = Sequence(rule, 0), Sequence(rule, 20)
    cache = new_cache(rule, 3, drafts=2)
    step(rule, cache, [a.part(0, 70), b.part(0, 9)], torch.tensor([1, 2]))
    cache.copy(torch.tensor([1, 2]), torch.tensor([2, 0]))
    cache.reset(torch.tensor([1]))
    parts = [b.part(9, 11), b.part(0, 5), a.part(70, 90)]
    for got, (sequence, first, end) in zip(
        step(rule, cache, parts), ((b, 9, 11), (b, 0, 5), (a, 70, 90)), strict=True
    ):
        check(sequence, got, first, end)


def selections(rule: str) -> None:
    """Slots that are selected go on, twice or in another order, and drop drafts from then on."""
    a, b, other = Sequence(rule, 0), Sequence(rule, 20), Sequence(rule, 60)
    cache = new_cache(rule, 3)
    step(rule, cache, [a.part(0, 70), b.part(0, 63)], torch.tensor([0, 2]))
    cache = cache.select(torch.tensor([2, 0, 2]), drafts=9)
    assert cache.slots == 3
    for first, end, dropped in ((0, 20, 9), (20, 22, 1), (22, 40, 0)):
        parts = []
        for sequence, behind in ((b, 63), (a, 70), (b, 63)):
            kept = sequence.part(behind + first, behind + end)
            bad = other.part(0, dropped)
            parts.append([torch.cat(pair) for pair in zip(kept, bad, strict=True)])
        found = step(rule, cache, parts)
        cache[0].spare.fill_(dropped)  # the layer that is not called
        cache.rollback(dropped)
        for got, (sequence, behind) in zip(found, ((b, 63), (a, 70), (b, 63)), strict=True):
            rows = tuple(t[: end - first] for t in got)
            check(sequence, rows, behind + first, behind + end)
    cache = cache.select(torch.tensor([1]), drafts=0)
    check(a, step(rule, cache, [a.part(110, 150)])[0], 110, 150)


def fewer_drafts(rule: str) -> None:
    """Rows that could be dropped are kept behind the state when none can be any more."""
    sequence, length = Sequence(rule, 0), CHUNKS[rule] + 6
    cache = new_cache(rule, 1, drafts=9)
    step(rule, cache, [sequence.part(0, length)])
    cache = cache.select(torch.tensor([0]), drafts=0)
    for count in (5, 5, 1, 1):
        part = sequence.part(length, length + count)
        check(sequence, step(rule, cache, [part])[0], length, length + count)
        length += count


def neighbours(rule: str) -> None:
    """NaN in a neighbour's rows, in free slots and behind the pack reaches nothing."""
    sequence = Sequence(rule, 0)
    cache = new_cache(rule, 3)
    for ring in cache[1]._rings():
        ring.data.fill_(float("nan"))
    cache[1].state[2] = float("nan")
    for first, end in ((0, 66), (66, 67), (67, 130)):
        part = sequence.part(first, end)
        bad = [torch.full_like(t[:3], float("nan")) for t in part]
        check(sequence, step(rule, cache, [bad, part], torch.tensor([0, 1]))[1], first, end)
    rows = [torch.cat([t, t.new_full(t.shape, float("nan"))]) for t in sequence.part(130, 132)]
    offsets = torch.tensor([0, 2])
    options = {"cu_seqlens": offsets, "slots": torch.tensor([1])}
    out = applied(rule, cache[1], [t[None] for t in rows[:5]], **options)[0]
    assert same_bytes(out[:2], sequence.out[130:132]) and not out[2:].any()


CHECKS = {
    "pieces": pieces,
    "pieces with drafts": lambda rule: pieces(rule, drafts=20),
    "drafts": drafts,
    "copies": copies,
    "selections": selections,
    "fewer drafts": fewer_drafts,
    "neighbours": neighbours,
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("rule", CHUNKS)
def test_bytes(rule, name, device):
    with torch.device(device):
        CHECKS[name](rule)


def test_batch_of_equal_lengths():
    """[B, T, ...] without a pack, in fp32, by the second call a row alone."""
    sequences = [Sequence(DELTA, seed, 20) for seed in (0, 20)]
    cache = new_cache(DELTA, 2)
    rows = [torch.stack(pair) for pair in zip(*(s.rows for s in sequences), strict=True)]
    first = cache[0].gated_delta_rule(*(t[:, :19] for t in rows))
    last = cache[0].gated_delta_rule(*(t[:, 19:] for t in rows))
    assert same_bytes(torch.cat([first, last], 1), torch.stack([s.out for s in sequences]))


#: Name -> the check that it fails, and the edit.
MUTANTS = {
    "grid_counts_drafts": ("drafts", "(offsets.diff() - self.drafts)", "offsets.diff()"),
    "slot_by_place": ("copies", "return slots.long()", "return torch.arange(len(slots))"),
    "short_tail": ("drafts", "width - 1 + drafts, (channels,)", "width - 1, (channels,)"),
    "zeros_by_a_product": ("neighbours", "torch.where((before < 0)[..., None], 0, initial).mT",
                           "(initial * (before >= 0)[..., None]).mT"),
    "same_slots": ("selections", "self.read(slots[:, None], position)",
                   "self.read(slot, position)"),
    "same_place": ("selections", "position = length[:, None] + back",
                   "position = length[:1, None] + 0 * length[:, None] + back"),
    "steps_without_limits": ("pieces", "offsets, None, None, None, *steps",
                             "offsets, None, None, None, True, 0.0, 1e9"),
    "state_of_all_rows": ("pieces", "True,\n                self.drafts,\n",
                          "True,\n                -1,\n"),
    "state_of_all_channels": ("drafts", "True, self.drafts,\n", "True, -1,\n"),
    "short_rings": ("fewer drafts", "max(self._ring_rows(drafts), self._kept[0].rows)",
                    "self._ring_rows(drafts)"),
    "another_row": ("neighbours", "out[0][row]", "out[0][row - 1]"),
    "states_stay": ("copies", '("state", "grid", "length"', '("grid", "length"'),
}  # fmt: skip


#: Those of other records than the delta rule's.
_OF_OTHERS = {
    "steps_without_limits": MAMBA2, "state_of_all_rows": MAMBA2, "state_of_all_channels": MAMBA,
}  # fmt: skip


@pytest.mark.mutants
@pytest.mark.parametrize("name", MUTANTS)
def test_killed(name, monkeypatch):
    check, old, new = MUTANTS[name]
    assert ck.LinearAttentionCache is module.LinearAttentionCache  # what comes back
    in_rings = old in Path(rings.__file__).read_text()
    of_rings, edits = [(old, new)] if in_rings else [], [] if in_rings else [(old, new)]
    with planted(rings, *of_rings), planted(module, *edits):
        monkeypatch.setattr(ck, "LinearAttentionCache", module.LinearAttentionCache)
        with pytest.raises((AssertionError, ArgumentValueError)):
            CHECKS[check](_OF_OTHERS.get(name, DELTA))


def test_rings_of_steps_have_as_many_rows_as_the_others():
    """Also where fewer drafts are selected: a step on a GPU finds all of them by one number."""
    cache = new_cache(DELTA, 1, drafts=9)
    for layer in cache.layers:
        layer._derived = [rings.Ring(1, layer._kept[0].rows, (2, 3), BF16, "cpu")]
    for layer in cache.select(torch.tensor([0]), drafts=0).layers:
        assert {ring.rows for ring in (*layer._kept, *layer._derived)} == {128}


def test_too_many_rows_are_not_dropped():
    """The state does not go back: what was appended since bounds what can be dropped."""
    sequence, cache = Sequence(DELTA, 0, 80), new_cache(DELTA, 1, drafts=4)
    refused = pytest.raises(ArgumentValueError, match="rows: expected")

    def call(first: int, end: int) -> None:
        for layer in cache.layers:
            out = layer.gated_delta_rule(*(t[None, first:end] for t in sequence.rows))[0]
            assert same_bytes(out, sequence.out[first:end])

    with refused:
        cache.rollback(1)
    call(0, 2)
    with refused:  # two rows were appended
        cache.rollback(3)
    call(2, 68)
    cache.rollback(4)
    call(64, 65)
    with refused:  # one row was appended since; the state is behind 64
        cache.rollback(2)
    cache.rollback(1)
    call(64, 80)
    with refused:
        cache.rollback(5)


def test_gates_of_another_rule_are_refused():
    for rule, other in ((DELTA, KDA), (KDA, DELTA)):
        rows, cache = [t[None] for t in Sequence(other, 0, 4).rows], new_cache(rule, 1)
        with pytest.raises(ShapeError, match=r"g: expected \d dimensions"):
            cache[0].gated_delta_rule(*rows)


def test_what_a_cache_cannot_keep_is_refused():
    rows = [t[None, :4] for t in Sequence(DELTA, 0, 8).rows]
    two = [t.expand(2, *t.shape[1:]) for t in rows]
    wide = [t.float() for t in rows]
    for given, options, said in (
        (wide, {}, (DtypeError, "rows: expected torch.bfloat16")),
        (two, {"slots": torch.tensor([1, 1])}, (ArgumentValueError, "slots: .* all different")),
        (two, {"slots": torch.tensor([0, 2])}, (ArgumentValueError, "slots: .* from 0 to 1")),
        (two, {"slots": torch.tensor([0])}, (ShapeError, "slots")),
        (two, {"slots": torch.tensor([0.0, 1.0])}, (DtypeError, "slots")),
        (rows, {"cu_seqlens": torch.tensor([1, 4])}, (ArgumentValueError, "cu_seqlens")),
        (two, {"cu_seqlens": torch.tensor([0, 4])}, (ShapeError, "cu_seqlens")),
    ):
        cache = new_cache(DELTA, 2)
        with pytest.raises(said[0], match=said[1]):
            cache[0].gated_delta_rule(*given, **options)
        assert not cache[0].length.any()


WRONG = {"layers": 0}, {"slots": 0}, {"drafts": -1}, {"conv": (4, 1)}


@pytest.mark.parametrize("wrong", WRONG)
def test_sizes_are_refused_by_name(wrong):
    right = {
        "layers": 1,
        "slots": 1,
        "heads": HEADS,
        "sizes": sizes(),
        "conv": (4, 4),
        "dtype": FP32,
    }
    with pytest.raises(ArgumentValueError, match=next(iter(wrong))):
        ck.LinearAttentionCache(**right | wrong)
