"""The soak of attention: its cases, their junk, its command and its small cases."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from cute_kernels.sparse_attn import config, launch
from perf.attention import sanitized, soak_cases
from perf.attention.soak_cases import Case
from perf.core import record, soak
from tests.perf.core.soaked import Stub, flips, options, settings_are_kept

__all__ = ["settings_are_kept"]

TINY = Case("causal", 64, heads=2, kv_heads=1, s=130, batch=1, repeats=20)


@pytest.mark.parametrize(
    ("case", "repeats"),
    [(TINY, 20), (dataclasses.replace(TINY, mask=soak_cases.PACK, s=1300), 2)],
)
def test_the_kernels_of_the_cpu_hold(case, repeats):
    body = soak.soak(case, options(repeats=repeats))
    assert body["status"] == "ok", body
    assert body["differing_bytes"] == dict.fromkeys(TINY.outputs, 0)
    assert body["graph"]["differing_bytes"] == dict.fromkeys(TINY.outputs, 0)
    assert (body["repeats"], body["graph"]["replays"]) == (repeats, repeats)
    assert (body["differing_results"], body["expected_to_differ"]) == (0, False)


def test_junk_fills_outputs_and_workspace():
    device = torch.device("cpu")
    before = launch.allocator, launch.plan_workspace
    with soak.poisoned(launch, 0xFF):
        out = launch.allocator((3, 4), torch.bfloat16, device)()
        workspace = launch.plan_workspace((1, 2, 3), 64, 64, 1, device)()
    assert out.isnan().all() and workspace.total.isnan().all()
    assert (workspace.semaphore == -1).all() and (workspace.counter == -1).all()
    assert before == (launch.allocator, launch.plan_workspace)


def test_records_are_written_and_the_budget_is_kept(tmp_path):
    path, clock = tmp_path / "soak.jsonl", itertools.count(0, 10)
    todo = [TINY, dataclasses.replace(TINY, ordered=False), dataclasses.replace(TINY, dim=128)]
    run = options(repeats=2, budget_s=150.0, now=lambda: float(next(clock)))
    out = list(soak.measure("attention", todo, run, output=path, commit="abc123"))
    assert out[-1] == f"not run, the time is spent: {todo[2].label}"
    records = record.read(path)
    assert [r["shape"] for r in records] == [case.label for case in todo[:2]]
    assert {(r["kind"], r["kernel"], r["commit"]) for r in records} == {
        ("soak", "attention", "abc123")
    }
    assert all(
        {"gpu", "versions", "source", "seconds", "ctas", "graph"} <= r.keys() for r in records
    )
    assert [r["system"] for r in records] == ["ours", "ours_unordered"]


def test_the_small_cases_for_the_sanitizer_run(monkeypatch):
    cases = sanitized.cases()
    assert {c.dim for c in cases} == set(config.HEAD_DIMS)
    assert {c.mask for c in cases} == {"full", "causal", "random"}
    assert {c.ordered for c in cases} == {True, False}
    monkeypatch.setattr(sanitized, "cases", lambda: cases[:4])
    sanitized.run("cpu")
    monkeypatch.setattr(sanitized, "cases", lambda: [Stub(flips(2, every=2))])
    with pytest.raises(AssertionError, match="stub: the second call gave other bytes"):
        sanitized.run("cpu")
