"""Every constant that the bits of block-sparse attention depend on, and the schedule of "auto"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from .. import arch
from ..contracts import BATCH_INVARIANT, RUN_TO_RUN, SCHEDULE_INVARIANT
from ..schedulers.mask import BlockMask
from ..schedulers.schedule import Schedule

#: The head sizes that are taken, the same for q, k and v.
HEAD_DIMS = (64, 96, 128)

#: ``batch_invariant`` is the forward's: a gradient of k and v is a sum over rows.
KEPT: Mapping[str, frozenset[str]] = {
    arch.CPU: frozenset({RUN_TO_RUN, BATCH_INVARIANT, SCHEDULE_INVARIANT}),
}


@dataclass(frozen=True)
class CpuPlan:
    """The CPU backend's blocks, and how dK and dV add the query heads of one KV head.

    ``group``: with a mask that heads share, in each visit; else per head, then over heads.
    """

    block: tuple[int, int] = (128, 128)
    group: str = "query heads ascending, in each visit or of each head's sum"


CPU = CpuPlan()


def schedule_heads(mask_heads: int, batch: int, heads: int, kv_heads: int) -> int:
    """The heads of a schedule: batch x KV heads, or query heads if they have masks of their own."""
    return batch * (kv_heads if mask_heads == 1 else heads)


def auto(mask: BlockMask, heads: int, head_dim: int, device_type: str) -> Schedule:
    """The schedule that ``schedule="auto"`` means; the same one on every call.

    mask: in blocks of 128 x 128; heads: see ``schedule_heads``.  On a GPU the fastest that
    ``schedulers.selection`` finds; on a CPU, which has no SMs to keep busy, shortest columns first.
    """
    if device_type == "cpu":
        from ..schedulers.kinds import spt

        return spt(mask, heads=heads)
    from ..schedulers.selection import select

    machine = "h200_d64" if head_dim == 64 else "h200_d128"
    return select(mask, heads=heads, machine=machine).schedule


def plan(backend: str, device: arch.Device) -> dict[str, object]:
    """What a contract id covers: the orders, the roundings and the instruction family."""
    return {
        "forward": "key blocks ascending, online softmax in base 2, P in the input dtype",
        "backward": "dK, dV by visits, dQ by ranks; dS in the input dtype; one rounding from fp32",
        "family": "blas",
        "blocks": asdict(CPU),
        "threads": device.units,
    }
