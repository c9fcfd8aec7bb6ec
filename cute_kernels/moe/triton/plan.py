"""Every constant of the Triton kernels of routing.  Guesses that no measurement has tuned.

Grouped products have the plan of all products: runtime/triton_products.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoutingPlan:
    """Sizes that decide no bit, but for ``fp_fusion``: every rounding is one that is written.

    Sort: ``alone``: slots up to which one program has all of them; ``blocks``: programs at most;
    ``slots``: slots that a program compares at once, with at most ``compared`` pairs of a slot and
    an expert; ``added``: counts that it adds at once.  Moves: ``columns`` of a program; ``unroll``:
    rows of a token in flight; ``backward_slots`` rows and ``backward_unroll`` of 256 columns.
    """

    alone: int = 256
    blocks: int = 128
    slots: int = 128
    compared: int = 16384
    added: int = 8192
    sort_warps: int = 8
    columns: int = 1024
    unroll: int = 8
    backward_slots: int = 8
    backward_unroll: int = 2
    num_warps: int = 4
    fp_fusion: bool = False


ROUTING = RoutingPlan()
