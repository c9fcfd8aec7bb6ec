"""Every constant of the Triton kernels of linear_logp.

No number here decides a bit: units and the order in them are config.py's, sums of units are exact.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TritonPlan:
    """Guesses that no measurement has tuned.

    ``wide``: (rows, columns) of a program's tile where threads load 16 bytes; ``narrow``: where
    they load one logit and a unit's state is kept by 16 of them.  Few tokens take tiles of one row.
    ``programs``: what a compute unit is meant to hold; a row's units are split into parts up to so
    many.  ``fp_fusion``: an fma is one that is written (kernel.py), or none.
    ``scaled_elements``: of a gradient that a program multiplies at a time.  ``finished_rows``,
    ``finished_parts``: tokens whose states a program finishes, and parts that it loads at a time.
    """

    wide: tuple[int, int] = (8, 128)
    narrow: tuple[int, int] = (2, 128)
    num_warps: int = 4
    programs: int = 4
    fp_fusion: bool = False
    scaled_elements: int = 4096
    finished_rows: int = 4
    finished_parts: int = 32

    def tile(self, tokens: int, wide: bool) -> tuple[int, int]:
        """(rows, columns) of a program's tile."""
        rows, columns = self.wide if wide else self.narrow
        return (rows, columns) if tokens >= self.wide[0] else (1, rows * columns)


TRITON = TritonPlan()

#: Bytes of logits in fp32, with the leaves of their sums, that a call may hold at a time.
WORKSPACE = 16 * 2**20
#: Rows of a block of logits.
BLOCK_ROWS = 1024
