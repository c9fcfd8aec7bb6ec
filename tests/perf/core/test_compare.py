"""The regression rule."""

from __future__ import annotations

import pytest

from perf.core.compare import Unusable, compare
from tests.perf.records import H100
from tests.perf.records import bench as timed


def bench(us: float, spread: float = 2.0, shape: str = "qkv", product: str = "fwd", **more) -> dict:
    ends = {"p10_us": us - spread / 2, "p90_us": us + spread / 2}
    return timed("gemm", product, shape, us, bitwise={"repeat": True, "rows": True}, **ends) | more


WRONG = {k: v for k, v in bench(50.0).items() if not k.endswith("_us")} | {"status": "failed"}
LOST = bench(50.0, bitwise={"repeat": True, "rows": False})


@pytest.mark.parametrize(
    ("before", "after", "want"),
    [
        (bench(100.0), bench(101.9), "same"),  # two half spreads of 1 us make 2 us of noise
        (bench(100.0), bench(102.1), "regression: slower"),
        (bench(100.0), bench(97.9), "faster"),
        (bench(100.0), bench(102.1, 4.0), "same"),  # B's own noise counts too
        (bench(100.0), bench(103.1, 4.0), "regression: slower"),
        (bench(100.0), LOST, "regression: lost bitwise rows"),
        (LOST, bench(50.0), "same"),
        (bench(100.0), WRONG | {"why": "wrong"}, "regression: failed (wrong)"),
        (WRONG, bench(100.0), "not timed"),
    ],
)
def test_a_verdict_is_of_noise_and_promises(before, after, want):
    assert compare([before], [after])[0][0].verdict == want


def test_cases_in_one_file_only_are_listed_and_the_last_record_counts():
    a = [bench(90.0), bench(100.0), bench(5.0, shape="o_proj")]
    b = [bench(100.5), bench(7.0, product="dx")]
    rows, only_in_first, new = compare(a, b)
    assert [(r.before, r.after) for r in rows] == [(100.0, 100.5)]
    assert [key[3] for key in only_in_first] == ["o_proj"]
    assert [key[2] for key in new] == ["dx"]


def test_what_cannot_be_compared_is_unusable():
    with pytest.raises(Unusable, match="no measured case in common"):
        compare([bench(1.0)], [bench(1.0, gpu=H100)])
    with pytest.raises(Unusable, match="no field 'gpu'"):
        compare([{k: v for k, v in bench(1.0).items() if k != "gpu"}], [bench(1.0)])
