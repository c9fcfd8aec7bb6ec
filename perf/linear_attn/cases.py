"""The ops of linear attention that are measured, and their operands: bf16, sizes of Qwen3-Next.

A case is one direction of one op at one size.  Decoding is not measured here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..core.passes import DIRECTIONS, Inputs
from ..core.work import Work

#: Rows of a chunk of the delta rule, for its work.
CHUNK = 64
#: Rows, and v heads, of the delta rule's case that is compared with float64.
CHECKED_ROWS, CHECKED_HEADS = 512, 4

Draw = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """What all cases have: a direction, sequences and their rows."""

    direction: str
    batch: int
    rows: int
    op: ClassVar[str]

    @property
    def product(self) -> str:
        return f"{self.op} {self.direction}"

    @property
    def tokens(self) -> int:
        return self.batch * self.rows

    def items(self) -> dict:
        """Fields of a record."""
        sizes = {"batch": self.batch, "rows": self.rows}
        return {"product": self.product, "shape": self.label, "dtype": "bf16"} | sizes

    def checked(self) -> Case:
        """The case whose results are compared with float64."""
        return self

    def part(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The part of an operand, or of its gradient, that is compared with float64."""
        return value

    def inputs(self, seed: int, device: str) -> Inputs:
        """Random operands, and the gradient that comes in."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        out = {name: t.requires_grad_() for name, t in self._operands(normal).items()}
        if self.direction == "bwd":
            out["d0"] = normal(*self._out).bfloat16()
        return out


@dataclass(frozen=True)
class Conv(Case):
    """The short convolution with SiLU, over the channels of q, k and v of 16/32 heads."""

    channels: int = 2 * 16 * 128 + 32 * 128
    op: ClassVar[str] = "conv"

    @property
    def label(self) -> str:
        return f"{self.batch}x{self.rows}x{self.channels}"

    @property
    def work(self) -> Work:
        """x and y; or x, dy and dx."""
        return Work(0, {"fwd": 2, "bwd": 3}[self.direction] * self.tokens * self.channels * 2)

    @property
    def _out(self) -> tuple[int, ...]:
        return self.batch, self.rows, self.channels

    def _operands(self, normal: Draw) -> Inputs:
        return {"x": normal(*self._out).bfloat16(), "weight": normal(self.channels, 4).bfloat16()}


@dataclass(frozen=True)
class GatedNorm(Case):
    """The norm behind a delta rule, a head a row; or behind a state space, in groups of a row.

    group: Elements that are normalised together after the gate; None: the norm is before the gate.
    """

    heads: int = 32
    width: int = 128
    group: int | None = None
    op: ClassVar[str] = "gated_norm"

    @property
    def label(self) -> str:
        size = f"{self.tokens}x{self.heads}x{self.width}"
        return size if self.group is None else f"{size} groups of {self.group}"

    @property
    def work(self) -> Work:
        """x, gate and y; or x, gate, dy, dx and dgate."""
        elements = self.tokens * self.heads * self.width
        return Work(0, {"fwd": 3, "bwd": 5}[self.direction] * elements * 2)

    @property
    def _out(self) -> tuple[int, ...]:
        return self.tokens, self.heads, self.width

    def _operands(self, normal: Draw) -> Inputs:
        out = {name: normal(*self._out).bfloat16() for name in ("x", "gate")}
        return out | {"weight": (1 + normal(self.width) / 8).bfloat16()}


@dataclass(frozen=True)
class Delta(Case):
    """The gated delta rule; q and k are normalised and g is the log of the decay."""

    heads: int = 16
    v_heads: int = 32
    size: int = 128
    op: ClassVar[str] = "delta"

    @property
    def label(self) -> str:
        return f"{self.heads}/{self.v_heads} {self.batch}x{self.rows}"

    @property
    def work(self) -> Work:
        """Products of the chunks, triangles counted as such, and the bytes of the operands.

        Three products with a state, P u and T h, and of a k head k kᵀ and q kᵀ; a backward has
        about 2.6 times as many.
        """
        k_heads, v_heads, size = self.heads, self.v_heads, self.size
        flops = v_heads * (6 * size + 2 * CHUNK) * size + k_heads * 2 * CHUNK * size
        qk, v, gates = 2 * k_heads * size * 2, v_heads * size * 2, v_heads * (4 + 2)
        if self.direction == "fwd":
            return Work(self.tokens * flops, self.tokens * (qk + 2 * v + gates))
        moved = 2 * qk + 3 * v + 2 * gates
        return Work(int(2.6 * self.tokens * flops), self.tokens * moved)

    def checked(self) -> Case:
        return replace(self, batch=1, rows=min(self.rows, CHECKED_ROWS))

    def part(self, name: str, value: torch.Tensor) -> torch.Tensor:
        group = self.v_heads // self.heads
        heads = max(1, CHECKED_HEADS // group) * (1 if name in ("q", "k") else group)
        return value[:heads] if value.dim() == 1 else value[:, :, :heads]

    @property
    def _out(self) -> tuple[int, ...]:
        return self.batch, self.rows, self.v_heads, self.size

    def _operands(self, normal: Draw) -> Inputs:
        out = self._rows(normal)
        for name in ("q", "k"):
            out[name] = torch.nn.functional.normalize(out[name].float(), dim=-1).bfloat16()
        a, A_log, dt_bias = (t.float() for t in self._gate(normal))
        return out | {"g": -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)}

    def _rows(self, normal: Draw) -> Inputs:
        rows = (self.batch, self.rows)
        out = {name: normal(*rows, self.heads, self.size).bfloat16() for name in ("q", "k")}
        out["v"] = normal(*self._out).bfloat16()
        return out | {"beta": normal(*rows, self.v_heads).sigmoid().bfloat16()}

    def _gate(self, normal: Draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input of the gate, A_log and dt_bias: A in (0, 16), steps of 1e-3 to 0.1 at input 0."""
        uniform = (0.5 * (1 + torch.erf(normal(2, self.v_heads) / 2**0.5))).clamp(1e-3, 1)
        steps = (uniform[1] * math.log(100) + math.log(1e-3)).exp()
        a = normal(self.batch, self.rows, self.v_heads).bfloat16()
        return a, (16 * uniform[0]).log(), steps.expm1().log()


@dataclass(frozen=True)
class DeltaInside(Delta):
    """The gated delta rule with the norms of q and k and the gate inside."""

    op: ClassVar[str] = "delta_inside"

    def _operands(self, normal: Draw) -> Inputs:
        a, A_log, dt_bias = self._gate(normal)
        return self._rows(normal) | {"g": a, "A_log": A_log, "dt_bias": dt_bias}


OPS = tuple(kind.op for kind in (Conv, GatedNorm, Delta, DeltaInside))


def of_conv() -> list[Case]:
    return [Conv(way, *size) for size in ((1, 8192), (4, 4096)) for way in DIRECTIONS]


def of_norm() -> list[Case]:
    kinds = {"heads": 32, "width": 128}, {"heads": 1, "width": 4096, "group": 512}
    return [GatedNorm(way, 1, 8192, **kind) for kind in kinds for way in DIRECTIONS]


def of_delta() -> list[Case]:
    """The most telling ones first."""
    sizes = ((1, 8192, 16, 32), (4, 4096, 16, 32), (1, 8192, 16, 64), (4, 4096, 16, 64))
    first, *others = ([Delta(way, *size) for way in DIRECTIONS] for size in sizes)
    inside = [DeltaInside(way, 1, 8192) for way in DIRECTIONS]
    return [*first, *others[0], Delta("fwd", 1, 32768), *inside, *others[1], *others[2]]


#: Lists of cases by name.
LISTS = {"conv": of_conv, "norm": of_norm, "delta": of_delta}
