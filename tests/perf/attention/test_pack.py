"""Packed sequences: whole runs on the CPU, FA4's varlen interface, and what a new pack costs."""

from __future__ import annotations

import itertools
import sys
import types

import pytest
import torch

from cute_kernels.sparse_attn import launch, lowering
from cute_kernels.sparse_attn import op as attention_op
from cute_kernels.sparse_attn.varlen import layout
from perf.attention import bench, check, fa4, flex, pack, rivals, targets
from perf.attention.cases import Case, Problem, drawn_lengths
from perf.core.bits import same_bytes
from perf.core.rival import Absent, Rival
from tests.oracles import sparse_attn as reference
from tests.perf.attention import stand_ins
from tests.perf.attention.runs import options, run
from tests.perf.core.clocks import FakeClock

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
    bodies, lines = run(todo, options([*OURS, "ours_unordered"], wanted=wanted))
    by = {(b["mask"], b["system"], b["pass"]): b for b in bodies}
    assert set(by) == {
        *(("causal", "ours", which) for which in ("fwd", "bwd")),
        ("causal", "ours_unordered", "bwd"),
        *(("pack", name, which) for name in OURS for which in ("fwd", "bwd")),
    }
    assert {b["status"] for b in bodies} == {"ok"}
    # Ours is checked first, on the masks where it is measured.
    assert [(x.split()[0], "pack/" in x) for x in lines if " fwd " in x] == [
        ("ours", False),
        *((name, True) for name in OURS),
    ]
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
    assert f"{len(lengths)} sequences; the host takes" in bench.line(told)
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
    assert "NOT THE BYTES OF EACH SEQUENCE ALONE" in bench.line(body)


def test_one_round_is_queued_at_a_time_beside_a_launch_for_each_sequence():
    """More would not fit the queue of launches, and then gaps count."""
    sleeps = {}
    for names in (["ours", "ours_pack"], OURS):
        clock = FakeClock()
        run([CASE], options(names, passes=["fwd"], clock=clock, rounds=10))
        sleeps[len(names)] = len(clock.sleeps)
    assert sleeps == {2: 2, 3: 10}


def test_backwards_are_given_lse_in_their_own_layout():
    problem = Problem(stand_ins.case("pack", heads=4), "cpu")
    t = stand_ins.inputs(problem)
    assert t.pack_lse.shape == (1, 4, 512) and t.pack_lse.is_contiguous()
    _, lse = pack.in_rows(problem, t.out.flatten(0, 1), t.pack_lse[0])
    assert lse.equal(t.lse)
    assert t.nbytes == sum(x.nbytes for x in t)
    other = stand_ins.inputs(Problem(stand_ins.case("causal"), "cpu"))
    assert other.pack_lse is None and other.nbytes == sum(x.nbytes for x in other[:6])


@pytest.mark.parametrize("name", ["ours_pack", "ours_runs", "fa4_varlen"])
@pytest.mark.parametrize("which", ["fwd", "bwd"])
def test_rivals_of_packs_take_nothing_else(name, which):
    with pytest.raises(Absent, match="packed sequences alone"):
        rivals.RIVALS[name].start[which](Problem(stand_ins.case("document"), "cpu"))


def test_other_rivals_say_that_they_take_no_pack():
    problem = Problem(CASE, "cpu")
    for which in ("fwd", "bwd"):
        with pytest.raises(Absent, match="fa4_varlen"):
            fa4.arguments(problem, which)
    with pytest.raises(Absent, match="FA4's varlen kernels alone"):
        flex.rule(problem)
    with pytest.raises(Absent, match="fa4_varlen"):
        fa4.backward(problem, True)


class Varlen:
    """FA4's two passes as it documents them, 4.0.0b36, for causal packs; the calls are kept."""

    def __init__(self):
        self.calls = []

    def fwd(self, q, k, v, *, return_lse, **stated):
        assert return_lse
        parts = [
            reference.attention(*(x[None, at].double() for x in (q, k, v)), mask, scale=scale)
            for at, mask, scale in self._sequences(q, **stated)
        ]
        out = torch.cat([part[0][0] for part in parts]).to(q.dtype)
        return out, torch.cat([part[1][0] for part in parts], 1).float(), None, None, None

    def bwd(self, q, k, v, out, dout, lse, *, deterministic, **stated):
        assert not deterministic and out.shape == dout.shape == q.shape
        assert lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous()
        found = []
        for at, mask, scale in self._sequences(q, **stated):
            leaves = [x[None, at].double().requires_grad_() for x in (q, k, v)]
            with torch.enable_grad():
                got, sums = reference.attention(*leaves, mask, scale=scale)
            assert (sums[0] - lse[:, at]).abs().max() < 1e-2
            assert (got[0] - out[at]).abs().max() < 3e-2
            found.append(torch.autograd.grad(got, leaves, dout[None, at].double()))
        return tuple(
            torch.cat([x[0] for x in part]).to(q.dtype) for part in zip(*found, strict=True)
        )

    def _sequences(
        self,
        q,
        *,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
    ):
        assert q.dim() == 3 and q.is_contiguous() and causal
        assert cu_seqlens_q is cu_seqlens_k and cu_seqlens_q.dtype == torch.int32
        assert cu_seqlens_q.device == q.device
        offsets = cu_seqlens_q.tolist()
        longest = max(end - begin for begin, end in itertools.pairwise(offsets))
        assert type(max_seqlen_q) is int and max_seqlen_q == max_seqlen_k == longest
        assert offsets[0] == 0 and offsets[-1] == len(q)
        self.calls.append(offsets)
        for begin, end in itertools.pairwise(offsets):
            mask = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()[None, None]
            yield slice(begin, end), mask, softmax_scale


@pytest.fixture
def varlen(monkeypatch):
    out, module = Varlen(), types.ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd, module._flash_attn_bwd = out.fwd, out.bwd
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    monkeypatch.setattr(fa4, "_needs_cuda", lambda problem: None)
    return out


@pytest.mark.parametrize("which", ["fwd", "bwd"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fa4_is_given_the_pack(which, kv_heads, varlen):
    rival = rivals.RIVALS["fa4_varlen"]
    case = stand_ins.case("pack", heads=2, kv_heads=kv_heads)
    out = check.whole(rival, which, case, "cpu")
    assert check.wrong(rival, out) == "" and varlen.calls
    problem = Problem(case, "cpu")
    t = stand_ins.inputs(problem)
    got = rival.start[which](problem)(t)
    assert check.sampled(problem, which, t, got) < check.REL_ERROR
    assert varlen.calls[-1] == problem.offsets.tolist()


def test_fa4_serves_the_backwards_where_ours_is_wrong(varlen, monkeypatch):
    out = dict(rivals.RIVALS)
    out["ours"] = stand_ins.system("ours", lambda w: stand_ins.raises, promised=True)
    monkeypatch.setattr(bench, "RIVALS", out)
    names = ["ours", "ours_pack", "fa4_varlen"]
    bodies, _ = run([CASE], options(names, passes=["bwd"]))
    assert [b["status"] for b in bodies] == ["failed", "ok", "ok"]


def test_fa4_needs_its_package_and_a_gpu(monkeypatch):
    for start in (fa4.varlen_forward, fa4.varlen_backward):
        monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
        with pytest.raises(Absent, match=r"flash_attn.cute.interface cannot be imported"):
            start(Problem(CASE, "cpu"))
        module = types.ModuleType("flash_attn.cute.interface")
        monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
        with pytest.raises(Absent, match="needs a CUDA GPU"):
            start(Problem(CASE, "cpu"))


def test_what_a_new_pack_costs_has_its_schedules_and_nothing_else(monkeypatch):
    """Between two readings of the clock a layout, lists and an order are made, and no schedule.

    Where kernels read copies.
    """
    events, ticks = [], itertools.count()
    for owner, name in ((layout, "_layout"), (layout, "_on_host"), (lowering, "spt")):
        whole = getattr(owner, name)

        def told(*a, name=name, whole=whole, **k):
            events.append(name)
            return whole(*a, **k)

        monkeypatch.setattr(owner, name, told)
    lowering.cache.clear()

    def now() -> float:
        events.append("clock")
        return float(next(ticks))

    problem = Problem(CASE, "cpu")
    assert pack.new_pack_host_us(problem, lambda: events.append("finish"), now) == 1e6
    text = " ".join(events)
    parts = [part.split() for part in text.split("clock")]
    outside, timed = parts[::2], parts[1::2]
    assert len(timed) == 20 and all(part[-1] == "finish" for part in outside[:-1])
    assert all(part[0] == "_layout" and "spt" not in part for part in timed)
    assert "spt" in outside[0]


@pytest.fixture
def placing(monkeypatch):
    """This CPU's kernels read offsets where they lie; (clock, what was placed and when)."""
    clock, placed = FakeClock(), []

    def plan_varlen_tables(bounds, q, kv_heads=0, window=(None, None)):
        def run(bounds):
            placed.append((bounds.tolist(), tuple(q.shape), kv_heads, window))
            clock.now += 7.0 if kv_heads else 3.0

        return launch.VarlenTables(run, 0)

    monkeypatch.setattr(launch, "plan_varlen_tables", plan_varlen_tables)
    monkeypatch.setattr(attention_op, "reads_keys_on_device", lambda device: True)
    return clock, placed


def test_in_place_the_device_takes_what_its_kernel_takes(placing):
    clock, placed = placing
    problem = Problem(stand_ins.case("pack", heads=4, kv_heads=2), "cpu")
    facts = pack.facts(problem, {"ours_pack": 700.0}, lambda: None, clock)
    assert facts["table_us"] == 7.0 and facts["table_share"] == 0.01
    assert facts["sequences"] == len(problem.offsets) - 1 and facts["new_pack_host_us"] > 0
    own = [list(at) for at in itertools.pairwise(problem.offsets.tolist())]
    assert placed[-1] == (own, (1, 512, 4, 64), 2, (None, 0))


def test_in_place_a_new_pack_is_two_launches(placing):
    """Its own, between two readings of the clock: one for each pass."""
    clock, placed = placing
    problem, recorded = Problem(CASE, "cpu"), []

    def now() -> float:
        recorded.append(len(placed))
        return clock.now

    assert pack.new_pack_host_us(problem, lambda: None, now) == 10e6
    assert [b - a for a, b in zip(recorded[::2], recorded[1::2], strict=True)] == [2] * 20
    assert [each[2:] for each in placed[recorded[0] : recorded[1]]] == [
        (0, (None, None)),
        (1, (None, 0)),
    ]
    packs_timed = [str(placed[index][0]) for index in recorded[::2]]
    assert len(set(packs_timed)) == 20


def test_offsets_are_where_kernels_read_them(placing):
    """And on the CPU for a launch for each sequence."""
    problem = Problem(CASE, "cpu")
    one, each = (pack._options(problem, each)[0] for each in (False, True))
    assert one.dtype == torch.int32 and each.dtype == torch.int64 and one.equal(each.int())


def test_a_pack_that_reads_the_same_from_behind_is_refused():
    """It would be known already: here each has one token."""
    problem = Problem(Case("pack", 2, 64, 1, 1, 4), "cpu")
    with pytest.raises(ValueError, match="the same from the last to the first"):
        pack.new_pack_host_us(problem, lambda: None)


def test_a_failure_of_the_hosts_part_leaves_the_times(monkeypatch):
    def fails(*given):
        raise RuntimeError("no list")

    monkeypatch.setattr(pack, "facts", fails)
    bodies, _ = run([CASE], options(["ours_pack"], passes=["bwd"]))
    assert bodies[0]["new_pack"] == {"status": "failed", "why": "RuntimeError: no list"}
    assert bodies[0]["status"] == "ok" and bodies[0]["median_us"] > 0


def test_the_rivals_of_packs_are_known():
    assert set(targets.PACK_RIVALS) <= set(rivals.RIVALS)
    ours = [rivals.RIVALS[name] for name in ("ours_pack", "ours_runs")]
    assert all(isinstance(x, Rival) and x.promised and x.ordered for x in ours)
