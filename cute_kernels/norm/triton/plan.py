"""Every constant that the bits of the Triton norms depend on, and sizes that show in none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TritonPlan:
    """What bits depend on; no measurement has tuned it.  Not run on a GPU.

    ``lanes``: of a row, which each add every lanes-th element, ascending; lanes are added half onto
    half.  ``fp_fusion``: an fma is one that is written.
    """

    lanes: int = 256
    fp_fusion: bool = False


TRITON = TritonPlan()
