"""Tests on the card: the probe kernel's bits, one benchmark case of each kind, the ceilings."""

from __future__ import annotations

import functools

import pytest
import torch

from perf.core import passes, timing
from perf.core.rival import started
from perf.gemm import bench
from perf.gemm.cases import Case
from perf.probes import golden, inputs, runner, smoke, truncation

GOLDEN_FILES = sorted(runner.GOLDEN.glob("wgmma_*.npz"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


sm90 = pytest.mark.skipif(not hopper(), reason="needs an SM90 GPU")


@pytest.fixture(scope="module")
def build():
    return functools.cache(runner.compile_here)


@sm90
def test_the_toolchain_works(build):
    *rows, answer = smoke.run(build)
    assert answer["verdict"] == "yes", rows


@sm90
@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.name)
def test_the_card_still_makes_the_golden_bits(build, path):
    from perf.probes.wgmma_kernel import Chain

    for kind, vectors in golden.read(path)[0].items():
        a, b, c, want = (t.cuda() for t in vectors)
        got = torch.full_like(want, float("nan"))
        build(Chain(golden.SIZE[1], block_k=32), with_c=True)(a, b, got, c)
        assert (got.view(torch.int32) == want.view(torch.int32)).all(), kind


def test_the_model_gives_the_same_bits_on_the_card_as_on_the_cpu():
    for kind in inputs.ORDINARY | inputs.EXTREME:
        a, b, c = inputs.make(kind, 128, 96, 128, device="cpu")
        want = truncation.chain(a, b, c, promote_every=4)
        got = truncation.chain(a.cuda(), b.cuda(), c.cuda(), promote_every=4).cpu()
        assert (got.view(torch.int32) == want.view(torch.int32)).all(), kind


def test_events_behind_a_backlog_time_the_device_alone():
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    times = timing.interleave({"mm": lambda _: torch.mm(a, a), "none": lambda _: None}, rounds=50)
    assert times["mm"].backlog
    assert times["mm"].median > 5 * times["none"].median > 0


@pytest.mark.parametrize("product", ["fwd", "dx", "dw"])
def test_one_case_against_cublas(product):
    case = Case(product, "qkv", 512, 1024, 1536)
    calls, others = started(bench.RIVALS, ["ours", "cublas"], case.product, case)
    assert not others
    options = {"rounds": 50, "device": "cuda", "ceilings": timing.ceilings()}
    bodies = passes._run_case(bench.SUITE, case, calls, others, **options)
    for body in bodies.values():
        assert body["status"] == "ok", body
        assert body["backlog"] and body["median_us"] > 0, body
    assert all(bodies["ours"]["bitwise"].values())
    assert bodies["ours"]["check"]["poisoned"]


@sm90
@pytest.mark.parametrize("mask", ["causal", "document", "random"])
def test_one_attention_case_in_both_orders(mask):
    from perf.attention.bench import Options, measure
    from perf.attention.cases import Case as Attention

    case = Attention(mask, 2048, 128, 8, 2, 4096)
    options = Options(["ours", "ours_unordered"], l2_bytes=60 << 20, patience_s=60.0)
    bodies = [b for b in measure([case], options, output=None) if isinstance(b, dict)]
    ran = [f"{b['system']} {b['pass']}" for b in bodies]
    assert ran == ["ours fwd", "ours bwd", "ours_unordered bwd"]
    for body in bodies:
        assert body["status"] == "ok" and body["backlog"] and body["median_us"] > 0, body
    assert bodies[0]["bitwise"]["repeat"] and bodies[1]["bitwise"]["repeat"]
