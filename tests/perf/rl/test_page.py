"""An RL step on the status page: what its records say, and "not run" where there are none."""

from __future__ import annotations

import pytest

from perf.rl import page
from perf.rl.bench import PARTS
from perf.rl.size import CARD
from tests.perf.core.records import bench

SHAPE = CARD["0.5b"].label


def steps(differ: int = 0, shape: str = SHAPE, **seconds: float) -> list[dict]:
    """Records of the systems, whose steps took so long."""
    out = []
    for system, actual in seconds.items():
        ratio = {other: s / actual for other, s in seconds.items() if other != system}
        fields = {"kernel": "rl", "system": system, "shape": shape, "ratio": ratio}
        fields |= {"date": "2026-11-28", "commit": "0123456789ab", "tokens": 1000}
        fields |= {"differ": differ if system == "ours" else 990, "tokens_s": 1000 / actual}
        parts = (*((part, actual / 4) for part in PARTS), ("step", actual))
        out += [bench(1e6 * s, product=part, **fields) for part, s in parts]
    return out


def test_without_records_nothing_was_run():
    assert [line[1:] for line in page.target_rows([])] == [
        ["not run", "not run", f"`python -m perf bench rl --size {name}`"] for name in CARD
    ] + [["not run", "not run", "`python -m perf bench rl`"]]
    assert page.bits_kept([]) == [["bits", "not run"]]


@pytest.mark.parametrize(
    ("ours", "differ", "expected"),
    [(4.2, 0, ["met", "met"]), (4.21, 0, ["missed", "met"]), (3.0, 7, ["met", "missed"])],
)
def test_targets_are_a_steps_time_and_its_bytes(ours, differ, expected):
    records = steps(differ, native=4.0, ours=ours)
    rows = page.target_rows(records)
    assert [rows[0][2], rows[2][2]] == expected and rows[1][2] == "not run"
    assert rows[0][1] == f"{ours / 4:.2f}x" and rows[2][1] == f"{differ} of 1000"
    assert page.bits_kept(records) == [["bits", f"{differ} of 1000 log-probs differ"]]


def test_both_sizes_count():
    large = steps(2, CARD["3b"].label, native=4.0, ours=5.0)
    rows = page.target_rows([*steps(1, native=4.0, ours=4.0), *large])
    assert [line[2] for line in rows] == ["met", "missed", "missed"]
    assert rows[2][1] == "3 of 2000"
