"""Calls that the dispatcher makes, as from a compiled graph: ops remember those as well.

The SM90 launchers run here in the simulator, on CPU tensors that are taken for those of a GPU.
"""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels import again, dispatch, errors, torch_ops
from cute_kernels.gemm import op as gemm_op
from cute_kernels.gemm import prepared as gemm_prepared
from cute_kernels.norm import op as norm_op
from cute_kernels.norm import prepared as norm_prepared
from cute_kernels.norm.tensors import Rule, Scale
from cute_kernels.sparse_attn import api, sequence_op
from tests.again import drawn, rewritten
from tests.again_sm90 import idle, pretended, simulated
from tests.contract import same_bytes
from tests.ptxsim.available import requires_sim

X, W = drawn(8, 48), drawn(64, 48, seed=1)


@pytest.fixture
def on_sm90(monkeypatch):
    with pretended(monkeypatch):
        yield


@pytest.fixture
def launched(on_sm90, monkeypatch):
    """The launchers that were looked up: those of calls that went the whole way."""
    names, true = [], dispatch.launcher
    monkeypatch.setattr(dispatch, "launcher", lambda name, *at: names.append(name) or true(name))
    return names


def remembering(op, run, prepare):
    """What the dispatcher would call for an op that is prepared for in another way."""
    types = [str(argument.type) for argument in op.default._schema.arguments]
    return torch_ops._remembering(run, prepare, types)


def composed(x, weight):
    """Of four ops two are alike; some results are not there."""
    y, h = ck.rms_norm(ck.linear(x, weight), weight[2], residual=x)
    return ck.layer_norm(ck.linear(y, weight), weight[0], weight[1]) + h


@requires_sim
def test_ops_of_a_compiled_graph_have_the_bytes_of_the_first(launched):
    weight = drawn(64, 64, seed=1)
    one, other = drawn(2, 3, 64, seed=5), drawn(2, 3, 64, seed=6)
    graph = torch.compile(composed, fullgraph=True, backend="aot_eager")
    with simulated():
        first = graph(one, weight)
        # The second product is like the first.
        assert launched == ["gemm", "norm_forward", "norm_forward"]
        later = [graph(one, weight), graph(other, weight)]
        assert len(launched) == 3
        again.forget()
        assert same_bytes(later[1], graph(other, weight)) and len(launched) == 6
        assert same_bytes(first, composed(one, weight))
    assert same_bytes(first, later[0]) and not same_bytes(first, later[1])


@requires_sim
def test_a_training_step_of_a_compiled_graph_has_those_of_the_whole_way(launched):
    graph = torch.compile(composed, fullgraph=True, backend="aot_eager")

    def step():
        x, weight = drawn(3, 64, seed=5).requires_grad_(), drawn(64, 64, seed=1).requires_grad_()
        y = graph(x, weight)
        return y.detach(), *torch.autograd.grad(y, (x, weight), drawn(3, 64, seed=9))

    with simulated():
        first, later = step(), step()
        again.forget()
        whole = step()
    assert all(map(same_bytes, first, later)) and all(map(same_bytes, first, whole))


def decoded(q, k, spans):
    """One token each of two sequences."""
    return api.sequence_attention(q, k, k * 0.5, spans, scale=0.2) + 1


@requires_sim
def test_so_has_attention_with_spans(launched):
    graph = torch.compile(decoded, fullgraph=True, backend="aot_eager")
    one, other = drawn(2, 1, 6, 64, seed=5), drawn(2, 1, 6, 64, seed=6)
    rest = drawn(2, 150, 3, 64), torch.tensor([[[[0, 0, 0, 150]]], [[[40, 0, 40, 150]]]]).int()
    with simulated():
        first, count = graph(one, *rest), len(launched)
        later = [graph(one, *rest), graph(other, *rest)]
        assert len(launched) == count > 0
        again.forget()
        assert same_bytes(later[1], graph(other, *rest)) and len(launched) == 2 * count
    assert same_bytes(first, later[0]) and not same_bytes(first, later[1])


@requires_sim
@pytest.mark.parametrize("forgotten", [False, True])
def test_sinks_go_the_whole_way(launched, monkeypatch, forgotten):
    """Known calls of attention have none; the mutant remembers one with them."""
    attend = torch.ops.cute_kernels.sequence_attention
    if forgotten:
        prepare = rewritten(sequence_op._prepare_op, "sinks is not None", "False")
        attend = remembering(attend, sequence_op.attend, prepare)
    q, k = drawn(1, 1, 2, 64), drawn(1, 150, 1, 64, seed=1)
    sinks = torch.tensor([3.0, -1.0])
    spans = torch.tensor([[[[0, 0, 0, 150]]]], dtype=torch.int32)
    with simulated():
        first, later = (attend(q, k, k, spans, 0.2, 0.0, sinks)[0] for _ in range(2))
    assert same_bytes(first, later) is not forgotten


Q, KV = drawn(1, 1, 2, 64), drawn(1, 150, 1, 64, seed=1)
SPANS = torch.tensor([[[[0, 0, 0, 150]]]], dtype=torch.int32)
PUBLIC = {
    "linear": lambda: ck.linear(X, W),
    "rms_norm": lambda: ck.rms_norm(X, W[0]),
    "attention": lambda: ck.block_sparse_attention(Q, KV, KV),
    "spans": lambda: api.sequence_attention(Q, KV, KV, SPANS),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_call_that_is_known_in_eager_is_traced(launched, name):
    """What finds it may be C, which Dynamo does not trace: it never comes to that."""
    run = PUBLIC[name]
    with idle():
        run(), run()
        assert len(launched) == 1
        torch.compile(lambda: run(), fullgraph=True, backend="eager")()
        assert len(launched) == 2  # the op remembers apart


def test_what_an_op_remembers_passes_no_check(launched):
    with idle():
        for _ in range(2):
            norm_op.norm(X, None, W[0], None, None, None, "rms", -1.0, 0.0)
            torch.ops.cute_kernels.norm(X, None, W[0], None, None, None, "rms", -1.0, 0.0)
        with pytest.raises(errors.ArgumentValueError, match="eps"):
            ck.rms_norm(X, W[0], -1.0)


@pytest.mark.parametrize("forgotten", [False, True])
def test_an_ops_call_with_a_main_grad_goes_the_whole_way(launched, monkeypatch, forgotten):
    """What it may not share memory with is looked at each time; the mutant remembers it."""
    memory = torch.zeros(64 * 48 + 8 * 24)
    target, x = memory[: 64 * 48].view(64, 48), memory[-8 * 24 :].view(torch.bfloat16).view(8, 48)
    linear = torch.ops.cute_kernels.linear
    if forgotten:
        prepare = rewritten(gemm_op._prepare_op, "main_grad is not None", "False")
        linear = remembering(linear, gemm_op._run_linear, prepare)
    with idle():
        for _ in range(2):
            linear(x, W, None, target, "chain")
        assert len(launched) == (1 if forgotten else 2)
        shared = memory[-64 * 48 :].view(64, 48)
        if forgotten:
            linear(x, W, None, shared, "chain")
        else:
            with pytest.raises(errors.AliasError):
                linear(x, W, None, shared, "chain")


#: A prepared launcher, a guard of it, and operands that only this guard turns away.
GUARDED = {
    "gemm, a copied operand": (gemm_prepared.gemm, "copied or n", (drawn(8, 44), W[:, :44], None)),
    "gemm, a transposed tree": (
        gemm_prepared.gemm,
        'or (order != ORDER and major != "k")',
        (drawn(48, 8).mT, W, None, "tree"),
    ),
    "gemm, rows of no 16 bytes": (
        gemm_prepared.gemm,
        " or n * x.itemsize % ALIGN",
        (X, W[:60], None),
    ),
    "gemm, a strided bias": (gemm_prepared.gemm, "bias.stride(0) != 1", (X, W, drawn(128)[::2])),
    **{
        f"norm, a copied {name}": (
            norm_prepared.forward,
            "one is not other for",
            (x, residual, Scale(weight, None), Rule("rms", 1e-6)),
        )
        for name, x, residual, weight in (
            ("x", drawn(8, 44), None, drawn(44)),
            ("residual", X, drawn(9 * 48 + 1)[1 : 8 * 48 + 1].view(8, 48), W[0]),
            ("weight", X, None, drawn(96)[::2]),
        )
    },
}


@pytest.mark.parametrize("name", GUARDED)
def test_operands_that_would_be_copied_are_not_prepared(name):
    """A launch of them as they are reads or writes other memory; the mutants would."""
    prepare, guard, operands = GUARDED[name]
    if prepare is gemm_prepared.gemm and len(operands) == 3:
        operands += ("chain",)
    by = {
        "copied or n": "n",
        "one is not other for": "False for",
        "bias.stride(0) != 1": "False",
    }.get(guard, "")
    with idle():
        assert prepare(*operands) is None
        assert rewritten(prepare, guard, by)(*operands) is not None
