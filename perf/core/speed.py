"""One line of the README's table of speed: a page has those of its system."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .tables import NOT_RUN, Bench, geomean


@dataclass(frozen=True)
class Speed:
    """One line: all cases of some products of one kernel against one rival.

    shapes: Those that count; all without any.
    ours: The name of our side in the records.
    """

    label: str
    kernel: str
    products: tuple[str, ...]
    rival: str
    name: str
    shapes: Collection[str] = ()
    ours: str = "ours"

    def takes(self, product: str, shape: str) -> bool:
        """Whether a case belongs to this row."""
        return product in self.products and (not self.shapes or shape in self.shapes)

    def ratios(self, bench: Bench) -> list[float]:
        """The ratios of the cases that have one."""
        cases = {(p, s) for _, p, s in bench.records if self.takes(p, s)}
        ratios = (bench.ratio(case, self.rival, self.ours) for case in cases)
        return sorted(ratio for ratio in ratios if ratio is not None)

    def cell(self, bench: Bench) -> str:
        """Geometric mean of the ratios, and their range where there are several."""
        ratios = self.ratios(bench)
        if not ratios:
            return NOT_RUN
        mean = f"{geomean(ratios):.2f}"
        return mean if len(ratios) == 1 else f"{mean} ({min(ratios):.2f} to {max(ratios):.2f})"
