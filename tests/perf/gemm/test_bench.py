"""Cases, floors and one whole case on the CPU, with our own CPU backend as a rival."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace

import pytest
import torch

from perf import report
from perf.core import passes, record, timing
from perf.core.rival import Rival, by_name, module
from perf.gemm import bench, rivals, targets
from perf.gemm.cases import Case
from tests.perf.core.clocks import HostClock
from tests.perf.gemm import products

CEILINGS = {"mm_tflops": 800.0, "copy_gbs": 4300.0}


def test_the_floor_is_the_larger_of_compute_and_traffic():
    large, thin = (Case("fwd", "qkv", m, 4096, 12288) for m in (4096, 16))
    assert large.flops == 2 * 4096 * 4096 * 12288
    assert large.work.floor_us(CEILINGS) == pytest.approx(large.flops / 800e12 * 1e6)
    assert thin.bytes == 2 * (16 * 4096 + 12288 * 4096 + 16 * 12288)
    assert thin.work.floor_us(CEILINGS) == pytest.approx(thin.bytes / 4300e9 * 1e6)
    assert Case("dw", "qkv", 16, 32, 64).bytes == 2 * (16 * 64 + 16 * 32) + 8 * 64 * 32


@pytest.mark.parametrize("product", targets.PRODUCTS)
def test_inputs_are_random_and_each_set_is_another(product):
    one, two = (products.inputs(product, seed) for seed in (0, 1))
    names = {"fwd": {"x", "w"}, "dx": {"dy", "w"}, "dw": {"x", "dy", "main_grad"}}
    assert set(one) == names[product]
    for name, value in one.items():
        assert not torch.equal(value, two[name])
        assert (value != 0).float().mean() > 0.99
    assert one.get("main_grad", torch.zeros(())).dtype == torch.float32


def raises(t):
    raise RuntimeError("no such tile")


def rival(name: str, call, **options) -> Rival:
    """A rival of all products; ``call``: product -> its call."""
    return Rival(name, {p: lambda case: call(case.product) for p in targets.PRODUCTS}, **options)


def test_a_whole_run_has_a_record_of_each_case_and_rival(monkeypatch, tmp_path):
    """Rivals for a CPU: ours, one that is right, wrong, raises, is missing, has its own process."""
    monkeypatch.setattr(timing, "CudaClock", HostClock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "ceilings", lambda: CEILINGS)
    monkeypatch.setattr(bench, "HOST_SIZE", 16)
    monkeypatch.setattr(bench, "HOST_LABEL", products.case("fwd").label)
    timed = {"status": "ok", "bitwise": {}, "median_us": 123.0, "p10_us": 122.0, "p90_us": 124.0}
    monkeypatch.setattr(passes, "own_process", lambda rival, todo: {c: dict(timed) for c in todo})
    rivals_here = by_name(
        rivals.RIVALS["ours"],
        rival("honest", products.honest, promised=True, op=None),
        rival("wrong", products.drops_the_last_k),
        rival("raises", lambda _: raises),
        rival("missing", lambda _: module("no_such_package")),
        Rival("apart", {}, environment=("A=1",)),
    )
    suite, path = replace(bench.SUITE, rivals=rivals_here), tmp_path / "gemm.jsonl"
    todo, names = [products.case(which) for which in targets.PRODUCTS], list(rivals_here)
    options = {"output": path, "rounds": 50, "commit": "abc", "device": "cpu"}
    bodies = list(passes.bench(suite, todo, names, **options))
    assert record.read(path) == json.loads(json.dumps(bodies))
    assert [b["system"] for b in bodies] == names * 3 and all(map(passes.line, bodies))
    assert [b["status"] for b in bodies] == ["ok", "ok", "failed", "failed", "absent", "ok"] * 3
    for first in range(0, len(bodies), len(names)):
        ours, honest, wrong, broken, missing, apart = bodies[first : first + len(names)]
        for body in (ours, honest):
            assert all(body["bitwise"].values()) and body["samples"] == 50, body
            assert body["p10_us"] <= body["median_us"] <= body["p90_us"]
            assert body["floor_fraction"] == pytest.approx(body["floor_us"] / body["median_us"])
            assert body["cold_l2"]["sets"] >= 2 and body["ceilings"] == CEILINGS
        assert ours["ratio"]["apart"] == pytest.approx(123.0 / ours["median_us"])
        assert apart["ratio"]["ours"] == pytest.approx(ours["median_us"] / 123.0)
        assert ours["contract_id"] and ours["commit"] == "abc" and "contract_id" not in honest
        assert broken["why"] == "RuntimeError: no such tile"
        assert "no_such_package" in missing["why"]
        assert "median_us" not in wrong and "median_us" not in broken
        assert ("host_us" in ours) == (ours["product"] == "fwd") == ("host_us" in honest)
    (checked, *_) = passes.bench(suite, todo, ["ours"], **(options | {"rounds": 0}))
    assert checked["status"] == "ok" and "median_us" not in checked and passes.line(checked)
    assert report.status(bodies, []) == report.status([], []), "what ran on a CPU is on no page"


@pytest.mark.parametrize("written", [True, False])
def test_a_rival_of_other_variables_is_this_command_again(written, monkeypatch):
    """Its records are those of ``program`` there, or why there are none."""
    case, starved = products.case("fwd"), rivals.RIVALS["cublas_starved"]

    def run(command, **options):
        assert command[: 1 + len(starved.environment)] == ["env", *starved.environment]
        assert command[-4:-1] == ["--rivals", "cublas", "-o"] and sys.argv[1:] == command[-6:-4]
        if written:
            item = case.items() | {"system": "cublas", "status": "ok", "median_us": 7.0}
            record.append(command[-1], item | {"kind": "bench", "schema": record.SCHEMA})
        return types.SimpleNamespace(returncode=3, stdout="its last", stderr=" words")

    monkeypatch.setattr(passes.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["perf", "bench", "gemm"])
    body = passes.own_process(starved, [case])[case]
    assert body["own_process"] == list(starved.environment)
    failed = "its process ended with 3: its last words"
    assert body.get("median_us") == (7.0 if written else None)
    assert body.get("why") == (None if written else failed)


def test_host_costs_are_taken_with_and_without_a_graph(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    recorded = []

    def call(t):
        recorded.append(torch.is_inference_mode_enabled())
        assert t["x"].requires_grad is not torch.is_inference_mode_enabled()
        return t["x"]

    costs = bench.host_costs(call, products.case("fwd"), "cpu")
    assert set(costs) == {"grad", "inference"}
    assert True in recorded and False in recorded
    assert all(cost > 0 for cost in costs.values())
