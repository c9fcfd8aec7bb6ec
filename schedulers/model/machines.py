"""Machine models of ``simulate`` and ``select``: constants, each with its source.

All times are whole nanoseconds, so that two ways to compute a schedule's time agree exactly.  One
*tile* is what a backward CTA computes between two dQ reductions: ``tile`` = (queries, keys).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import gcd
from types import MappingProxyType

from cute_kernels.errors import ScheduleError, expected, one_of

from ..order.ranks import integer

TIMES = ("full_ns", "partial_ns", "reduce_ns", "handoff_ns", "tile_start_ns", "tile_end_ns")


@dataclass(frozen=True)
class Machine:
    """Constants of the discrete-event model; the default costs are zero only where unmeasured.

    slots              CTAs resident at once
    full_ns            one full tile: five matrix products and the softmax between them
    partial_ns         one partial tile (the mask is evaluated)
    reduce_ns          the dQ reduction of one tile, from the turn's begin to its landing
    handoff_ns         from a landed reduction to the next writer's turn (release, spin, acquire)
    dq_stages          dQ buffers: compute of tile i + dq_stages waits for the reduction of tile i
    tile_start_ns      from taking a ticket to the first tile's compute
    tile_end_ns        from the last reduction to the slot being free (dK, dV stores)
    max_heads_in_flight  the most heads that ``select`` interleaves
    l2_rows            query rows, of all heads in flight together, whose Q, dO and fp32 dQ stay in
                       L2; 0: not known.  It bounds the heads that ``select`` interleaves too
    l2_tiles           query tiles whose Q, dO and fp32 dQ stay in L2 together; 0: not known
    fetch_ns           what the memory takes for one tile that does not; no launch is faster
    fetch_wait_ns      what each such tile adds to a makespan that is longer anyway
    tile               (queries, keys) of one tile

    The last three are ``select``'s with a group of query heads; ``simulate`` leaves them out.
    """

    name: str
    slots: int
    full_ns: int
    partial_ns: int
    reduce_ns: int
    handoff_ns: int
    dq_stages: int = 1
    tile_start_ns: int = 0
    tile_end_ns: int = 0
    max_heads_in_flight: int = 16
    l2_rows: int = 0
    l2_tiles: int = 0
    fetch_ns: int = 0
    fetch_wait_ns: int = 0
    tile: tuple[int, int] = (64, 128)

    def __post_init__(self):
        least = dict.fromkeys(TIMES, 0) | {"slots": 1, "dq_stages": 1, "max_heads_in_flight": 1}
        least |= dict.fromkeys(("l2_rows", "l2_tiles", "fetch_ns", "fetch_wait_ns"), 0)
        least |= {"full_ns": 1, "partial_ns": 1}
        for name, low in least.items():
            integer(f"machine.{name}", getattr(self, name), least=low)
        tile = self.tile
        if not (isinstance(tile, tuple) and len(tile) == 2 and min(tile) >= 1):
            raise ScheduleError(expected("machine.tile", "(queries, keys) of at least 1", tile))

    def tick(self) -> int:
        """Greatest time that divides all constants, in ns."""
        return gcd(*(getattr(self, name) for name in TIMES))

    def most_heads(self, q_blocks: int, block_size: tuple[int, int] | None) -> int:
        """Most heads to interleave, each of ``q_blocks`` query blocks and one query head."""
        rows = max(1, q_blocks * (block_size or self.tile)[0])
        fit = self.l2_rows // rows if self.l2_rows else self.max_heads_in_flight
        return max(1, min(self.max_heads_in_flight, fit))

    def for_blocks(self, block_size: tuple[int, int] | None) -> tuple[Machine, int]:
        """Return (machine with costs per tile for a mask's blocks, query tiles per block).

        Each query tile has its own lock.  Blocks of another width, or not a multiple of the
        tile's height, scale the costs by their area.
        """
        if block_size is None or tuple(block_size) == self.tile:
            return self, 1
        (bq, bkv), (tq, tkv) = block_size, self.tile
        steps = bq // tq if bq % tq == 0 else 1
        rows, area = (tq, tq * bkv) if bq % tq == 0 else (bq, bq * bkv)
        if (rows, area) == (tq, tq * tkv):
            return self, steps
        scale = {
            "full_ns": max(1, self.full_ns * area // (tq * tkv)),
            "partial_ns": max(1, self.partial_ns * area // (tq * tkv)),
            "reduce_ns": self.reduce_ns * rows // tq,
        }
        return replace(self, **scale), steps


_FITTED = "fitted to FA3 on H800, full 4k, d128: deterministic over unordered = 1.28 (DASH repo)"
_TILE = "64% of 989 TFLOPS for the 10.5 MFLOP of a 64x128 tile at d128; a model, not measured here"
_MODEL = "model: 32 KB of fp32 dQ per tile; not measured here"
_SAME = "as h200_d128: a 128x128 tile at d64 has the same flops and dQ bytes; not measured"
_ZERO = "not modelled yet: the published ratios fit without it"
_UNKNOWN = (0, "not modelled: no published number")

_D128 = {
    "slots": (132, "H200: 132 SMs, one backward CTA per SM (192 KB of shared memory)"),
    "full_ns": (2200, _TILE),
    "partial_ns": (2200, "as full_ns: no published number separates the two"),
    "reduce_ns": (1200, _MODEL),
    "handoff_ns": (2000, _FITTED),
    "dq_stages": (1, "FA4's SM90 backward at d128: one dQ buffer in shared memory"),
    "tile_start_ns": (0, _ZERO),
    "tile_end_ns": (0, _ZERO),
    "max_heads_in_flight": (16, "the widest interleave studied at 8k"),
    **dict.fromkeys(("l2_rows", "l2_tiles", "fetch_ns", "fetch_wait_ns"), _UNKNOWN),
    "tile": ((64, 128), "FA4's SM90 backward tile at d128, causal and sparse"),
}
_D64 = _D128 | {
    "full_ns": (2200, _SAME),
    "partial_ns": (2200, _SAME),
    "reduce_ns": (1200, _SAME),
    "tile": ((128, 128), "FA4's SM90 backward tile at d64"),
}

_RUN = "this library's backward on an H200, 2026-11-20: docs/notes/attention_sm90.md"
_AS_D128 = f"as at d128, not fitted by itself; {_RUN}"
_OURS_D128 = _D128 | {
    "full_ns": (2250, f"fitted to {_RUN}"),
    "partial_ns": (2400, f"fitted to {_RUN}"),
    "reduce_ns": (1000, f"fitted to {_RUN}"),
    "handoff_ns": (1000, f"fitted to {_RUN}"),
    "dq_stages": (2, "sparse_attn/config.py: BackwardConfig.dq_stages"),
    "tile_start_ns": (1500, f"fitted to {_RUN}"),
    "tile_end_ns": (1500, f"fitted to {_RUN}"),
    "l2_rows": (32768, f"4 heads of 8k are at most 2% off the best, 16 cost 40% more; {_RUN}"),
    "l2_tiles": (512, f"32 of 50 MB, in tiles of 64 KB: fitted to causal GQA rows; {_RUN}"),
    "fetch_ns": (28, f"96 KB at 3.4 TB/s, what ordered rows that miss L2 reach; {_RUN}"),
    "fetch_wait_ns": (7, f"0 to 3 in causal GQA rows, 6 to 10 in random ones; {_RUN}"),
}
_ENDS = {
    "handoff_ns": (1000, _AS_D128),
    "tile_start_ns": (1500, _AS_D128),
    "tile_end_ns": (1500, _AS_D128),
}
_OURS_D64 = _OURS_D128 | {
    "full_ns": (2400, f"fitted to {_RUN}"),
    "partial_ns": (2550, f"fitted to {_RUN}"),
    "reduce_ns": (1000, _AS_D128),
    **_ENDS,
    "l2_rows": (65536, "half the bytes of a row at d128; not measured"),
    "tile": ((128, 128), "sparse_attn/config.py: BackwardConfig.tile_m"),
}

# Two tickets of 64 keys stand for one of 128 there, and a tile here for one of either.
_RATE = "its rate unordered, full 8k, on an H200, 2026-11-24: docs/notes/attention_sm90.md"
_BYTES = "as at d128 in proportion to the bytes of a row of Q, dO and dQ; not fitted"
_OURS_D192 = _OURS_D128 | {
    "full_ns": (4000, _RATE),
    "partial_ns": (4200, "as full_ns, and what a mask costs at d128 for two; not fitted"),
    "reduce_ns": (1500, _BYTES),
    "dq_stages": (1, "sparse_attn/config.py: BackwardConfig.dq_stages"),
    **_ENDS,
    "l2_rows": (23552, _BYTES),
    "l2_tiles": (372, _BYTES),
    "fetch_ns": (41, _BYTES),
    "fetch_wait_ns": (10, _BYTES),
}
_OURS_D256 = _OURS_D192 | {
    "full_ns": (6400, _RATE),
    "partial_ns": (6600, "as full_ns, and what a mask costs at d128 for two; not fitted"),
    "reduce_ns": (2000, _BYTES),
    "dq_stages": (1, "sparse_attn/config.py: BackwardConfig.dq_stages; halves have turns each"),
    "l2_rows": (16384, _BYTES),
    "l2_tiles": (256, _BYTES),
    "fetch_ns": (56, _BYTES),
    "fetch_wait_ns": (14, _BYTES),
}

# Machine -> constant -> (value, where it comes from).  The first two are a model of others'
# kernels, estimated before this library's kernels ran; the others describe those.
TABLE = MappingProxyType(
    {
        "h200_d128": _D128,
        "h200_d64": _D64,
        "cute_sm90_d128": _OURS_D128,
        "cute_sm90_d64": _OURS_D64,
        "cute_sm90_d192": _OURS_D192,
        "cute_sm90_d256": _OURS_D256,
    }
)


def machine(name: str = "h200_d128", **changes: int) -> Machine:
    """Return a machine of ``TABLE``, with constants changed by keyword (``slots=96``, say).

    Example:
        >>> ck.schedulers.machine(slots=66).slots
        66
    """
    if name not in TABLE:
        raise ScheduleError(one_of("machine", TABLE, name))
    names = {field.name for field in fields(Machine)} - {"name"}
    for change in changes:
        if change not in names:
            raise ScheduleError(one_of("machine constant", sorted(names), change))
    values = {key: value for key, (value, _) in TABLE[name].items()}
    return Machine(name if not changes else f"{name}*", **(values | changes))


def resolve(machine_or_name: Machine | str) -> Machine:
    """Return a Machine, given itself or a name of ``TABLE``."""
    if isinstance(machine_or_name, str):
        return machine(machine_or_name)
    if not isinstance(machine_or_name, Machine):
        raise ScheduleError(
            expected("machine", "a Machine or a name", type(machine_or_name).__name__)
        )
    return machine_or_name
