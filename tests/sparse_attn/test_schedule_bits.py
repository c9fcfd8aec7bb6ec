"""The gradients' bits follow the schedule: ranks for dQ, visits for dK and dV, and nothing else."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch

from cute_kernels.errors import ScheduleError
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.order.safety import check
from cute_kernels.schedulers.order.schedule import Schedule
from cute_kernels.sparse_attn import checks, cpu, masks
from cute_kernels.sparse_attn.api import block_sparse_attention
from cute_kernels.sparse_attn.tensors import Grads, Saved
from tests.contract import bits, same_bytes
from tests.sparse_attn import cases

#: Rows of the last two of four blocks add three parts of dQ and more, whose order shows.
BATCH, HEADS, KV_HEADS, SIZE, DIM = 2, 4, 2, 450, 64
COLUMNS = -(-SIZE // 128)
SHARED, BY_HEAD = "shared mask", "a mask per head"


@functools.cache
def mask_of(kind: str) -> BlockMask:
    causal = BlockMask.causal(SIZE, SIZE)
    if kind == SHARED:
        return causal
    generator = torch.Generator().manual_seed(4)
    return causal | BlockMask.from_dense(
        torch.rand(1, HEADS, SIZE, SIZE, generator=generator) < 0.1
    )


def heads_of(kind: str) -> int:
    return BATCH * (KV_HEADS if kind == SHARED else HEADS)


@functools.cache
def problem() -> cases.Inputs:
    return cases.inputs(BATCH, HEADS, KV_HEADS, SIZE, SIZE, DIM, seed=9)


def gradients(schedule, kind: str = SHARED) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv through the public op."""
    x = problem()
    out = block_sparse_attention(*x.leaves(), mask_of(kind), schedule=schedule)
    return torch.autograd.grad(out, x.leaves(), x.dout)


@functools.cache
def forward_of(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    lowered = masks.lower(mask_of(kind))
    return cpu.forward(*(t.detach() for t in problem().leaves()), lowered, DIM**-0.5, 0.0)


def launched(schedule: Schedule, kind: str = SHARED) -> tuple[torch.Tensor, ...]:
    """fp32 dq, dk, dv of the backend itself, which takes any schedule without a cycle."""
    x, lowered = problem(), masks.lower(mask_of(kind))
    order = masks.order_of(lowered, schedule)
    leaves = (t.detach() for t in x.leaves())
    saved = Saved(*leaves, *forward_of(kind))
    return cpu.ordered_sums(Grads(x.dout, None), saved, lowered, order, DIM**-0.5, 0.0)


def rounded(sums: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """What the op returns for the backend's sums."""
    return tuple(cpu._unblocked(t, SIZE, torch.bfloat16) for t in sums)


def spread(a: torch.Tensor, b: torch.Tensor) -> float:
    """The share of elements whose bits differ."""
    return (bits(a) != bits(b)).double().mean().item()


def lists(kind: str, **options) -> Schedule:
    return kinds.permutation(mask_of(kind), heads=heads_of(kind), **options)


ASCENDING = list(range(COLUMNS))
SHUFFLED = [2, 0, 3, 1]


@pytest.mark.parametrize("kind", [SHARED, BY_HEAD])
def test_dq_follows_the_write_order(kind):
    """Other ranks: other dQ.  dK and dV, whose visits stay as they are, keep every byte."""
    one, two = (launched(lists(kind, order=order), kind) for order in (ASCENDING, SHUFFLED))
    assert 0.1 < spread(one[0], two[0]) < 0.9
    assert same_bytes(one[1], two[1]) and same_bytes(one[2], two[2])
    # So do the op's gradients, of whose bits a rounding from fp32 to bf16 leaves few.
    got = gradients(ASCENDING, kind), gradients(SHUFFLED, kind)
    for actual, sums in zip(got, (one, two), strict=True):
        assert all(same_bytes(a, b) for a, b in zip(actual, rounded(sums), strict=True))
    assert not same_bytes(got[0][0], got[1][0])


def relaunched(schedule: Schedule, order: np.ndarray) -> Schedule:
    """The same lists and ranks under other tickets."""
    return dataclasses.replace(schedule, order=order.astype(np.int32))


@pytest.mark.parametrize("kind", [SHARED, BY_HEAD])
def test_bits_do_not_follow_any_launch_order(kind):
    """Tickets of heads interleaved, backwards and shuffled: early parts wait for their rank."""
    schedule = lists(kind, order=SHUFFLED)
    want, got = launched(schedule, kind), gradients(schedule, kind)
    assert all(same_bytes(a, b) for a, b in zip(got, rounded(want), strict=True))
    interleaved = lists(kind, order=SHUFFLED, heads_in_flight=3)
    assert schedule.hash != interleaved.hash
    assert all(map(same_bytes, gradients(interleaved, kind), got))
    rng = np.random.default_rng(0)
    for order in (schedule.order[::-1], rng.permutation(schedule.order)):
        other = relaunched(schedule, order)
        assert check(other, mask_of(kind)).residents > 1
        for actual, theirs in zip(launched(other, kind), want, strict=True):
            assert same_bytes(actual, theirs)


def test_kinds_have_their_own_bits_and_repeat_them(tmp_path):
    names = ("left_to_right", "spt", "lpt")
    first = {name: gradients(name) for name in names}
    assert not same_bytes(first["left_to_right"][0], first["spt"][0])
    for name in names:
        out = kinds.KINDS[name](mask_of(SHARED), heads=heads_of(SHARED))
        out.save(tmp_path / name)
        for again in (gradients(name), gradients(out), gradients(Schedule.load(tmp_path / name))):
            assert all(same_bytes(a, b) for a, b in zip(again, first[name], strict=True))
    auto = gradients("auto")
    assert all(same_bytes(a, b) for a, b in zip(auto, first["spt"], strict=True))


def test_orders_are_taken_in_every_form():
    want = gradients(SHUFFLED)
    per_head = [SHUFFLED] * heads_of(SHARED)
    for inputs in (tuple(SHUFFLED), np.array(SHUFFLED), torch.tensor(SHUFFLED), per_head):
        assert all(same_bytes(a, b) for a, b in zip(gradients(inputs), want, strict=True))
    mixed = [SHUFFLED] * (heads_of(SHARED) - 1) + [ASCENDING]
    got, plain = gradients(mixed), gradients(ASCENDING)
    # The last KV head of the last batch is that of the other order.
    assert same_bytes(got[0][:, :, :2], want[0][:, :, :2]) and same_bytes(got[0][:1], want[0][:1])
    assert same_bytes(got[0][1:, :, 2:], plain[0][1:, :, 2:])
    assert not same_bytes(got[0], want[0])


def by_hand(schedule: Schedule, kind: str) -> tuple[torch.Tensor, ...]:
    """The order of sums written out: parts first, added afterwards as the schedule says."""
    x, allowed = problem(), mask_of(kind).to_dense().expand(BATCH, HEADS, SIZE, SIZE)
    out, lse = forward_of(kind)
    pad, group = COLUMNS * 128 - SIZE, HEADS // KV_HEADS
    shared = group if kind == SHARED else 1
    q, k, v, dout = (
        torch.nn.functional.pad(t.detach().float().transpose(1, 2), (0, 0, 0, pad))
        for t in (*x.leaves(), x.dout)
    )
    delta = torch.nn.functional.pad((x.dout.float() * out.float()).sum(-1).mT, (0, pad))
    lse2 = torch.nn.functional.pad(lse, (0, pad)) * math.log2(math.e)
    allowed = torch.nn.functional.pad(allowed, (0, pad, 0, pad))
    dk, dv = torch.zeros(2, *q.shape)
    parts: dict[tuple, dict] = {}
    for ticket, n, visits in schedule.tickets():
        cols = slice(n * 128, n * 128 + 128)
        for m, _, rank in visits:
            rows = slice(m * 128, m * 128 + 128)
            for head in range(ticket * shared, (ticket + 1) * shared):
                b, h = divmod(head, HEADS)
                keys, values = k[b, h // group, cols], v[b, h // group, cols]
                queries, grads = q[b, h, rows], dout[b, h, rows]
                scores = queries @ keys.T * (DIM**-0.5 * math.log2(math.e))
                p = torch.exp2(scores - lse2[b, h, rows, None])
                p = p.masked_fill(~allowed[b, h, rows, cols], 0.0)
                ds = p * (grads @ values.T - delta[b, h, rows, None])
                p, ds = p.bfloat16().float(), ds.bfloat16().float()
                home = h // group * group if kind == SHARED else h
                dv[b, home, cols] += p.T @ grads
                dk[b, home, cols] += ds.T @ queries
                parts.setdefault((b, h, m), {})[rank] = ds @ keys
    dq = torch.zeros_like(q)
    for (b, h, m), by_rank in parts.items():
        for rank in sorted(by_rank):
            dq[b, h, m * 128 : m * 128 + 128] += by_rank[rank]
    dk, dv = (t.unflatten(1, (KV_HEADS, group)) for t in (dk, dv))
    dk, dv = (t[:, :, 0] if kind == SHARED else t[:, :, 0] + t[:, :, 1] for t in (dk, dv))
    return tuple(t.unflatten(2, (-1, 128)) for t in (dq * DIM**-0.5, dk * DIM**-0.5, dv))


def differing(got, want) -> list[float]:
    return [spread(a, b) for a, b in zip(got, want, strict=True)]


def the_order_is_written_out(kind: str, walk: str, backwards: bool = False) -> None:
    """dQ, dK and dV are the sums that the schedule spells; backwards: last ticket first."""
    schedule = lists(kind, order=SHUFFLED, walk=walk)
    want = by_hand(schedule, kind)
    if backwards:
        schedule = relaunched(schedule, schedule.order[::-1])
    assert all(map(same_bytes, launched(schedule, kind), want))


@pytest.mark.parametrize("kind", [SHARED, BY_HEAD])
@pytest.mark.parametrize("walk", ["ascending", "cyclic"])
def test_the_order_written_out(kind, walk):
    the_order_is_written_out(kind, walk, backwards=kind == SHARED)


def test_a_schedule_that_needs_residency_is_refused():
    """shift on a full mask waits on later tickets; with few CTAs resident it would hang."""
    full = BlockMask.full(512, 512)
    schedule = kinds.shift(full, heads=2)
    assert check(schedule, full).residents > 1
    x = cases.inputs(1, 2, 2, 512, 512, DIM)
    for inputs in ("shift", schedule):
        with pytest.raises(ScheduleError, match=r"^schedule: .*resident CTAs"):
            block_sparse_attention(*x.leaves(), full, schedule=inputs)


# ---- names, and sinks of no weight ---------------------------------------------------------------


def operands(q_len: int = 300, kv_len: int = 700) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(q_len)
    q = torch.randn(1, q_len, 4, 64, generator=generator).bfloat16().requires_grad_()
    return q, torch.randn(1, kv_len, 2, 64, generator=generator).bfloat16()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("schedule", checks.SCHEDULES)
def test_a_schedule_is_refused_before_the_forward_or_its_backward_runs(schedule, causal):
    q, k = operands()
    try:
        out = block_sparse_attention(q, k, k, causal=causal, schedule=schedule)
    except ScheduleError:
        assert schedule in checks.MAY_BE_UNSAFE
        return
    out.sum().backward()
    assert schedule not in checks.MAY_BE_UNSAFE and q.grad.abs().sum() > 0


def test_a_sink_of_no_weight_has_no_gradient_where_rows_see_nothing():
    """-inf is the log weight of no sink; rows without a key have a log sum of -inf too."""
    q, k = operands(200, 128)
    allowed = torch.arange(200)[:, None].expand(200, 128) < 128
    mask = BlockMask.from_dense(allowed)
    sinks = torch.tensor([-math.inf, 0.3, -math.inf, -1.0], requires_grad=True)
    out = block_sparse_attention(q, k, k, mask, sinks=sinks)
    generator = torch.Generator().manual_seed(3)
    out.backward(torch.randn(out.shape, generator=generator).bfloat16())
    assert sinks.grad[[0, 2]].tolist() == [0.0, 0.0]
    assert sinks.grad[[1, 3]].abs().min() > 0 and q.grad.isfinite().all()
