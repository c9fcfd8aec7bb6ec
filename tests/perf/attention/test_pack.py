"""Packed sequences: whole runs on the CPU, and what a new pack costs."""

from __future__ import annotations

import pytest

from cute_kernels.sparse_attn import op as attention_op
from perf.attention import bench, rivals, targets
from perf.attention.cases import Case, Problem, drawn_lengths
from perf.core.bits import same_bytes
from perf.core.rival import Absent
from tests.perf.attention import stand_ins
from tests.perf.attention.runs import options, run

CASE = stand_ins.case("pack")
OURS = ["ours", "ours_pack", "ours_runs"]


@pytest.fixture
def launches(monkeypatch):
    """On this CPU a launch takes a whole pack, as on a GPU; the passes that did are kept."""
    out = []
    monkeypatch.setattr(attention_op, "is_one_launch", lambda t: True)
    for name in ("_attend_padded", "_differentiate_padded"):
        whole = getattr(attention_op, name)
        monkeypatch.setattr(
            attention_op, name, lambda *a, name=name, whole=whole: out.append(name) or whole(*a)
        )
    return out


def test_a_run_measures_a_pack_its_sequences_and_one_mask(launches):
    def wanted(name: str, case: Case) -> bool:
        return targets.rival_wanted(name, case.mask, (64, 2, 1))

    todo = [stand_ins.case("causal"), CASE]
    bodies, _ = run(todo, options([*OURS, "ours_unordered"], wanted=wanted))
    by = {(b["mask"], b["system"], b["pass"]): b for b in bodies}
    assert set(by) == {
        *(("causal", "ours", which) for which in ("fwd", "bwd")),
        ("causal", "ours_unordered", "bwd"),
        *(("pack", name, which) for name in OURS for which in ("fwd", "bwd")),
    }
    assert {b["status"] for b in bodies} == {"ok"}
    lengths = drawn_lengths(CASE)
    for which in ("fwd", "bwd"):
        one, each = by["pack", "ours_pack", which], by["pack", "ours_runs", which]
        assert one["bitwise"] == {"repeat": True, "alone": True}
        assert each["bitwise"] == {"repeat": True}
        assert one["elements"] == 2 * sum(n * (n + 1) // 2 for n in lengths)
        assert set(one["ratio"]) == {"ours", "ours_runs"}
        assert 0 < one["check"]["of_bound"] <= 1 and one["check"]["sampled_error"] < 0.01
        assert ("new_pack_host_us" in one) == (which == "bwd") and "table_us" not in one
    told = by["pack", "ours_pack", "bwd"]
    assert told["sequences"] == len(lengths) and told["new_pack_host_us"] > 0
    assert {"_attend_padded", "_differentiate_padded"} == set(launches)


@pytest.mark.parametrize("which", ["fwd", "bwd"])
def test_a_launch_for_each_sequence_is_not_one_for_all(which, launches):
    """The same bytes by another way, which is open while the call lasts only."""
    problem = Problem(CASE, "cpu")
    t = stand_ins.inputs(problem)
    each = rivals.RIVALS["ours_runs"].start[which](problem)(t)
    assert not launches and attention_op.is_one_launch(t.q)
    one = rivals.RIVALS["ours_pack"].start[which](problem)(t)
    assert launches == [{"fwd": "_attend_padded", "bwd": "_differentiate_padded"}[which]]
    assert all(same_bytes(x, y) for x, y in zip(one, each, strict=True))


def test_sequences_with_other_bytes_than_alone_are_seen(monkeypatch):
    out = {name: rivals.RIVALS[name] for name in ("ours", "ours_pack")}
    out["ours_runs"] = stand_ins.system("ours_runs", stand_ins.right, promised=True, ordered=True)
    monkeypatch.setattr(bench, "RIVALS", out)
    bodies, _ = run([CASE], options(OURS, passes=["bwd"]))
    body = next(b for b in bodies if b["system"] == "ours_pack")
    assert body["bitwise"] == {"repeat": True, "alone": False}


@pytest.mark.parametrize("which", ["fwd", "bwd"])
@pytest.mark.parametrize(
    ("name", "mask", "why"),
    [
        *((name, "document", "packed seq") for name in ("ours_pack", "ours_runs", "fa4_varlen")),
        ("fa4", "pack", "fa4_varlen|cannot be imported"),
        ("flex", "pack", "FA4's varlen kernels alone"),
        ("fa4_varlen", "pack", "cannot be imported|needs a CUDA GPU"),
    ],
)
def test_rivals_of_packs_take_nothing_else_and_others_no_pack(name, mask, why, which):
    with pytest.raises(Absent, match=why):
        rivals.RIVALS[name].start[which](Problem(stand_ins.case(mask), "cpu"))
