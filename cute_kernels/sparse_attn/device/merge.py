"""One or two ascending lists of key blocks, walked as one: those of the blocks of a CTA's rows.

The producer alone reads the lists.  For each step, a block of keys, it leaves one word per list
where the consumers find it a step earlier, so that no two of them can disagree on what comes.

    word    BLOCK_SHIFT and on: the block, if it is on the list; below 0 (ABSENT): it is not
            PARTIAL    the block is partial
            ENDS       no other block of this list follows
            LAST       no step follows
            PLACE_SHIFT and on: where in their rings K and V of the step are (``place_code``)

A consumer that counted its way through the rings itself, from tile to tile, would compute the
addresses of its products in every thread: ptxas does not see that they are equal.

A consumer holds V of its last block until its next one (with no ``patience``: until the next step).
So that the ring can go on meanwhile, a list that has been absent for ``patience`` steps in a row is
given a step of its own: its last block again, under a word whose keys are all beyond the end.  That
changes no bit of its rows, and asks no more of V than the visit before.
"""

import cutlass
from cutlass import cute, pipeline

from .spans import Run

LAST, ENDS, PARTIAL, ABSENT = 1, 2, 4, -(2**31)
#: In a word: how far to the left the place in the rings is, and the block.
PLACE_SHIFT, BLOCK_SHIFT = 3, 7
#: In the code of a place: the phase; below it is the stage.
PHASE = 8
#: A block beyond all keys, and an entry beyond all blocks.
BEYOND, END = 2**23, 2**30
#: The columns of a cursor; that of the next ``LANES`` entries differs by lane.
PLACE, ENTRY, AWAY, TILE, ENTRIES = range(5)
LANES = 32


@cute.jit
def listing(counts: cute.Tensor, entries: cute.Tensor, tiles, row):
    """(how many, entries, mask tiles or None) of one row of blocks; none beyond the last row."""
    at = cutlass.min(row, counts.shape[0] - 1)
    count = counts[at] if at == row else cutlass.Int32(0)
    return count, entries[at, None], None if tiles is None else tiles[at, None]


def cursor(lists) -> cute.Tensor:
    """int32 [lists, 5]: the place in each list, the entry there, the steps without the list, the
    mask tile of the last entry, and the entries that come, one in each lane."""
    at = cute.make_rmem_tensor((len(lists), 5), cutlass.Int32)
    at.fill(0)
    for n, list in enumerate(lists):
        look_up(list, at, n)
    return at


def place_code(stage, phase):
    """The code of a reader's place in rings that go round together."""
    return stage + PHASE * phase


def state_at(code, stages: int):
    """The place in a ring with a code."""
    stage = cute.arch.make_warp_uniform(code & (PHASE - 1))
    phase = code // PHASE & 1
    return pipeline.PipelineState(stages, cutlass.Int32(0), stage, phase)


def state_of(word, stages: int):
    """The place of a step in its rings."""
    return state_at(word >> PLACE_SHIFT, stages)


@cute.jit
def step(lists, at: cute.Tensor, words: cute.Tensor, patience: cutlass.Constexpr, code):
    """Goes on by a step and returns its block, or ``END``; by one warp, which may then tell others.

    words  [lists, 2]: the word of this step, and the mask tile of the step before it
    code   of this step's place in the rings
    """
    tell_tiles(lists, at, words)
    block, repeated = END >> 1, cutlass.Int32(-1)
    for n in cutlass.range_constexpr(len(lists)):
        block = cutlass.min(block, at[n, ENTRY] >> 1)
    if cutlass.const_expr(len(lists) > 1 and patience is not None):
        for n in cutlass.range_constexpr(len(lists)):
            if at[n, AWAY] == patience and at[n, ENTRY] < END:
                repeated, block = cutlass.Int32(n), entry_at(lists[n][1], at[n, PLACE] - 1) >> 1
    word = cute.make_rmem_tensor((len(lists),), cutlass.Int32)
    last = cutlass.Int32(LAST)
    for n in cutlass.range_constexpr(len(lists)):
        word[n] = ABSENT
        if repeated == n:
            word[n] = BEYOND << BLOCK_SHIFT
            at[n, AWAY] = 0
        elif repeated < 0 and at[n, ENTRY] >> 1 == block:
            entry = at[n, ENTRY]
            word[n] = (entry >> 1 << BLOCK_SHIFT) + (entry & 1) * PARTIAL
            if cutlass.const_expr(lists[n][2] is not None):
                # For the next step, when it will have come.
                at[n, TILE] = lists[n][2][cutlass.min(at[n, PLACE], cute.size(lists[n][2]) - 1)]
            at[n, PLACE] = at[n, PLACE] + 1
            look_up(lists[n], at, n)
            at[n, AWAY] = 0
            if at[n, ENTRY] == END:
                word[n] = word[n] + ENDS
        elif at[n, PLACE] > 0:
            at[n, AWAY] = at[n, AWAY] + 1
        if at[n, ENTRY] < END:
            last = cutlass.Int32(0)
    if cute.arch.lane_idx() == 0:
        for n in cutlass.range_constexpr(len(lists)):
            words[n, 0] = word[n] + last + (code << PLACE_SHIFT)
    cute.arch.sync_warp()
    return END if block == END >> 1 else block


@cute.jit
def tell_tiles(lists, at: cute.Tensor, words: cute.Tensor):
    """The mask tiles of the entries before the cursor, if there are tiles."""
    for n in cutlass.range_constexpr(len(lists)):
        if cutlass.const_expr(lists[n][2] is not None):
            if cute.arch.lane_idx() == 0:
                words[n, 1] = at[n, TILE]


def entry_at(entries, place):
    """The entry at a place of a list, stored or not."""
    return entries.entry(place) if isinstance(entries, Run) else entries[place]


@cute.jit
def look_up(list, at: cute.Tensor, n: cutlass.Constexpr):
    """The cursor's entry is that at its place, or ``END``.

    A warp reads ``LANES`` stored entries at once: one by one, K of each step would wait for global
    memory.
    """
    count, entries, _ = list
    place = at[n, PLACE]
    if cutlass.const_expr(isinstance(entries, Run)):
        at[n, ENTRY] = entries.entry(place) if place < count else cutlass.Int32(END)
    else:
        if place & (LANES - 1) == 0:
            index = cutlass.min(place + cute.arch.lane_idx(), cute.size(entries) - 1)
            at[n, ENTRIES] = entries[index]
        entry = cute.arch.shuffle_sync(at[n, ENTRIES], place & (LANES - 1))
        at[n, ENTRY] = entry if place < count else cutlass.Int32(END)
