"""The torch ops of rowwise: vmap, tied weights, contracts."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

import cute_kernels as ck
from cute_kernels import arch, contracts
from cute_kernels.errors import UnsupportedTransformError
from cute_kernels.rowwise import config, op
from cute_kernels.runtime import dispatch
from tests.contract import same_bytes

from .cases import (
    ACTIVATIONS,
    BF16,
    DTYPES,
    FP32,
    drawn,
    indices,
    spread,
    threads,
)


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return drawn(*shape, seed=seed, dtype=dtype).requires_grad_()


# ---- autograd and vmap ---------------------------------------------------------------------------


def test_a_tied_weight():
    """An embedding and a head of one parameter add into one main_grad."""
    weight, state = leaf(5, 8, dtype=FP32), torch.zeros(5, 8)
    ids = indices(5, 6)
    y = ck.linear(ck.embedding(ids, weight, main_grad=state), weight, main_grad=state)
    y.backward(drawn(6, 5, seed=2))
    other = weight.detach().double().requires_grad_()
    torch.nn.functional.linear(other[ids], other).backward(drawn(6, 5, seed=2).double())
    assert weight.grad is None and (state - other.grad).abs().max() < 1e-5


def test_vmap_of_rows_is_more_rows():
    x, y = drawn(4, 3, 5), drawn(4, 3, 5, seed=1)
    assert same_bytes(torch.vmap(ck.softmax)(x), ck.softmax(x))
    assert same_bytes(torch.vmap(ck.silu_mul, in_dims=(1, None))(x, y[:, 0]),
                      torch.stack([ck.silu_mul(x[:, i], y[:, 0]) for i in range(3)]))  # fmt: skip
    leaf_ = x.clone().requires_grad_()
    out = ck.gelu(leaf_)
    cotangents = torch.stack([y, x])
    (batched,) = torch.autograd.grad(
        out, leaf_, cotangents, retain_graph=True, is_grads_batched=True
    )
    for i in range(2):
        assert same_bytes(
            batched[i], torch.autograd.grad(out, leaf_, cotangents[i], retain_graph=True)[0]
        )
    table = drawn(5, 3)
    with pytest.raises(UnsupportedTransformError, match="vmap"):
        torch.vmap(lambda some: ck.embedding(some, table))(indices(5, 2, 3))


# ---- f(gate) up in steps -------------------------------------------------------------------------


def results(function, gate, up, dy) -> tuple[torch.Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (gate, up)]
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("kind", config.GATES)
def test_gated_in_steps_has_the_bytes_of_two_ops(kind):
    """Also of strides, compiled, and of one gradient; one rounding has other bytes."""
    gate = spread(3, 40, dtype=BF16)
    gate[0, :4] = torch.tensor([0.0, -0.0, 30.0, -30.0])
    args = (gate, *(drawn(3, 40, seed=seed, dtype=BF16) for seed in (1, 2)))
    fused = lambda gate, up: op.gated(gate, up, kind, True)  # noqa: E731
    want = results(lambda gate, up: ACTIVATIONS[kind](gate) * up, *args)
    torch.compiler.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    for function, layout in ((fused, lambda t: t), (fused, column_major), (compiled, lambda t: t)):
        assert all(map(same_bytes, results(function, *map(layout, args)), want))
    for i in (0, 1):
        pair = [t.detach().requires_grad_(i == j) for j, t in enumerate(args[:2])]
        assert same_bytes(torch.autograd.grad(fused(*pair), pair[i], args[2])[0], want[1 + i])
    once = results(lambda gate, up: op.gated(gate, up, kind, False), *args)
    assert not any(map(same_bytes, once, want))
    none = op.gated_rows(gate.new_empty(2, 0, 8), kind)
    assert none.shape == (2, 0, 4) and none.dtype == BF16


def column_major(t: torch.Tensor) -> torch.Tensor:
    return t.mT.contiguous().mT


# ---- contracts -----------------------------------------------------------------------------------


def test_what_is_promised():
    for name, kept in config.KEPT.items():
        assert ck.guarantees(name, "cpu") == kept[arch.CPU]
        assert ck.contract_id(name, "cpu").startswith(f"{name}/cpu/")
    assert "split_invariant" in ck.guarantees("embedding")
    assert ck.guarantees("clip_grad_norm_") == {"run_to_run"}


def test_an_id_has_no_thread_count_and_all_constants(monkeypatch):
    ids = []
    for count in (1, 2):
        with threads(count):
            ids.append(ck.contract_id("softmax"))
    assert ids[0] == ids[1]
    monkeypatch.setattr(config, "LANES", 512)
    assert ck.contract_id("softmax") != ids[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "name"), [("cuda", "sm_90a"), ("cuda", "sm_80"), ("hip", "gfx942")]
)
def test_triton_runs_on_every_gpu(monkeypatch, kind, name, dtype):
    """On SM90 too: no other kernel of these was meant for it."""
    monkeypatch.setattr(arch, "describe", lambda _: arch.Device("cuda:0", kind, name, 132))
    monkeypatch.setattr(arch, "_installed", lambda package: True)
    for entry in op._LAUNCHERS:
        assert dispatch.backend(entry, "cuda:0", dtype) == arch.TRITON
    for public in config.KEPT:
        assert contracts.guarantees(public, "cuda:0", dtype) >= {"run_to_run", "schedule_invariant"}


def test_what_ran_is_told():
    dispatch.forget()
    x = leaf(3, 4, dtype=FP32)
    ck.gelu(x, approximate="tanh").sum().backward()
    ck.softmax(x)
    told = [(run.op, run.kernel) for run in dispatch.ran()]
    assert told == [("gelu", "gelu"), ("gelu", "gelu_backward"), ("softmax", "softmax")]


def test_every_launcher_is_there():
    """Of both backends, with one signature; Triton's where triton is."""
    pytest.importorskip("triton")
    for _, function in op._LAUNCHERS.values():
        modules = [
            importlib.import_module(f"cute_kernels.rowwise.{m}") for m in ("cpu", "triton.launch")
        ]
        found = [inspect.signature(getattr(module, function)) for module in modules]
        assert list(found[0].parameters) == list(found[1].parameters), function
