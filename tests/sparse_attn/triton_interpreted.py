"""The Triton attention in Triton's interpreter: its order written out, drawn cases, planted bugs.

Collected by test_triton_interpreter.py only, in a process that has TRITON_INTERPRET=1 before triton
is imported.  The interpreter multiplies the bit patterns of bf16 and truncates when it makes bf16,
so the launcher is told to hand over fp32, to round P and dS by their bits and results at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import os

import pytest
import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.order import kinds
from cute_kernels.sparse_attn import masks
from cute_kernels.sparse_attn.api import block_sparse_attention
from cute_kernels.sparse_attn.tensors import Grads, Saved
from cute_kernels.sparse_attn.triton import launch as triton_launch
from tests.contract import same_bytes
from tests.sparse_attn import against_float64, cases
from tests.sparse_attn.triton_engines import ByHand, copy_of, through
from tests.triton_in_numpy import same_on_every_machine  # noqa: F401

assert os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

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
    return launch.ordered_sums(grads, saved, lowered, order, dim**-0.5, 0.0, interpret=True)[:3]


def forward_order(launch, dim: int = DIM) -> None:
    """out and lse are what the docstring spells, byte for byte."""
    for kind in (SHARED, BY_HEAD):
        (_, out, lse), leaves = by_hand(kind, dim), problem(kind, dim).leaves()
        with through(launch, interpret=True):
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
    for case in chosen:
        with through(launch, interpret=True):
            excess = against_float64.checked(case)
        assert max(excess.values()) <= 1, f"{case}: {excess}"


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
    with through(launch, interpret=True):
        alone = block_sparse_attention(q[:, :1], k, v, BlockMask.from_dense(allowed[:1]))
        both = block_sparse_attention(q, k, v, BlockMask.from_dense(allowed))
    assert same_bytes(both[:, :1], alone) and (both[:, 1] == 1).all()


def neighbours(launch) -> None:
    """A row keeps its bits next to rows of large scores, alone, and in another place."""
    x = cases.inputs(1, 1, 1, 130, 200, DIM, seed=2)
    q, k, v = (t.detach() for t in x.leaves())
    loud = q * torch.where(torch.arange(130) == 7, 1.0, 64.0).bfloat16()[:, None, None]
    with through(launch, interpret=True):
        want = block_sparse_attention(q, k, v)[:, 7:8]
        for rows, index in ((loud, 7), (q[:, 7:8], 0), (q[:, 5:], 2), (q.flip(1), 122)):
            assert same_bytes(block_sparse_attention(rows, k, v)[:, index : index + 1], want)


CHECKS = (forward_order, backward_order, write_order, values, ends, two_widths, zeros, neighbours)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_kernels(check):
    check(triton_launch)


@pytest.mark.parametrize("check", [forward_order, backward_order], ids=lambda check: check.__name__)
@pytest.mark.parametrize("dim", WIDE)
def test_the_kernels_of_wide_heads(check, dim):
    check(triton_launch, dim)


@pytest.mark.parametrize("seed", DRAWN)
def test_drawn_cases_against_float64(seed):
    values(triton_launch, [cases.draw(seed)])


def test_the_draw_covers_what_it_claims():
    drawn = [cases.draw(seed) for seed in DRAWN]
    assert {c.dim for c in drawn} == set(cases.HEAD_DIMS)
    assert {c.dtype for c in drawn} == set(cases.DTYPES)
    lowered = [masks.lower(c.mask) for c in drawn if c.mask is not None]
    assert {m.form for m in lowered} >= {"band", "bits"} and any(c.mask is None for c in drawn)
    assert any(c.softcap for c in drawn) and any(c.heads > c.kv_heads > 1 for c in drawn)
    assert any(c.q_len != c.kv_len for c in drawn)
    assert any(not c.allowed().any(-1).all() for c in drawn)
    assert any(c.mask is not None and c.mask.shape[1] > 1 and c.heads > c.kv_heads for c in drawn)


#: What follows the bound of a head's columns where rows are loaded, not stored.
LOADED = "[None, :]\n    return"
MUTANTS = {
    "ranks backwards": (
        "writer_ptr, writer_tile_ptr, writers, i, STEPS",
        "writer_ptr, writer_tile_ptr, writers + visits - 1 - 2 * (i // STEPS), i, STEPS",
        backward_order,
    ),
    "ranks dropped: key blocks as they come": (
        "        rank = tl.load(rank_ptr + e, mask=inside, other=0)\n",
        "        rank = n + e * 0\n",
        write_order,
    ),
    "visits backwards": (
        "            e = begin + i // (INNER * STEPS)\n",
        "            e = begin + visits - 1 - i // (INNER * STEPS)\n",
        backward_order,
    ),
    "steps of a visit backwards": (
        "            start_m = (entry >> 1) * BLOCK + i % STEPS * BLOCK_M\n",
        "            start_m = (entry >> 1) * BLOCK + (STEPS - 1 - i % STEPS) * BLOCK_M\n",
        backward_order,
    ),
    "heads backwards": (
        "i // STEPS % INNER)",
        "INNER - 1 - i // STEPS % INNER)",
        backward_order,
    ),
    "key blocks backwards": (
        "row * LISTED, i, STEPS",
        "row * LISTED + tl.load(count_ptr + row) - 1 - 2 * (i // STEPS), i, STEPS",
        forward_order,
    ),
    "the band one key too narrow": ("gap <= tl.where", "gap < tl.where", values),
    "the band one key too wide": ("gap >= tl.where", "gap + 1 >= tl.where", values),
    "a key beyond the end": ("(kv < kv_len)", "(kv <= kv_len)", ends),
    "bits of the next key": ("(bits % 32)) & 1", "((bits + 1) % 32)) & 1", forward_order),
    "bits of the next row": ("q % BLOCK * WORDS", "(q + 1) % BLOCK * WORDS", forward_order),
    "one maximum for the block": (
        "tl.max(s, axis=1) * factor",
        "tl.max(tl.max(s, axis=1), axis=0) * factor",
        neighbours,
    ),
    "no rescaling": ("acc * shrink[:, None]", "acc", values),
    "-0 is kept": (
        "tl.where(acc == 0.0, 0.0, acc / total[:, None])",
        "tl.where(total[:, None] == 0.0, 0.0, acc / total[:, None])",
        zeros,
    ),
    "no gradient of lse": ("delta -= tl.load", "delta -= 0.0 * tl.load", values),
    "P not rounded": ("tl.dot(through(p, v, ROUND)", "tl.dot(p.to(v.dtype)", forward_order),
    "delta over half of v": (
        "tl.sum(out * dout, axis=1)",
        "tl.sum(tl.where(tl.arange(0, BLOCK_DV)[None, :] < DV // 2, out * dout, 0.0), axis=1)",
        two_widths,
    ),
    "dK where dV would be": ("dk_ptr + place * D", "dk_ptr + place * DV", two_widths),
    "scores over v's width": (f"(d < D){LOADED}", f"(d < 128){LOADED}", two_widths),
    "columns behind a head": (f"(d < D){LOADED}", f"(d < 224){LOADED}", two_widths),
}


#: By day every third one.
DAY_AND_NIGHT = [
    pytest.param(name, marks=pytest.mark.nightly if at % 3 else ())
    for at, name in enumerate(MUTANTS)
]


@pytest.mark.parametrize("name", DAY_AND_NIGHT)
def test_killed(tmp_path, name):
    old, new, check = MUTANTS[name]
    with pytest.raises(AssertionError):
        check(copy_of(tmp_path, (old, new)))
