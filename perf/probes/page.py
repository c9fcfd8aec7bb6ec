"""The questions for the hardware, and what each GPU model answered."""

from __future__ import annotations

from ..core.tables import NOT_RUN, where
from .questions import MIN_OUTPUTS, QUESTIONS

_HEAD = ["question", "answer", "ran on", "decides", "next step"]


def rows(records: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of `perf show probes`."""
    rows = []
    for question in QUESTIONS:
        answers = [
            r
            for r in records
            if r["kind"] == "probe" and r["probe"] == question.probe and r["case"] == "answer"
        ]
        text = f"{question.number}. {question.text}"
        command = f"`python -m perf probe {question.probe}`"
        if not answers:
            rows.append([text, NOT_RUN, NOT_RUN, question.decides, command])
            continue
        last = max(enumerate(answers), key=lambda pair: (pair[1]["date"], pair[0]))[1]
        unknown = last.get("extreme", {}).get("verdict") == "no"
        step = f"the rule for those operands, then {command}" if unknown else "none"
        rows.append([text, _answer(last), where(last | {"status": "ok"}), question.decides, step])
    return _HEAD, rows


def _answer(last: dict) -> str:
    if last["verdict"] == "failed":
        return "failed: " + last["why"].splitlines()[0][:80]
    parts = [last["verdict"]]
    if "outputs" in last:
        parts[0] += f" ({last['differ']} of {last['outputs']:,} outputs differ)"
        if last["outputs"] < MIN_OUTPUTS:
            parts.append(f"too few outputs, {MIN_OUTPUTS:,} count")
    if "extreme" in last:
        parts.append(f"subnormal and overflowing operands: {last['extreme']['verdict']}")
    if "costs" in last:
        costs = sorted(last["costs"].items(), key=lambda pair: int(pair[0]))
        parts.append(", ".join(f"leaf of {p} groups {cost:+.1%}" for p, cost in costs))
    return "; ".join(parts)
