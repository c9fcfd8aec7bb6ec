"""Cases, floors and one whole case on the CPU, with our own CPU backend as a rival."""

from __future__ import annotations

import json
import types

import pytest
import torch

from perf import report
from perf.core import record, timing
from perf.core.rival import Rival, module, started
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


@pytest.fixture
def stand_ins(monkeypatch):
    """Rivals for a CPU: ours, one that is wrong, one that raises."""

    def raises(t):
        raise RuntimeError("no such tile")

    def everywhere(call):
        return {which: lambda case: call(case.product) for which in targets.PRODUCTS}

    known = {
        "ours": rivals.RIVALS["ours"],
        "honest": Rival("honest", everywhere(products.honest), promised=True),
        "wrong": Rival("wrong", everywhere(products.drops_the_last_k)),
        "raises": Rival("raises", everywhere(lambda _: raises)),
    }
    monkeypatch.setattr(bench, "RIVALS", known)
    return known


@pytest.mark.parametrize("product", targets.PRODUCTS)
def test_a_case_checks_all_and_times_the_right_ones(product, stand_ins):
    case = products.case(product)
    out, absent = started(bench.RIVALS, list(stand_ins), case.product, case)
    assert not absent
    bodies = bench.run_case(
        case,
        out,
        rounds=50,
        device="cpu",
        ceilings=CEILINGS,
        clock=HostClock(),
    )
    for name in ("ours", "honest"):
        body = bodies[name]
        assert body["status"] == "ok", body
        assert all(body["bitwise"].values()), body
        assert body["samples"] == 50
        assert body["p10_us"] <= body["median_us"] <= body["p90_us"]
        assert body["cold_l2"]["sets"] >= 2
        assert body["floor_fraction"] == pytest.approx(body["floor_us"] / body["median_us"])
    assert bodies["wrong"]["status"] == "failed"
    assert bodies["raises"]["why"] == "RuntimeError: no such tile"
    assert "median_us" not in bodies["wrong"] and "median_us" not in bodies["raises"]


def test_a_whole_run_writes_one_record_per_case_and_rival(stand_ins, monkeypatch, tmp_path):
    """The card's facts are stand-ins; everything else is what runs there."""
    card = types.SimpleNamespace(L2_cache_size=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "ceilings", lambda: CEILINGS)
    monkeypatch.setattr(bench, "HOST_SIZE", 16)
    monkeypatch.setattr(
        bench, "own_process", lambda rival, todo, *_: {c: starved(c, rival.name) for c in todo}
    )
    absent = dict.fromkeys(targets.PRODUCTS, lambda case: module("no_such_package"))
    missing, apart = Rival("missing", absent), Rival("apart", {}, environment=("A=1",))
    stand_ins |= {"missing": missing, "apart": apart}
    path = tmp_path / "gemm.jsonl"
    todo = [products.case("fwd"), products.case("dw")]
    names = ["ours", "wrong", "missing", "apart"]
    bodies = list(
        bench.gemm(todo, names, output=path, commit="abc", device="cpu", clock=HostClock())
    )
    assert record.read(path) == json.loads(json.dumps(bodies))
    assert [b["system"] for b in bodies] == names * 2
    assert [b["status"] for b in bodies] == ["ok", "failed", "absent", "ok"] * 2
    ours, _, missed, other = bodies[:4]
    assert ours["ratio"] == {"apart": pytest.approx(123.0 / ours["median_us"])}
    assert other["ratio"] == {"ours": pytest.approx(ours["median_us"] / 123.0)}
    assert set(ours["host_us"]) == {"grad", "inference"} and "host_us" not in bodies[4]
    assert ours["contract_id"] and ours["commit"] == "abc" and ours["ceilings"] == CEILINGS
    assert "no_such_package" in missed["why"]
    assert all(bench.line(body) for body in bodies)
    assert report.status(bodies, []) == report.status([], []), "what ran on a CPU is on no page"


def starved(case: Case, name: str) -> dict:
    facts = {"system": name, "status": "ok", "bitwise": {"repeat": True}, "median_us": 123.0}
    return (
        case.items()
        | facts
        | {"p10_us": 122.0, "p90_us": 124.0, "tflops": 1.0, "floor_fraction": 0.5}
    )


def test_host_costs_are_taken_with_and_without_a_graph():
    recorded = []

    def call(t):
        recorded.append(torch.is_inference_mode_enabled())
        assert t["x"].requires_grad is not torch.is_inference_mode_enabled()
        return t["x"]

    costs = bench.host_costs(call, products.case("fwd"), "cpu", lambda: None)
    assert set(costs) == {"grad", "inference"}
    assert True in recorded and False in recorded
    assert all(cost > 0 for cost in costs.values())
