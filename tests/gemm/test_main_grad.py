"""Tests of linear's main_grad: double backwards, memory that it may not share, transforms.

When it is written and whose flag is set: tests/test_main_grads.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import AliasError, UnsupportedTransformError
from cute_kernels.gemm import op
from cute_kernels.runtime import main_grad
from tests.contract import same_bytes

M, N, K = 37, 24, 40
ORDER = "chain"
BF16, FP32 = torch.bfloat16, torch.float32


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameter(*shape: int, dtype: torch.dtype = FP32) -> torch.nn.Parameter:
    """Parameter as Megatron has it: with a main_grad that is not zero, and the flag."""
    out = torch.nn.Parameter(drawn(*shape, seed=1, dtype=dtype))
    out.main_grad, out.grad_added_to_main_grad = drawn(*shape, seed=2), False
    return out


def test_the_op_refuses_an_incoming_gradient_that_is_the_main_grad():
    """A compiled graph calls the op alone."""
    x, main = drawn(K, K), drawn(K, K, seed=2)
    for dy in (main, main.mT):
        with pytest.raises(AliasError, match="alias of dy"):
            op.linear_dw_(dy, x, main, ORDER)


def untouched(weight: torch.nn.Parameter) -> bool:
    start = drawn(*weight.shape, seed=2)
    return same_bytes(weight.main_grad, start) and weight.grad_added_to_main_grad is False


def autocast():
    return torch.autocast("cpu", BF16)


def test_a_parameter_of_the_other_layout():
    """A parameter [K, N] used as its transpose: the flag is its own, main_grad may be a view."""
    weight, x, dy = parameter(K, N, dtype=BF16), drawn(M, K, dtype=BF16), drawn(M, N, dtype=BF16)
    want = weight.main_grad.t().contiguous()
    op.linear_dw_(dy, x, want, ORDER)
    ck.linear(x, weight.t(), main_grad=weight.main_grad.t()).backward(dy)
    assert weight.grad_added_to_main_grad is True and weight.grad is None
    assert same_bytes(weight.main_grad.t(), want)


def test_a_weight_of_two_parameters_has_no_flag():
    """Its gradient goes to main_grad; whose flag that is nobody can say."""
    one, two = parameter(N, K), parameter(N, K)
    state = torch.zeros(N, K)
    ck.linear(drawn(M, K), one + two, main_grad=state).sum().backward()
    assert state.abs().sum() > 0 and one.grad is None
    assert not one.grad_added_to_main_grad and not two.grad_added_to_main_grad
    assert main_grad.leaf_of(one + two) is None and main_grad.leaf_of(one * 2) is one


def test_the_gradient_of_a_cast_is_returned():
    """autograd.grad of what was cast from the parameter: not a backward of the parameter."""
    weight, x = parameter(N, K), drawn(M, K, dtype=BF16)
    used = weight.bfloat16()
    y = ck.linear(x, used, main_grad=weight.main_grad)
    (dw,) = torch.autograd.grad(y.sum(), used)
    assert same_bytes(dw, op.linear_dw(torch.ones(M, N).bfloat16(), x, ORDER)) and untouched(weight)


@pytest.mark.parametrize("of", ["x", "weight"])
def test_double_backward_is_refused(of):
    """A second gradient would reach the weight around main_grad, through weight.grad."""
    x, weight = drawn(M, K).requires_grad_(), parameter(N, K)
    y = ck.linear(x, weight, main_grad=weight.main_grad)
    with pytest.raises(UnsupportedTransformError, match=r"create_graph=True.* leave main_grad out"):
        torch.autograd.grad(y.pow(3).sum(), {"x": x, "weight": weight}[of], create_graph=True)
    frozen = weight.detach()
    penalty = torch.autograd.grad(
        ck.linear(x, frozen, main_grad=weight.main_grad).pow(3).sum(), x, create_graph=True
    )
    penalty[0].sum().backward()
    assert x.grad is not None and untouched(weight)


# ---- memory -------------------------------------------------------------------------------------

#: Another tensor object on the memory of one, with a storage object of its own.
OTHER_STORAGE = {
    "numpy": lambda t: torch.from_numpy(t.detach().numpy()),
    "dlpack": lambda t: torch.from_dlpack(t.detach()),
    "numpy, 4 bytes off": lambda t: torch.from_numpy(
        np.lib.stride_tricks.as_strided(t.detach().numpy().reshape(-1)[1:], (N, K), (4 * K, 4))
    ),
}


@pytest.mark.parametrize("way", list(OTHER_STORAGE))
@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_memory_is_compared_not_storages(name, way):
    memory = torch.zeros(N * K + 1)
    tensors = {"x": drawn(M, K), "weight": drawn(N, K), "bias": drawn(N)}
    tensors[name] = memory[: tensors[name][:N].numel()].view(tensors[name][:N].shape)
    tensors["weight"] = tensors["weight"].requires_grad_()
    state = OTHER_STORAGE[way](memory[: N * K].view(N, K))
    with pytest.raises(AliasError, match=f"an alias of {name}"):
        ck.linear(*tensors.values(), main_grad=state)


def test_neighbours_in_one_memory_are_no_aliases():
    memory = torch.zeros(2 * N * K)
    weight, state = memory[: N * K].view(N, K), memory[N * K :].view(N, K)
    for used in (state, torch.from_numpy(state.numpy())):
        ck.linear(drawn(M, K), weight.requires_grad_(), main_grad=used).sum().backward()
    assert state.abs().sum() > 0 and weight.abs().sum() == 0
    empty = torch.zeros(0, K)
    ck.linear(drawn(M, K), empty.requires_grad_(), main_grad=empty.detach())


def test_autocast_hides_no_alias():
    """The op sees the cast of the weight; the parameter would be overwritten all the same."""
    weight = parameter(N, K)
    with autocast(), pytest.raises(AliasError, match="alias of weight"):
        ck.linear(drawn(M, K), weight, main_grad=torch.from_numpy(weight.detach().numpy()))
    state = torch.zeros(N, K)
    with autocast(), pytest.raises(AliasError, match="alias of bias"):
        ck.linear(drawn(M, K), weight, state.view(-1)[K : K + N], main_grad=state)


def test_a_compiled_graph_looks_when_it_runs():
    """A traced tensor has no address; the graph is run on tensors that have one."""

    def step(x, weight, state):
        return ck.linear(x * 2, weight, main_grad=state).sum()

    run = torch.compile(step, fullgraph=True, backend="aot_eager")
    x, weight, state = drawn(M, K), drawn(N, K, seed=1).requires_grad_(), torch.zeros(N, K)
    run(x, weight, state).backward()
    assert state.abs().sum() > 0 and weight.grad is None
    before = weight.detach().clone()
    with pytest.raises(AliasError, match="alias of weight"):
        run(x, weight, torch.from_numpy(weight.detach().numpy())).backward()
    assert same_bytes(weight.detach(), before)


def test_a_compiled_graph_writes_in_every_backward():
    """As the docstring says: which gradients were asked for is not known when it is traced."""
    run = torch.compile(lambda x, w, s: ck.linear(x, w, main_grad=s).sum(), backend="aot_eager")
    weight, x = parameter(N, K), drawn(M, K).requires_grad_()
    torch.autograd.grad(run(x, weight, weight.main_grad), x)
    assert not same_bytes(weight.main_grad, drawn(N, K, seed=2))
    assert weight.grad_added_to_main_grad is False


# ---- transforms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_vmap_over_rows(dim):
    """The mapped dimension may be any, with and without main_grad, forward and backward."""
    rows, dy = drawn(3, 3, 3, K), drawn(3, 3, 3, N)
    weight, want = parameter(N, K), parameter(N, K)
    y = torch.func.vmap(lambda one: ck.linear(one, weight, main_grad=weight.main_grad), dim)(rows)
    moved = rows.movedim(dim, 0)
    assert same_bytes(y, ck.linear(moved, want, main_grad=want.main_grad))
    assert same_bytes(torch.func.vmap(lambda one: ck.linear(one, want), dim)(rows), y)
    y.backward(dy)
    ck.linear(moved, want, main_grad=want.main_grad).backward(dy)
    assert same_bytes(weight.main_grad, want.main_grad) and weight.grad_added_to_main_grad


def test_vmap_over_main_grad_is_refused():
    weight, rows = parameter(N, K), drawn(3, M, K)
    run = lambda one, state: ck.linear(one, weight, main_grad=state)  # noqa: E731
    for dims in ((0, 0), (None, 0)):
        with pytest.raises(UnsupportedTransformError, match="main_grad are shared"):
            torch.func.vmap(run, dims)(rows if dims[0] == 0 else rows[0], torch.zeros(3, N, K))


def test_an_op_without_a_backward_refuses_gradients(recwarn):
    """torch's own fallback warns that it is deprecated, and computes."""
    state = torch.zeros(N, K)
    dy, x = drawn(M, N).requires_grad_(), drawn(M, K)
    with pytest.raises(UnsupportedTransformError, match=r"linear_dw_.*: no gradient of it"):
        op.linear_dw_(dy, x, state, ORDER)
    assert not state.any()
    with torch.no_grad():
        op.linear_dw_(dy, x, state, ORDER)
    assert state.any() and not recwarn.list
