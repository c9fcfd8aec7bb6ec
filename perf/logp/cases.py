"""The sizes of `linear_logp` that are measured, and their operands."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.work import Work

#: Name -> (tokens, D, V): two large heads, and those of four models.
SHAPES = {
    "128k": (4096, 4096, 131072),
    "152k": (8192, 4096, 151936),
    "qwen3-4b": (6000, 2560, 151936),
    "deepseek-v3": (2048, 7168, 129280),
    "llama3-1b": (16384, 2048, 128256),
    "llama4": (3000, 5120, 202048),
}
#: Those whose decode steps are measured too, and that status.md's targets are about.
LARGE = ("128k", "152k")
PASSES = ("fwd", "bwd", "both")
#: Tokens of a decode step: the forward alone.
DECODE = (1, 8, 16, 64, 128)

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One pass at one size."""

    product: str
    shape: str
    tokens: int

    @property
    def label(self) -> str:
        is_default = self.tokens == SHAPES[self.shape][0]
        return self.shape if is_default else f"{self.shape}/t{self.tokens}"

    @property
    def width(self) -> int:
        return SHAPES[self.shape][1]

    @property
    def vocab(self) -> int:
        return SHAPES[self.shape][2]

    @property
    def work(self) -> Work:
        """Work of the pass: one product forward, three backward (logits are computed again)."""
        products = {"fwd": 1, "bwd": 3, "both": 4}[self.product]
        product = 2 * self.tokens * self.width * self.vocab
        operands = 2 * self.width * (self.tokens + self.vocab)
        return Work(products * product, operands * (1 if self.product == "fwd" else 3))

    def items(self) -> dict:
        """Fields of a record."""
        sizes = {"tokens": self.tokens, "d": self.width, "vocab": self.vocab}
        return {"product": self.product, "shape": self.label, "dtype": "bf16"} | sizes

    def inputs(self, seed: int, device: str) -> Inputs:
        """Random operands; log-probabilities around ln V."""
        generator = torch.Generator(device).manual_seed(seed)
        options = {"generator": generator, "device": device}
        hidden = torch.randn(self.tokens, self.width, **options)
        weight = torch.randn(self.vocab, self.width, **options) * self.width**-0.5
        return {
            "hidden": hidden.bfloat16().requires_grad_(),
            "weight": weight.bfloat16().requires_grad_(),
            "target": torch.randint(0, self.vocab, (self.tokens,), **options),
            "d0": torch.randn(self.tokens, **options),
        }


def cases(shapes: list[str], passes: list[str]) -> list[Case]:
    """Cases of the passes at the shapes, and of decoding steps."""
    out = [Case(which, name, SHAPES[name][0]) for name in shapes for which in passes]
    if "fwd" in passes:
        decoding = [name for name in shapes if name in LARGE]
        out += [Case("fwd", name, tokens) for name in decoding for tokens in DECODE]
    return out
