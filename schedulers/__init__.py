"""Orders of work, decided and proved on the CPU: block masks in, a checked schedule out.

``BlockMask`` says which blocks of a score matrix are needed; ``select`` or a named kind makes a
``Schedule``; ``check`` proves that it progresses; ``simulate`` predicts its time and ``bound`` what
no schedule can beat.  Names load their module at first use; nothing here imports ``cutlass``.
"""

from __future__ import annotations

from cute_kernels.lazy import lazy_names

#: Public name -> its module.
HOMES = {
    "BlockMask": "masks.mask",
    "Machine": "model.machines",
    "Safety": "order.safety",
    "Schedule": "order.schedule",
    "bound": "model.bounds",
    "check": "order.safety",
    "left_to_right": "order.kinds",
    "lpt": "order.kinds",
    "machine": "model.machines",
    "permutation": "order.kinds",
    "select": "model.selection",
    "shift": "order.kinds",
    "shortest_first": "order.kinds",
    "simulate": "model.simulation",
    "spt": "order.kinds",
    "symmetric_shift": "order.kinds",
}

__all__ = sorted(HOMES)
__getattr__, __dir__ = lazy_names(__name__, HOMES)
