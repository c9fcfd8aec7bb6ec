"""The norms that are measured, their sizes and operands: bf16 rows and weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.passes import DIRECTIONS, Inputs
from ..core.work import Work

#: (rows, width): a model's hidden states, and the heads of queries.
SIZES = ((8192, 4096), (32768, 2048), (4096, 7168), (16384, 8192), (262144, 128))
#: rms_norm; the same with a residual, both results used; layer_norm with a bias.
OPS = ("rms_norm", "add_rms_norm", "layer_norm")

#: (op, direction) -> rows that are read or written, whole.
ROWS = {
    ("rms_norm", "fwd"): 2,
    ("rms_norm", "bwd"): 3,
    ("add_rms_norm", "fwd"): 4,
    ("add_rms_norm", "bwd"): 4,
    ("layer_norm", "fwd"): 2,
    ("layer_norm", "bwd"): 3,
}


@dataclass(frozen=True)
class Case:
    """One direction of one norm at one size."""

    op: str
    direction: str
    rows: int
    width: int

    @property
    def product(self) -> str:
        return f"{self.op} {self.direction}"

    @property
    def label(self) -> str:
        return f"{self.rows}x{self.width}"

    @property
    def work(self) -> Work:
        """Work: the bytes of the rows and of their statistics."""
        moved = ROWS[self.op, self.direction] * self.rows * self.width * 2
        return Work(0, moved + 4 * self.rows)

    def items(self) -> dict:
        """Fields of a record."""
        sizes = {"rows": self.rows, "width": self.width}
        return {"product": self.product, "shape": self.label, "dtype": "bf16"} | sizes

    def inputs(self, seed: int, device: str) -> Inputs:
        """Random rows and weights, and the gradients that come in."""
        generator = torch.Generator(device).manual_seed(seed)

        def drawn(*shape: int) -> torch.Tensor:
            values = torch.randn(*shape, generator=generator, device=device)
            return values.bfloat16()

        out: Inputs = {"x": drawn(self.rows, self.width)}
        if self.op == "add_rms_norm":
            out["residual"] = drawn(self.rows, self.width)
        out["weight"] = drawn(self.width)
        if self.op == "layer_norm":
            out["bias"] = drawn(self.width)
        for t in out.values():
            t.requires_grad_()
        if self.direction == "bwd":
            out["d0"] = drawn(self.rows, self.width)
            if self.op == "add_rms_norm":
                out["d1"] = drawn(self.rows, self.width)
        return out


def cases(ops: list[str], sizes: list[tuple[int, int]]) -> list[Case]:
    """Cases of both directions of each norm at each size."""
    return [Case(op, direction, m, d) for m, d in sizes for op in ops for direction in DIRECTIONS]
