"""The CPU backend: blocks of one fixed shape, 128 x 128, in the schedule's order.

Forward, per query block: key blocks ascending; scores in base 2, running maximum, P rounded to the
input dtype before its product, one division at the end.  A row that a block does not touch keeps
its state bit for bit, so the blocks that its neighbours need are no part of its bits.

Backward, per (KV head, key block) ticket: query blocks in visiting order, in each the query heads
of the group.  A dQ part is added when its rank comes, whatever the order of tickets.  Rows of q,
dout and k that a block masks whole are replaced by zeros in its products: NaN and Inf in them reach
no gradient.

All sequences are padded with zero rows to whole blocks: every product has one shape.  A BLAS
promises nothing about row positions, so the first call of each head size proves it on this machine:
128 equal query rows must end in 128 equal states, or the call fails.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..cpu.ieee import ieee, mm
from ..errors import BackendUnavailable
from ..schedulers.masks.bits import unpack
from .config import CPU, VALUE_DIMS
from .masks import LoweredMask, Order
from .tensors import LOG2E, Grads, Saved, sinks_gradient

ROWS, COLUMNS = CPU.block


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: LoweredMask,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [B, Sq, Hq, Dv], lse fp32 [B, Hq, Sq]) of q [B, Sq, Hq, D], k and v [B, Sk, Hkv, ..]."""
    batch, q_len, heads, dim = q.shape
    group = heads // k.shape[2]
    with ieee() as team:
        _prove_row_position(dim, softcap > 0, team)
        qs, ks, vs = (_blocked(t) for t in (q, k, v))
        out, lse = _zeros(*qs.shape[:4], v.shape[3]), _zeros(*qs.shape[:4])
        entries = _lists(mask, batch, heads)
        # Heads and batches share most tiles.
        tiles = functools.lru_cache(maxsize=64)(functools.partial(_allowed, mask))
        first = [None] * heads if sinks is None else (sinks.float() * LOG2E).tolist()
        for b in range(batch):
            for h in range(heads):
                for m, visits in enumerate(entries[b][h]):
                    state = _start(v.shape[3], first[h])
                    for entry, tile in visits:
                        n = entry >> 1
                        allowed = tiles(m, n, entry & 1, tile)
                        keys, values = ks[b, h // group, n], vs[b, h // group, n]
                        state = _attend(
                            state, qs[b, h, m], keys, values, allowed, scale, softcap, q.dtype
                        )
                    out[b, h, m], lse[b, h, m] = _finish(state)
        return _unblocked(out, q_len, q.dtype), lse.flatten(2)[:, :, :q_len].contiguous()


def backward(
    grads: Grads,
    saved: Saved,
    mask: LoweredMask,
    order: Order,
    scale: float,
    softcap: float,
    deterministic: bool,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv), shaped and typed as q, k and v; with sinks their gradient too, fp32.

    ``deterministic`` changes nothing here: one thread of tickets is always in order.
    """
    with ieee():
        sums = ordered_sums(grads, saved, mask, order, scale, softcap)
        pairs = zip(sums, saved[:3], strict=True)
        gradients = tuple(_unblocked(t, x.shape[1], x.dtype) for t, x in pairs)
        if saved.sinks is None:
            return gradients
        delta = _delta(_blocked(grads.dout), _blocked(saved.out), grads.dlse).flatten(2)
        lse2 = saved.lse * LOG2E
        return *gradients, sinks_gradient(saved.sinks, lse2, delta[:, :, : lse2.shape[2]])


def ordered_sums(
    grads: Grads,
    saved: Saved,
    mask: LoweredMask,
    order: Order,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) before their one rounding: fp32 [B, H, blocks, 128, D], Dv of dv."""
    (dout, dlse), (q, k, v, out, lse, _) = grads, saved
    batch, heads = q.shape[0], q.shape[2]
    entry, rank, tile = (t.tolist() for t in (order.entry, order.rank, order.tile))
    schedule_heads = len(order.list_of_head)
    # Query heads of one ticket, and of one KV head.
    shared, group = batch * heads // schedule_heads, heads // k.shape[2]
    qs, ks, vs, dos = (_blocked(t) for t in (q, k, v, dout))
    delta = _delta(dos, _blocked(out), dlse)
    delta, lse2 = (t.flatten(0, 1)[..., None] for t in (delta, _rows(lse) * LOG2E))
    qs, dos, ks, vs = (t.flatten(0, 1) for t in (qs, dos, ks, vs))
    dq = _Turns(qs)
    dk, dv = (_zeros(schedule_heads, *t.shape[1:]) for t in (ks, vs))
    for schedule_head, n, begin, end in order.ticket.tolist():
        keys, values = (t[schedule_head * shared // group, n] for t in (ks, vs))
        for e in range(begin, end):
            m, bits = entry[e] >> 1, tile[e] if mask.form == "bits" else -1
            allowed = _allowed(mask, m, n, entry[e] & 1, bits)
            # A sum adds nothing for a row or key that sees none of the block, be it NaN.
            queried, keyed = (allowed.any(dim, keepdim=True) for dim in (1, 0))
            seen_keys = torch.where(keyed.mT, keys, 0.0)
            for head in range(schedule_head * shared, (schedule_head + 1) * shared):
                queries, dos_here = qs[head, m], dos[head, m]
                scores, slope = _scores(queries, keys, scale, softcap)
                p = torch.where(allowed, torch.exp2(scores - lse2[head, m]), 0.0)
                ds = p * (mm(dos_here, values.mT) - delta[head, m])
                ds = torch.where(allowed, ds if slope is None else ds * slope, 0.0)
                p, ds = _through(p, q.dtype), _through(ds, q.dtype)
                dv[schedule_head, n] += mm(p.mT, torch.where(queried, dos_here, 0.0))
                dk[schedule_head, n] += mm(ds.mT, torch.where(queried, queries, 0.0))
                dq.add(head, m, rank[e], mm(ds, seen_keys))
    dk, dv = (_over_group(t, batch * k.shape[2]).unflatten(0, (batch, -1)) for t in (dk, dv))
    return dq.total.unflatten(0, (batch, -1)) * scale, dk * scale, dv


def _delta(dos: Tensor, outs: Tensor, dlse: Tensor | None) -> Tensor:
    """rowsum(dO * O) - dlse, fp32 [B, H, blocks, 128]; -dlse in a row of O that is zeros."""
    delta = (dos * outs).sum(-1)
    # A row without keys, where dO may hold anything: 0 NaN = NaN.
    delta = torch.where(delta.isnan() & (outs == 0).all(-1), 0.0, delta)
    return delta if dlse is None else delta - _rows(dlse)


class _Turns:
    """fp32 sums of query blocks whose parts are added by rank; one that comes early waits."""

    def __init__(self, like: Tensor):
        self.total = torch.zeros_like(like)
        self.turn: dict[tuple[int, int], int] = {}
        self.early: dict[tuple[int, int, int], Tensor] = {}

    def add(self, head: int, m: int, rank: int, part: Tensor) -> None:
        self.early[head, m, rank] = part
        turn = self.turn.get((head, m), 0)
        while (head, m, turn) in self.early:
            self.total[head, m] += self.early.pop((head, m, turn))
            turn += 1
        self.turn[head, m] = turn


def _attend(state, queries, keys, values, allowed, scale, softcap, dtype):
    """One step of the online softmax: (maximum, sum, weighted values) of 128 rows."""
    top, total, acc = state
    scores = torch.where(allowed, _scores(queries, keys, scale, softcap)[0], -math.inf)
    above = torch.maximum(top, scores.amax(dim=1, keepdim=True))
    # Of a row that has seen nothing yet, the maximum is -inf: any finite number will do.
    base = torch.where(above == -math.inf, 0.0, above)
    p = torch.exp2(scores - base)
    shrink = torch.exp2(top - base)
    touched = allowed.any(dim=1, keepdim=True)
    total = torch.where(touched, total * shrink + p.sum(dim=1, keepdim=True), total)
    weighted_values = mm(_through(p, dtype), values)
    acc = torch.where(touched, acc * shrink + weighted_values, acc)
    return torch.where(touched, above, top), total, acc


def _start(dim: int, sink: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """``sink``: times log2 e; as behind a key of that score with a value of zeros."""
    top, total = (-math.inf, 0.0) if sink is None else (sink, 1.0)
    return _zeros(ROWS, 1) + top, _zeros(ROWS, 1) + total, _zeros(ROWS, dim)


def _finish(state: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) of 128 rows; those that saw nothing are 0, with a log-sum of -inf."""
    top, total, acc = state
    out = torch.where(total == 0, 0.0, acc / total)
    return out, ((top + torch.log2(total)) / LOG2E)[:, 0]


def _scores(
    queries: Tensor, keys: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """Scores times log2 e, and the softcap's derivative (None without one)."""
    products = mm(queries, keys.mT)
    if not softcap:
        return products * (scale * LOG2E), None
    bent = torch.tanh(products * (scale / softcap))
    return bent * (softcap * LOG2E), 1 - bent * bent


def _allowed(mask: LoweredMask, m: int, n: int, partial: int, tile: int) -> Tensor:
    """Bool [128, 128]: within both lengths and, in a partial block, allowed by the rule."""
    q, kv = (
        torch.arange(first, first + size, device="cpu")
        for first, size in ((m * ROWS, ROWS), (n * COLUMNS, COLUMNS))
    )
    q = q[:, None]
    allowed = (q < mask.q_len) & (kv < mask.kv_len)
    if not partial:
        return allowed
    if mask.form == "band":
        return allowed & (kv - q >= mask.lo) & (kv - q <= mask.hi)
    return allowed & unpack(mask.words[tile], COLUMNS)


def _lists(mask: LoweredMask, batch: int, heads: int) -> list:
    """Per batch, head and query block: [(2 * key block + is_partial, tile), ...]."""
    count = mask.kv_count.expand(batch, heads, -1).tolist()
    entry = mask.kv_entry.expand(batch, heads, -1, -1)
    tile = mask.kv_tile.expand_as(entry).tolist()
    entry = entry.tolist()
    return [
        [
            [
                list(zip(entry[b][h][m][:size], tile[b][h][m][:size], strict=True))
                for m, size in enumerate(count[b][h])
            ]
            for h in range(heads)
        ]
        for b in range(batch)
    ]


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def _through(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the input dtype, and back to fp32."""
    return t.to(dtype).float()


def _blocked(t: Tensor) -> Tensor:
    """[B, S, H, D] -> fp32 [B, H, ceil(S / 128), 128, D], zero rows at the end."""
    batch, size, heads, dim = t.shape
    blocks = _zeros(batch, heads, -(-size // ROWS) * ROWS, dim)
    blocks[:, :, :size] = t.transpose(1, 2)
    return blocks.unflatten(2, (-1, ROWS))


def _unblocked(blocks: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `_blocked`, with the one rounding; contiguous [B, S, H, D]."""
    return blocks.flatten(2, 3)[:, :, :size].to(dtype).transpose(1, 2).contiguous()


def _rows(t: Tensor) -> Tensor:
    """[B, H, S] -> fp32 [B, H, ceil(S / 128), 128], zeros at the end."""
    return _blocked(t.mT[..., None])[..., 0]


def _over_group(t: Tensor, kv_heads: int) -> Tensor:
    """[heads, ...] -> [KV heads, ...]: the heads of each KV head added in ascending order."""
    return functools.reduce(torch.add, t.unflatten(0, (kv_heads, -1)).unbind(1))


@functools.cache
def _prove_row_position(dim: int, capped: bool, team: tuple[int, int]) -> None:
    """128 equal query rows in, 128 equal states out, byte for byte; BackendUnavailable if not."""
    generator = torch.Generator("cpu").manual_seed(dim)

    def drawn(make, *shape: int) -> Tensor:
        return make(*shape, generator=generator, dtype=torch.float32, device="cpu")

    row = drawn(torch.randn, 1, dim)
    keys, values = (drawn(torch.randn, 2, COLUMNS, size) for size in (dim, VALUE_DIMS[dim]))
    allowed = (drawn(torch.rand, 1, COLUMNS) < 0.8).expand(ROWS, COLUMNS)
    state = _start(VALUE_DIMS[dim])
    for n in range(2):
        queries = row.expand(ROWS, dim).contiguous()
        cap = 5.0 * capped
        state = _attend(state, queries, keys[n], values[n], allowed, dim**-0.5, cap, torch.bfloat16)
    if any(bool((t.view(torch.int32) != t[:1].view(torch.int32)).any()) for t in state):
        raise BackendUnavailable(
            f"block_sparse_attention: backend cpu cannot keep batch_invariant here: this machine's "
            f"BLAS gives equal rows different bits by position at D={dim}, {team[1]} threads"
        )
