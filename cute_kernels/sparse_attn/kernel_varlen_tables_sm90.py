"""Block table and backward tickets of a varlen batch, made on the device: SM90.

Sequence i is the tokens from b_i to e_i of T.  Its rows are counted from a multiple of 128:

    s_i = e_i - b_i     n_i = ceil(s_i / 128) blocks, from block f_i = n_0 + .. + n_(i - 1) on

After the last sequence come the tokens that are left, T - e_(N - 1) of them, as one more that
pairs with nothing; then the blocks that are not in use.

Layouts      bounds [N, 2]: (b_i, e_i), int32 or int64, any strides, as of offsets that each end one
             sequence and begin the next.  table int32 [blocks + 1, 4]: (shift, end, first, last)
             of each block, as in ``device/varlen``; T // 128 + N + 1 are enough for any bounds.
             tickets int32 [Hkv blocks + 1, 4]: (head, block, first query block, end of them); the
             last row begins with how many of those before it are in use, the others are not
             written.
Any bounds   stay inside: they are cut to 0 .. T, and a sequence begins no earlier than the one
             before it ends.  Tokens in front of a sequence that are of none have no block.
Tickets      in the order in which they are taken: of every 256 sequences, in pack order, those with
             most blocks first, tokens of none last; of a sequence sections of ``in_flight`` heads;
             of a section the columns from right to left, each of all its heads.  So all that a
             ticket waits for, the columns right of its own, are in earlier tickets.
Roles        one CTA per 256 sequences and slice; a thread finds where one begins.  A CTA looks at
             all sequences before its own too.  Slices share the blocks and tickets of theirs.
Limits       SM90a; T below 2^30.  No floating point.
Measured     docs/notes/attention_sm90.md
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy
from .config import SEQUENCES, VarlenTablesConfig
from .device import varlen
from .device.block_union import BLOCK

#: A CTA has a thread for each of its sequences.
CHUNK = SEQUENCES
WARP = 32
WARPS = CHUNK // WARP
OFFSETS = {"int32": cutlass.Int32, "int64": cutlass.Int64}
#: (first, last) of blocks that pair with nothing.
NOTHING = 1, 0


@cute.struct
class Storage:
    """Shared memory: each warp's sum in a scan; values by sequence; values by ticket order."""

    sums: cute.struct.MemRange[cutlass.Int32, 2 * WARPS]
    first: cute.struct.MemRange[cutlass.Int32, CHUNK]
    blocks: cute.struct.MemRange[cutlass.Int32, CHUNK]
    shift: cute.struct.MemRange[cutlass.Int32, CHUNK]
    end: cute.struct.MemRange[cutlass.Int32, CHUNK]
    before: cute.struct.MemRange[cutlass.Int32, CHUNK]
    which: cute.struct.MemRange[cutlass.Int32, CHUNK]


@dataclass(frozen=True)
class Sequences:
    """A CTA's sequences in shared memory, int32 [CHUNK] each.

    first, blocks, shift, end: by sequence, its first block, its number of blocks, and the table's
    numbers; before, which: by ticket order, the blocks before a sequence, and its number.
    """

    first: cute.Tensor
    blocks: cute.Tensor
    shift: cute.Tensor
    end: cute.Tensor
    before: cute.Tensor
    which: cute.Tensor


@dataclass(frozen=True)
class Share:
    """A thread's share of a CTA's blocks and tickets.

    base, used: blocks before this CTA's sequences, and with them; count: its sequences; rest: the
    number of the one that is the tokens left over, or CHUNK; first, step: the thread's first number
    and its stride.
    """

    base: cutlass.Int32
    used: cutlass.Int32
    count: cutlass.Int32
    rest: cutlass.Int32
    first: cutlass.Int32
    step: cutlass.Int32


@dataclass(frozen=True)
class TicketRule:
    """What tickets follow from.

    heads: KV heads; in_flight: heads of a section; left, right: blocks that a query block sees
    before and after its own (``varlen.reach``).
    """

    heads: cutlass.Int32
    in_flight: cutlass.Int32
    left: cutlass.Int32
    right: cutlass.Int32


class VarlenTablesSm90:
    """One configuration; ``__call__`` is what is compiled."""

    def __init__(self, config: VarlenTablesConfig):
        self.tickets = config.tickets

    @cute.jit
    def __call__(
        self,
        mBounds: cute.Tensor,
        mTable: cute.Tensor,
        mTicket: cute.Tensor | None,
        tokens: cutlass.Int32,
        lo: cutlass.Int32,
        hi: cutlass.Int32,
        heads: cutlass.Int32,
        in_flight: cutlass.Int32,
        slices: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        # The tokens that are left are one sequence more.
        chunks = cute.ceil_div(mBounds.shape[0] + 1, CHUNK)
        self.kernel(mBounds, mTable, mTicket, tokens, lo, hi, heads, in_flight).launch(
            grid=(chunks, slices, 1), block=(CHUNK, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mBounds: cute.Tensor,
        mTable: cute.Tensor,
        mTicket: cute.Tensor | None,
        tokens: cutlass.Int32,
        lo: cutlass.Int32,
        hi: cutlass.Int32,
        heads: cutlass.Int32,
        in_flight: cutlass.Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        chunk, slice_, _ = cute.arch.block_idx()
        chunks, slices, _ = cute.arch.grid_dim()
        storage = SmemAllocator().allocate(Storage)
        names = ("first", "blocks", "shift", "end", "before", "which")
        sequences = Sequences(
            *(getattr(storage, name).get_tensor(cute.make_layout(CHUNK)) for name in names)
        )
        sums = storage.sums.get_tensor(cute.make_layout((2, WARPS)))
        base, used = self.place(mBounds, sequences, sums, tokens, chunk, tidx)

        number, step = slice_ * CHUNK + tidx, slices * CHUNK
        count = cutlass.min(mBounds.shape[0] + 1 - chunk * CHUNK, CHUNK)
        # The last sequence of the last chunk is the tokens that are left.
        rest = count - 1 if chunk == chunks - 1 else cutlass.Int32(CHUNK)
        for block in cutlass.range(base + number, used, step, unroll=1):
            item = find(sequences.first, count, block)
            first = sequences.first[item]
            last = first + sequences.blocks[item] - 1
            first = first if item < rest else cutlass.Int32(NOTHING[0])
            last = last if item < rest else cutlass.Int32(NOTHING[1])
            write(mTable, block, sequences.shift[item], sequences.end[item], first, last)
        if cutlass.const_expr(self.tickets):
            self.order(sequences, count, rest, tidx)
            rule = TicketRule(heads, in_flight, *varlen.reach(lo, hi))
            share = Share(base, used, count, rest, number, step)
            self.write_tickets(mTicket, sequences, share, rule)
        if chunk == chunks - 1:
            rows = mTable.shape[0] - 1
            for block in cutlass.range(used + number, rows, step, unroll=1):
                write(mTable, block, 0, 0, *NOTHING)
            if number == 0:
                write(mTable, rows, 0, 0, used, -1)
            if cutlass.const_expr(self.tickets):
                if number == 0:
                    write(mTicket, mTicket.shape[0] - 1, heads * used, 0, 0, 0)

    @cute.jit
    def place(
        self,
        mBounds: cute.Tensor,
        sequences: Sequences,
        sums: cute.Tensor,
        tokens: cutlass.Int32,
        chunk: cutlass.Int32,
        tidx: cutlass.Int32,
    ):
        """Place this chunk's sequences; returns (blocks before them, blocks with them)."""
        latest, base, used = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        begin, size, blocks, earlier = (cutlass.Int32(0) for _ in range(4))
        for part in cutlass.range(chunk + 1, unroll=1):
            begin, end = self.bounds_of(mBounds, part * CHUNK + tidx, tokens)
            # b_i = max(b_i, e_0, .., e_(i - 1))
            last, most = scanned(end, cutlass.max, sums[0, None], tidx)
            begin = cutlass.max(begin, cutlass.max(latest, last))
            latest = cutlass.max(latest, most)
            size = cutlass.max(end - begin, 0)
            # f_i = n_0 + .. + n_(i - 1)
            blocks = (size + BLOCK - 1) // BLOCK
            earlier, total = scanned(blocks, operator.add, sums[1, None], tidx)
            base, used = used, used + total
        first = base + earlier
        sequences.first[tidx] = first
        sequences.blocks[tidx] = blocks
        sequences.shift[tidx] = first * BLOCK - begin
        sequences.end[tidx] = first * BLOCK + size
        cute.arch.sync_threads()
        return base, used

    @cute.jit
    def bounds_of(self, mBounds: cute.Tensor, item: cutlass.Int32, tokens: cutlass.Int32):
        """Return (begin, end) of a sequence, cut to the tokens; of the tokens left; or (0, 0)."""
        begin, end = cutlass.Int32(0), cutlass.Int32(0)
        count = mBounds.shape[0]
        if item < count:
            limit = mBounds.element_type(tokens)
            begin = cutlass.Int32(cutlass.max(cutlass.min(mBounds[item, 0], limit), 0))
            end = cutlass.Int32(cutlass.max(cutlass.min(mBounds[item, 1], limit), 0))
        elif item == count:
            end = tokens
        return begin, end

    @cute.jit
    def order(
        self,
        sequences: Sequences,
        count: cutlass.Int32,
        rest: cutlass.Int32,
        tidx: cutlass.Int32,
    ):
        """Sort the sequences into ticket order, most blocks first."""
        blocks = sequences.blocks
        mine = blocks[tidx] if tidx < rest else cutlass.Int32(0)
        rank, before = cutlass.Int32(0), cutlass.Int32(0)
        for other in cutlass.range(count, unroll=8):
            theirs = blocks[other]
            key = theirs if other < rest else cutlass.Int32(0)
            first = (key > mine) | ((key == mine) & (other < tidx))
            rank += cutlass.Int32(first)
            before += theirs if first else cutlass.Int32(0)
        if tidx < count:
            sequences.before[rank] = before
            sequences.which[rank] = tidx
        cute.arch.sync_threads()

    @cute.jit
    def write_tickets(
        self, mTicket: cute.Tensor, sequences: Sequences, share: Share, rule: TicketRule
    ):
        """Write the tickets of this chunk, after those of the chunks before it."""
        heads, in_flight, base = rule.heads, rule.in_flight, share.base
        start = cutlass.Int64(heads) * base
        tickets = heads * (share.used - base)
        for ticket in cutlass.range(share.first, tickets, share.step, unroll=1):
            rank = find(sequences.before, share.count, ticket // heads)
            item = sequences.which[rank]
            first, blocks = sequences.first[item], sequences.blocks[item]
            # Of the sequence's tickets: the section's, then the column's, then the head's.
            number = ticket - sequences.before[rank] * heads
            section = number // (in_flight * blocks)
            number -= section * in_flight * blocks
            width = cutlass.min(heads - section * in_flight, in_flight)
            column = number // width
            head = section * in_flight + number - column * width
            last = first + blocks - 1
            block = last - column
            begin = cutlass.max(first, block - rule.right)
            end = cutlass.min(last, block + rule.left) + 1
            begin, end = (x if item < share.rest else cutlass.Int32(0) for x in (begin, end))
            write(mTicket, start + ticket, head, block, begin, end)


@cute.jit
def scanned(value: cutlass.Int32, add: cutlass.Constexpr, sums: cute.Tensor, tidx: cutlass.Int32):
    """Return (the sum over the threads before this one, that over all).

    No value is negative, 0 is neutral.  sums: a number for each warp.
    """
    lane, warp = tidx % WARP, tidx // WARP
    inclusive = value
    for power in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(inclusive, 1 << power, mask_and_clamp=0)
        inclusive = add(inclusive, other) if lane >= 1 << power else inclusive
    if lane == WARP - 1:
        sums[warp] = inclusive
    before = cute.arch.shuffle_sync_up(inclusive, 1, mask_and_clamp=0)
    before = before if lane > 0 else cutlass.Int32(0)
    cute.arch.sync_threads()
    total = cutlass.Int32(0)
    for other in cutlass.range_constexpr(WARPS):
        before = add(before, sums[other]) if other < warp else before
        total = add(total, sums[other])
    cute.arch.sync_threads()
    return before, total


@cute.jit
def find(values: cute.Tensor, count: cutlass.Int32, value: cutlass.Int32):
    """Return the index of the last of ``count`` ascending values that is not above ``value``.

    The first value never is.
    """
    low = cutlass.Int32(0)
    for power in cutlass.range_constexpr(CHUNK.bit_length() - 1):
        middle = low + (CHUNK >> 1 + power)
        if middle < count:
            low = middle if values[middle] <= value else low
    return low


@cute.jit
def write(
    tensor: cute.Tensor,
    row: cutlass.Int64,
    a: cutlass.Int32,
    b: cutlass.Int32,
    c: cutlass.Int32,
    d: cutlass.Int32,
):
    """Write a row of four numbers at once."""
    record = cute.make_rmem_tensor(4, cutlass.Int32)
    record[0], record[1], record[2], record[3] = a, b, c, d
    cute.autovec_copy(record, copy.vector(tensor, (row, 0), 4))


def build(config: VarlenTablesConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; no GPU needed."""
    element = OFFSETS[config.offsets]
    strides = cute.sym_int64(), cute.sym_int64()
    align = element.width // 8
    bounds = make_fake_tensor(element, (fake.size(), 2), strides, assumed_align=align)
    return compile(
        VarlenTablesSm90(config),
        bounds,
        varlen.fake_table(),
        varlen.fake_table() if config.tickets else None,
        *(cutlass.Int32(1),) * 6,
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
