"""The ops of mHC that are measured, their sizes and operands: n = 4, bf16 streams, fp32 weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.passes import DIRECTIONS, Inputs
from ..core.work import Work

N_STREAMS, N_COLUMNS = 4, 24
TOKENS = (4096, 8192, 32768)
CHANNELS = (2560, 4096, 5120, 7168)
OPS = ("projection", "projection_norm", "scale_sinkhorn", "aggregate", "expand", "site")
LAYOUTS = ("cn", "nc")

#: (op, direction) -> elements of C that a token must move, in bf16; see docs/notes/mhc_sm90.md.
_N = N_STREAMS
ELEMENTS = {
    ("projection", "fwd"): _N,
    ("projection", "bwd"): 2 * _N,
    ("projection_norm", "fwd"): _N,
    ("projection_norm", "bwd"): 2 * _N,
    ("scale_sinkhorn", "fwd"): 0,
    ("scale_sinkhorn", "bwd"): 0,
    ("aggregate", "fwd"): _N + 1,
    ("aggregate", "bwd"): 2 * _N + 1,
    ("expand", "fwd"): 2 * _N + 1,
    ("expand", "bwd"): 3 * _N + 2,
    ("site", "fwd"): 4 * _N + 2,
    ("site", "bwd"): 6 * _N + 4,
}
#: Bytes of a token's coefficients that it must move besides.
_SMALL = {"projection": 132, "projection_norm": 132, "scale_sinkhorn": 388}


@dataclass(frozen=True)
class Case:
    """One direction of one op at one size."""

    op: str
    direction: str
    tokens: int
    channels: int
    layout: str = "cn"

    @property
    def product(self) -> str:
        return f"{self.op} {self.direction}"

    @property
    def label(self) -> str:
        return f"{self.tokens}x{self.channels}" + (" nc" if self.layout == "nc" else "")

    @property
    def work(self) -> Work:
        """Work in bytes; products never bound it."""
        rows = ELEMENTS[self.op, self.direction] * self.channels * 2
        return Work(0, self.tokens * (rows + _SMALL.get(self.op, 0)))

    def items(self) -> dict:
        """Fields of a record."""
        sizes = {"tokens": self.tokens, "channels": self.channels, "n": N_STREAMS}
        facts = {"product": self.product, "shape": self.label, "layout": self.layout}
        return facts | {"dtype": "bf16"} | sizes

    @property
    def streams(self) -> tuple[int, ...]:
        """The shape of x: [tokens, 1, C, n] or [tokens, 1, n, C]."""
        last = (self.channels, N_STREAMS)
        return (self.tokens, 1, *(last if self.layout == "cn" else last[::-1]))

    def inputs(self, seed: int, device: str) -> Inputs:
        """Random operands that the op reads, and the gradients that come in."""
        generator = torch.Generator(device).manual_seed(seed)
        m, c, n = self.tokens, self.channels, N_STREAMS

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        out: Inputs = {}
        if self.op != "scale_sinkhorn":
            out["x"] = normal(*self.streams).bfloat16()
        if self.op in ("projection", "projection_norm", "site"):
            out["phi"] = normal(N_COLUMNS, n * c) * (n * c) ** -0.5
        if self.op == "projection_norm":
            out["norm_weight"] = normal(n * c) * 0.1 + 1.0
        if self.op == "scale_sinkhorn":
            out["h"] = torch.nn.functional.pad(normal(m, N_COLUMNS), (0, 8))
            out["ms"] = normal(m).square() + 0.5
        if self.op in ("scale_sinkhorn", "site"):
            out["alpha"], out["beta"] = normal(3), normal(1, N_COLUMNS)
        if self.op == "aggregate":
            out["pre"] = normal(m, 1, n).sigmoid()
        if self.op == "expand":
            out["post"] = 2 * normal(m, 1, n).sigmoid()
            out["res"] = normal(m, 1, n, n).softmax(-1)
        if self.op in ("expand", "site"):
            out["f"] = normal(m, 1, c).bfloat16()
        for t in out.values():
            t.requires_grad_()
        if self.direction == "bwd":
            out |= {f"d{i}": g for i, g in enumerate(self._upstream(normal))}
        return out

    def _upstream(self, normal) -> list[torch.Tensor]:
        m, c, n = self.tokens, self.channels, N_STREAMS
        if self.op in ("projection", "projection_norm"):
            return [torch.nn.functional.pad(normal(m, N_COLUMNS), (0, 8)), normal(m)]
        if self.op == "scale_sinkhorn":
            return [normal(m, n), normal(m, n), normal(m, 1, n, n)]
        if self.op == "aggregate":
            return [normal(m, 1, c).bfloat16()]
        return [normal(*self.streams).bfloat16()]


def cases(ops: list[str], tokens: list[int], channels: list[int], layout: str) -> list[Case]:
    """Cases of both directions of each op at each size; coefficients alone have no layout."""
    return [
        Case(op, direction, m, c, layout)
        for m in tokens
        for c in channels
        for op in ops
        for direction in DIRECTIONS
        if layout == "cn" or op != "scale_sinkhorn"
    ]
