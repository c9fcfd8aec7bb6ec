"""The Triton attention in Triton's interpreter: its order written out, drawn cases, mutants.

The interpreter multiplies the bit patterns of bf16 and truncates when it makes bf16, so launchers
hand over fp32, round P and dS by their bits, and round results at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.order.schedule import Schedule
from cute_kernels.sparse_attn import masks
from cute_kernels.sparse_attn.api import block_sparse_attention
from cute_kernels.sparse_attn.tensors import Grads, Saved
from tests.contract import same_bytes
from tests.sparse_attn import against_float64, cases, paged_cases
from tests.sparse_attn.triton_engine import DENSE, PAGED, engine, running, through
from tests.triton_in_numpy import product
from tests.triton_runner import INTERPRETER, case, mutants

pytestmark = pytest.mark.simulates("sparse_attn.triton")

F32 = np.float32
LOG2E, LN2 = F32(math.log2(math.e)), F32(math.log(2))
#: The plan's steps by head size: keys of the forward, query rows of dK and dV, keys of dQ.
STEPS = {64: (64, 32, 64), 192: (32, 16, 32), 256: (32, 16, 16)}


class ByHand:
    """One attention without softcap, in bf16, as the kernels' docstring spells it, in numpy.

    A product here is the one that Triton's interpreter takes, so that bytes can be compared.
    """

    def __init__(self, q, k, v, allowed, scale: float):
        self.sizes = q.shape[1], k.shape[1]
        self.group, self.steps = q.shape[2] // k.shape[2], STEPS[q.shape[3]]
        self.q, self.k, self.v = (_blocks(t) for t in (q, k, v))
        m, n = self.q.shape[2], self.k.shape[2]
        dense = allowed.expand(q.shape[0], q.shape[2], *self.sizes)
        pad = (0, n - self.sizes[1], 0, m - self.sizes[0])
        self.allowed = torch.nn.functional.pad(dense, pad).numpy()
        self.scale, self.factor = F32(scale), F32(scale * math.log2(math.e))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse; a block without an allowed pair is not visited."""
        step, width = self.steps[0], self.v.shape[3]
        lse = np.zeros(self.q.shape[:3], F32)
        out = np.zeros((*lse.shape, width), F32)
        for b, h, m in np.ndindex(*self.q.shape[:2], self.q.shape[2] // 128):
            rows = np.s_[m * 128 : m * 128 + 128]
            top = np.full(128, -np.inf, F32)
            total, acc = np.zeros(128, F32), np.zeros((128, width), F32)
            for index in range(0, self.k.shape[2], step):
                if not self.allowed[
                    b, h, rows, index // 128 * 128 : index // 128 * 128 + 128
                ].any():
                    continue
                cols = np.s_[index : index + step]
                allowed = self.allowed[b, h, rows, cols]
                s = product(self.q[b, h, rows], self.k[b, h // self.group, cols].T)
                above = np.maximum(top, np.where(allowed, s, F32(-np.inf)).max(1) * self.factor)
                base = np.where(above == -np.inf, F32(0), above)
                p = np.where(allowed, np.exp2(s * self.factor - base[:, None]), F32(0))
                shrink = np.exp2(top - base)
                total = total * shrink + p.sum(1)
                part = product(_rounded(p), self.v[b, h // self.group, cols])
                acc, top = part + acc * shrink[:, None], above
            with np.errstate(divide="ignore", invalid="ignore"):
                out[b, h, rows] = np.where(acc == 0, F32(0), acc / total[:, None])
                lse[b, h, rows] = (top + np.log2(total)) * LN2
        self.out, self.lse = _rounded(out), lse
        size = self.sizes[0]
        return self._stored(out, size), torch.from_numpy(lse[:, :, :size].copy())

    def backward(self, dout, schedule: Schedule) -> tuple[torch.Tensor, ...]:
        """dq, dk, dv in fp32 [B, S, H, D], visits and ranks read off the schedule's tickets."""
        self.dout = _blocks(dout)
        self.delta = (self.out * self.dout).sum(3)
        dq, dk, dv = np.zeros_like(self.q), np.zeros_like(self.k), np.zeros_like(self.v)
        _, rows_of_step, keys_of_step = self.steps
        heads, per = self.q.shape[1], self.q.shape[0] * self.q.shape[1] // schedule.heads
        writers: dict[tuple, dict[int, int]] = {}
        for ticket, n, visits in sorted(schedule.tickets(), key=lambda t: t[0]):
            for (m, _, rank), inner in itertools.product(visits, range(per)):
                b, h = divmod(ticket * per + inner, heads)
                kv, cols = h // self.group, np.s_[n * 128 : n * 128 + 128]
                writers.setdefault((b, h, m), {})[rank] = n
                for index in range(m * 128, m * 128 + 128, rows_of_step):
                    rows = np.s_[index : index + rows_of_step]
                    p, ds = self._slopes(b, h, rows, cols, flip=True)
                    dv[b, kv, cols] = product(p, self.dout[b, h, rows]) + dv[b, kv, cols]
                    dk[b, kv, cols] = product(ds, self.q[b, h, rows]) + dk[b, kv, cols]
        for (b, h, m), out in writers.items():
            rows = np.s_[m * 128 : m * 128 + 128]
            for rank, index in itertools.product(sorted(out), range(0, 128, keys_of_step)):
                cols = np.s_[out[rank] * 128 + index : out[rank] * 128 + index + keys_of_step]
                _, ds = self._slopes(b, h, rows, cols, flip=False)
                dq[b, h, rows] = product(ds, self.k[b, h // self.group, cols]) + dq[b, h, rows]
        q_len, kv_len = self.sizes
        return (
            self._stored(dq * self.scale, q_len),
            self._stored(dk * self.scale, kv_len),
            self._stored(dv, kv_len),
        )

    def _slopes(self, b: int, h: int, rows, cols, flip: bool) -> tuple[np.ndarray, np.ndarray]:
        """P and dS of a tile; ``flip``: keys are rows."""
        x, y = self.q[b, h, rows], self.k[b, h // self.group, cols]
        g, v = self.dout[b, h, rows], self.v[b, h // self.group, cols]
        allowed, shift = self.allowed[b, h, rows, cols], -(self.lse[b, h, rows] * LOG2E)[:, None]
        delta = self.delta[b, h, rows, None]
        if flip:
            x, y, g, v = y, x, v, g
            allowed, shift, delta = allowed.T, shift.T, delta.T
        p = np.where(allowed, np.exp2(product(x, y.T) * self.factor + shift), F32(0))
        ds = np.where(allowed, p * (product(g, v.T) - delta), F32(0))
        return _rounded(p), _rounded(ds)

    def _stored(self, blocks: np.ndarray, size: int) -> torch.Tensor:
        return torch.from_numpy(blocks[:, :, :size].copy()).transpose(1, 2)


def _rounded(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().float().numpy()


def _blocks(t: torch.Tensor) -> np.ndarray:
    """[B, S, H, D] -> fp32 [B, H, whole blocks, D], zero rows at the end."""
    t = t.detach().float().transpose(1, 2)
    return torch.nn.functional.pad(t, (0, 0, 0, -t.shape[2] % 128)).contiguous().numpy()


SHARED, BY_HEAD, FULL = "shared mask", "a mask per head", "all"
HEADS, Q_LEN, KV_LEN, DIM = 2, 200, 300, 64
#: Padded to 256, with v of 128; and the widest.
WIDE = (192, 256)
SHUFFLED = [1, 2, 0]
#: Every head size, dtype and form, a group, softcap, tails and empty rows.
DRAWN = (28, 31, 42, 57, 58, 59, 67, 80)


@functools.cache
def mask_of(kind: str) -> BlockMask:
    """Bits, with 1 of the 6 blocks empty; or all."""
    if kind == FULL:
        return BlockMask.full(Q_LEN, KV_LEN)
    generator = torch.Generator().manual_seed(4)
    heads = HEADS if kind == BY_HEAD else 1
    is_allowed = torch.rand(1, heads, Q_LEN, KV_LEN, generator=generator) < 0.3
    is_allowed[..., :128, 256:] = False
    return BlockMask.from_dense(is_allowed)


@functools.cache
def problem(kind: str, dim: int = DIM) -> cases.Inputs:
    return cases.inputs(1, 1 if kind == FULL else HEADS, 1, Q_LEN, KV_LEN, dim, seed=9)


@functools.cache
def by_hand(kind: str, dim: int = DIM) -> tuple[ByHand, torch.Tensor, torch.Tensor]:
    leaves = problem(kind, dim).leaves()
    hand = ByHand(*leaves, mask_of(kind).to_dense(), dim**-0.5)
    return (hand, *hand.forward())


def lists(kind: str, **options):
    options = {"order": SHUFFLED, "walk": "cyclic"} | options
    return kinds.permutation(mask_of(kind), heads=HEADS if kind == BY_HEAD else 1, **options)


def sums(launch, kind: str, schedule, dim: int = DIM) -> tuple[torch.Tensor, ...]:
    """fp32 dq, dk, dv of the kernels."""
    lowered, (_, out, lse) = masks.lower(mask_of(kind)), by_hand(kind, dim)
    order = masks.order_of(lowered, schedule)
    x = problem(kind, dim)
    leaves = [t.detach() for t in x.leaves()]
    grads, saved = Grads(x.dout, None), Saved(*leaves, out.bfloat16(), lse)
    return launch.ordered_sums(grads, saved, lowered, order, dim**-0.5, 0.0)[:3]


def forward_order(launch, dim: int = DIM) -> None:
    """out and lse are what the docstring spells, byte for byte."""
    for kind in (SHARED, BY_HEAD):
        (_, out, lse), leaves = by_hand(kind, dim), problem(kind, dim).leaves()
        with through(launch):
            got = block_sparse_attention(*leaves, mask_of(kind), return_lse=True)
        assert same_bytes(got[0], out.bfloat16()) and same_bytes(got[1], lse), kind


def backward_order(launch, dim: int = DIM) -> None:
    """dQ adds by ranks, dK and dV by visits and heads, byte for byte, before the rounding."""
    for kind in (SHARED, BY_HEAD):
        schedule = lists(kind)
        want = by_hand(kind, dim)[0].backward(problem(kind, dim).dout, schedule)
        got = sums(launch, kind, schedule, dim)
        names = ("dq", "dk", "dv")
        wrong = [n for n, g, w in zip(names, got, want, strict=True) if not same_bytes(g, w)]
        assert not wrong, (kind, wrong)


def write_order(launch) -> None:
    """Other ranks: other dQ, the same dK and dV.  Other tickets: every byte as before."""
    schedule = lists(FULL)
    dq, dk, dv = sums(launch, FULL, schedule)
    other = sums(launch, FULL, lists(FULL, write_order=[0, 1, 2]))
    assert not same_bytes(other[0], dq) and same_bytes(other[1], dk) and same_bytes(other[2], dv)
    back = dataclasses.replace(schedule, order=schedule.order[::-1])
    assert all(map(same_bytes, sums(launch, FULL, back), (dq, dk, dv)))


WINDOW = BlockMask.sliding_window(100, 200, left=90, right=40)
CASE = cases.Case(7, "by hand", *(1, 2, 1, 100, 200, 64), torch.bfloat16, 3.0, "lpt", True, WINDOW)
NO_MASK = cases.Case(8, "none", *(1, 1, 1, 3, 65, 64), torch.float16, 0.0, "spt", False, None)
OF_192 = cases.Case(9, "none", *(1, 2, 2, 40, 65, 192), torch.bfloat16, 0.0, "spt", True, None)


def values(launch, chosen=(CASE,)) -> None:
    """Forward and gradients lie within the rounding bound, and empty rows are exact."""
    for drawn in chosen:
        with through(launch):
            excess = against_float64.checked(drawn)
        assert max(excess.values()) <= 1, f"{drawn}: {excess}"


def ends(launch) -> None:
    """No rule: only the lengths bound the pairs."""
    values(launch, [NO_MASK])


def two_widths(launch) -> None:
    """q and k of 192, v of 128."""
    values(launch, [OF_192])


def zeros(launch) -> None:
    """Row 0 sees keys 0 to 127, whose sum underflows to -0; row 1 needs another block, all +0."""
    q, k, v = (torch.zeros(1, n, 1, DIM, dtype=torch.bfloat16) for n in (2, 200, 200))
    q[0, 0], k[0, :128, 0, 0], v[0, :128] = 8.0, -30.0 / (8 * DIM**-0.5 * 1.4427), -(2.0**-133)
    k[0, 64], v[0, 64] = 0.0, 0.0
    v[0, 128:] = 1.0
    allowed = torch.zeros(2, 200, dtype=torch.bool)
    allowed[0, :128] = allowed[1, 130] = True
    with through(launch):
        alone = block_sparse_attention(q[:, :1], k, v, BlockMask.from_dense(allowed[:1]))
        both = block_sparse_attention(q, k, v, BlockMask.from_dense(allowed))
    assert same_bytes(both[:, :1], alone) and (both[:, 1] == 1).all()


def neighbours(launch) -> None:
    """A row keeps its bits next to rows of large scores, alone, and in another place."""
    x = cases.inputs(1, 1, 1, 130, 200, DIM, seed=2)
    q, k, v = (t.detach() for t in x.leaves())
    loud = q * torch.where(torch.arange(130) == 7, 1.0, 64.0).bfloat16()[:, None, None]
    with through(launch):
        want = block_sparse_attention(q, k, v)[:, 7:8]
        for rows, index in ((loud, 7), (q[:, 7:8], 0), (q[:, 5:], 2), (q.flip(1), 122)):
            assert same_bytes(block_sparse_attention(rows, k, v)[:, index : index + 1], want)


def drawn_case(launch, seed: int) -> None:
    values(launch, [cases.draw(seed)])


CHECKS = [
    *(
        case(INTERPRETER, check, night=True)
        for check in (
            *(forward_order, backward_order, write_order, values),
            *(ends, two_widths, zeros, neighbours),
        )
    ),
    *(
        case(INTERPRETER, check, dim, night=True)
        for check in (forward_order, backward_order)
        for dim in WIDE
    ),
    *(case(INTERPRETER, drawn_case, seed, night=True) for seed in DRAWN),
]


@pytest.mark.parametrize(("engine", "check", "options"), CHECKS)
def test_dense(engine, check, options):
    with DENSE.running(engine) as launch:
        check(launch)


def drawn_batch(engine, seed: int) -> None:
    engine.check(paged_cases.drawn(**paged_cases.draw(seed)))


PAGED_CHECKS = [
    *(case(INTERPRETER, check, night=True) for check in paged_cases.CHECKS),
    *(case(INTERPRETER, drawn_batch, seed, night=True) for seed in range(10)),
]


@pytest.mark.parametrize(("name", "check", "options"), PAGED_CHECKS)
def test_paged(name, check, options):
    with running(name) as engine:
        check(engine)


def test_the_draw_covers_what_it_claims():
    drawn = [cases.draw(seed) for seed in DRAWN]
    assert {c.dim for c in drawn} == set(cases.HEAD_DIMS)
    assert {c.dtype for c in drawn} == set(cases.DTYPES)
    lowered = [masks.lower(c.mask) for c in drawn if c.mask is not None]
    assert {m.form for m in lowered} >= {"band", "bits"} and any(c.mask is None for c in drawn)
    assert any(c.softcap for c in drawn) and any(c.heads > c.kv_heads > 1 for c in drawn)
    assert any(not c.allowed().any(-1).all() for c in drawn)
    assert any(c.mask is not None and c.mask.shape[1] > 1 and c.heads > c.kv_heads for c in drawn)


# ---- mutants -------------------------------------------------------------------------------------

#: What follows the bound of a head's columns where rows are loaded, not stored.
LOADED = "[None, :]\n    return"
VISIT, STEP_M = "i // (INNER * STEPS)\n", "(entry >> 1) * BLOCK + "
WRITERS, LISTED = "writer_ptr, writer_tile_ptr, writers", "row * LISTED"
RANK = "        rank = tl.load(rank_ptr + e, mask=inside, other=0)\n"
TOP, ALL_TOP = "tl.max(s, axis=1) * factor", "tl.max(tl.max(s, axis=1), axis=0) * factor"
ZERO = "tl.where(acc == 0.0, 0.0, acc / total[:, None])"
SUM = "tl.sum(out * dout, axis=1)"
HALF = "tl.where(tl.arange(0, BLOCK_DV)[None, :] < DV // 2, out * dout, 0.0)"
NOT_RESCALED = ("acc * shrink[:, None]", "acc")
NOT_ROUNDED = ("tl.dot(through(p, v, ROUND)", "tl.dot(p.to(v.dtype)")
#: The check that sees it -> what: (old text, new text).
DENSE_MUTANTS = {
    backward_order: {
        "ranks": (f"{WRITERS}, i, S", f"{WRITERS} + visits - 1 - 2 * (i // STEPS), i, S"),
        "visits": (f"begin + {VISIT}", f"begin + visits - 1 - {VISIT}"),
        "steps": (f"{STEP_M}i % STEPS * BLOCK_M", f"{STEP_M}(STEPS - 1 - i % STEPS) * BLOCK_M"),
        "heads": ("i // STEPS % INNER)", "INNER - 1 - i // STEPS % INNER)"),
    },
    write_order: {"key blocks as they come": (RANK, "        rank = n + e * 0\n")},
    forward_order: {
        "key blocks": (
            f"{LISTED}, i, STEPS",
            f"{LISTED} + tl.load(count_ptr + row) - 1 - 2 * (i // STEPS), i, STEPS",
        ),
        "bits of the next key": ("(bits % 32)) & 1", "((bits + 1) % 32)) & 1"),
        "bits of the next row": ("q % BLOCK * WORDS", "(q + 1) % BLOCK * WORDS"),
        "P not rounded": NOT_ROUNDED,
    },
    values: {
        "the band one key too narrow": ("gap <= tl.where", "gap < tl.where"),
        "the band one key too wide": ("gap >= tl.where", "gap + 1 >= tl.where"),
        "no rescaling": NOT_RESCALED,
        "no gradient of lse": ("delta -= tl.load", "delta -= 0.0 * tl.load"),
    },
    ends: {"a key beyond the end": ("(kv < kv_len)", "(kv <= kv_len)")},
    neighbours: {"one maximum for the block": (TOP, ALL_TOP)},
    zeros: {"-0 is kept": (ZERO, ZERO.replace("acc == 0.0", "total[:, None] == 0.0"))},
    two_widths: {
        "delta over half of v": (SUM, SUM.replace("out * dout", HALF)),
        "dK where dV would be": ("dk_ptr + place * D", "dk_ptr + place * DV"),
        "scores over v's width": (f"(d < D){LOADED}", f"(d < 128){LOADED}"),
        "columns behind a head": (f"(d < D){LOADED}", f"(d < 224){LOADED}"),
    },
}
KEYS, STEP_N = "(n >= first_key) & (n < end_key)", "n = step * BLOCK_N + tl.arange"
FIRST, LAST = "first_key // BLOCK_N", "(end_key - 1) // BLOCK_N"
TABLE, PAGE_OF = "table_ptr += {} * TABLE", "tl.load(table_ptr + n // {},"
SEQUENCE, BEFORE = "sequence.to(tl.int64)", "tl.maximum(sequence - 1, 0).to(tl.int64)"
SLOT, STRIDES = "_first_slot(cu_ptr, middle, GROUP, BLOCK_M)", "_strides({}), _strides(v), _str"
PAGED_MUTANTS = {
    paged_cases.mixed: {
        "page of another sequence": (TABLE.format(SEQUENCE), TABLE.format(BEFORE)),
        "page before": (PAGE_OF.format("PAGE"), PAGE_OF.format("(PAGE + 1)")),
        "key of a page": ("(n % PAGE).to(tl.int64) * v_str", "(n % 16).to(tl.int64) * v_str"),
        "tail of the last page": (
            KEYS,
            KEYS.replace("end_key", "(end_key + PAGE - 1) // PAGE * PAGE"),
        ),
        "head of the first page": (KEYS, KEYS.replace("first_key)", "first_key // PAGE * PAGE)")),
        "all keys of a block": (KEYS, "n < kv_len"),
        "a key less": (KEYS, KEYS.replace(">=", ">")),
        "left edge too narrow": ("(gap >= lo)", "(gap > lo)"),
        "left edge too wide": ("(gap >= lo)", "(gap >= lo - 1)"),
        "right edge too narrow": ("(gap <= hi)", "(gap < hi)"),
        "right edge too wide": ("(gap <= hi)", "(gap <= hi + 1)"),
        "positions from the first query": ("shift = kv_len - (end - begin)", "shift = kv_len * 0"),
        "tile of another sequence": (f"{SLOT} <= slot", f"{SLOT} < slot"),
        "slots of one sequence": (
            "start * GROUP // BLOCK_M + sequence",
            "start * GROUP // BLOCK_M",
        ),
        "heads": ("kv_head * GROUP + r % GROUP", "kv_head + r % GROUP * KV_HEADS"),
        "blocks from the window": (
            STEP_N,
            STEP_N.replace("step * B", f"first_key + (step - {FIRST}) * B"),
        ),
        "blocks backwards": (STEP_N, STEP_N.replace("step", f"({FIRST} + {LAST} - step)")),
        "no rescaling": NOT_RESCALED,
        "P not rounded": NOT_ROUNDED,
        "a sink of no sequence": ("mask=is_row & is_sequence, other", "mask=is_row, other"),
        "no sink": ("        total += 1.0\n", ""),
    },
    paged_cases.more: {"no right edge": ("(gap <= hi)", "(gap <= hi + 10000)")},
    paged_cases.zeros: {"-0 is kept": (ZERO, "acc / total[:, None]")},
    paged_cases.places: {"layouts": (STRIDES.format("k"), STRIDES.format("k.transpose(1, 2)"))},
}


def rows(table: dict) -> dict[str, tuple]:
    """The rows of a table of `mutants`, of check -> name -> edit."""
    return {
        name: (INTERPRETER, check, edit)
        for check, edits in table.items()
        for name, edit in edits.items()
    }


@pytest.mark.parametrize(("engine", "check", "edits"), mutants(rows(DENSE_MUTANTS)))
def test_killed(engine, check, edits):
    DENSE.kill(engine, check, *edits)


@pytest.mark.parametrize(("name", "check", "edits"), mutants(rows(PAGED_MUTANTS)))
def test_paged_killed(name, check, edits):
    with DENSE.running(name) as dense:
        PAGED.kill(name, lambda paged: check(engine(paged, dense)), *edits)
