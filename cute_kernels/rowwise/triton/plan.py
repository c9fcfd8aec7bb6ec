"""Every constant of the Triton kernels of rowwise.  Guesses that no measurement has tuned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TritonPlan:
    """Sizes that no measurement has tuned.

    ``elements``: of a program of an elementwise kernel.  ``wide``: columns of a program of rotary
    and of embedding's gradient, at most; the latter has ``chain_warps``.  ``fp_fusion``: an fma is
    one that is written, or none.
    None of them decides a bit; the lanes of config.py do.
    """

    elements: int = 1024
    wide: int = 256
    num_warps: int = 4
    chain_warps: int = 2
    fp_fusion: bool = False


TRITON = TritonPlan()
