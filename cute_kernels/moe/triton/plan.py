"""Every constant of the Triton kernels of routing.  Guesses that no measurement has tuned.

Grouped products have the plan of all products: runtime/triton_products.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoutingPlan:
    """Sizes that decide no bit, but for ``fp_fusion``: every rounding is one that is written.

    ``slots``: of a program that counts or places.  ``columns``: of a program that combines.
    """

    slots: int = 256
    columns: int = 1024
    num_warps: int = 4
    fp_fusion: bool = False


ROUTING = RoutingPlan()
