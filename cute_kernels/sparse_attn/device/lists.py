"""Lists of key blocks that a query block visits, stored in memory or given by a formula."""

from dataclasses import dataclass

import cutlass
from cutlass import cute


@dataclass(frozen=True)
class BlockRange:
    """Entries of a list of consecutive blocks from ``first`` on.

    Each row decides whether a block is partial (``spans.hides``): its entries do not say it.
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
