"""The list of the demo's kernels: true to the catalogue, and started where the device runs them."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch

from cute_kernels import arch
from cute_kernels.compile import together
from cute_kernels.demo import run
from cute_kernels.gemm.config import ORDERS
from cute_kernels.runtime import dispatch

from . import gpu_kernels


@pytest.fixture
def started(monkeypatch):
    """Lists of kernels that processes would be given."""
    lists = []

    @contextlib.contextmanager
    def compiling(listed, arch, catalogue):
        assert catalogue == "cute_kernels.demo.run:known"
        lists.append((list(listed), arch))
        yield 0

    monkeypatch.setattr(together, "compiling", compiling)
    return lists


@pytest.mark.parametrize("order", ORDERS)
def test_each_is_in_the_catalogue_once(order):
    listed = run.listed(order)  # KeyError for one that the catalogue lacks
    names = [kernel.name for kernel in listed]
    assert len(set(listed)) == len(listed) > 20
    orders = {dict(k.constexpr)["order"] for k in listed if k.name == "gemm_skinny_sm90"}
    assert orders == {order}
    for system in (
        "gemm",
        "logp_fwd",
        "logp_grad",
        "norm_bwd",
        "sparse_attn_fwd",
        "sparse_attn_bwd",
    ):
        assert any(name.startswith(system) for name in names), system


def test_a_cpu_compiles_none_of_them(started):
    with run.compiling(torch.device("cpu"), "chain"):
        assert not started


def test_an_sm90_gpu_compiles_those_of_the_order(started, monkeypatch):
    monkeypatch.setattr(dispatch, "backend", lambda *asked: arch.CUTE_SM90)
    monkeypatch.setattr(arch, "describe", lambda d: arch.Device("a card", "cuda", "sm_90a", 132))
    with run.compiling(torch.device("cuda"), "tree"):
        assert started == [(run.listed("tree"), "sm_90a")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("order", ORDERS)
def test_it_is_what_a_demo_asks_for(order):
    """On 132 SMs; `python -m tests.demo.gpu_kernels` writes it anew."""
    listed = [json.loads(kernel.identity) for kernel in run.listed(order)]
    assert gpu_kernels.used(order) == listed
