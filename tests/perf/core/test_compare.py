"""The regression rule."""

from __future__ import annotations

import pytest

from perf.core.compare import Unusable, compare
from tests.perf.core.records import bench


def verdict(before: dict, after: dict) -> str:
    rows, _, _ = compare([before], [after])
    return rows[0].verdict


@pytest.mark.parametrize(
    ("after", "spread", "want"),
    [
        (101.9, 2.0, "same"),  # two half spreads of 1 us make 2 us of noise
        (102.1, 2.0, "regression: slower"),
        (97.9, 2.0, "faster"),
        (98.1, 2.0, "same"),
        (102.1, 4.0, "same"),  # B's own noise counts too
        (103.1, 4.0, "regression: slower"),
    ],
)
def test_noise_is_half_of_each_spread(after, spread, want):
    assert verdict(bench(100.0), bench(after, spread)) == want


def test_a_lost_promise_is_a_regression_however_fast():
    fast = bench(50.0, bitwise={"repeat": True, "rows": False})
    assert verdict(bench(100.0), fast) == "regression: lost bitwise rows"
    assert verdict(fast, bench(50.0)) == "same"
    wrong = {k: v for k, v in bench(50.0).items() if not k.endswith("_us")}
    wrong |= {"status": "failed", "why": "the result is wrong"}
    assert verdict(bench(100.0), wrong) == "regression: failed (the result is wrong)"
    assert verdict(wrong, bench(100.0)) == "not timed"


def test_cases_in_one_file_only_are_listed_and_the_last_record_counts():
    a = [bench(90.0), bench(100.0), bench(5.0, shape="o_proj")]
    b = [bench(100.5), bench(7.0, product="dx")]
    rows, only_in_first, new = compare(a, b)
    assert [(r.before, r.after) for r in rows] == [(100.0, 100.5)]
    assert [key[3] for key in only_in_first] == ["o_proj"]
    assert [key[2] for key in new] == ["dx"]


def test_other_cards_have_nothing_in_common():
    with pytest.raises(Unusable, match="no measured case in common"):
        compare([bench(1.0)], [bench(1.0, gpu="NVIDIA H100")])


def test_a_record_without_a_field_is_unusable():
    item = bench(1.0)
    del item["gpu"]
    with pytest.raises(Unusable, match="no field 'gpu'"):
        compare([item], [bench(1.0)])
