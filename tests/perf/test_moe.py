"""The bench of mixtures: its cases, and verdicts that can fail."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from perf.moe import cases, check, rivals
from perf.moe.cases import Case

SMALL = (12, 3, 64, 32)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(cases.SHAPES, "small", SMALL)


def test_weights_that_are_read_are_of_experts_with_rows():
    case = Case("fwd", "qwen3-30b-a3b", 1, "zipf")
    assert case.weight_bytes == 8 * 2 * 2048 * 768
    assert case.work.bytes == case.weight_bytes + 2 * 8 * (2048 + 768)


def test_wrong_results_and_other_bits_are_found():
    case = Case("fwd", "small", 20, "zipf")
    rival, t = rivals.RIVALS["ours"], case.inputs(0, "cpu")
    ours = rival.start["fwd"](case)

    def verdict(call):
        return check.verdict(rival, call, case, t)

    assert verdict(ours)["bitwise"] == {"linear": True, "repeat": True}
    assert verdict(lambda t: ours(t).roll(1, 0))["status"] == "failed"
    assert verdict(lambda t: ours(t) * torch.nan)["status"] == "failed"
    off = verdict(lambda t: (ours(t).float() * (1 + 2.0**-8)).bfloat16())
    assert off["bitwise"] == {"linear": False, "repeat": True}


def test_rows_with_padding(monkeypatch):
    """DeepGEMM's rows, each expert's from a multiple of 8 on, are those of the case."""

    def multiply(a, b, out, experts):
        assert len(a) % 8 == 0 and (experts.view(-1, 8).amax(1) >= 0).all()
        for e in range(len(b)):
            out[experts == e] = a[experts == e] @ b[e]

    stand_in = SimpleNamespace(
        get_mk_alignment_for_contiguous_layout=lambda: 8,
        m_grouped_bf16_gemm_nt_contiguous=lambda a, b, *rest: multiply(a, b.mT, *rest),
        m_grouped_bf16_gemm_nn_contiguous=multiply,
    )
    monkeypatch.setattr(rivals, "module", lambda name: stand_in)
    for product in ("fwd", "dx"):
        case = Case(product, "small", 150, "zipf")
        rival = rivals.RIVALS["deepgemm"]
        body = check.verdict(rival, rival.start[product](case), case, case.inputs(0, "cpu"))
        assert "status" not in body, body
