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
    mask: LoweredMask,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
) -> Plan:
    """Launch plan of (out, lse) of ``op``; `plan_one_kernel`, or two kernels with the same bytes.

    The latter where one query a sequence sees a range of a long key buffer (``kv_ranges.launch``).
    It may hold the lists of ``mask``: cache it no longer than those.
    """
    keys = buffer_launch.keys_of(mask) if buffer_launch.is_long(q, k, v) else None
    if keys is None:
        return plan_one_kernel(q, k, v, mask, scale, softcap, sinks)
    launch = buffer_launch.plan(q, k, v, keys, scale, softcap)

    def run(q, k, v, mask, scale, softcap, sinks=None):
        return launch(q, k, v, sinks, None)

    return Plan(run)


def plan_one_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: LoweredMask,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
) -> Plan:
    """Launch plan of `plan_forward` of one kernel; tiles of 128 or 192 query rows of a head.

    It holds the lists of ``mask``: cache it no longer than those.
    """
    lists = mask.kv_count, not_empty(mask.kv_entry), not_empty(mask.kv_tile), mask.words
    # Where whole blocks alone are masked, and alike for all heads, a row's number is in no rule.
    grouped = q.shape[1] == 1 and mask.form == "none" and mask.kv_count.shape[1] == 1
    rule = mask.form, (mask.lo, mask.hi)
    launch = _plan_forward(q, k, v, sinks, rule, (scale, softcap), packs_gqa=grouped)

    def run(q, k, v, mask, scale, softcap, sinks=None):
        return launch(q, k, v, sinks, (*lists, None), None)

    return Plan(run)


forward = launcher(plan_forward)


def plan_forward_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    window: Window,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
) -> Plan:
    """Launch plan of (out, lse) of sequences where they lie in q, k, v [1, T, H, D]: two launches.

    bounds: [N, 2], int32 or int64, where each begins and ends, in ascending order; the host reads
    none, see ``kernel_varlen_tables_sm90``.  window: (left, right), None for no bound.  Tokens
    after the last sequence see nothing; tokens of no sequence are not written.
    """
    tables = plan_varlen_tables(bounds, q)
    rule = config.VARLEN_FORM, band(window)
    launch = _plan_forward(q, k, v, sinks, rule, (scale, softcap), tables.rows)

    def run(q, k, v, bounds, window, scale, softcap, sinks=None):
        table, _ = tables.run(bounds)
        return launch(q, k, v, sinks, (*NO_LISTS, None), table)

    return Plan(run)


forward_varlen = launcher(plan_forward_varlen)


def _plan_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    rule: tuple[str, tuple[int, int]],
    factors: tuple[float, float],
    varlen_rows: int = 0,
    packs_gqa: bool = False,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """``run(q, k, v, sinks, lists, table)`` of a forward; rule: (form, band).

    varlen_rows: Query rows of the blocks of a varlen batch; 0: none.  packs_gqa: Whether the heads
    of a group are rows of one head, for one query.
    """
    device, out_shape, (batch, _, heads, _) = q.device, shape_of_out(q, v), q.shape
    (form, ends), (scale, softcap) = rule, factors
    packed = PackedGqa(1, heads, k.shape[2], 1) if packs_gqa else None
    if packed is not None:
        q = packed.pack(q)
    flags = softcap > 0, sinks is not None, varlen_rows > 0
    kernel_config = config.configure_forward(config.DTYPE_NAMES[q.dtype], q.shape[3], form, *flags)
    launch = bind(device, kernel(kernel_config))
    (_, q_len, kernel_heads, _), (c, inner) = q.shape, config.factors(scale, softcap)
    counter, ctas = grid(kernel_config, varlen_rows or q_len, batch * kernel_heads, device)
    new_out = allocator(out_shape, q.dtype, device)
    new_lse = allocator((batch, heads, out_shape[1]), torch.float32, device)
    direct = all(map(is_addressable, (q, k, v)))
    if packed is not None:
        out = torch.empty(out_shape, dtype=q.dtype, device="meta")
        pack_q, pack_out = _view_like(q), _view_like(packed.pack(out))

    def run(q, k, v, sinks, lists, table):
        out, lse = new_out(), new_lse()
        results = out, lse
        if packed is not None:
            q, results = pack_q(q), (pack_out(out), packed.pack_sums(lse))
        by_row = None
        if sinks is not None:
            by_row = sinks.float().view(kernel_heads, -1).expand(-1, q_len)
        if not direct:
            q, k, v = _addressed({"q": q, "k": k, "v": v})
        launch(q, k, v, *results, *lists, by_row, table, counter(), *ends, c, inner, ctas)
        return out, lse

    return run


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


def plan_forward_kv_ranges(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_ranges: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
) -> Plan:
    """Launch plan of (out, lse) of ranges of keys on the device.

    kv_ranges: int32 [B, 1, T, 4]; all of a batch row with one begin and one position.  One query a
    sequence of a long key buffer takes two kernels with the same bytes (``kv_ranges.launch``).
    """
    if not buffer_launch.is_long(q, k, v):
        return plan_one_kernel_of_ranges(q, k, v, kv_ranges, scale, softcap, sinks)
    launch = buffer_launch.plan(q, k, v, None, scale, softcap)
    is_contiguous = kv_ranges.is_contiguous()

    def run(q, k, v, kv_ranges, scale, softcap, sinks=None):
        return launch(q, k, v, sinks, _by_token(kv_ranges, is_contiguous))

    return Plan(run)


def plan_one_kernel_of_ranges(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_ranges: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
) -> Plan:
    """Launch plan of `plan_forward_kv_ranges` of one kernel."""
    # In a step of decoding the query heads of a group are rows of one tile: K and V come once.
    rule, packs_gqa = (SPANS, (0, 0)), q.shape[1] == 1
    launch = _plan_forward(q, k, v, sinks, rule, (scale, softcap), packs_gqa=packs_gqa)
    is_contiguous = kv_ranges.is_contiguous()

    def run(q, k, v, kv_ranges, scale, softcap, sinks=None):
        ranges = _by_token(kv_ranges, is_contiguous)
        return launch(q, k, v, sinks, (*NO_LISTS, ranges), None)

    return Plan(run)


forward_kv_ranges = launcher(plan_forward_kv_ranges)


def _by_token(kv_ranges: Tensor, is_contiguous: bool) -> Tensor:
    """Ranges as kernels read them: contiguous [B, T, 4]."""
    return kv_ranges.squeeze(1) if is_contiguous else kv_ranges[:, 0].contiguous()


def plan_backward(
    grads: Grads,
    saved: Saved,
    mask: LoweredMask,
    order: Order,
    scale: float,
    softcap: float,
    deterministic: bool,
) -> Plan:
    """Launch plan of (dq, dk, dv) of ``op``, and of the sinks' gradient if there are sinks.

    dK and dV are added by visits, dQ by ranks unless not ``deterministic``.  It holds the lists of
    ``mask`` and ``order``: cache it no longer than those.
    """
    (_, q_len, heads, _), kv_heads = saved.q.shape, saved.k.shape[2]
    lists = order.ticket, *(not_empty(t) for t in (order.entry, order.rank, order.tile))
    lists = *lists, mask.key_words
    packed = None
    if has_group_masks(mask.kv_count.shape[1], heads, kv_heads):
        packed = PackedGqa.of_blocks(q_len, heads, kv_heads)
    rows = q_len if packed is None else packed.rows
    operands = (grads, saved) if packed is None else packed.operands(grads, saved)
    rule = mask.form, rows, (mask.lo, mask.hi)
    work = len(lists[0]), order.mean_key_blocks(rows, saved.k.shape[1])
    launch = _plan_backward(*operands, rule, work, (scale, softcap, deterministic))

    def run(grads, saved, *_):
        operands = (grads, saved) if packed is None else packed.operands(grads, saved)
        dq, dk, dv, space = launch(*operands, lists, None)
        dq = dq if packed is None else packed.unpack(dq)
        return dq, dk, dv, *_of_sinks(saved.sinks, heads, space)

    return Plan(run)


backward = launcher(plan_backward)


def plan_backward_varlen(
    grads: Grads, saved: Saved, bounds: Tensor, window: Window, scale: float, softcap: float
) -> Plan:
    """Launch plan of the backward of `plan_forward_varlen`, ordered: four launches."""
    kv_heads, heads = saved.k.shape[2], saved.q.shape[2]
    tables = plan_varlen_tables(bounds, saved.q, kv_heads, window)
    rule = config.VARLEN_FORM, tables.rows, band(window)
    # The host does not know how long sequences are.
    work = kv_heads * (tables.rows // BLOCK[0]) + 1, 0.0
    launch = _plan_backward(grads, saved, rule, work, (scale, softcap, True), packed=True)

    def run(grads, saved, bounds, *_):
        table, tickets = tables.run(bounds)
        dq, dk, dv, space = launch(grads, saved, (tickets, *NO_LISTS), table)
        return dq, dk, dv, *_of_sinks(saved.sinks, heads, space)

    return Plan(run)


backward_varlen = launcher(plan_backward_varlen)


def _of_sinks(sinks: Tensor | None, heads: int, space: Workspace) -> tuple[Tensor, ...]:
    """(gradient of the sinks,), or () without sinks."""
    if sinks is None:
        return ()
    of_head = (t.view(t.shape[0], heads, -1) for t in (space.lse2, space.delta))
    return (sinks_gradient(sinks, *of_head),)


def _plan_backward(
    grads: Grads,
    saved: Saved,
    rule: tuple[str, int, tuple[int, int]],
    work: tuple[int, float],
    options: tuple[float, float, bool],
    packed: bool = False,
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Workspace]]:
    """``run(grads, saved, lists, table)`` of the three kernels: (dq, dk, dv, workspace).

    rule: (form, query rows, band).  work: (tickets, mean key blocks of a query block).  lists:
    ticket, entry, rank, tile and the words of bits, as the kernel takes them.
    """
    (batch, _, heads, dim), device = saved.q.shape, saved.q.device
    (form, rows, ends), (scale, softcap, deterministic) = rule, options
    (tickets, key_blocks), dtype = work, config.DTYPE_NAMES[saved.q.dtype]
    kernel_config = config.configure(
        *(dtype, dim, form, deterministic, softcap > 0, packed, key_blocks)
    )
    tiles, turns = -(-rows // kernel_config.tile_m), kernel_config.turns
    pre, post = configs_around(kernel_config, grads.dlse is not None)
    launch_pre = bind(device, kernel(pre))
    launch_main = bind(device, kernel(kernel_config))
    launch_post = bind(device, kernel(post))
    new_workspace = plan_workspace((batch, heads, tiles), kernel_config.tile_m, dim, turns, device)
    new_dq, new_dk, new_dv = (
        allocator(t.shape, t.dtype, device) for t in (saved.q, saved.k, saved.v)
    )
    # A CTA takes tickets until there are none: more CTAs than tickets have nothing to do.
    ctas = min(most_ctas(device), kernel_config.parts * tickets)
    scalars = scale, *config.factors(scale, softcap), *ends, ctas
    direct = all(map(is_addressable, (grads.dout, saved.q, saved.k, saved.v, saved.out)))
    direct = direct and all(t is None or t.is_contiguous() for t in (grads.dlse, saved.lse))

    def run(grads, saved, lists, table):
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
        launch_main(*operands, *lists, table, *scalars)
        dq = new_dq()
        launch_post(space.total, dq, space.semaphore if post.visited else None, table, scale)
        return dq, dk, dv, space

    return run


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
