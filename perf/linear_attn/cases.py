"""The ops of linear attention that are measured, and their operands in bf16: of a Qwen3-Next layer.

``decode``: one row of each sequence behind `DECODED` rows, as steps go on from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..core.passes import DIRECTIONS, Inputs
from ..core.work import Work

#: Op -> tensors of a row that a forward and a backward move; of delta rules products count too.
#: norm_gate: a norm of each head, then the gate.  gate_norm: the gate, then a norm of groups of a
#: row.  delta_inside: the delta rule with the norms of q and k and the gate inside.
MOVED = {"conv": (2, 3), "norm_gate": (3, 5), "gate_norm": (3, 5)}
DELTAS = ("delta", "delta_inside")
DECODE = "decode"
#: Rows before the first step of decoding.
DECODED = 96
OPS = (*MOVED, *DELTAS)
#: Groups of a row that gate_norm normalises apart.
GROUPS = 8
#: Rows of a chunk of the delta rule, for its work.
CHUNK = 64
#: Rows, and v heads, of the delta rule's case that is compared with float64.
CHECKED_ROWS, CHECKED_HEADS = 512, 4

Draw = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One direction of one op at one size.

    The convolution has the channels of q, k and v; norms have the rows that a delta rule returns.
    """

    op: str
    direction: str
    batch: int
    rows: int
    heads: int = 16
    v_heads: int = 32
    size: int = 128

    @property
    def product(self) -> str:
        return f"{self.op} {self.direction}"

    @property
    def label(self) -> str:
        return f"{self.batch}x{self.rows} {self.heads}/{self.v_heads}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        row = {"conv": ((2 * self.heads + self.v_heads) * self.size,)}
        row["gate_norm"] = (self.v_heads * self.size,)
        return self.batch, self.rows, *row.get(self.op, (self.v_heads, self.size))

    @property
    def work(self) -> Work:
        """Bytes of the operands; of a delta rule also the products of its chunks.

        Three with a state, P u and T h, and of a k head k kᵀ and q kᵀ, triangles counted as such;
        a backward has about 2.6 times as many.
        """
        if self.op == DECODE:
            return Work(0, self.batch * self._decoded_bytes)
        tokens, v, way = self.batch * self.rows, self.v_heads, DIRECTIONS.index(self.direction)
        if self.op in MOVED:
            return Work(0, MOVED[self.op][way] * math.prod(self.shape) * 2)
        flops = (v * (6 * self.size + 2 * CHUNK) + self.heads * 2 * CHUNK) * self.size
        qk, gates = 2 * self.heads * self.size * 2, v * (4 + 2)
        moved = (1 + way) * (qk + gates) + (2 + way) * v * self.size * 2
        return Work(int((1, 2.6)[way] * tokens * flops), tokens * moved)

    @property
    def _decoded_bytes(self) -> int:
        """Bytes of a step of one sequence: S^, and rows of k, r, u, A and gates of half a chunk."""
        state = 2 * self.v_heads * self.size**2
        row = 2 * self.heads * self.size + self.v_heads * (4 * self.size + 2 * CHUNK + 8)
        return state + CHUNK // 2 * row

    def items(self) -> dict:
        """Fields of a record."""
        sizes = {name: getattr(self, name) for name in ("batch", "rows", "heads", "v_heads")}
        return {"product": self.product, "shape": self.label, "dtype": "bf16"} | sizes

    def checked(self) -> Case:
        """The case whose results are compared with float64."""
        if self.op in MOVED:
            return self
        return replace(self, batch=1, rows=min(self.rows, CHECKED_ROWS))

    def part(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The part of an operand, or of its gradient, that is compared with float64."""
        if self.op in MOVED:
            return value
        group = self.v_heads // self.heads
        heads = max(1, CHECKED_HEADS // group) * (1 if name in ("q", "k") else group)
        return value[:heads] if value.dim() == 1 else value[:, :, :heads]

    def inputs(self, seed: int, device: str) -> Inputs:
        """Random operands, and the gradient that comes in."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        if self.op == DECODE:
            state = self.batch, self.v_heads, self.size, self.size
            return self._delta(normal) | {"state": normal(*state) / 16}
        operands = self._delta(normal) if self.op in DELTAS else self._rows(normal)
        out = {name: t.requires_grad_() for name, t in operands.items()}
        if self.direction == "bwd":
            out["d0"] = normal(*self.shape).bfloat16()
        return out

    def _rows(self, normal: Draw) -> Inputs:
        """Operands of the convolution or of a norm."""
        x = normal(*self.shape).bfloat16()
        if self.op == "conv":
            return {"x": x, "weight": normal(self.shape[-1], 4).bfloat16()}
        weight = (1 + normal(self.shape[-1]) / 8).bfloat16()
        return {"x": x, "gate": normal(*self.shape).bfloat16(), "weight": weight}

    def _delta(self, normal: Draw) -> Inputs:
        """Operands of a delta rule: A up to 16, and steps of 1e-3 to 0.1 where the gate's input
        is 0.
        """
        rows = (self.batch, self.rows)
        q, k = (normal(*rows, self.heads, self.size) for _ in "qk")
        out = {"v": normal(*self.shape).bfloat16()}
        out["beta"] = normal(*rows, self.v_heads).sigmoid().bfloat16()
        a = normal(*rows, self.v_heads).bfloat16()
        spread = torch.linspace(0, 1, self.v_heads, device=a.device)
        A_log = (16 * spread.flip(0) + 0.1).log()
        dt_bias = (1e-3 * 100**spread).expm1().log()
        if self.op == "delta_inside":
            return out | {"q": q.bfloat16(), "k": k.bfloat16(), "g": a} | {
                "A_log": A_log, "dt_bias": dt_bias,
            }  # fmt: skip
        out |= {"g": -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)}
        q, k = (torch.nn.functional.normalize(x, dim=-1).bfloat16() for x in (q, k))
        return out | {"q": q, "k": k}


def _both(op: str, *sizes: tuple[int, ...]) -> list[Case]:
    return [Case(op, way, *size) for size in sizes for way in DIRECTIONS]


#: Cases by the names of the command line, the most telling ones first.
LISTS = {
    "conv": _both("conv", (1, 8192), (4, 4096)),
    "norm": [*_both("norm_gate", (1, 8192)), *_both("gate_norm", (1, 8192))],
    "delta": [
        *_both("delta", (1, 8192), (4, 4096)),
        Case("delta", "fwd", 1, 32768),
        *_both("delta_inside", (1, 8192)),
        *_both("delta", (1, 8192, 16, 64), (4, 4096, 16, 64)),
    ],
}
LISTS["decode"] = [Case(DECODE, "fwd", batch, 1) for batch in (64, 256, 1)]
ALL = [case for cases in LISTS.values() for case in cases]
