"""Union of one or two ascending lists of key blocks: those of the blocks of a CTA's rows.

The producer alone reads the lists.  For each step, a block of keys, it writes one `Step` per list
where the consumers find it a step earlier, so that all of them see the same steps.

Were a consumer to count its way through the rings itself, from tile to tile, every thread would
compute the addresses of its products: ptxas does not see that they are equal.

A consumer holds V of its last block until its next one (where ``max_skipped_steps`` is None: until
the next step).  So that the ring can go on meanwhile, a list that has been absent for
``max_skipped_steps`` steps in a row gets a step of its own: its last block again, as a `Step`
whose keys are all beyond the end.  That changes no bit of its rows, and reads no more of V than the
visit before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
from cutlass import cute, pipeline

#: Query rows and keys of a block of the mask.
BLOCK = 128
#: Flags of a `Step`, and the shifts of its ring position and of its block.
LAST, ENDS, PARTIAL, ABSENT = 1, 2, 4, -(2**31)
RING_SHIFT, BLOCK_SHIFT = 3, 7
#: In a ring code: the factor of the phase; the stage is below it.
PHASE = 8
#: A block beyond all keys, and an entry beyond all blocks.
BEYOND, END = 2**23, 2**30
#: The columns of a cursor; the next ``LANES`` entries (ENTRIES) differ by lane.
INDEX, ENTRY, AWAY, TILE, ENTRIES = range(5)
LANES = 32


@dataclass(frozen=True)
class BlockRange:
    """Entries of a list of consecutive blocks from ``first`` on.

    Each row decides whether a block is partial (``kv_ranges.hides``): its entries do not say it.
    """

    first: cutlass.Int32

    def entry(self, index: cutlass.Int32):
        """Return 2 * block, as stored entries have it."""
        return 2 * (self.first + index)


@dataclass(frozen=True)
class BlockList:
    """Ascending key blocks of one query block.

    count: blocks on the list; entries: 2 * block + is_partial; tiles: the mask tile of each entry,
    or None without bit masks.
    """

    count: cutlass.Int32
    entries: cute.Tensor | BlockRange
    tiles: cute.Tensor | None


@cute.jit
def load_list(
    counts: cute.Tensor, entries: cute.Tensor, tiles: cute.Tensor | None, row: cutlass.Int32
):
    """Return the stored `BlockList` of one row of blocks; empty beyond the last row."""
    index = cutlass.min(row, counts.shape[0] - 1)
    count = counts[index] if index == row else cutlass.Int32(0)
    return BlockList(count, entries[index, None], None if tiles is None else tiles[index, None])


def cursor(lists: Sequence[BlockList]) -> cute.Tensor:
    """Return the state of the union, int32 [lists, 5], at its first step.

    By list: the index in it, the entry there, the steps without the list, the mask tile of the last
    entry, and the entries that come, one in each lane.
    """
    state = cute.make_rmem_tensor((len(lists), 5), cutlass.Int32)
    state.fill(0)
    for n, blocks in enumerate(lists):
        look_up(blocks, state, n)
    return state


def ring_code(stage: cutlass.Int32, phase: cutlass.Int32):
    """Return the code of a reader's position in rings that advance together."""
    return stage + PHASE * phase


def ring_state(code: cutlass.Int32, stages: int) -> pipeline.PipelineState:
    """Return the ring position of a code."""
    stage = cute.arch.make_warp_uniform(code & (PHASE - 1))
    phase = code // PHASE & 1
    return pipeline.PipelineState(stages, cutlass.Int32(0), stage, phase)


@dataclass(frozen=True)
class Step:
    """A step as one list sees it, packed into an int32.

    From bit ``BLOCK_SHIFT`` on: the block; negative (ABSENT) if only the other list has it.
    From ``RING_SHIFT`` on: the ring code of the step's K and V.  PARTIAL: the block is partial;
    ENDS: no other block of this list follows; LAST: no step follows.
    """

    word: cutlass.Int32

    @property
    def block(self):
        """Key block."""
        return self.word >> BLOCK_SHIFT

    @property
    def is_partial(self):
        """Whether the block is partial."""
        return self.word & PARTIAL != 0

    @property
    def goes_on(self):
        """Whether another block of this list follows."""
        return self.word & ENDS == 0

    @property
    def has_next(self):
        """Whether a step follows."""
        return self.word & LAST == 0

    @property
    def ring_code(self):
        """Ring code of the step's K and V."""
        return self.word >> RING_SHIFT

    def state(self, stages: int) -> pipeline.PipelineState:
        """Return the ring position of the step's K and V."""
        return ring_state(self.ring_code, stages)


def next_step(steps: cute.Tensor, stage: cutlass.Int32):
    """Return the `Step` after the one whose K is in ``stage``."""
    return Step(cute.arch.make_warp_uniform(steps[0, stage]))


def is_absent(step: Step, lists: int):
    """Return whether only the other list has the block; a single list has every one."""
    return step.word < 0 if lists > 1 else cutlass.Boolean(False)


@cute.jit
def step(
    lists: Sequence[BlockList],
    state: cute.Tensor,
    words: cute.Tensor,
    max_skipped_steps: cutlass.Constexpr,
    code: cutlass.Int32,
):
    """Advance by a step and return its block, or ``END``; by one warp, which may then tell others.

    words: [lists, 2], the `Step` and the mask tile of the step before it; code: ring code of the
    step.
    """
    write_tiles(lists, state, words)
    # block = min over lists of the next entry's block
    block, repeated = END >> 1, cutlass.Int32(-1)
    for n in cutlass.range_constexpr(len(lists)):
        block = cutlass.min(block, state[n, ENTRY] >> 1)
    if cutlass.const_expr(len(lists) > 1 and max_skipped_steps is not None):
        for n in cutlass.range_constexpr(len(lists)):
            if state[n, AWAY] == max_skipped_steps and state[n, ENTRY] < END:
                repeated = cutlass.Int32(n)
                block = entry_at(lists[n].entries, state[n, INDEX] - 1) >> 1
    word = cute.make_rmem_tensor((len(lists),), cutlass.Int32)
    last = cutlass.Int32(LAST)
    for n in cutlass.range_constexpr(len(lists)):
        word[n] = ABSENT
        if repeated == n:
            word[n] = BEYOND << BLOCK_SHIFT
            state[n, AWAY] = 0
        elif repeated < 0 and state[n, ENTRY] >> 1 == block:
            entry = state[n, ENTRY]
            word[n] = (entry >> 1 << BLOCK_SHIFT) + (entry & 1) * PARTIAL
            if cutlass.const_expr(lists[n].tiles is not None):
                # For the next step: the load has landed by then.
                tiles = lists[n].tiles
                state[n, TILE] = tiles[cutlass.min(state[n, INDEX], cute.size(tiles) - 1)]
            state[n, INDEX] = state[n, INDEX] + 1
            look_up(lists[n], state, n)
            state[n, AWAY] = 0
            if state[n, ENTRY] == END:
                word[n] = word[n] + ENDS
        elif state[n, INDEX] > 0:
            state[n, AWAY] = state[n, AWAY] + 1
        if state[n, ENTRY] < END:
            last = cutlass.Int32(0)
    if cute.arch.lane_idx() == 0:
        for n in cutlass.range_constexpr(len(lists)):
            words[n, 0] = word[n] + last + (code << RING_SHIFT)
    cute.arch.sync_warp()
    return END if block == END >> 1 else block


@cute.jit
def write_tiles(lists: Sequence[BlockList], state: cute.Tensor, words: cute.Tensor):
    """Write the mask tiles of the entries before the cursor, if there are tiles."""
    for n in cutlass.range_constexpr(len(lists)):
        if cutlass.const_expr(lists[n].tiles is not None):
            if cute.arch.lane_idx() == 0:
                words[n, 1] = state[n, TILE]


def entry_at(entries: cute.Tensor | BlockRange, index: cutlass.Int32):
    """Return an entry of a list, stored or not."""
    return entries.entry(index) if isinstance(entries, BlockRange) else entries[index]


@cute.jit
def look_up(blocks: BlockList, state: cute.Tensor, n: cutlass.Constexpr):
    """Set the cursor's entry to the one at its index, or to ``END``.

    A warp reads ``LANES`` stored entries at once: one by one, K of each step would wait for global
    memory.
    """
    entries, index = blocks.entries, state[n, INDEX]
    if cutlass.const_expr(isinstance(entries, BlockRange)):
        state[n, ENTRY] = entries.entry(index) if index < blocks.count else cutlass.Int32(END)
    else:
        if index & (LANES - 1) == 0:
            lane_index = cutlass.min(index + cute.arch.lane_idx(), cute.size(entries) - 1)
            state[n, ENTRIES] = entries[lane_index]
        entry = cute.arch.shuffle_sync(state[n, ENTRIES], index & (LANES - 1))
        state[n, ENTRY] = entry if index < blocks.count else cutlass.Int32(END)
