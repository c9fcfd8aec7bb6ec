"""The questions for the hardware on the status page, and their answers."""

from __future__ import annotations

from perf.probes.questions import QUESTIONS
from tests.perf.pages import facts, made, row
from tests.perf.probes.records import probe


def test_an_answer_needs_enough_outputs_and_tells_extremes_apart():
    few = probe("width", verdict="yes", outputs=1000, differ=0)
    question = QUESTIONS[0]
    text = f"{question.number}. {question.text}"
    assert "too few outputs" in row(made("probes", few), text)[1]
    extreme = {"verdict": "no"}
    full = probe("width", verdict="yes", outputs=2 * 10**7, differ=0, extreme=extreme)
    out = facts(made("probes", few, full), "## Questions and answers", text)
    assert out["answer"] == (
        "yes (0 of 20,000,000 outputs differ); subnormal and overflowing operands: no"
    )
    assert out["ran on"] == "NVIDIA H200, fedcba9876+, 2026-11-21"
    step = "the rule for those operands, then `python -m perf probe width`"
    assert out["next step"] == step
    known = probe("width", verdict="yes", outputs=2 * 10**7, differ=0, extreme={"verdict": "yes"})
    assert row(made("probes", known), text)[-1] == "none"
    failed = probe("width", verdict="failed", why="RuntimeError: boom")
    assert row(made("probes", failed), text)[1] == "failed: RuntimeError: boom"


def test_promotion_costs_are_listed_by_period():
    item = probe("promotion", verdict="yes", outputs=10**7, differ=0, costs={"16": 0.02, "4": 0.25})
    question = QUESTIONS[3]
    cells = row(made("probes", item), f"{question.number}. {question.text}")
    assert cells[1].endswith("leaf of 4 groups +25.0%, leaf of 16 groups +2.0%")
