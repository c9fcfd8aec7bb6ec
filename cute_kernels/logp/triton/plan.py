"""Every constant of the Triton kernels of linear_logp.

No number here decides a bit: units and the order in them are config.py's, sums of units are exact.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TritonPlan:
    """Guesses that no measurement has tuned.  Not run on a GPU.

    ``elements``: of a program's tile, [rows, elements / rows] logits; rows are ``rows``, or 1 where
    there are fewer.  ``programs``: what a compute unit is meant to hold; a row's units are split
    into parts up to so many.  ``fp_fusion``: an fma is one that is written (kernel.py), or none.
    """

    elements: int = 1024
    rows: int = 8
    num_warps: int = 4
    programs: int = 4
    fp_fusion: bool = False

    def tile(self, tokens: int) -> tuple[int, int]:
        """(rows, columns) of a program's tile."""
        rows = self.rows if tokens >= self.rows else 1
        return rows, self.elements // rows


TRITON = TritonPlan()

#: Bytes of logits in fp32, with the leaves of their sums, that a call may hold at a time.
WORKSPACE = 16 * 2**20
#: Rows of a block of logits.
BLOCK_ROWS = 2048
