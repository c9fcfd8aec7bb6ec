"""The soak of attention: its cases, their junk, its command and its small cases."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from typer.testing import CliRunner

from cute_kernels.sparse_attn import config, launch, masks
from perf.__main__ import app
from perf.attention import sanitized, soak_cases
from perf.attention.soak_cases import Case
from perf.core import record, soak
from perf.core.watch import Lost
from tests.perf.core.soaked import Stub, body_of, flips, options, settings_are_kept

__all__ = ["settings_are_kept"]

TINY = Case("causal", 64, heads=2, kv_heads=1, s=130, batch=1, repeats=20)


def test_the_kernels_of_the_cpu_hold():
    body = soak.soak(TINY, options())
    assert body["status"] == "ok", body
    assert body["differing_bytes"] == dict.fromkeys(TINY.outputs, 0)
    assert body["graph"]["differing_bytes"] == dict.fromkeys(TINY.outputs, 0)
    assert (body["repeats"], body["graph"]["replays"]) == (20, 20)
    assert (body["differing_results"], body["expected_to_differ"]) == (0, False)
    assert body["seconds"] >= 0 and body["shape"] == "causal/s130/d64/h2/kv1/bf16"
    assert "20 repeats, 0 differing bytes; 20 replays, 0;" in soak.line(body)


def test_packs_hold_on_the_cpu():
    body = soak.soak(dataclasses.replace(TINY, mask=soak_cases.PACK, s=1300), options(repeats=2))
    assert body["status"] == "ok", body
    assert body["differing_bytes"] == dict.fromkeys(TINY.outputs, 0)


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


def test_the_suite_has_every_configuration():
    out = soak_cases.suite()
    packs = [case for case in out if case.mask == soak_cases.PACK]
    assert {c.dim for c in packs} == set(config.HEAD_DIMS) and len(packs) == len(config.HEAD_DIMS)
    ordered = [case for case in out if case.ordered and case not in packs]
    sizes = {(c.dim, c.dtype, c.kv_heads < c.heads, c.mask) for c in ordered}
    dims, dtypes = config.HEAD_DIMS, config.DTYPE_NAMES.values()
    masks_of = soak_cases.MASKS
    assert sizes == set(itertools.product(dims, dtypes, (False, True), masks_of))
    assert len({case.label for case in out}) == len(out)
    assert sorted(c.repeats for c in out)[-11:] == [1_000, *[10_000] * (5 + len(packs))]
    assert sum(c.softcap > 0 for c in ordered) == 1
    assert {(c.dim, c.kv_heads) for c in out if not c.ordered} == {
        (dim, kv_heads) for dim in dims for _, kv_heads in soak_cases.HEADS
    }
    for case in out:
        assert case.batch * case.kv_heads * -(-case.s // 128) > 132
    assert [c.label for c in soak_cases.suite("causal/s1100/d64,cap")] == [
        c.label for c in out if "causal/s1100/d64" in c.label or "cap" in c.label
    ]
    assert soak_cases.suite("nose") == []


def test_the_masks_have_every_form():
    forms = {
        mask: masks.lower(Case(mask, 64, s=300)._mask("cpu")).form for mask in soak_cases.MASKS
    }
    assert forms == {
        "full": "none",
        "causal": "band",
        "window": "band",
        "document": "bits",
        "random": "bits",
    }


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs the command with `bodies` in place of what is measured."""

    def invoke(bodies, *arguments):
        def measured(kernel, todo, options, **_):
            yield from bodies(todo)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(soak, "on_the_card", lambda repeats, budget: options())
        monkeypatch.setattr(soak, "measure", measured)
        return CliRunner().invoke(app, ["soak", "attention", *arguments])

    return invoke


def test_the_command_fails_with_its_records(command):
    def bodies(todo, dq=0):
        yield "a line"
        for case in todo[:1]:
            yield case.items() | body_of(False, dq)

    cli_result = command(bodies, "--only", "unordered")
    assert cli_result.exit_code == 1
    assert "no control differed" in " ".join(cli_result.output.splitlines()[-2:])
    cli_result = command(lambda todo: bodies(todo, 7), "--only", "unordered")
    assert cli_result.exit_code == 0, cli_result.output
    assert cli_result.output.splitlines()[0] == "a line"
    assert command(bodies, "--only", "nose").exit_code == 2

    def lost(todo):
        yield "a line"
        raise Lost("illegal memory access")

    cli_result = command(lost)
    assert cli_result.exit_code == 1
    assert (
        cli_result.output.splitlines()[-1] == "perf soak: the device is lost: illegal memory access"
    )


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
