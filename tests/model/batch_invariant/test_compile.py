"""torch.compile: a graph of its own for the mode, with our ops in it, on the disk too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import cute_kernels as ck
from tests.contract import same_bytes
from tests.model.batch_invariant.cases import drawn

ROOT = Path(__file__).resolve().parents[3]
WEIGHT = drawn(60, 203, seed=2)


@pytest.fixture(autouse=True)
def no_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model(x: torch.Tensor) -> torch.Tensor:
    hidden = F.linear(F.silu(F.rms_norm(x, (203,))), WEIGHT)
    return F.softmax(F.layer_norm(hidden, (60,)), -1) * hidden.mean(-1, keepdim=True)


def run(function, x: torch.Tensor) -> torch.Tensor:
    """y and dx side by side."""
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    y.backward(torch.ones_like(y))
    return torch.cat((y.detach(), leaf.grad), dim=-1)


def test_a_graph_has_the_bytes_of_eager():
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = drawn(9, 203)
    plain = run(compiled, x)
    with ck.batch_invariant(strict=True):
        want, got = run(model, x), run(compiled, x)
        alone = torch.cat([run(compiled, row[None]) for row in x])
    assert same_bytes(got, want) and same_bytes(alone, want) and not same_bytes(got, plain)
    # Out of it the first graph is there still, and is torch's.
    assert same_bytes(run(compiled, x), plain)
    # backward outside, of a forward inside.
    leaf = x.clone().requires_grad_()
    with ck.batch_invariant():
        y = compiled(leaf)
    y.backward(torch.ones_like(y))
    assert same_bytes(leaf.grad, want[:, 60:])


def test_dynamic_lengths():
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    with ck.batch_invariant(strict=True):
        for rows in (2, 5, 9, 17):
            x = drawn(rows, 203, seed=rows)
            assert same_bytes(run(compiled, x), run(model, x))


def test_what_passes_is_compiled_and_strict_refuses_in_a_graph():
    wide = drawn(3, 4, dtype=torch.float64)
    compiled = torch.compile(lambda a: (a @ a.mT).cumsum(-1), backend="aot_eager", fullgraph=True)
    with ck.batch_invariant():
        assert (compiled(wide) - (wide @ wide.mT).cumsum(-1)).abs().max() < 1e-12
    compiled = torch.compile(lambda x: F.softplus(x), backend="aot_eager", fullgraph=True)
    with ck.batch_invariant(strict=True), pytest.raises(Exception, match=r"softplus.*refused"):
        compiled(drawn(3, 4))


@pytest.mark.parametrize("enter", ["batch_invariant", "enable_batch_invariant", "disable"])
def test_it_is_not_entered_inside_a_graph(enter):
    def inside(x):
        if enter == "batch_invariant":
            with ck.batch_invariant():
                return F.linear(x, WEIGHT)
        (ck.enable_batch_invariant if enter.startswith("en") else ck.disable_batch_invariant)()
        return F.linear(x, WEIGHT)

    compiled = torch.compile(inside, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"inside a graph|UnsupportedTransformError"):
        compiled(drawn(3, 203))


def test_higher_order_ops_pass():
    """Activation checkpointing is one in a graph, and runs its part twice in eager."""
    from torch.utils.checkpoint import checkpoint

    def twice(x):
        return checkpoint(model, x, use_reentrant=False)

    x = drawn(5, 203)
    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    with ck.batch_invariant(strict=True):
        want = run(model, x)
        assert same_bytes(run(twice, x), want) and same_bytes(run(compiled, x), want)


DISK = """
import sys, torch, torch.nn.functional as F
import cute_kernels as ck
from cute_kernels.model.batch_invariant import mode
from torch._dynamo.utils import counters
if sys.argv[1] == "mutant":
    mode._NAME = ""
generator = torch.Generator().manual_seed(1)
x = torch.randn(17, 1003, generator=generator)
compiled = torch.compile(lambda x: F.softmax(F.rms_norm(x, (1003,)) * 9, -1), fullgraph=True)
compiled(x)
with ck.batch_invariant():
    got, want = compiled(x), F.softmax(F.rms_norm(x, (1003,)) * 9, -1)
same = bool((got.view(torch.int32) == want.view(torch.int32)).all())
print(same, counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "want"), [("ours", "True 0"), ("mutant", "False 1")])
def test_inductor_finds_no_graph_of_the_other_kind_on_the_disk(kind, want, tmp_path, monkeypatch):
    """The mutant keeps both under one key, and runs torch's kernels in the mode."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", DISK, kind]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == want
