"""The SM90 launchers: operands as TMA can address them, workspace, compiled kernels, calls.

The forward is one launch, or two for one query over a long buffer (``kv_ranges.launch``).  The
backward is three on one stream: delta and zeros, then dK, dV and the fp32 dQ, then dQ rounded.
A varlen batch has one more before them, which makes its tables.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import log
from ..compile.call import allocator, bind
from ..compile.kernel import Entry, Expect
from ..runtime.operands import addressable, is_addressable, most_ctas, not_empty
from ..runtime.plan_cache import Plan, launcher
from . import config
from .config import BackwardConfig, ForwardConfig, PostConfig, PreConfig, VarlenTablesConfig
from .entries import entry, kernel
from .kv_ranges import launch as buffer_launch
from .masks import BLOCK, FORMS, FORWARD_FORMS, SPANS, LoweredMask, Order, Window, band
from .pack_gqa import PackedGqa, has_group_masks
from .paged import launch as paged_launch
from .tensors import Grads, Keys, Saved, Varlen, shape_of_out, sinks_gradient

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


#: Lists of a kernel that reads ranges, and of one whose lists are formulas.
NO_LISTS = None, None, None, None
#: Of the kernel of varlen tables: blocks or tickets to a slice, and slices to a CTA's.
_SLICE, _MOST_SLICES = 512, 64


class Workspace(NamedTuple):
    """Workspace passed between the backward's kernels; a tile is ``tile_m`` query rows of one head.

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


def plan_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Keys,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
) -> Plan:
    """Launch plan of (out, lse) of ``op``; `plan_one_kernel`, or two kernels with the same bytes.

    The latter where one query a sequence sees a range of a long key buffer (``kv_ranges.launch``).
    It may hold the lists of a mask: cache it no longer than those.
    """
    if not buffer_launch.is_long(q, k, v):
        return plan_one_kernel(q, k, v, keys, scale, softcap, sinks)
    by_range = isinstance(keys, Tensor)
    seen = None if by_range else buffer_launch.keys_of(keys)
    if not by_range and seen is None:
        return plan_one_kernel(q, k, v, keys, scale, softcap, sinks)
    launch = buffer_launch.plan(q, k, v, seen, scale, softcap)
    is_contiguous = by_range and keys.is_contiguous()

    def run(q, k, v, keys, scale, softcap, sinks=None):
        return launch(q, k, v, sinks, _by_token(keys, is_contiguous) if by_range else None)

    return Plan(run)


def plan_one_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Keys,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
) -> Plan:
    """Launch plan of `plan_forward` of one kernel; tiles of 128 or 192 query rows of a head.

    A varlen batch has a launch before it, which makes its table.
    """
    device, out_shape, (batch, q_len, heads, _) = q.device, shape_of_out(q, v), q.shape
    lists, ends, tables, is_contiguous = NO_LISTS, (0, 0), None, True
    if isinstance(keys, LoweredMask):
        form, ends = keys.form, (keys.lo, keys.hi)
        lists = keys.kv_count, not_empty(keys.kv_entry), not_empty(keys.kv_tile), keys.words
        # Where whole blocks alone are masked, and alike for all heads, a row's number is in no
        # rule.
        packs_gqa = q_len == 1 and form == "none" and keys.kv_count.shape[1] == 1
    elif isinstance(keys, Varlen):
        form, ends, packs_gqa = config.VARLEN_FORM, band(keys.window), False
        tables = plan_varlen_tables(keys.bounds, q)
    else:
        # In a step of decoding the query heads of a group are rows of one tile: K and V come once.
        form, packs_gqa, is_contiguous = SPANS, q_len == 1, keys.is_contiguous()
    packed = PackedGqa(1, heads, k.shape[2], 1) if packs_gqa else None
    if packed is not None:
        q = packed.pack(q)
    flags = softcap > 0, sinks is not None, tables is not None
    kernel_config = config.configure_forward(config.DTYPE_NAMES[q.dtype], q.shape[3], form, *flags)
    launch = bind(device, kernel(kernel_config))
    (_, q_len, kernel_heads, _), (c, inner) = q.shape, config.factors(scale, softcap)
    rows = q_len if tables is None else tables.rows
    counter, ctas = grid(kernel_config, rows, batch * kernel_heads, device)
    new_out = allocator(out_shape, q.dtype, device)
    new_lse = allocator((batch, heads, out_shape[1]), torch.float32, device)
    direct = all(map(is_addressable, (q, k, v)))
    if packed is not None:
        out = torch.empty(out_shape, dtype=q.dtype, device="meta")
        pack_q, pack_out = _view_like(q), _view_like(packed.pack(out))

    def run(q, k, v, keys, scale, softcap, sinks=None):
        ranges = table = None
        if tables is not None:
            table, _ = tables.run(keys.bounds)
        elif form == SPANS:
            ranges = _by_token(keys, is_contiguous)
        out, lse = new_out(), new_lse()
        results = out, lse
        if packed is not None:
            q, results = pack_q(q), (pack_out(out), packed.pack_sums(lse))
        by_row = None
        if sinks is not None:
            by_row = sinks.float().view(kernel_heads, -1).expand(-1, q_len)
        if not direct:
            q, k, v = _addressed({"q": q, "k": k, "v": v})
        operands = q, k, v, *results, *lists, ranges, by_row, table, counter()
        launch(*operands, *ends, c, inner, ctas)
        return out, lse

    return Plan(run)


forward = launcher(plan_forward)


def _view_like(t: Tensor) -> Callable[[Tensor], Tensor]:
    """View of another tensor's memory with the sizes and strides of ``t``, in one step."""
    return functools.partial(torch.as_strided, size=t.shape, stride=t.stride())


def _addressed(tensors: dict[str, Tensor]) -> list[Tensor]:
    return [addressable(t, NAME, name) for name, t in tensors.items()]


def grid(
    chosen: ForwardConfig, rows: int, heads: int, device: torch.device
) -> tuple[Callable[[], Tensor], int]:
    """(what makes the counter of tiles for a launch, its CTAs); heads: of all batches."""
    total, most = -(-rows // chosen.rows) * heads, most_ctas(device)
    if total <= most:
        # One CTA per tile: the counter is not read.
        return functools.partial(_unread, device), total
    return functools.partial(torch.zeros, 1, dtype=torch.int32, device=device), most


@functools.cache
def _unread(device: torch.device) -> Tensor:
    """Placeholder for a tensor that a kernel takes and does not read."""
    return torch.zeros(1, dtype=torch.int32, device=device)


class VarlenTables(NamedTuple):
    """Launch plan of the kernel that makes the tables of a varlen batch.

    run: ``run(bounds)`` returns (table, tickets or None).
    rows: The most query rows that the blocks of the table have.
    """

    run: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    rows: int


def plan_varlen_tables(
    bounds: Tensor, q: Tensor, kv_heads: int = 0, window: Window = (None, None)
) -> VarlenTables:
    """Plan the tables of a varlen batch for ``q`` [1, T, Hq, D]; tickets for ``kv_heads``.

    Sizes are bounds that the host knows; the last row of either says how many are in use.
    """
    tokens, count, device = q.shape[1], max(1, len(bounds)), q.device
    blocks = tokens // BLOCK[0] + count + 1
    kernel_config = VarlenTablesConfig(str(bounds.dtype).removeprefix("torch."), kv_heads > 0)
    slices = -(-blocks * max(kv_heads, 1) // (_SLICE * -(-(count + 1) // config.SEQUENCES)))
    in_flight = config.in_flight(q.shape[2] // max(kv_heads, 1))
    scalars = tokens, *band(window), kv_heads, in_flight, min(slices, _MOST_SLICES)
    launch = bind(device, kernel(kernel_config))
    new_table = allocator((blocks + 1, 4), torch.int32, device)
    new_tickets = allocator((kv_heads * blocks + 1, 4), torch.int32, device)

    def run(bounds):
        bounds = not_empty(bounds).to(device, non_blocking=True)
        table, tickets = new_table(), new_tickets() if kv_heads else None
        launch(bounds, table, tickets, *scalars)
        return table, tickets

    return VarlenTables(run, blocks * BLOCK[0])


def _by_token(kv_ranges: Tensor, is_contiguous: bool) -> Tensor:
    """Ranges as kernels read them: contiguous [B, T, 4]."""
    return kv_ranges.squeeze(1) if is_contiguous else kv_ranges[:, 0].contiguous()


def plan_backward(
    grads: Grads,
    saved: Saved,
    keys: LoweredMask | Varlen,
    order: Order | None,
    scale: float,
    softcap: float,
    deterministic: bool,
) -> Plan:
    """Launch plan of (dq, dk, dv) of ``op``, and of the sinks' gradient if there are sinks.

    Three kernels; a varlen batch, which has no order of its own, has one before them.  dK and dV
    are added by visits, dQ by ranks unless not ``deterministic``.  It holds the lists of a mask and
    of ``order``: cache it no longer than those.
    """
    (batch, q_len, heads, dim), kv_heads, device = saved.q.shape, saved.k.shape[2], saved.q.device
    lists, tables, packed, true_heads = NO_LISTS, None, None, heads
    if isinstance(keys, Varlen):
        tables = plan_varlen_tables(keys.bounds, saved.q, kv_heads, keys.window)
        form, rows, ends = config.VARLEN_FORM, tables.rows, band(keys.window)
        # The host does not know how long sequences are.
        tickets, key_blocks = kv_heads * (rows // BLOCK[0]) + 1, 0.0
    else:
        if has_group_masks(keys.kv_count.shape[1], heads, kv_heads):
            packed = PackedGqa.of_blocks(q_len, heads, kv_heads)
            heads = kv_heads
        form, rows, ends = keys.form, packed.rows if packed else q_len, (keys.lo, keys.hi)
        tickets, key_blocks = len(order.ticket), order.mean_key_blocks(rows, saved.k.shape[1])
        entries = (not_empty(t) for t in (order.entry, order.rank, order.tile))
        lists = *entries, keys.key_words
    dtype = config.DTYPE_NAMES[saved.q.dtype]
    kernel_config = config.configure(
        *(dtype, dim, form, deterministic, softcap > 0, tables is not None, key_blocks)
    )
    tiles, turns = -(-rows // kernel_config.tile_m), kernel_config.turns
    pre, post = configs_around(kernel_config, grads.dlse is not None)
    launch_pre = bind(device, kernel(pre))
    launch_main = bind(device, kernel(kernel_config))
    launch_post = bind(device, kernel(post))
    new_workspace = plan_workspace((batch, heads, tiles), kernel_config.tile_m, dim, turns, device)
    if packed is not None:
        grads, saved = packed.operands(grads, saved)
    new_dq, new_dk, new_dv = (
        allocator(t.shape, t.dtype, device) for t in (saved.q, saved.k, saved.v)
    )
    # A CTA takes tickets until there are none: more CTAs than tickets have nothing to do.
    ctas = min(most_ctas(device), kernel_config.parts * tickets)
    scalars = scale, *config.factors(scale, softcap), *ends, ctas
    direct = all(map(is_addressable, (grads.dout, saved.q, saved.k, saved.v, saved.out)))
    direct = direct and all(t is None or t.is_contiguous() for t in (grads.dlse, saved.lse))
    ticket = None if order is None else order.ticket

    def run(grads, saved, keys, *_):
        sinks, table, chosen = saved.sinks, None, ticket
        if tables is not None:
            table, chosen = tables.run(keys.bounds)
        if packed is not None:
            grads, saved = packed.operands(grads, saved)
        (dout, dlse), (q, k, v, out, lse, _) = grads, saved
        if not direct:
            tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out}
            dout, q, k, v, out = _addressed(tensors)
            dlse = None if dlse is None else log.contiguous(NAME, "dlse", dlse, "contiguous")
            lse = log.contiguous(NAME, "lse", lse, "contiguous")
        space = new_workspace()
        of_rows = space.lse2.flatten(2), space.delta.flatten(2)
        launch_pre(out, dout, lse, dlse, *of_rows, *space[2:], table)
        dk, dv = new_dk(), new_dv()
        operands = q, k, v, dout, *space[:3], dk, dv, *space[3:]
        launch_main(*operands, chosen, *lists, table, *scalars)
        dq = new_dq()
        launch_post(space.total, dq, space.semaphore if post.visited else None, table, scale)
        dq = dq if packed is None else packed.unpack(dq)
        if sinks is None:
            return dq, dk, dv
        sums = (t.view(batch, true_heads, -1) for t in (space.lse2, space.delta))
        return dq, dk, dv, sinks_gradient(sinks, *sums)

    return Plan(run)


backward = launcher(plan_backward)


def configs_around(main: BackwardConfig, dlse: bool) -> tuple[PreConfig, PostConfig]:
    """The kernels before and after a backward; dlse: whether lse has a gradient."""
    common, stores = (main.dtype, main.head_dim, main.tile_m), main.first_stores
    pre = PreConfig(*common, dlse, main.packed, main.turns, zeros=not stores, pdl=main.pdl)
    return pre, PostConfig(*common, main.packed, visited=stores, pdl=main.pdl)


def plan_workspace(
    tiles: tuple[int, int, int], tile_m: int, dim: int, turns: int, device: torch.device
) -> Callable[[], Workspace]:
    """``new()`` allocates an uninitialised workspace; the first kernel of a backward writes it.

    tiles: B, Hq, and the tiles of a head.
    """
    rows, semaphores = (*tiles, tile_m), (*tiles, turns) if turns > 1 else tiles
    new_rows = allocator(rows, torch.float32, device)
    new_total = allocator((*tiles, tile_m * dim), torch.float32, device)
    new_semaphore = allocator(semaphores, torch.int32, device)
    new_counter = allocator((1,), torch.int32, device)
    return lambda: Workspace(new_rows(), new_rows(), new_total(), new_semaphore(), new_counter())


def catalogue() -> Iterator[Entry]:
    """Every kernel that these launchers can ask for."""
    dtypes, flags = config.DTYPE_NAMES.values(), (False, True)
    for key in itertools.product(dtypes, config.HEAD_DIMS, FORWARD_FORMS, flags, flags, flags):
        kernel_config = config.configure_forward(*key)
        if kernel_config.packed and kernel_config.form != config.VARLEN_FORM:
            continue
        mma = ("64x128x16", f"64x{config.VALUE_DIMS[kernel_config.head_dim]}x16")
        shared = _FORWARD_SHARED[kernel_config.head_dim]
        yield Entry(
            entry(kernel_config),
            "A",
            Expect(mma, _REGISTERS[kernel_config.consumers], shared),
        )
    yield from paged_launch.catalogue()
    yield from buffer_launch.catalogue()
    for offsets, tickets in itertools.product(config.OFFSETS, flags):
        expect = Expect(None, max_registers=40, max_shared=6400)
        yield Entry(entry(VarlenTablesConfig(offsets, tickets)), "A", expect)
    for dtype, dim in itertools.product(dtypes, config.HEAD_DIMS):
        mains = dict.fromkeys(config.backwards(dtype, dim, FORMS))
        yield from _entries_around(mains)
        for main in mains:
            limits = _REGISTERS[2], _BACKWARD_SHARED[dim]
            expect = Expect(_BACKWARD_MMA[dim], *limits, pdl=main.pdl)
            yield Entry(entry(main), "B" if main.ordered else None, expect)


def _entries_around(mains: Iterable[BackwardConfig]) -> Iterator[Entry]:
    """The kernels before and after backwards."""
    around = [configs_around(main, dlse) for main in mains for dlse in (False, True)]
    # Row statistics and a rounding: no shared memory, no product.
    expect = Expect(None, max_registers=96, max_shared=0)
    for pre in dict.fromkeys(pre for pre, _ in around):
        yield Entry(entry(pre), "A", expect)
    for post in dict.fromkeys(post for _, post in around):
        yield Entry(entry(post), "A", replace(expect, pdl=post.pdl))
