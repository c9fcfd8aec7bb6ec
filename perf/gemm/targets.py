"""What is measured and what it is measured against: shapes, targets, hardware questions."""

from __future__ import annotations

from dataclasses import dataclass

#: (M, K, N) of y[M, N] = x[M, K] @ W[N, K]^T.
SHAPES = {
    "qkv": (4096, 4096, 12288),
    "o_proj": (4096, 4096, 4096),
    "mlp_up": (4096, 4096, 14336),
    "mlp_down": (4096, 14336, 4096),
    "lm_head": (4096, 4096, 32000),
}
#: Row counts measured at qkv's K and N besides its own.
SWEEP_M = (512, 1024, 2048, 8192, 16384)
SWEEP_SHAPE = "qkv"
PRODUCTS = ("fwd", "dx", "dw")
PRODUCT_FORMULAS = {
    "fwd": "y = x W^T",
    "dx": "dx = dy W",
    "dw": "main_grad += dy^T x",
}


@dataclass(frozen=True)
class Target:
    """`system` must reach `at_least` times the throughput of `rival` over the five shapes.

    The geometric mean counts; `each` bounds every single shape (None: no such bound).
    """

    product: str
    rival: str
    at_least: float
    each: float | None = None
    system: str = "ours"

    @property
    def text(self) -> str:
        each = f", each >= {self.each:.2f}x" if self.each else ""
        extra = " and an add" if (self.product, self.rival) == ("dw", "cublas") else ""
        return f"{self.product}: >= {self.at_least:.2f}x {RIVAL_TEXT[self.rival]}{extra}{each}"


RIVAL_TEXT = {
    "cublas": "cuBLAS",
    "cublas_starved": "cuBLAS without workspace",
    "ours_triton": "the Triton kernel",
    "quack": "quack",
    "quack_untuned": "quack, untuned",
}

TARGETS = (
    Target("fwd", "cublas", 0.95, each=0.90),
    Target("fwd", "ours_triton", 2.3),
    Target("dx", "cublas", 0.93),
    Target("dw", "cublas", 0.90),  # the rival is a bf16 product and main_grad.add_
)

#: Host microseconds of one forward call of `ours`, at most.
HOST_TARGETS = {"grad": 15.0, "inference": 8.0}
HOST_NEXT = "time the parts of a call on that host: checks, dispatch, autograd, launch"


#: Attention: lengths of each mask, at 32k tokens a batch.
ATTENTION_MASKS = {
    "full": (4096, 8192),
    "causal": (8192,),
    "window": (8192,),
    "document": (8192,),
    "prefix": (8192,),
    "random": (8192,),
}
ATTENTION_MASK_TEXT = {
    "full": "full",
    "causal": "causal",
    "window": "window of 1024 keys",
    "document": "documents of 1.5k tokens on average",
    "prefix": "prefix-LM, a quarter of the keys",
    "random": "random 25% of the blocks",
}
ATTENTION_DIMS = (64, 128)
#: (head size, query heads, KV heads), the most telling first: the time of a call may end.
ATTENTION_SIZES = tuple(
    (dim, heads, heads // group)
    for heads, group in ((16, 1), (16, 4), (32, 1), (32, 4))
    for dim in ATTENTION_DIMS[::-1]
)
ATTENTION_QUICK = ATTENTION_SIZES[:1]


@dataclass(frozen=True)
class AttentionTarget:
    """`system` must take at most `at_most` times what `rival` takes, in every case of `masks`.

    masks: (mask, length) pairs; empty for all.
    """

    which: str
    system: str
    rival: str
    at_most: float
    masks: tuple[tuple[str, int], ...] = ()

    @property
    def text(self) -> str:
        masks = ", ".join(f"{mask} {s // 1024}k" for mask, s in self.masks) or "every case of both"
        names = ATTENTION_SYSTEM_TEXT
        return (
            f"{self.which}, {masks}: {names[self.system]} <= {self.at_most:.2f}x the time of "
            f"{names[self.rival]}"
        )


ATTENTION_SYSTEM_TEXT = {
    "ours": "ours",
    "ours_unordered": "ours without order",
    "fa4": "FA4",
    "fa4_ordered": "FA4 deterministic",
    "flex": "FlexAttention",
}


def _order_costs(at_most: float, *masks: tuple[str, int]) -> AttentionTarget:
    return AttentionTarget("bwd", "ours", "ours_unordered", at_most, masks)


ATTENTION_TARGETS = (
    _order_costs(1.03, ("full", 8192)),
    _order_costs(1.07, ("full", 4096)),
    _order_costs(1.06, ("causal", 8192)),
    _order_costs(1.05, ("window", 8192)),
    _order_costs(1.10, ("document", 8192)),
    _order_costs(1.06, ("prefix", 8192)),
    _order_costs(1.15, ("random", 8192)),
    AttentionTarget("bwd", "ours_unordered", "fa4", 1 / 0.97),
    AttentionTarget("bwd", "ours", "flex", 1 / 1.5),
    AttentionTarget("fwd", "ours", "fa4", 1 / 0.95),
)
#: TFLOP/s of our ordered backward, full mask, D = 128, at least; cost of its lists, at most.
ATTENTION_RATE = 600.0
ATTENTION_LISTS = 0.02


def attention_cases(quick: bool = False) -> list[tuple[str, int, int, int, int]]:
    """(mask, length, head size, query heads, KV heads) of every row of the status page."""
    sizes = ATTENTION_QUICK if quick else ATTENTION_SIZES
    masks = [(mask, s) for mask, lengths in ATTENTION_MASKS.items() for s in lengths]
    return [(mask, s, *size) for size in sizes for mask, s in masks]


def attention_rival_wanted(system: str, mask: str, size: tuple[int, int, int]) -> bool:
    """Whether a rival is measured in a case by default: each compiles for seconds to a minute."""
    dim, heads, kv_heads = size
    if system == "fa4":
        return heads == kv_heads or mask in ("full", "causal", "document")
    if system == "fa4_ordered":
        return heads == kv_heads == 16
    if system == "flex":
        return (dim, heads, kv_heads) == (128, 16, 16) and mask in ("causal", "document")
    return True


@dataclass(frozen=True)
class Question:
    """A fact about the card that decides a plan, and the probe that settles it."""

    number: int
    probe: str
    text: str
    decides: str


QUESTIONS = (
    Question(
        1,
        "width",
        "Are WGMMA bits the same for every instruction N (8..256), tile shape, and with operands "
        "swapped?",
        "whether M may choose the tile, and whether decode can share bits with prefill",
    ),
    Question(
        2,
        "zeros",
        "Do whole zero k16 groups leave bits unchanged, -0 included?",
        "whether K tails and token padding are neutral",
    ),
    Question(
        3,
        "model",
        "Does the truncation model predict every bit?",
        "whether a CPU oracle can check every output bit (golden vectors)",
    ),
    Question(
        4,
        "promotion",
        "What do fp32 promotion points cost?",
        "whether `chain` and `tree` can be one contract",
    ),
)
MIN_OUTPUTS = 10_000_000  # a probe's answer counts from this many compared outputs


def shape_of(name: str, m: int | None = None) -> tuple[int, int, int]:
    """(M, K, N) of a named shape, with another M if one is given."""
    rows, k, n = SHAPES[name]
    return (m or rows, k, n)


def label(name: str, m: int) -> str:
    """A case's name: the shape, and its M where that is not the shape's own."""
    return name if m == SHAPES[name][0] else f"{name}/m{m}"


def sweep_sizes() -> list[int]:
    """Every M at the sweep's K and N, ascending."""
    return sorted((*SWEEP_M, SHAPES[SWEEP_SHAPE][0]))


def gemm_cases() -> list[tuple[str, str, int]]:
    """(product, shape, M) of every row of the status page: five shapes, then the sweep at qkv."""
    sizes = [(name, dims[0]) for name, dims in SHAPES.items()]
    sizes += [(SWEEP_SHAPE, m) for m in SWEEP_M]
    return [(product, name, m) for product in PRODUCTS for name, m in sizes]
