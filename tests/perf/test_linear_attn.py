"""The bench of linear attention: cases, float64 results, rivals in place of ours, verdicts."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from triton.runtime import _async_compile
from triton.runtime.autotuner import Autotuner, Config

from perf.core.rival import Absent
from perf.linear_attn import cases, page, rivals
from perf.linear_attn.rivals import RIVALS, SUITE, WRONG, check, tuned_together
from tests.perf.records import bench


def tiny(case: cases.Case) -> cases.Case:
    """The case at a size that a CPU runs: a ragged chunk, as many v heads a k head."""
    return dataclasses.replace(
        case, rows=70, heads=2, v_heads=2 * case.v_heads // case.heads, size=16
    )


TINY = list(dict.fromkeys(tiny(case) for case in cases.ALL if case.op != cases.DECODE))
each = pytest.mark.parametrize("case", TINY, ids=lambda case: f"{case.product} {case.label}")


def checked(case: cases.Case, change=None) -> dict:
    """`check` of ours, whose results ``change`` alters."""
    ours = RIVALS["ours"]

    def start(size):
        call = ours.start[case.product](size)
        return lambda t: tuple(change(out, size) if change else out for out in call(t))

    changed = dataclasses.replace(ours, start={case.product: start})
    return check(changed, start(case), case, case.inputs(0, "cpu"))


def test_a_case_has_one_name_and_its_own_targets():
    assert len(set(page.CASES)) == len(cases.ALL)
    products = {product for product, _ in page.CASES}
    assert {product for t in page.TARGETS for product, _ in t.cases} == products
    assert products <= set(RIVALS["ours"].start) and products <= set(RIVALS["fla"].start)


def test_steps_have_the_bytes_of_one_pass(monkeypatch):
    step = dataclasses.replace(tiny(cases.LISTS["decode"][0]), batch=2, rows=1)
    ours = RIVALS["ours"]
    call, operands = ours.start[step.product](step), step.inputs(0, "cpu")
    assert call(operands) == () and call(operands) == ()
    assert check(ours, call, step, operands) == {"bitwise": {"one pass": True}}
    behind = rivals._cache_behind
    less = lambda rows: behind({name: t[:, :-1] for name, t in rows.items()})  # noqa: E731
    monkeypatch.setattr(rivals, "_cache_behind", less)
    assert check(ours, call, step, operands) == {"bitwise": {"one pass": False}}


@each
def test_ours_is_right_and_repeats(case):
    body = checked(case)
    names = [n for n, t in case.inputs(0, "cpu").items() if t.requires_grad]
    assert list(body["check"]["errors"]) == (["out"] if case.direction == "fwd" else names)
    assert body["check"]["relative_error"] < 0.01 and body["bitwise"] == {"repeat": True}


@pytest.mark.parametrize("case", [TINY[1], TINY[4], TINY[-1]], ids=lambda case: case.product)
def test_a_wrong_result_is_refused(case):
    with pytest.raises(ValueError, match="errors against float64"):
        checked(case, lambda out, size: out * (1 + 1.1 * WRONG))
    with pytest.raises(ValueError, match="errors against float64"):
        checked(case, lambda out, size: out * float("nan"))


def test_errors_are_of_the_first_rows_and_heads_alone():
    """Float64 needs no more of a long case, and another sequence has no part in it."""
    case = dataclasses.replace(tiny(cases.Case("delta", "fwd", 2, 8192)), rows=520, v_heads=6)

    def spoil(out, size):
        assert (size.batch, size.rows) in ((2, 520), (1, cases.CHECKED_ROWS))
        out[:, :, 3:] = 0  # v heads of the second k head
        return out

    body = checked(case, spoil)
    assert body["check"]["rows"] == cases.CHECKED_ROWS and body["bitwise"]["repeat"]


@pytest.mark.parametrize("case", [TINY[0], TINY[5]], ids=lambda case: case.product)
def test_a_copy_has_no_result_and_no_delta_rule(case):
    rival = RIVALS["copy"]
    call = rival.start[case.product](case)
    assert check(rival, call, case, case.inputs(0, "cpu")) == {"bitwise": {}}
    assert set(rival.start) == {*SUITE.ops, "decode fwd"}


def test_without_fla_its_rows_are_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(Absent, match="fla"):
        RIVALS["fla"].start["delta fwd"](TINY[-2])(None)


def test_verdicts():
    shape = "1x8192 16/32"

    def records(us: float, error: float) -> list[dict]:
        def errors(dq: float) -> dict:
            return {"check": {"errors": {"q": dq, "g": 0.01}}}

        return [
            bench("linear_attn", "delta bwd", shape, 1.0, {"fla": us}, **errors(error)),
            bench("linear_attn", "delta bwd", shape, us, {}, system="fla", **errors(0.002)),
            bench("linear_attn", "conv fwd", shape, 1.0, {"copy": 0.85}),
        ]

    def verdicts(*args) -> dict[str, list[str]]:
        return {text: rest[:2] for text, *rest in page.target_rows(records(*args))}

    faster, closer = "delta bwd: at least 1.30x fla", "no result farther from float64 than fla's"
    good, bad = verdicts(1.3, 0.0019), verdicts(1.29, 0.0021)
    assert good[faster] == ["1.30x to 1.30x, 1 sizes", "met"] and bad[faster][1] == "missed"
    assert good[f"delta bwd: {closer}"] == ["1.00x to 1.00x, 1 sizes", "met"]
    assert bad[f"delta bwd: {closer}"][1] == "missed"
    copy = "conv fwd: at least 85% of a copy of as many bytes"
    assert good[copy] == ["85% to 85%, 1 sizes", "met"]
    assert good["conv bwd" + copy[8:]] == ["not run", "not run"]


def test_a_tuner_compiles_all_configurations_before_it_times_one():
    """A stand-in for a kernel: what is compiled in a pool, and what is launched."""
    events = []

    class Kernel:
        fn = staticmethod(lambda x: None)

        def run(self, *args, grid, warmup, num_warps, **kwargs):
            mode = _async_compile.active_mode.get()
            events.append(("compile" if warmup and mode is not None else "launch", num_warps))

    tuner = Autotuner(
        Kernel(), ["x"], [Config({}, num_warps=n) for n in (1, 2, 4)], ["x"], None, None,
        do_bench=lambda call, quantiles: (call(), [1.0] * 3)[1],
    )  # fmt: skip
    with tuned_together(workers=2):
        tuner.run(3, grid=(1,), warmup=False)
        tuner.run(3, grid=(1,), warmup=False)
    words = ["compile"] * 3 + ["launch"] * 5
    assert [word for word, _ in events] == words
    assert [warps for _, warps in events[:3]] == [1, 2, 4]
    tuner.run(4, grid=(1,), warmup=False)
    assert [word for word, _ in events[8:]] == ["launch"] * 4
