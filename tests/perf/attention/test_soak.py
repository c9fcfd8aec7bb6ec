"""The soak loop on a CPU: what it disturbs, what it counts, and that it sees what differs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os

import pytest
import torch
from typer.testing import CliRunner

from cute_kernels import settings
from cute_kernels.sparse_attn import config, launch, masks
from perf.__main__ import app
from perf.attention import sanitized, soak_cases
from perf.attention.soak_cases import Case
from perf.core import record, soak
from perf.core.watch import Lost

TINY = Case("causal", 64, heads=2, kv_heads=1, s=130, batch=1, repeats=20)
OUTPUTS = TINY.outputs
SHAPES = ((3, 4), (4,), (5, 2), (2, 2), (2, 2))


@pytest.fixture(autouse=True)
def settings_are_kept(monkeypatch):
    """As outside of tests: what is read once is kept until `reload`."""
    monkeypatch.setattr(settings, "get", functools.cache(settings.get))


def captured(call):
    """As a graph: static results, and a replay that writes them."""
    held = call()

    def again():
        for t, new in zip(held, call(), strict=True):
            t.copy_(new)

    return held, again


def options(**more) -> soak.Options:
    given = {"device": "cpu", "finish": lambda: None, "capture": captured} | more
    return soak.Options(**given)


class Stub:
    """A case whose calls give drawn tensors; `change(number, tensors)` is the bug."""

    repeats, label, outputs, launcher = 40, "stub", OUTPUTS, launch

    def __init__(self, change=None, ordered: bool = True):
        self.change, self.ordered = change, ordered
        self.may_differ = () if ordered else ("dq",)
        generator = torch.Generator().manual_seed(0)
        self.right = [torch.randn(shape, generator=generator) for shape in SHAPES]
        self.caps: list[int] = []

    def items(self) -> dict:
        return {"shape": self.label}

    def started(self, device: str):
        numbers = itertools.count()

        def call():
            self.caps.append(settings.max_ctas())
            found = tuple(t.clone() for t in self.right)
            if self.change:
                self.change(next(numbers), found)
            return found

        return call


def flips(output: int, every: int = 7):
    """One bit of one output in some calls, never in the first."""

    def change(number: int, found) -> None:
        if number % every == every - 1:
            found[output].view(torch.int32).view(-1)[-1] ^= 1

    return change


def zero_of_the_other_sign(number: int, found) -> None:
    found[2].view(-1)[0] = -0.0 if number else 0.0


def test_the_kernels_of_the_cpu_hold():
    body = soak.soak(TINY, options())
    assert body["status"] == "ok", body
    assert body["differing_bytes"] == dict.fromkeys(OUTPUTS, 0)
    assert body["graph"]["differing_bytes"] == dict.fromkeys(OUTPUTS, 0)
    assert (body["repeats"], body["graph"]["replays"]) == (20, 20)
    assert (body["differing_results"], body["expected_to_differ"]) == (0, False)
    assert body["seconds"] >= 0 and body["shape"] == "causal/s130/d64/h2/kv1/bf16"
    assert "20 repeats, 0 differing bytes; 20 replays, 0;" in soak.line(body)


@pytest.mark.parametrize("output", range(5), ids=OUTPUTS)
def test_one_bit_of_one_output_is_seen(output):
    body = soak.soak(Stub(flips(output)), options(capture=None))
    assert body["status"] == "failed" and "graph" not in body
    name = OUTPUTS[output]
    # 41 calls, the first of which is the result to compare with: 5 are changed.
    assert body["differing_bytes"] == dict.fromkeys(OUTPUTS, 0) | {name: 5}
    assert body["why"] == f"5 bytes of {name} differ in 5 repeats"
    assert soak.differed(body)


def test_a_zero_of_the_other_sign_is_seen():
    body = soak.soak(Stub(zero_of_the_other_sign), options())
    assert body["differing_bytes"]["dq"] == 40 and body["status"] == "failed"


def test_a_replay_that_differs_is_seen():
    def stale(call):
        held = call()
        held[1].view(torch.int32)[0] ^= 1 << 30
        return held, lambda: None

    body = soak.soak(Stub(), options(capture=stale))
    assert body["differing_results"] == 0 and body["status"] == "failed"
    assert body["why"] == "40 bytes of lse differ in 40 graph replays"


@pytest.mark.parametrize(
    ("output", "status"), [(0, "failed"), (1, "failed"), (2, "ok"), (3, "failed"), (4, "failed")]
)
def test_a_control_may_differ_in_dq_alone(output, status):
    body = soak.soak(Stub(flips(output), ordered=False), options(capture=None))
    assert body["expected_to_differ"] and body["status"] == status
    assert soak.differed(body)


@pytest.mark.parametrize("value", [float("nan"), 1.0])
def test_results_that_cannot_tell_are_refused(value):
    body = soak.soak(Stub(lambda number, found: found[3].fill_(value)), options())
    assert body["status"] == "failed" and "dk of the first call" in body["why"]


def test_an_error_is_recorded():
    def broken(number, found):
        raise RuntimeError("no such tile")

    body = soak.soak(Stub(broken), options())
    assert (body["status"], body["why"]) == ("failed", "RuntimeError: no such tile")
    assert "FAILED: RuntimeError" in soak.line(body)


def test_every_cap_meets_other_work_and_junk(monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", "3")
    settings.reload()
    case, seen, work = Stub(), [], []
    true = soak.poisoned
    monkeypatch.setattr(soak, "poisoned", lambda at, fill: seen.append(fill) or true(at, fill))
    count = 16 * soak.POISON_EVERY * soak.BUSY_EVERY
    body = soak.soak(case, options(repeats=count, capture=None, busy=lambda: work.append(1)))
    assert case.caps[0] == 3 and case.caps[1:17] == list(soak.CTAS) == body["ctas"]
    assert len(set(soak.CTAS)) == 16
    assert len(seen) == body["poisoned"] == count / soak.POISON_EVERY
    assert set(seen) == set(soak.FILLS)
    both = {c for i, c in enumerate(case.caps[1:]) if i % 21 == 0}
    assert both == set(soak.CTAS) and len(work) == count / soak.BUSY_EVERY
    assert settings.max_ctas() == 3 and os.environ["CUTE_KERNELS_MAX_CTAS"] == "3"


def test_junk_fills_outputs_and_workspace():
    device = torch.device("cpu")
    before = launch.empty, launch.workspace
    with soak.poisoned(launch, 0xFF):
        made = launch.empty((3, 4), torch.bfloat16, device)
        held = launch.workspace(1, 2, 3, 64, 64, device)
    assert made.isnan().all() and held.total.isnan().all()
    assert (held.semaphore == -1).all() and (held.counter == -1).all()
    assert before == (launch.empty, launch.workspace)


def test_records_are_written_and_the_budget_is_kept(tmp_path):
    path, clock = tmp_path / "soak.jsonl", itertools.count(0, 10)
    todo = [TINY, dataclasses.replace(TINY, ordered=False), dataclasses.replace(TINY, dim=128)]
    run = options(repeats=2, budget_s=150.0, now=lambda: float(next(clock)))
    found = list(soak.measure("attention", todo, run, output=path, commit="abc123"))
    assert found[-1] == f"not run, the time is spent: {todo[2].label}"
    kept = record.read(path)
    assert [r["shape"] for r in kept] == [case.label for case in todo[:2]]
    assert {(r["kind"], r["kernel"], r["commit"]) for r in kept} == {
        ("soak", "attention", "abc123")
    }
    assert all({"gpu", "versions", "source", "seconds", "ctas", "graph"} <= r.keys() for r in kept)
    assert [r["system"] for r in kept] == ["ours", "ours_unordered"]


def body_of(ordered: bool, dq: int, status: str = "ok") -> dict:
    counts = dict.fromkeys(OUTPUTS, 0) | {"dq": dq}
    return {"status": status, "expected_to_differ": not ordered, "differing_bytes": counts}


@pytest.mark.parametrize(
    ("bodies", "held", "words"),
    [
        ([body_of(True, 0), body_of(False, 0), body_of(False, 9)], True, "1 controls differed"),
        ([body_of(True, 0), body_of(False, 0)], False, "no control differed"),
        ([body_of(True, 0)], True, "without a control"),
        ([body_of(True, 4, "failed"), body_of(False, 9)], False, "1 failed"),
    ],
)
def test_a_soak_whose_controls_never_differ_does_not_hold(bodies, held, words):
    text, found = soak.verdict(bodies)
    assert found == held and words in text


def test_the_suite_has_every_configuration():
    found = soak_cases.suite()
    ordered = [case for case in found if case.ordered]
    sizes = {(c.dim, c.dtype, c.kv_heads < c.heads, c.mask) for c in ordered}
    dims, dtypes = config.HEAD_DIMS, config.DTYPE_NAMES.values()
    masks_of = soak_cases.MASKS
    assert sizes == set(itertools.product(dims, dtypes, (False, True), masks_of))
    assert len({case.label for case in found}) == len(found)
    assert sorted(c.repeats for c in found)[-4:] == [1_000, 10_000, 10_000, 10_000]
    assert sum(c.softcap > 0 for c in ordered) == 1
    assert {(c.dim, c.kv_heads) for c in found if not c.ordered} == {
        (dim, kv_heads) for dim in dims for _, kv_heads in soak_cases.HEADS
    }
    for case in found:
        assert case.batch * case.kv_heads * -(-case.s // 128) > 132
    assert [c.label for c in soak_cases.suite("causal/s1100/d64,cap")] == [
        c.label for c in found if "causal/s1100/d64" in c.label or "cap" in c.label
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

    done = command(bodies, "--only", "unordered")
    assert done.exit_code == 1 and "no control differed" in done.output.splitlines()[-1]
    done = command(lambda todo: bodies(todo, 7), "--only", "unordered")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[0] == "a line"
    assert command(bodies, "--only", "nose").exit_code == 2

    def lost(todo):
        yield "a line"
        raise Lost("illegal memory access")

    done = command(lost)
    assert done.exit_code == 1
    assert done.output.splitlines()[-1] == "perf soak: the device is lost: illegal memory access"


def test_the_small_cases_for_the_sanitizer_run(monkeypatch):
    found = sanitized.cases()
    assert {c.dim for c in found} == set(config.HEAD_DIMS)
    assert {c.mask for c in found} == {"full", "causal", "random"}
    assert {c.ordered for c in found} == {True, False}
    monkeypatch.setattr(sanitized, "cases", lambda: found[:4])
    sanitized.run("cpu")
    monkeypatch.setattr(sanitized, "cases", lambda: [Stub(flips(2, every=2))])
    with pytest.raises(AssertionError, match="stub: the second call gave other bytes"):
        sanitized.run("cpu")
