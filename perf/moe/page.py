"""Targets and bits of mixtures of experts on the status page: pure functions of the records."""

from __future__ import annotations

from ..core.speed import Speed
from ..core.tables import Target, field_of, page_of, ratio_to
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


def _of(product: str, tokens: tuple[int, ...]) -> list[tuple[str, str]]:
    some = (case for case in _ALL if case.product == product and case.tokens in tokens)
    return [(case.product, case.label) for case in some]


_RIVALS = {"dense": "one dense product of as many operations", "copy": "a copy of as many bytes"}


def _target(product: str, at_least: float, rival: str) -> Target:
    """A rival's time over ours in training."""
    text = f"{product}: at least {at_least:.2f}x {_RIVALS[rival]}"
    return Target(text, _of(product, cases.TRAIN), at_least, ratio_to(rival))


TARGETS = (
    *(
        Target(
            f"decode of {t} tokens: weights at 75% or more of the copy's bandwidth",
            _of("fwd", (t,)),
            0.75,
            field_of("of_copy"),
            share=True,
        )
        for t in cases.DECODE
    ),
    _target("fwd", 0.84, "dense"),
    _target("dx", 0.84, "dense"),
    _target("dw", 0.90, "dense"),
    _target("permute", 0.85, "copy"),
    _target("combine", 0.85, "copy"),
    _target("permute+combine", 0.80, "copy"),
)
bits_kept, target_rows = page_of(
    "moe", CASES, TARGETS, ("`python -m perf bench moe`", "docs/moe.md")
)
