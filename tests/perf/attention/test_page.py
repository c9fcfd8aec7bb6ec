"""The attention part of the status page, a pure function of records and certificates."""

from __future__ import annotations

import pytest

from perf import report
from perf.attention import page, targets
from perf.attention.cases import Case
from perf.core.compare import compare
from perf.core.tables import latest
from tests.perf.attention.records import FIRST, bench, every
from tests.perf.pages import facts, made, row


def rendered(*records: dict) -> str:
    return made("attention", *records)


def cells(text: str, size=FIRST) -> dict[str, str]:
    """Column -> cell of a case's rows in the tables of times and of rivals."""
    tables = "## Cases", "## Rivals"
    return {k: v for table in tables for k, v in facts(text, table, page._text(size)).items()}


def spaced(text: str) -> str:
    """Text with ordinary spaces in place of those that keep a cell's parts together."""
    return text.replace("\N{NO-BREAK SPACE}", " ")


def test_without_records_the_quick_cases_say_not_run():
    text = rendered()
    for size in targets.cases(quick=True):
        out = cells(text, size)
        assert out.pop("next step").startswith("`python -m perf bench attention --mask")
        assert out.pop("mask, length, heads") == page._text(size)
        assert len(out) == 13 and set(out.values()) == {"not run"}
    for target in targets.TARGETS:
        assert row(text, target.text)[1:3] == ["not run", "not run"]
    others, packs = spaced(text).split("## Packed sequences")
    assert others.count("heads MHA |") == 14 and "GQA" not in others
    assert packs.count("heads, MHA |") == 2 and packs.count("GQA") == 1
    assert "Schedules: predicted and measured" not in text


def test_the_labels_are_those_of_the_records():
    for size in targets.cases():
        assert page.label(size) == Case(*size).label


def test_records_fill_a_row():
    own = bench(
        rivals={"ours_unordered": 980.0, "flex": 2500.0, "fa4_ordered": 1290.0}, order_share=0.012
    )
    loose = bench(system="ours_unordered", us=980.0, rivals={"fa4": 960.4})
    forward = bench(which="fwd", us=300.0, rivals={"fa4": 291.0})
    out = cells(rendered(own, loose, forward))
    assert spaced(out["ordered backward"]) == "1,000 us, 612 TFLOP/s"
    assert spaced(out["forward"]) == "300 us, 612 TFLOP/s"
    assert out["FA4 forward"] == "0.970x"
    assert out["ordered / unordered"] == "1.020x"
    assert out["FA4 / our unordered"] == "0.980x"
    assert out["FA4 in order"] == "1.290x"
    assert out["Flex"] == "2.500x"
    assert out["lists / backward"] == "1.2%"
    assert out["bits"] == "same"
    assert out["ran on"] == "NVIDIA H200, 0123456789, 2026-11-21"
    assert out["next step"] == "none"


def test_other_cases_appear_when_they_have_a_record():
    size = targets.cases()[-1]
    out = cells(rendered(bench(size)), size)["ordered backward"]
    assert spaced(out).startswith("1,000 us")


@pytest.mark.parametrize(
    ("record_of", "step"),
    [
        (lambda: bench(rivals={"ours_unordered": 900.0}), "tune against ours without order"),
        (lambda: bench(bitwise={"repeat": False}), "fix the bits of bwd"),
        (
            lambda: bench(system="ours_unordered", status="failed", why="3 outputs\nmore"),
            "fix ours_unordered bwd: 3 outputs",
        ),
    ],
)
def test_the_next_step_follows_from_the_record(record_of, step):
    assert cells(rendered(record_of()))["next step"] == step


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
    _, measured, out, _ = row(rendered(*records), full.text)
    assert out == verdict
    assert measured.startswith(f"{ratio:.3f}x ({page._text(size)}; 9 of 9 cases)")


def test_some_cases_do_not_hold_a_target_but_one_can_miss_it():
    full = targets.TARGETS[0]
    some = [r for r in every(1.0) if r["shape"].startswith("full/s8192/d128")]
    measured, verdict = row(rendered(*some), full.text)[1:3]
    assert "4 of 9 cases" in measured and verdict == "not run"
    some[0]["ratio"]["ours_unordered"] = 0.5
    assert row(rendered(*some), full.text)[2] == "missed"


def test_a_rival_counts_in_the_cases_where_it_is_measured():
    flex = next(t for t in targets.TARGETS if t.rival == "flex")
    held = [r for r in every(0.6, "flex") if "d128/h16/kv16" in r["shape"]]
    assert row(rendered(*held), flex.text)[1].endswith("2 of 2 cases)")
    assert row(rendered(*held), flex.text)[2] == "met"
    assert row(rendered(*every(0.7, "flex")), flex.text)[2] == "missed"


def test_a_target_on_average_is_the_mean_of_all_its_cases():
    """One slow case is made up for; the target of each case says that it is slow."""
    mean = next(t for t in targets.TARGETS if t.mean and t.which == "bwd")
    each = next(t for t in targets.TARGETS if not t.mean and t.masks == mean.masks)
    records = every(1.0, "fa4")
    slow = next(r for r in records if r["shape"] == page.label(FIRST))
    slow["ratio"] = {"fa4": 0.9}
    text = rendered(*records)
    measured, verdict = row(text, mean.text)[1:3]
    cases = [s for s in (*targets.cases(), *targets.HELD_OUT) if s[0] in targets.FA4_DENSE]
    cases = [s for s in cases if targets.rival_wanted("fa4", s[0], s[2:])]
    factor = (1 / 0.9) ** (1 / len(cases))
    assert verdict == "met" and factor < 1.01
    assert measured == f"{factor:.3f}x (geometric mean; {len(cases)} of {len(cases)} cases)"
    assert row(text, each.text)[2] == "missed"
    slower = [r | {"ratio": {"fa4": 0.96}} for r in every(1.0, "fa4")]
    assert row(rendered(*slower), mean.text)[2] == "missed"
    assert row(rendered(*slower), each.text)[2] == "met"
    assert row(rendered(*slower[:5]), mean.text)[2] == "not run"
    assert row(rendered(), mean.text)[1:3] == ["not run", "not run"]


def test_held_out_cases_have_rows_where_they_have_records():
    size = next(s for s in targets.HELD_OUT if s[1] == 3000)
    assert page._text(size).startswith("full\N{NO-BREAK SPACE}3,000,")
    out = cells(rendered(bench(size)), size)
    assert spaced(out["ordered backward"]) == "1,000 us, 612 TFLOP/s"
    failed = {"ordered_us": None}
    item = {k: v for k, v in bench(size, which="fwd").items() if k not in failed}
    assert cells(rendered(item), size)["next step"].startswith(
        "`python -m perf bench attention --held-out`"
    )
    assert page._text(size) not in rendered(bench())


def test_the_rate_and_the_lists_have_targets():
    rate, lists = "bwd, full, D = 128: ours >= 580 TFLOP/s", "the tensors of an order"
    records = every(1.0, order_share=0.019)
    text = rendered(*records)
    measured, verdict = row(text, rate)[1:3]
    assert spaced(measured) == "612 TFLOP/s (full 4k, D = 128, 16 heads MHA; 8 of 8 cases)"
    assert verdict == "met"
    line = next(x for x in text.splitlines() if x.startswith(f"| {lists}"))
    assert "| 1.9% (" in line and line.endswith("| met | none |")
    next(r for r in records if r["shape"].startswith("full/s8192/d128"))["tflops"] = 579.0
    records[5]["order_share"] = 0.021
    text = rendered(*records)
    assert row(text, rate)[2] == "missed"
    assert "| 2.1% (" in text


def test_the_tables_of_packs_have_a_target():
    name = "the table and the tickets of a pack, likewise: <= 2% of one backward"
    assert row(rendered(*every(1.0)), name)[1:3] == ["not run", "not run"]
    for shares, verdict in (((0.003, 0.02, 0.01), "met"), ((0.003, 0.021), "missed")):
        records = [
            bench(size, system="ours_pack", table_us=1.0, table_share=share)
            for size, share in zip(targets.PACKS, shares, strict=False)
        ]
        measured, out = row(rendered(*records), name)[1:3]
        assert out == verdict and spaced(measured).startswith(f"{max(shares):.1%} (pack 8k, D")
        assert measured.endswith(f"{len(shares)} of 3 cases)")
    assert row(rendered(records[0]), name)[2] == "not run"


def test_predictions_stand_beside_what_was_measured():
    prediction = {"makespan_us": 1040.0, "unordered_us": 1000.0, "ratio": 1.04}
    out = {"name": "spt (ascending)", "hash": "ab" * 32}
    times = {"ordered_us": 1100.0, "unordered_us": 1000.0, "rivals": {"ours_unordered": 1000.0}}
    item = bench(us=1100.0, predicted=prediction, schedule=out, **times)
    text = rendered(item)
    found = [x for x in text.splitlines() if "spt (ascending)" in x]
    assert found[0].split(" | ")[1:] == [
        "spt (ascending) `abababababab`",
        "1,040, 1,000",
        "1,100, 1,000 |",
    ]
    assert cells(text)["predicted"] == "1.040x"
    assert cells(text)["ordered / unordered"] == "1.100x"


def packs(text: str, size=targets.PACKS[0]) -> dict[str, str]:
    return facts(text, "## Packed sequences", page._heads(size))


def test_packs_say_not_run_and_how_to_run_them():
    text = rendered()
    for size in targets.PACKS:
        out = packs(text, size)
        assert out.pop("heads") == page._heads(size)
        assert len(out) == 7 and set(out.values()) == {"not run"}
    part = text.split("## Packed sequences")[1].split("\n## ")[0]
    assert "`python -m perf bench attention --mask pack`" in part
    assert spaced(part).rstrip().endswith("the device in a backward: not run.")
    assert not set(targets.PACKS) & set(targets.cases())


def test_records_fill_the_table_of_packs():
    size, own = targets.PACKS[1], {"system": "ours_pack", "us": 200.0}
    held = {"bitwise": {"repeat": True, "alone": True}}
    rivals = {"ours_runs": 400.0, "ours": 180.0, "fa4_varlen": 190.0}
    pack_facts = {"sequences": 34, "new_pack_host_us": 9_637.0}
    forward = bench(size, "fwd", **own, **held, rivals=rivals)
    backward = bench(size, **own, **held, **pack_facts, rivals=rivals | {"fa4_varlen": 150.0})
    text = rendered(forward, backward)
    out = {name: spaced(cell) for name, cell in packs(text, size).items()}
    assert out == {
        "heads": "D = 128, 32 heads, GQA 4:1",
        "forward": "200 us, 612 TFLOP/s",
        "ordered backward": "200 us, 612 TFLOP/s",
        "FA4 varlen / ours": "0.95x, 0.75x",
        "one mask / ours": "0.90x, 0.90x",
        "each alone / ours": "2.00x, 2.00x",
        "bits": "same",
        "ran on": "NVIDIA H200, 0123456789, 2026-11-21",
    }
    message = "in a backward: 9,637 us (D = 128, 32 heads, GQA 4:1; 34 sequences)."
    assert message in spaced(text)
    placed = bench(size, **own, **held, **pack_facts, table_us=4.25, table_share=0.02125)
    message = "9,637 us, the device 4.2 us (D = 128, 32 heads, GQA 4:1; 34 sequences)."
    assert message in spaced(rendered(placed))
    assert packs(text)["ran on"] == "not run"
    # They are no part of the other tables, nor of what is counted.
    whole = report.pages([forward, backward], [])
    assert page.bits_kept([forward, backward]) == page.bits_kept([])
    assert whole["status/attention.md"].split("## Targets")[1].count("NVIDIA") == 0
    one = packs(rendered(backward), size)
    assert spaced(one["FA4 varlen / ours"]) == "not run, 0.75x" and one["forward"] == "not run"


@pytest.mark.parametrize(
    ("bitwise", "said"),
    [
        ({"repeat": True, "alone": False}, "differ: alone bwd"),
        ({"repeat": False, "alone": True}, "differ: repeat bwd"),
        ({"repeat": True}, "same; alone: not run"),
    ],
)
def test_the_bits_of_a_pack_are_those_of_each_sequence_alone(bitwise, said):
    size = targets.PACKS[0]
    forward = bench(size, "fwd", system="ours_pack", bitwise={"repeat": True, "alone": True})
    backward = bench(size, system="ours_pack", bitwise=bitwise)
    assert packs(rendered(forward, backward))["bits"] == said


def test_a_pack_that_failed_is_named_where_it_ran():
    item = bench(targets.PACKS[0], system="ours_pack", status="failed", why="3 outputs")
    assert packs(rendered(item))["ran on"].startswith("failed NVIDIA H200")


def test_what_a_rival_cannot_do_is_listed_with_its_masks():
    why = {"status": "absent", "why": "no order with lists"}
    items = []
    for size in targets.cases(quick=True)[4:6]:
        item = bench(size, system="fa4_ordered", **why)
        items.append({k: v for k, v in item.items() if not k.endswith("_us")})
    text = rendered(*items)
    assert "- fa4_ordered (document bwd, prefix bwd): no order with lists" in text


def test_the_page_keeps_the_two_kernels_apart():
    """An attention record is in no gemm table, and the other way round."""
    item = bench(rivals={"ours_unordered": 990.0})
    assert made("gemm", item) == made("gemm")
    assert "1.010x" in rendered(item) and "NVIDIA H200" in rendered(item)
    absent = bench(system="flex", status="absent", why="no flex")
    assert "Rivals not measured" not in made("gemm", absent)


def test_compare_takes_attention_records():
    before = bench(us=1000.0)
    slow, faster = bench(us=1010.0), bench(us=990.0)
    changed = bench(us=900.0, bitwise={"repeat": False})
    verdicts = [compare([before], [x])[0][0].verdict for x in (slow, faster, changed)]
    assert verdicts == ["regression: slower", "faster", "regression: lost bitwise repeat"]
    rows, only_in_first, _ = compare([before, bench(which="fwd")], [before])
    assert len(rows) == 1 and only_in_first[0][2] == "fwd"


def test_what_the_order_costs_is_drawn(tmp_path):
    prediction = {"makespan_us": 1040.0, "unordered_us": 1000.0, "ratio": 1.04}
    out = {"name": "spt", "hash": "ab" * 32}
    items = [
        bench(size, predicted=prediction, schedule=out, ordered_us=1000.0, rivals=rivals)
        for size in targets.cases(quick=True)
        for rivals in [{"ours_unordered": 980.0} if size[0] != "prefix" else {}]
    ]
    points = page.order_points(latest(items, "attention"))
    assert points["causal 8k"] == (pytest.approx(1 / 0.98), 1.04, 1.06)
    assert len(points) == 6 and "prefix 8k" not in points
    drawn = report.draw(items, tmp_path)
    assert [path.name for path in drawn] == ["attention_order_h200.svg", "attention_order_h200.png"]
    assert "(../plots/attention_order_h200.svg)" in rendered(*items)
    assert report.draw([bench()], tmp_path / "none") == []
    assert "attention_order" not in rendered(bench())
