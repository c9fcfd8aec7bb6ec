"""Nothing but whole ops of ours is ever in a graph, wherever torch.compile breaks off."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest
import torch

import cute_kernels as ck
from cute_kernels.gemm import op as gemm
from cute_kernels.runtime.dynamo import untraced
from cute_kernels.schedulers.order import kinds
from cute_kernels.sparse_attn import op as attention
from tests.contract import same_bytes

PACKAGE = Path(ck.__file__).parent
M, N, K = 70, 48, 32


def drawn(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compiled(function, *inputs, of=PACKAGE):
    """(what ``function`` returns, what of our code its graphs call, but for ops); no ``fullgraph``.

    What a graph calls knows the lines of Python that it was made from.
    """
    called = []

    def backend(graph, example):
        for node in graph.graph.nodes:
            line = str(node.meta.get("stack_trace", "")).rpartition("File ")[2]
            # One of an op's results is the op's.
            whole = str(node.target).startswith("cute_kernels.") or node.target is operator.getitem
            ours = str(of) in line and not whole
            if ours and node.op.startswith("call"):
                called.append(f"{node.target}: {line}")
        return graph.forward

    torch.compiler.reset()
    return torch.compile(function, backend=backend)(*inputs), called


def below_a_break(op):
    """``op`` in a frame that Dynamo gives up on: it looks at each frame below that one."""

    def run(*inputs):
        for _ in range(1):
            torch._dynamo.graph_break()
            out = op(*inputs)
        return out

    return run


def attended(q, k, v):
    return attention.block_sparse_attention(q, k, v, [], [1], [], "spt", True, 0.125, 0.0, None)


def with_gradients(q, k, v):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = attended(*leaves)
    return out, lse, *torch.autograd.grad(out, leaves, q)


def into_main_grad(x, weight):
    state, weight = torch.zeros(N, K), weight.detach().requires_grad_()
    with torch.autocast("cpu"):
        gemm.linear(x, weight, None, state, "chain").float().sum().backward()
    assert weight.grad is None
    return state


OPS = {
    "linear": (gemm.linear, (drawn(M, K), drawn(N, K, seed=1), drawn(N), None, "chain")),
    "linear_dbias": (gemm.linear_dbias, (drawn(M, N), "chain")),
    "main_grad": (into_main_grad, (drawn(M, K), drawn(N, K, seed=1))),
    "attention": (
        with_gradients,
        [drawn(1, 150, 2, 64, seed=s, dtype=torch.bfloat16) for s in range(3)],
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_an_op_is_not_compiled_anew(name):
    """Compiled by Inductor, the CPU's attention had other bytes in lse."""
    op, inputs = OPS[name]
    want, (got, called) = op(*inputs), compiled(below_a_break(op), *inputs)
    assert called == []
    want, got = ((t,) if isinstance(t, torch.Tensor) else t for t in (want, got))
    assert all(same_bytes(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize(
    "kind",
    [
        lambda order: torch.tensor(order).numpy(),
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in (list, torch.tensor)),
    ],
)
def test_a_column_order_breaks_the_graph_and_runs_as_it_is(kind):
    """Without ``fullgraph``: each order has its own bytes, and a wrong one is refused."""
    inputs = [drawn(1, 300, 2, 64, seed=s, dtype=torch.bfloat16) for s in range(3)]

    def step(mask, order):
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = ck.block_sparse_attention(*leaves, mask, schedule=order)
        return torch.autograd.grad(out, leaves, inputs[0])

    recorded = []
    for right, order in enumerate(([0, 1, 2], [2, 1, 0])):
        # A mask that nothing is kept of.
        mask = ck.BlockMask.sliding_window(300, 300, left=None, right=290 + right)
        got, called = compiled(step, mask, kind(order))
        made = kinds.permutation(mask, order=order, heads=2)
        assert all(map(same_bytes, got, step(mask, made)))
        assert called == []
        recorded.append(got[0])
    assert not same_bytes(*recorded)
    with pytest.raises(ck.errors.ScheduleError, match="column 0 twice"):
        compiled(step, mask, kind([0, 0, 1]))


def test_all_that_a_marked_function_calls_is_kept_out():
    def inner(x):
        return x.sin()

    def plain(x):
        return inner(x)

    @untraced
    def marked(x):
        return inner(x)

    for function, calls in ((plain, 1), (marked, 0)):
        assert len(compiled(below_a_break(function), drawn(3), of=Path(__file__))[1]) == calls
