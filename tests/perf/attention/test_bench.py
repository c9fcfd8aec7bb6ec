"""Whole runs of the attention bench on the CPU, with our own backend and stand-ins as rivals."""

from __future__ import annotations

import json

import pytest

from perf.attention import bench, rivals
from perf.core import record, timing
from perf.core.rival import Rival
from perf.core.watch import Lost
from tests.perf.attention import stand_ins
from tests.perf.attention.runs import options, run


@pytest.fixture
def known(monkeypatch):
    """Ours, and systems that are wrong in one way each."""
    out = {
        "ours": rivals.RIVALS["ours"],
        "ours_unordered": rivals.RIVALS["ours_unordered"],
        "right": stand_ins.system("right", stand_ins.right, ordered=True),
        "off": stand_ins.system(
            "off", lambda w: stand_ins.changed(w, stand_ins.slightly_off), promised=True
        ),
        "shifted": stand_ins.system(
            "shifted", lambda w: stand_ins.with_mask(w, lambda d: d.roll(1, dims=-1) & d)
        ),
        "raises": stand_ins.system("raises", lambda w: stand_ins.raises),
        "absent": stand_ins.system("absent", lambda w: stand_ins.absent),
        "unsteady": stand_ins.system("unsteady", stand_ins.every_third_differs, ordered=True),
    }
    monkeypatch.setattr(bench, "RIVALS", out)
    return out


def test_a_run_writes_one_record_per_system_and_pass(known, tmp_path):
    path = tmp_path / "attention.jsonl"
    bodies, lines = run([stand_ins.case("causal")], options(known), path)
    assert record.read(path) == json.loads(json.dumps(bodies))
    by = {(b["system"], b["pass"]): b for b in bodies}
    assert [key for key in by if key[1] == "bwd"] == [(name, "bwd") for name in known]
    assert set(by) == {(n, w) for n in known for w in ("fwd", "bwd")} - {("ours_unordered", "fwd")}
    wrong = {"off": "beyond the bound", "shifted": "rel", "raises": "RuntimeError: no such tile"}
    for (name, which), body in by.items():
        failed = name in wrong
        assert body["status"] == {"absent": "absent"}.get(name, "failed" if failed else "ok"), body
        assert not failed or wrong[name] in body["why"]
        # Beyond the bound is failed but timed, wrong is not timed.
        assert ("median_us" in body) == (name not in ("shifted", "raises", "absent"))
        if name in ("ours", "unsteady"):
            assert body["bitwise"]["repeat"] == (name == "ours"), which
    # The checks of ours come first, each with its line.
    first = ["ours fwd", "off fwd", "ours bwd", "ours_unordered bwd", "off bwd"]
    assert [" ".join(line.split()[:2]) for line in lines] == first
    assert all(bench.line(body) for body in bodies)


def test_a_record_says_what_was_measured(known):
    bodies, _ = run([stand_ins.case("document")], options(["ours", "ours_unordered", "right"]))
    by = {(b["system"], b["pass"]): b for b in bodies}
    ours, loose = by["ours", "bwd"], by["ours_unordered", "bwd"]
    assert (ours["kind"], ours["kernel"], ours["mask"]) == ("bench", "attention", "document")
    assert (ours["s"], ours["d"], ours["heads"], ours["kv_heads"]) == (256, 64, 2, 1)
    assert ours["p10_us"] <= ours["median_us"] <= ours["p90_us"] and ours["samples"] == 3
    low, high = ours["ratio_spread"]["right"]
    assert low <= ours["ratio"]["right"] <= high and set(ours["ratio"]) == {
        "ours_unordered",
        "right",
    }
    assert ours["tflops"] == pytest.approx(10 * 64 * ours["elements"] / ours["median_us"] / 1e6)
    assert ours["floor_fraction"] == pytest.approx(ours["floor_us"] / ours["median_us"])
    assert ours["bitwise"] == {"repeat": True} and "bitwise" not in loose
    assert loose["check"]["apart"] == 0 and loose["check"]["sampled_error"] < 0.01
    assert ours["cold_l2"]["sets"] >= 2
    assert ours["ordered_us"] == ours["median_us"] and ours["unordered_us"] == loose["median_us"]
    assert ours["order_share"] == pytest.approx(ours["order_us"] / ours["median_us"])
    assert ours["order_us"] > 0 and ours["order_again_us"] > 0
    simulation = ours["predicted"]
    assert (
        simulation["machine"] == "cute_sm90_d64"
        and simulation["makespan_us"] >= simulation["unordered_us"] > 0
    )
    assert len(ours["schedule"]["hash"]) == 64 and ours["schedule"]["group"] == 2
    assert "predicted" not in loose and "predicted" not in by["ours", "fwd"]


def test_orders_that_disagree_at_full_size_fail_the_unordered_one(known):
    """In the full case only, which the short one cannot show: a row loses a part."""

    def start(problem):
        call = stand_ins.right("bwd")(problem)

        def loses(t):
            got = tuple(x.clone() for x in call(t))
            if problem.case.heads == 1:
                got[0][0, 200, 0] *= 0.5
            return got

        return loses

    known["ours"] = stand_ins.system("ours", stand_ins.right, promised=True, ordered=True)
    known["ours_unordered"] = Rival("ours_unordered", {"bwd": start}, promised=True)
    case = stand_ins.case("window", heads=1)
    assert case.small.heads != 1
    bodies, _ = run([case], options(["ours", "ours_unordered"], passes=["bwd"]))
    assert [b["status"] for b in bodies] == ["ok", "failed"]
    assert bodies[1]["check"]["apart"] > 0 and "far from" in bodies[1]["why"]


def test_no_backward_is_measured_without_a_right_forward(known):
    known["ours"] = stand_ins.system("ours", lambda w: stand_ins.raises, promised=True)
    known["fa4"] = stand_ins.system("fa4", lambda w: stand_ins.absent)
    bodies, _ = run([stand_ins.case("full")], options(["ours", "right"]))
    assert all(b["status"] == "failed" and "median_us" not in b for b in bodies)
    why = {(b["system"], b["pass"]): b["why"] for b in bodies}
    assert why["ours", "fwd"] == "RuntimeError: no such tile"
    assert "no forward is right" in why["right", "bwd"]
    known["fa4"] = stand_ins.system("fa4", stand_ins.right)
    bodies, _ = run([stand_ins.case("full")], options(["ours", "right"], passes=["bwd"]))
    assert [("median_us" in b) for b in bodies] == [False, True]


def test_the_budget_names_what_it_does_not_reach(known):
    ticks = iter(range(0, 10_000, 10))
    todo = [stand_ins.case(mask) for mask in ("full", "causal", "window")]
    run_options = options(["ours"], passes=["fwd"], budget_s=75.0, now=lambda: next(ticks))
    bodies, lines = run(todo, run_options)
    assert [b["mask"] for b in bodies] == ["full"]
    assert lines[-1].startswith("not run, the time is spent: causal/s256") and "window" in lines[-1]


def test_a_lost_device_ends_the_run(known):
    def dead():
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(Lost, match="no such tile; then the device: an illegal memory"):
        run([stand_ins.case("full")], options(["raises"], finish=dead, check_only=True))


def test_a_ratio_is_taken_within_each_round():
    """Clocks that drop in the middle of a run move both times of a round, and few ratios."""
    own = timing.Timing((100.0, 100.0, 100.0, 130.0, 130.0), True)
    rival = timing.Timing((103.0, 103.0, 133.9, 133.9, 133.9), True)
    low, middle, high = bench.paired(rival, own)
    assert low == pytest.approx(1.03) and middle == pytest.approx(1.03) and high > 1.2
    assert rival.median / own.median > 1.3
