"""Counting outputs whose bits differ, and the record a count becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from . import inputs


@dataclass
class Tally:
    """Tally of compared outputs; differ: other raw bits; zero_sign: of these, +0 against -0."""

    outputs: int = 0
    differ: int = 0
    zero_sign: int = 0
    first: dict | None = None

    def add(self, got: torch.Tensor, want: torch.Tensor, where: str = "") -> int:
        """Compares two fp32 matrices bit by bit; returns how many outputs differ."""
        bits_got, bits_want = (t.contiguous().view(torch.int32) for t in (got, want))
        wrong = bits_got != bits_want
        count = int(wrong.sum())
        self.outputs += got.numel()
        self.differ += count
        self.zero_sign += int((wrong & (got == 0) & (want == 0)).sum())
        if count and self.first is None:
            row, col = (int(i) for i in wrong.nonzero()[0])
            self.first = {
                "where": where,
                "row": row,
                "col": col,
                "got": f"0x{int(bits_got[row, col]) & 0xFFFFFFFF:08x}",
                "want": f"0x{int(bits_want[row, col]) & 0xFFFFFFFF:08x}",
            }
        return count

    def merge(self, other: Tally) -> None:
        self.outputs += other.outputs
        self.differ += other.differ
        self.zero_sign += other.zero_sign
        self.first = self.first or other.first

    @property
    def verdict(self) -> str:
        """ "yes", "yes, except the sign of zero", or "no"; "nothing compared" if so."""
        if self.outputs == 0:
            return "nothing compared"
        if self.differ == 0:
            return "yes"
        return "yes, except the sign of zero" if self.differ == self.zero_sign else "no"

    def items(self) -> dict:
        body = {"outputs": self.outputs, "differ": self.differ, "zero_sign": self.zero_sign}
        body["verdict"] = self.verdict
        return body | ({"first": self.first} if self.first else {})


@dataclass
class Answer:
    """Tallies of all that a probe compares, on ordinary and on extreme operands."""

    ordinary: Tally = field(default_factory=Tally)
    extreme: Tally = field(default_factory=Tally)

    def add(self, results: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> Tally:
        """Tally of (kind of operands, got, want), which counts here too."""
        out = Tally()
        for kind, got, want in results:
            tally = Tally()
            tally.add(got, want, kind)
            out.merge(tally)
            (self.ordinary if kind in inputs.ORDINARY else self.extreme).merge(tally)
        return out

    def items(self) -> dict:
        """Fields of the last record of a probe."""
        return {"case": "answer"} | self.ordinary.items() | {"extreme": self.extreme.items()}


def product(
    call: Callable, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None, **options
) -> torch.Tensor:
    """D of a call, in memory that held NaN."""
    d = poisoned(len(a), len(b), a.device)
    call(a, b, d, c, **options)
    return d


def poisoned(m: int, n: int, device: str | torch.device) -> torch.Tensor:
    """An fp32 [m, n] of NaN, so that an element nobody writes is seen."""
    return torch.full((m, n), float("nan"), device=device)
