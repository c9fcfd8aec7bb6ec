"""The masks and sizes of attention that are measured, and what they are measured against."""

from __future__ import annotations

from dataclasses import dataclass

#: Lengths of each mask, at 32k tokens a batch.
MASKS = {
    "full": (4096, 8192),
    "causal": (8192,),
    "window": (8192,),
    "document": (8192,),
    "prefix": (8192,),
    "random": (8192,),
}
DIMS = (64, 128)
#: (head size, query heads, KV heads), the most telling first: the time of a call may end.
SIZES = tuple(
    (dim, heads, heads // group)
    for heads, group in ((16, 1), (16, 4), (32, 1), (32, 4))
    for dim in DIMS[::-1]
)
QUICK = SIZES[:1]
#: (mask, length, head size, query heads, KV heads) of packed sequences, 32k tokens a pack.  Like no
#: other mask they have no target but that of their tables, and are measured where asked for.
PACK = "pack"
PACKS = tuple((PACK, 8192, *size) for size in ((128, 16, 16), (128, 32, 8), (64, 16, 16)))
#: Likewise of heads of 192 with v of 128, as DeepSeek's, and of 256: where their size is asked for.
WIDE = tuple(
    (mask, 8192, *size) for size in ((192, 16, 16), (256, 16, 16), (256, 16, 4)) for mask in MASKS
)
#: Other lengths, head sizes and groups than those that kernels were tuned on: they show whether
#: what was tuned holds elsewhere.  Measured together, where asked for.
HELD_OUT = (
    ("full", 3000, 128, 16, 16),
    ("full", 16384, 128, 16, 16),
    ("causal", 4096, 128, 64, 8),
    ("causal", 16384, 128, 32, 8),
    ("causal", 32768, 128, 16, 16),
    ("causal", 16384, 64, 32, 8),
    ("full", 8192, 96, 16, 16),
    ("causal", 8192, 96, 16, 16),
    ("window", 32768, 128, 16, 16),
    ("document", 16384, 128, 16, 16),
)
#: Masks that are arguments of FA4's dense kernels.  Its block lists are of 128 x 128; from 192 on
#: the tiles of its kernels are others.
FA4_DENSE = ("full", "causal", "window")
#: Masks that torch's SDPA gives to cuDNN.
CUDNN_MASKS = ("full", "causal")
PACK_RIVALS = ("ours", "ours_pack", "ours_runs", "fa4_varlen")


@dataclass(frozen=True)
class Target:
    """`system` must take at most `at_most` times what `rival` takes, in every case of `masks`.

    masks: names of masks, at all lengths, or (mask, length) pairs; empty for all.  mean: the limit
    is on the geometric mean of the cases.
    """

    which: str
    system: str
    rival: str
    at_most: float
    masks: tuple[str | tuple[str, int], ...] = ()
    mean: bool = False

    def covers(self, mask: str, s: int) -> bool:
        """Whether a mask of this length is among the cases."""
        return not self.masks or mask in self.masks or (mask, s) in self.masks

    @property
    def text(self) -> str:
        parts = (m if isinstance(m, str) else f"{m[0]} {m[1] // 1024}k" for m in self.masks)
        masks = ", ".join(parts) or "every case of both"
        names, kind = RIVAL_TEXT, "on average " if self.mean else ""
        return (
            f"{self.which}, {masks}: {names[self.system]} {kind}<= {self.at_most:.2f}x the time of "
            f"{names[self.rival]}"
        )


RIVAL_TEXT = {
    "ours": "ours",
    "ours_unordered": "ours without order",
    "ours_pack": "ours on a pack",
    "ours_runs": "a launch for each sequence",
    "fa4": "FA4",
    "fa4_ordered": "FA4 deterministic",
    "fa4_varlen": "FA4 varlen",
    "cudnn": "cuDNN",
    "flex": "FlexAttention",
}


def _order_costs(at_most: float, *masks: str | tuple[str, int]) -> Target:
    return Target("bwd", "ours", "ours_unordered", at_most, masks)


TARGETS = (
    _order_costs(1.03, ("full", 8192)),
    _order_costs(1.05, ("window", 8192)),
    _order_costs(1.06, *(mask for mask in MASKS if mask != "random")),
    _order_costs(1.12, "random"),
    Target("bwd", "ours", "fa4", 1 / 0.97, FA4_DENSE, mean=True),
    Target("bwd", "ours", "fa4", 1 / 0.93, FA4_DENSE),
    Target("bwd", "ours", "cudnn", 1.0),
    Target("bwd", "ours", "flex", 1 / 1.5, (("causal", 8192), ("document", 8192))),
    Target("fwd", "ours", "fa4", 1 / 0.98, mean=True),
    Target("fwd", "ours", "fa4", 1 / 0.95),
)
#: TFLOP/s of our ordered backward, full mask, D = 128, at least; cost of its lists, at most, and
#: of a pack's table and tickets.
RATE = 580.0
LISTS = 0.02


def cases(quick: bool = False) -> list[tuple[str, int, int, int, int]]:
    """(mask, length, head size, query heads, KV heads) of every row of the status page."""
    sizes = QUICK if quick else SIZES
    masks = [(mask, s) for mask, lengths in MASKS.items() for s in lengths]
    return [(mask, s, *size) for size in sizes for mask, s in masks]


def rival_wanted(rival: str, mask: str, size: tuple[int, int, int]) -> bool:
    """Whether a rival is measured in a case by default: each compiles for seconds to a minute."""
    dim, heads, kv_heads = size
    if mask == PACK or (rival in PACK_RIVALS and rival != "ours"):
        return mask == PACK and rival in PACK_RIVALS
    if rival == "cudnn":
        return mask in CUDNN_MASKS
    if rival == "fa4" and dim not in DIMS:
        return mask in FA4_DENSE
    if rival == "fa4":
        return heads == kv_heads or mask in ("full", "causal", "document")
    if rival == "fa4_ordered":
        return heads == kv_heads == 16
    if rival == "flex":
        return (dim, heads, kv_heads) == (128, 16, 16) and mask in ("causal", "document")
    return True
