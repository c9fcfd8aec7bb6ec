"""The questions for the hardware on the status page, and their answers."""

from __future__ import annotations

from perf.probes import page
from perf.probes.questions import QUESTIONS
from tests.perf.probes.records import probe


def shown(number: int, *records: dict) -> dict[str, str]:
    """The row of a question."""
    head, rows = page.rows(list(records))
    return dict(zip(head, rows[number - 1], strict=True))


def test_an_answer_needs_enough_outputs_and_tells_extremes_apart():
    few = probe("width", verdict="yes", outputs=1000, differ=0)
    assert shown(1)["answer"] == "not run" and len(page.rows([])[1]) == len(QUESTIONS)
    assert "too few outputs" in shown(1, few)["answer"]
    extreme = {"verdict": "no"}
    full = probe("width", verdict="yes", outputs=2 * 10**7, differ=0, extreme=extreme)
    out = shown(1, few, full)
    assert out["answer"] == (
        "yes (0 of 20,000,000 outputs differ); subnormal and overflowing operands: no"
    )
    assert out["ran on"] == "NVIDIA H200, fedcba9876+, 2026-11-21"
    step = "the rule for those operands, then `python -m perf probe width`"
    assert out["next step"] == step
    known = probe("width", verdict="yes", outputs=2 * 10**7, differ=0, extreme={"verdict": "yes"})
    assert shown(1, known)["next step"] == "none"
    failed = probe("width", verdict="failed", why="RuntimeError: boom")
    assert shown(1, failed)["answer"] == "failed: RuntimeError: boom"


def test_promotion_costs_are_listed_by_period():
    item = probe("promotion", verdict="yes", outputs=10**7, differ=0, costs={"16": 0.02, "4": 0.25})
    assert shown(4, item)["answer"].endswith("leaf of 4 groups +25.0%, leaf of 16 groups +2.0%")
