"""The shapes of products that are measured, and what they are measured against."""

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
        lowest = f", each >= {self.each:.2f}x" if self.each else ""
        extra = " and an add" if (self.product, self.rival) == ("dw", "cublas") else ""
        return f"{self.product}: >= {self.at_least:.2f}x {RIVAL_TEXT[self.rival]}{extra}{lowest}"


RIVAL_TEXT = {
    "cublas": "cuBLAS",
    "cublas_starved": "cuBLAS without workspace",
    "ours_triton": "the Triton kernel",
    "quack": "quack, tuned",
    "quack_untuned": "quack, untuned",
}

TARGETS = (
    Target("fwd", "cublas", 0.95, each=0.90),
    Target("fwd", "ours_triton", 2.3),
    Target("dx", "cublas", 0.93),
    Target("dw", "cublas", 0.90),  # the rival is a bf16 product and main_grad.add_
)

#: Host microseconds of one forward call of `ours`, at most.
HOST_TARGETS = {"grad": 22.0, "inference": 12.0}
HOST_NEXT = "time the parts of a call on that host: checks, dispatch, autograd, launch"


def shape_of(name: str, m: int | None = None) -> tuple[int, int, int]:
    """(M, K, N) of a named shape, with another M if one is given."""
    rows, k, n = SHAPES[name]
    return (m or rows, k, n)


def label(name: str, m: int) -> str:
    """A case's name: the shape, and its M where that is not the shape's own."""
    return name if m == SHAPES[name][0] else f"{name}/m{m}"


def cases() -> list[tuple[str, str, int]]:
    """(product, shape, M) of every row of the status page: five shapes, then the sweep at qkv."""
    sizes = [(name, dims[0]) for name, dims in SHAPES.items()]
    sizes += [(SWEEP_SHAPE, m) for m in SWEEP_M]
    return [(product, name, m) for product in PRODUCTS for name, m in sizes]
