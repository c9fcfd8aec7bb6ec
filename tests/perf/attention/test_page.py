"""Targets of attention on the status page: pure functions of the records."""

from __future__ import annotations

import pytest

from perf.attention import page, targets
from perf.attention.cases import Case
from perf.core.compare import compare
from tests.perf.attention.records import FIRST, bench, every
from tests.perf.pages import targets as told


def spaced(text: str) -> str:
    """Text with ordinary spaces in place of those that keep a cell's parts together."""
    return text.replace("\N{NO-BREAK SPACE}", " ")


def test_the_labels_are_those_of_the_records():
    for size in targets.cases():
        assert page.label(size) == Case(*size).label


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(1.02, "met"), (1.031, "missed")],
)
def test_a_target_is_held_by_its_worst_case(ratio, verdict):
    size = next(s for s in targets.cases() if s[:2] == ("full", 8192) and s[2] == 64)
    records = [r for r in every(1.01) if r["shape"] != page.label(size)]
    records.append(bench(size, rivals={"ours_unordered": 1000.0 / ratio}))
    full = targets.TARGETS[0]
    assert full.masks == (("full", 8192),)
    measured, out, _ = told(page, *records)[full.text]
    assert out == verdict
    assert measured.startswith(f"{ratio:.3f}x ({page._text(size)}; 9 of 9 cases)")


def test_some_cases_do_not_hold_a_target_but_one_can_miss_it():
    full = targets.TARGETS[0]
    some = [r for r in every(1.0) if r["shape"].startswith("full/s8192/d128")]
    measured, verdict = told(page, *some)[full.text][:2]
    assert "4 of 9 cases" in measured and verdict == "not run"
    some[0]["ratio"]["ours_unordered"] = 0.5
    assert told(page, *some)[full.text][1] == "missed"


def test_a_rival_counts_in_the_cases_where_it_is_measured():
    flex = next(t for t in targets.TARGETS if t.rival == "flex")
    held = [r for r in every(0.6, "flex") if "d128/h16/kv16" in r["shape"]]
    assert told(page, *held)[flex.text][0].endswith("2 of 2 cases)")
    assert told(page, *held)[flex.text][1] == "met"
    assert told(page, *every(0.7, "flex"))[flex.text][1] == "missed"


def test_a_target_on_average_is_the_mean_of_all_its_cases():
    """One slow case is made up for; the target of each case says that it is slow."""
    mean = next(t for t in targets.TARGETS if t.mean and t.which == "bwd")
    each = next(t for t in targets.TARGETS if not t.mean and t.masks == mean.masks)
    records = every(1.0, "fa4")
    slow = next(r for r in records if r["shape"] == page.label(FIRST))
    slow["ratio"] = {"fa4": 0.9}
    text = told(page, *records)
    measured, verdict = text[mean.text][:2]
    cases = [s for s in (*targets.cases(), *targets.HELD_OUT) if s[0] in targets.FA4_DENSE]
    cases = [s for s in cases if targets.rival_wanted("fa4", s[0], s[2:])]
    factor = (1 / 0.9) ** (1 / len(cases))
    assert verdict == "met" and factor < 1.01
    assert measured == f"{factor:.3f}x (geometric mean; {len(cases)} of {len(cases)} cases)"
    assert text[each.text][1] == "missed"
    slower = [r | {"ratio": {"fa4": 0.96}} for r in every(1.0, "fa4")]
    assert told(page, *slower)[mean.text][1] == "missed"
    assert told(page, *slower)[each.text][1] == "met"
    assert told(page, *slower[:5])[mean.text][1] == "not run"
    assert told(
        page,
    )[mean.text][:2] == ["not run", "not run"]


def test_the_rate_and_the_lists_have_targets():
    rate, lists = "bwd, full, D = 128: ours >= 580 TFLOP/s", "the tensors of an order"
    records = every(1.0, order_share=0.019)
    text = told(page, *records)
    measured, verdict = text[rate][:2]
    assert spaced(measured) == "612 TFLOP/s (full 4k, D = 128, 16 heads MHA; 8 of 8 cases)"
    assert verdict == "met"
    (lists,) = [target for target in text if target.startswith(lists)]
    assert text[lists][0].startswith("1.9% (") and text[lists][1:] == ["met", "none"]
    next(r for r in records if r["shape"].startswith("full/s8192/d128"))["tflops"] = 579.0
    records[5]["order_share"] = 0.021
    text = told(page, *records)
    assert text[rate][1] == "missed" and text[lists][0].startswith("2.1% (")


def test_the_tables_of_packs_have_a_target():
    name = "the table and the tickets of a pack, likewise: <= 2% of one backward"
    assert told(page, *every(1.0))[name][:2] == ["not run", "not run"]
    for shares, verdict in (((0.003, 0.02, 0.01), "met"), ((0.003, 0.021), "missed")):
        records = [
            bench(size, system="ours_pack", table_us=1.0, table_share=share)
            for size, share in zip(targets.PACKS, shares, strict=False)
        ]
        measured, out = told(page, *records)[name][:2]
        assert out == verdict and spaced(measured).startswith(f"{max(shares):.1%} (pack 8k, D")
        assert measured.endswith(f"{len(shares)} of 3 cases)")
    assert told(page, records[0])[name][1] == "not run"


def test_compare_takes_attention_records():
    before = bench(us=1000.0)
    slow, faster = bench(us=1010.0), bench(us=990.0)
    changed = bench(us=900.0, bitwise={"repeat": False})
    verdicts = [compare([before], [x])[0][0].verdict for x in (slow, faster, changed)]
    assert verdicts == ["regression: slower", "faster", "regression: lost bitwise repeat"]
    rows, only_in_first, _ = compare([before, bench(which="fwd")], [before])
    assert len(rows) == 1 and only_in_first[0][2] == "fwd"
