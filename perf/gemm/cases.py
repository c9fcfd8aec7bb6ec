"""Cases of the GEMM bench: one product at one shape, its inputs and its work.

An input set is a dict of x [M, K], w [N, K], dy [M, N] (bf16) and main_grad [N, K] (fp32); a case
has the entries its product reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.work import Work
from . import targets

Inputs = dict[str, torch.Tensor]

_SEED = 20_261_120


@dataclass(frozen=True)
class Case:
    """One product at one shape: its size, floor and inputs."""

    product: str
    shape: str
    m: int
    k: int
    n: int

    @property
    def label(self) -> str:
        return targets.label(self.shape, self.m)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n

    @property
    def bytes(self) -> int:
        """The least traffic: each bf16 operand and result once; main_grad is read and written."""
        m, k, n = self.m, self.k, self.n
        if self.product == "dw":
            return 2 * (m * n + m * k) + 8 * n * k
        return 2 * (m * k + n * k + m * n)

    @property
    def work(self) -> Work:
        return Work(self.flops, self.bytes)

    def inputs(self, seed: int, device: str) -> Inputs:
        """One random input set; never zeros, on which a card runs faster."""
        generator = torch.Generator(device).manual_seed(_SEED + seed)

        def normal(rows: int, cols: int, scale: float = 1.0, dtype=torch.bfloat16):
            values = torch.randn(rows, cols, generator=generator, device=device)
            return values.mul_(scale).to(dtype)

        t: Inputs = {}
        if self.product != "dx":
            t["x"] = normal(self.m, self.k)
        if self.product != "dw":
            t["w"] = normal(self.n, self.k, scale=self.k**-0.5)
        if self.product != "fwd":
            t["dy"] = normal(self.m, self.n)
        if self.product == "dw":
            t["main_grad"] = normal(self.n, self.k, dtype=torch.float32)
        return t

    def items(self) -> dict:
        return {
            "product": self.product,
            "shape": self.label,
            "m": self.m,
            "k": self.k,
            "n": self.n,
            "dtype": "bf16",
        }


def cases(shapes: list[str], ms: list[int], products: list[str]) -> list[Case]:
    """The cases asked for: M defaults to the shape's own; with neither, the status page's rows."""
    if not shapes and not ms:
        rows = [row for row in targets.cases() if row[0] in products]
    else:
        rows = [
            (product, shape, m)
            for product in products
            for shape in shapes or [targets.SWEEP_SHAPE]
            for m in ms or [targets.SHAPES[shape][0]]
        ]
    return [Case(product, shape, *targets.shape_of(shape, m)) for product, shape, m in rows]
