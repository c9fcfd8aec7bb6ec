"""Targets and bits of mixtures of experts on the status page: pure functions of the records."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.speed import Speed
from ..core.tables import Bench, kept, latest, sizes_row
from . import cases

TITLE = "Mixtures of experts"
BENCHES = ("moe",)
_ALL = cases.cases(
    list(cases.SHAPES),
    [*cases.DECODE, *cases.TRAIN],
    [*cases.PRODUCTS, *cases.MOVES],
    list(cases.LOADS),
)
CASES = [(case.product, case.label) for case in _ALL]
SPEED = tuple(
    Speed(
        f"MoE products, {what}",
        "moe",
        cases.PRODUCTS,
        "torch",
        "torch, `grouped_mm`",
        {case.label for case in _ALL if case.tokens in tokens},
    )
    for what, tokens in (("decode", cases.DECODE), ("training", cases.TRAIN))
)
_MEASURE = "`python -m perf bench moe`"
_STEP = "docs/moe.md"


@dataclass(frozen=True)
class Target:
    """A share of the copy's bandwidth over the weights that are read, or a rival's time over ours.

    cases: The ones that it is of.  rival: None: the copy's bandwidth.
    """

    text: str
    cases: tuple[tuple[str, str], ...]
    at_least: float
    rival: str | None = None

    def values(self, bench: Bench) -> list[float]:
        """Values of the sizes that were measured."""
        if self.rival:
            ratios = [bench.ratio(case, self.rival) for case in self.cases]
        else:
            ratios = [(bench.get(case) or {}).get("of_copy") for case in self.cases]
        return [value for value in ratios if value is not None]


def _of(product: str, tokens: tuple[int, ...]) -> tuple[tuple[str, str], ...]:
    some = (case for case in _ALL if case.product == product and case.tokens in tokens)
    return tuple((case.product, case.label) for case in some)


TARGETS = (
    *(
        Target(
            f"decode of {t} tokens: weights at 75% or more of the copy's bandwidth",
            _of("fwd", (t,)),
            0.75,
        )
        for t in cases.DECODE
    ),
    *(
        Target(f"{product}: at least {least:.2f}x one dense product of as many operations",
               _of(product, cases.TRAIN), least, "dense")
        for product, least in (("fwd", 0.84), ("dx", 0.84), ("dw", 0.90))
    ),
    *(
        Target(f"{product}: at least {least:.2f}x a copy of as many bytes",
               _of(product, cases.TRAIN), least, "copy")
        for product, least in zip(cases.MOVES, (0.85, 0.85, 0.80), strict=True)
    ),
)  # fmt: skip


def bits_kept(records: list[dict]) -> list[list[str]]:
    """Bits over all cases."""
    return [["bits", kept(latest(records, "moe"), CASES)]]


def target_rows(records: list[dict]) -> list[list[str]]:
    """(target, measured, verdict, next step) of every target."""
    bench = latest(records, "moe")
    return [
        sizes_row(
            t.text, t.values(bench), t.at_least, t.rival is None, (_MEASURE, _STEP)
        )
        for t in TARGETS
    ]  # fmt: skip
