"""The SM90 launchers: operands as TMA can address them, workspace, compiled kernels, calls.

The forward is one launch.  The backward is three on one stream: delta and zeros, then dK, dV and
the fp32 dQ, then dQ rounded.  Of a pack each has one before it, which says where sequences lie.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import log, settings
from ..compile import cache
from ..compile.call import call
from ..compile.kernel import Entry, Expect, Kernel
from ..operands import addressable, most_ctas, not_empty
from . import config, stacked, watchdog
from .config import BackwardConfig, ForwardConfig, PackConfig, PostConfig, PreConfig
from .masks import BLOCK, FAR, FORMS, FORWARD_FORMS, SPANS, LoweredMask, Order
from .tensors import Grads, Saved, shape_of_out, sinks_gradient

NAME = "block_sparse_attention"

# What the certificates hold the kernels to.  By consumers, the registers that 384 and 512 threads
# can start with; the roles then trade theirs.  Bytes of shared memory and products by head size.
_REGISTERS = {2: 168, 3: 128}
_FORWARD_SHARED = {64: 222208, 96: 185344, 128: 230400, 192: 214016, 256: 197632}
_BACKWARD_SHARED = {64: 232448, 96: 182272, 128: 231424, 192: 198656, 256: 222208}
_BACKWARD_MMA = {
    64: ("64x64x16", "64x128x16"),
    96: ("64x48x16", "64x64x16", "64x96x16"),
    128: ("64x64x16", "64x128x16"),
    192: ("64x64x16", "64x96x16", "64x128x16", "64x192x16"),
    256: ("64x64x16", "64x128x16", "64x256x16"),
}


#: Of a kernel that reads spans, and of one whose lists are formulas.
NO_LISTS = None, None, None, None
#: Of the kernel that places sequences: blocks or tickets to a slice, and slices to a CTA's.
_SLICE, _MOST_SLICES = 512, 64


class Walk(NamedTuple):
    """What the fused pass of a backward walks, over ``rows`` query rows.

    lists  ticket, entry, rank, tile and the words of bits, as the kernel takes them
    order  what they were made of; None for a pack, whose ``table`` says where it lies
    """

    form: str
    rows: int
    lists: tuple
    band: tuple[int, int]
    order: Order | None
    table: Tensor | None = None


class Workspace(NamedTuple):
    """What the backward's kernels hand on; a tile is ``tile_m`` query rows of one head.

    lse2, delta  fp32 [B, Hq, tiles, tile_m]
    total        fp32 [B, Hq, tiles, tile_m * D]: dQ, in the order of the accumulators
    semaphore    int32 [B, Hq, tiles], or [B, Hq, tiles, 2] where halves of a tile have turns
    counter      int32 [1]: the next ticket
    """

    lse2: Tensor
    delta: Tensor
    total: Tensor
    semaphore: Tensor
    counter: Tensor


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: LoweredMask,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``op``; tiles of 128 or 192 query rows of a head."""
    lists = mask.kv_count, not_empty(mask.kv_entry), not_empty(mask.kv_tile), mask.words
    band = mask.lo, mask.hi
    return _forward(q, k, v, (mask.form, lists, None, band), scale, softcap, sinks)


def forward_of_pack(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    window: tuple[int | None, int | None],
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of sequences where they lie in q, k, v [1, T, H, D], by two launches.

    bounds: [N, 2], int32 or int64, where each begins and ends, one behind another; the host reads
    none, see ``kernel_pack_sm90``.  window: (left, right), None for no bound.  Tokens behind the
    last sequence see nothing; others of none are not written.
    """
    table, _ = places(bounds, q)
    rule = config.FORM_OF_PACKS, NO_LISTS, table, band(window)
    return _forward(q, k, v, rule, scale, softcap, sinks)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: tuple,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """rule: (form, lists, table of a pack, band)."""
    batch, q_len, heads, dim = q.shape
    form, lists, table, ends = rule
    dtype, sunk, packed = config.DTYPE_NAMES[q.dtype], sinks is not None, table is not None
    chosen = config.configure_forward(dtype, dim, form, softcap > 0, sunk, packed)
    kernel = forward_kernel(chosen)
    out = empty(shape_of_out(q, v), q.dtype, q.device)
    lse = empty((batch, heads, q_len), torch.float32, q.device)
    by_row = sinks.float()[:, None].expand(heads, q_len) if sunk else None
    operands = [addressable(t, NAME, name) for name, t in (("q", q), ("k", k), ("v", v))]
    numbers = *ends, *config.factors(scale, softcap)
    rows = rows_of(table) if packed else q_len
    counter, ctas = grid(chosen, rows, batch * heads, q.device)
    given = *operands, out, lse, *lists, None, by_row, table, counter()
    call(q.device, kernel, *given, *numbers, ctas)
    return out, lse


def grid(
    chosen: ForwardConfig, rows: int, heads: int, device: torch.device
) -> tuple[Callable[[], Tensor], int]:
    """(what makes the counter of tiles for a launch, its CTAs); heads: of all batches."""
    total, most = -(-rows // chosen.rows) * heads, most_ctas(device)
    if total <= most:
        # A CTA for each tile: nobody asks for another one.
        return functools.partial(_unread, device), total
    return functools.partial(torch.zeros, 1, dtype=torch.int32, device=device), most


@functools.cache
def _unread(device: torch.device) -> Tensor:
    """For a kernel that is given a tensor and does not read it."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def band(window: tuple[int | None, int | None]) -> tuple[int, int]:
    """(lo, hi) of keys less queries."""
    left, right = window
    return -FAR if left is None else -left, FAR if right is None else right


def places(
    bounds: Tensor,
    q: Tensor,
    kv_heads: int = 0,
    window: tuple[int | None, int | None] = (None, None),
) -> tuple[Tensor, Tensor | None]:
    """The table of a pack, on the device of ``q`` [1, T, Hq, D]; for ``kv_heads`` tickets too.

    Their sizes are bounds that the host knows; the last row of either says what is in use.
    """
    bounds = not_empty(bounds).to(q.device, non_blocking=True)
    tokens, count = q.shape[1], len(bounds)
    blocks = tokens // BLOCK[0] + count + 1
    table = empty((blocks + 1, 4), torch.int32, q.device)
    tickets = empty((kv_heads * blocks + 1, 4), torch.int32, q.device) if kv_heads else None
    chosen = PackConfig(str(bounds.dtype).removeprefix("torch."), kv_heads > 0)
    slices = -(-blocks * max(kv_heads, 1) // (_SLICE * -(-(count + 1) // config.SEQUENCES)))
    in_flight = config.in_flight(q.shape[2] // max(kv_heads, 1))
    numbers = tokens, *band(window), kv_heads, in_flight, min(slices, _MOST_SLICES)
    call(q.device, _pack_kernel(chosen), bounds, table, tickets, *numbers)
    return table, tickets


def rows_of(table: Tensor) -> int:
    """The most rows that the blocks of a pack have."""
    return (len(table) - 1) * BLOCK[0]


def forward_of_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``sequence_op``, for spans on the device: one launch, nothing is read back.

    spans: int32 [B, T, 4], contiguous; all of a batch row with one begin and one position.
    """
    batch, q_len, heads, dim = q.shape
    dtype = config.DTYPE_NAMES[q.dtype]
    sunk = sinks is not None
    chosen = config.configure_forward(dtype, dim, SPANS, softcap > 0, sunk)
    kernel = forward_kernel(chosen)
    out = empty(shape_of_out(q, v), q.dtype, q.device)
    lse = empty((batch, heads, q_len), torch.float32, q.device)
    rows, stored, sums = q, out, lse
    by_row = sinks.float()[:, None].expand(heads, q_len) if sunk else None
    if q_len == 1:
        # The query heads of a group are rows of one tile: K and V come once for all of them.
        rows, stored = (rows_of_groups(t, k.shape[2]) for t in (q, out))
        sums = lse.view(batch, k.shape[2], -1)
        by_row = by_row.view(k.shape[2], -1) if sunk else None
    operands = (addressable(t, NAME, name) for name, t in zip("qkv", (rows, k, v), strict=True))
    numbers = 0, 0, *config.factors(scale, softcap)
    counter, ctas = grid(chosen, rows.shape[1], batch * rows.shape[2], q.device)
    given = *operands, stored, sums, *NO_LISTS, spans, by_row, None, counter()
    call(q.device, kernel, *given, *numbers, ctas)
    return out, lse


def rows_of_groups(t: Tensor, kv_heads: int) -> Tensor:
    """[B, 1, Hq, D] as [B, Hq / Hkv, Hkv, D]."""
    return t[:, 0].unflatten(1, (kv_heads, -1)).transpose(1, 2)


def backward(
    grads: Grads,
    saved: Saved,
    mask: LoweredMask,
    order: Order,
    scale: float,
    softcap: float,
    deterministic: bool,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv) of ``op``: dK and dV by visits, and dQ by ranks unless not ``deterministic``.

    With sinks their gradient too.
    """
    (_, q_len, heads, _), kv_heads = saved.q.shape, saved.k.shape[2]
    lists = order.ticket, *(not_empty(t) for t in (order.entry, order.rank, order.tile))
    walk = Walk(mask.form, q_len, (*lists, mask.key_words), (mask.lo, mask.hi), order)
    rest = scale, softcap, deterministic
    if stacked.wanted(mask.kv_count.shape[1], heads, kv_heads):
        sizes = stacked.Sizes(q_len, heads, kv_heads)
        walk = walk._replace(rows=sizes.rows)
        dq, dk, dv, space = _backward(*stacked.operands(grads, saved, sizes), walk, *rest)
        dq = stacked.gradient(dq, sizes)
    else:
        dq, dk, dv, space = _backward(grads, saved, walk, *rest)
    return dq, dk, dv, *_of_sinks(saved.sinks, heads, space)


def backward_of_pack(
    grads: Grads,
    saved: Saved,
    bounds: Tensor,
    window: tuple[int | None, int | None],
    scale: float,
    softcap: float,
) -> tuple[Tensor, ...]:
    """`backward` of what `forward_of_pack` made, ordered; likewise, by four launches."""
    table, tickets = places(bounds, saved.q, saved.k.shape[2], window)
    rows = rows_of(table)
    lists = tickets, *NO_LISTS
    walk = Walk(config.FORM_OF_PACKS, rows, lists, band(window), None, table)
    dq, dk, dv, space = _backward(grads, saved, walk, scale, softcap, True)
    return dq, dk, dv, *_of_sinks(saved.sinks, saved.q.shape[2], space)


def _of_sinks(sinks: Tensor | None, heads: int, space: Workspace) -> tuple[Tensor, ...]:
    """(their gradient,), or ()."""
    if sinks is None:
        return ()
    of_head = (t.view(t.shape[0], heads, -1) for t in (space.lse2, space.delta))
    return (sinks_gradient(sinks, *of_head),)


def _backward(
    grads: Grads,
    saved: Saved,
    walk: Walk,
    scale: float,
    softcap: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Workspace]:
    """The three kernels: (dq, dk, dv), and what they handed on."""
    (dout, dlse), (q, k, v, out, lse, _) = grads, saved
    batch, _, heads, dim = q.shape
    dtype, device = config.DTYPE_NAMES[q.dtype], q.device
    limit = settings.watchdog_ms()
    table, packed = walk.table, walk.table is not None
    chosen = config.configure(dtype, dim, walk.form, deterministic, softcap > 0, limit, packed)
    record = watchdog.record(device) if chosen.watchdog_ms else None
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out}
    dout, q, k, v, out = (addressable(t, NAME, name) for name, t in given.items())
    dlse = None if dlse is None else log.contiguous(NAME, "dlse", dlse, "contiguous")
    lse = log.contiguous(NAME, "lse", lse, "contiguous")
    tiles, turns = -(-walk.rows // chosen.tile_m), chosen.turns
    space = workspace((batch, heads, tiles), chosen.tile_m, dim, turns, device)

    pre = _pre_kernel(PreConfig(dtype, dim, chosen.tile_m, dlse is not None, packed, turns))
    of_rows = space.lse2.flatten(2), space.delta.flatten(2)
    call(device, pre, out, dout, lse, dlse, *of_rows, *space[2:], table)

    dk, dv = (empty(t.shape, t.dtype, device) for t in (k, v))
    numbers = scale, *config.factors(scale, softcap), *walk.band
    # A CTA takes tickets until there are none: more CTAs than tickets have nothing to do.
    ctas = min(most_ctas(device), chosen.parts * len(walk.lists[0]))
    operands = q, k, v, dout, *space[:3], dk, dv, *space[3:]
    call(device, _backward_kernel(chosen), *operands, *walk.lists, record, table, *numbers, ctas)

    dq = empty(q.shape, q.dtype, device)
    post = _post_kernel(PostConfig(dtype, dim, chosen.tile_m, packed))
    call(device, post, space.total, dq, table, scale)
    if record is not None:
        sizes = space.semaphore.shape[2], chosen.tile_m, heads // k.shape[2]
        order = walk.order or watchdog.order_of_pack(walk.lists[0], table, walk.band[1])
        watchdog.require_turns(record, order, *sizes, chosen.parts, limit)
    return dq, dk, dv, space


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised output."""
    return torch.empty(shape, dtype=dtype, device=device)


def workspace(
    tiles: tuple[int, int, int], tile_m: int, dim: int, turns: int, device: torch.device
) -> Workspace:
    """Uninitialised; the first kernel of a backward writes all of it.  tiles: B, Hq, of a head."""
    fp32 = functools.partial(torch.empty, dtype=torch.float32, device=device)
    ints = functools.partial(torch.empty, dtype=torch.int32, device=device)
    rows, semaphores = (*tiles, tile_m), (*tiles, turns) if turns > 1 else tiles
    return Workspace(fp32(rows), fp32(rows), fp32(*tiles, tile_m * dim), ints(semaphores), ints(1))


@functools.cache
def forward_kernel(chosen: ForwardConfig) -> Callable:
    """The compiled forward of a configuration."""
    return cache.get(forward_entry(chosen), "sm_90a")


@functools.cache
def _pack_kernel(chosen: PackConfig) -> Callable:
    return cache.get(pack_entry(chosen), "sm_90a")


@functools.cache
def _pre_kernel(chosen: PreConfig) -> Callable:
    return cache.get(pre_entry(chosen), "sm_90a")


@functools.cache
def _backward_kernel(chosen: BackwardConfig) -> Callable:
    return cache.get(backward_entry(chosen), "sm_90a")


@functools.cache
def _post_kernel(chosen: PostConfig) -> Callable:
    return cache.get(post_entry(chosen), "sm_90a")


def forward_entry(chosen: ForwardConfig) -> Kernel:
    """One forward as the cache and the catalogue know it."""
    way = "_wide" if chosen.parts > 1 else "_apart" if chosen.apart else ""
    name = f"fwd{way}_sm90"
    return Kernel.of(f"sparse_attn_{name}", f"{__package__}.kernel_{name}", chosen)


def pack_entry(chosen: PackConfig) -> Kernel:
    """The kernel that says where a pack's sequences lie, likewise."""
    return Kernel.of("sparse_attn_pack_sm90", f"{__package__}.kernel_pack_sm90", chosen)


def pre_entry(chosen: PreConfig) -> Kernel:
    """The kernel before a backward, likewise."""
    return Kernel.of("sparse_attn_bwd_pre_sm90", f"{__package__}.kernel_bwd_pre_sm90", chosen)


def backward_entry(chosen: BackwardConfig) -> Kernel:
    """One backward, likewise."""
    name = "bwd_wide_sm90" if chosen.parts > 1 else "bwd_sm90"
    return Kernel.of(f"sparse_attn_{name}", f"{__package__}.kernel_{name}", chosen)


def post_entry(chosen: PostConfig) -> Kernel:
    """The kernel after a backward, likewise."""
    return Kernel.of("sparse_attn_bwd_post_sm90", f"{__package__}.kernel_bwd_post_sm90", chosen)


def catalogue() -> Iterator[Entry]:
    """Every kernel that these launchers can ask for."""
    dtypes, flags = config.DTYPE_NAMES.values(), (False, True)
    for key in itertools.product(dtypes, config.HEAD_DIMS, FORWARD_FORMS, flags, flags, flags):
        chosen = config.configure_forward(*key)
        if chosen.packed and chosen.form != config.FORM_OF_PACKS:
            continue
        mma = ("64x128x16", f"64x{config.VALUE_DIMS[chosen.head_dim]}x16")
        shared = _FORWARD_SHARED[chosen.head_dim]
        yield Entry(forward_entry(chosen), "A", Expect(mma, _REGISTERS[chosen.consumers], shared))
    for offsets, tickets in itertools.product(config.OFFSETS, flags):
        expect = Expect(None, max_registers=40, max_shared=6400)
        yield Entry(pack_entry(PackConfig(offsets, tickets)), "A", expect)
    for dtype, dim in itertools.product(dtypes, config.HEAD_DIMS):
        of_dim = config.configure(dtype, dim, FORMS[0], True)
        tile_m, turns = of_dim.tile_m, of_dim.turns
        # Row statistics and a rounding: no shared memory, no product.
        around = Expect(None, max_registers=96, max_shared=0)
        for dlse, packed in itertools.product(flags, flags):
            chosen = PreConfig(dtype, dim, tile_m, dlse, packed, turns)
            yield Entry(pre_entry(chosen), "A", around)
        for packed in flags:
            yield Entry(post_entry(PostConfig(dtype, dim, tile_m, packed)), "A", around)
        for form, softcap, ordered, packed in itertools.product(FORMS, flags, flags, flags):
            chosen = config.configure(dtype, dim, form, ordered, softcap, packed=packed)
            if packed and not (ordered and form == config.FORM_OF_PACKS):
                continue
            expect = Expect(_BACKWARD_MMA[dim], _REGISTERS[2], _BACKWARD_SHARED[dim])
            yield Entry(backward_entry(chosen), "B" if ordered else None, expect)
