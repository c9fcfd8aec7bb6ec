"""Where the mode holds: nesting, exceptions, threads, backward; elsewhere it is nothing."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import cute_kernels as ck
from cute_kernels.errors import BatchVariantError
from cute_kernels.model.batch_invariant import mode
from cute_kernels.model.batch_invariant.mode import State
from tests.contract import same_bytes
from tests.model.batch_invariant.cases import BF16, CASES, drawn, row_op
from tests.watchers import Seen

OFF, ON, STRICT = State(False, False), State(True, False), State(True, True)


@pytest.fixture(autouse=True)
def left_as_it_was():
    assert mode.state() == OFF
    yield
    assert mode.state() == OFF
    assert torch.compiler.config.cache_key_tag == ""


def is_ours() -> bool:
    """Whether a product of the calling thread is ours."""
    with Seen() as seen:
        torch.mm(torch.zeros(2, 3), torch.zeros(3, 2))
    return "cute_kernels::linear" in seen.names


def test_contexts_nest_and_bring_back_what_was():
    """After exceptions too; what is enabled inside a context ends with it."""
    x = drawn(3, 4)
    ck.disable_batch_invariant()
    ck.enable_batch_invariant()
    with pytest.raises(ZeroDivisionError), ck.batch_invariant(strict=True):
        assert mode.state() == STRICT and is_ours()
        with ck.batch_invariant():
            assert mode.state() == ON
        with pytest.raises(BatchVariantError):
            F.softplus(x)
        with pytest.raises(ck.errors.ShapeError), ck.batch_invariant():
            x @ x
        assert mode.state() == STRICT
        ck.disable_batch_invariant()
        assert mode.state() == OFF and not is_ours()
        raise ZeroDivisionError
    assert mode.state() == ON
    ck.enable_batch_invariant(strict=True)
    assert mode.state() == STRICT
    ck.disable_batch_invariant()
    assert mode.state() == OFF and not is_ours()


def test_a_decorator_and_a_generator():
    inside = ck.batch_invariant(strict=True)(mode.state)
    assert inside() == STRICT == inside() and mode.state() == OFF

    def states():
        with ck.batch_invariant():
            yield mode.state()
            yield mode.state()

    assert list(states()) == [ON, ON]


def in_threads(work, *values) -> None:
    threads = [threading.Thread(target=work, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_thread_is_in_it_for_itself():
    states = {}

    def work(enter: bool) -> None:
        with ck.batch_invariant(strict=True) if enter else contextlib.nullcontext():
            states[enter] = (mode.state(), is_ours())

    with ck.batch_invariant():
        in_threads(work, False, True)
        assert mode.state() == ON
    assert states == {False: (OFF, False), True: (STRICT, True)}


def test_threads_that_enter_and_leave_do_not_meet():
    """Some are in it and some are not, at once: each has the bytes it has alone."""
    op = row_op("mean", BF16)
    rows = op.rows(33, 3)
    call = CASES["mean"].call
    plain, ours = call(rows), op.run(rows)
    wrong = []

    def work(enter: bool) -> None:
        for _ in range(100):
            got = op.run(rows) if enter else call(rows)
            if not same_bytes(got, ours if enter else plain):
                wrong.append(enter)

    in_threads(work, True, False, True, False)
    assert not wrong


def test_backward_is_where_it_is_called():
    x, states = drawn(3, 4).requires_grad_(), []
    x.register_hook(lambda g: states.append(mode.state()))
    with ck.batch_invariant(strict=True):
        y = (x * 2).sum()
    y.backward()
    y = (x * 2).sum()
    with ck.batch_invariant(strict=True):
        y.backward()
    assert states == [OFF, STRICT]


@pytest.mark.parametrize(
    "name", ["linear", "layer_norm", "softmax", "embedding", "mean", "attention"]
)
def test_a_gradient_is_ours_wherever_backward_is_called(name):
    case = CASES[name]
    rows = row_op(name, BF16).rows(5, 3)

    def gradient(inside: bool) -> torch.Tensor:
        leaf = rows.clone().requires_grad_()
        with ck.batch_invariant(strict=True):
            y = case.call(leaf)
            if inside:
                y.backward(torch.ones_like(y))
        if not inside:
            y.backward(torch.ones_like(y))
        return leaf.grad

    assert same_bytes(gradient(True), gradient(False))


def test_a_graph_from_outside_has_our_gradients_inside():
    """Its backward calls aten's ops of gradients, which are covered."""
    weight, ids = drawn(9, 6).requires_grad_(), torch.arange(20) % 5
    table = drawn(9, 6).requires_grad_()
    y = F.layer_norm(F.embedding(ids, table), (6,)) @ weight.mT
    loss = F.log_softmax(F.softmax(F.gelu(F.silu(y)), -1), -1)
    with ck.batch_invariant(strict=True), Seen() as seen:
        loss.backward(torch.ones_like(loss))
    left = {name for name in seen.names if "backward" in name or "gradients" in name}
    assert {n.split(":")[0] for n in left} == {"cute_kernels"} and len(left) == 4, left
    assert "cute_kernels::embedding_gradient" in seen.names
    assert "cute_kernels::linear" in seen.names and "aten::mm" not in seen.names


def test_inference_mode_and_no_grad():
    rows, weight = drawn(5, 8), drawn(4, 8)
    want = ck.linear(rows, weight)
    with ck.batch_invariant(strict=True):
        with torch.inference_mode():
            got = F.linear(rows, weight)
            assert got.is_inference()
        with torch.no_grad():
            assert not F.linear(rows, weight.requires_grad_()).requires_grad
    assert same_bytes(got.clone(), want)


def test_transforms_of_functions_end_in_ours():
    """torch.func differentiates and maps by torch's formulas, made of ops that come to the mode."""
    rows, weight = drawn(6, 5, 8), drawn(4, 8)

    def loss(x):
        return torch.softmax(F.layer_norm(F.linear(x, weight), (4,)), -1).square().sum()

    with ck.batch_invariant(strict=True):
        mapped = torch.func.vmap(lambda x: F.linear(x, weight).mean(-1))(rows)
        assert same_bytes(mapped, F.linear(rows, weight).mean(-1))
        with Seen() as seen:
            whole = torch.func.grad(loss)(rows)
        alone = torch.stack([torch.func.grad(loss)(row) for row in rows])
        assert same_bytes(whole, alone)
        pushed = torch.func.jvp(lambda x: x.sum(-1), (rows,), (rows,))[1]
        assert same_bytes(pushed, rows.sum(-1))
    ours = {"linear", "norm", "norm_gradients", "softmax", "softmax_backward", "row_sum"}
    assert {f"cute_kernels::{name}" for name in ours} <= set(seen.names)
    torchs = ("mm", "addmm", "bmm", "_softmax", "native_layer_norm")
    assert not {f"aten::{name}" for name in torchs} & set(seen.names)
    with ck.batch_invariant(), forward_ad.dual_level():
        dual = forward_ad.make_dual(rows, rows)
        with pytest.raises(ck.errors.UnsupportedTransformError, match="jvp"):
            F.linear(dual, weight)


def test_products_have_second_gradients():
    """gradgrad of what torch has it for, by ours."""
    a, b = drawn(2, 3, 4).requires_grad_(), drawn(2, 4, 5).requires_grad_()
    base = drawn(3, 5).requires_grad_()
    with ck.batch_invariant(strict=True):

        def run(a, b, base):
            return torch.baddbmm(base, a, b, beta=0.5, alpha=1.5).sum(-1).mean()

        (da,) = torch.autograd.grad(run(a, b, base), a, create_graph=True)
        (db,) = torch.autograd.grad((da * da).sum(), b)
    wide = [t.detach().double().requires_grad_() for t in (a, b, base)]
    (da,) = torch.autograd.grad(run(*wide), wide[0], create_graph=True)
    (want,) = torch.autograd.grad((da * da).sum(), wide[1])
    assert (db.double() - want).abs().max() < 1e-6


def test_subclasses_and_sparse_tensors_are_torchs():
    """A subclass that only has a name is not another kind of tensor."""

    class Named(torch.nn.Parameter):
        pass

    x, weight = drawn(3, 4), Named(drawn(5, 4))
    with ck.batch_invariant(strict=True):
        with Seen() as seen:
            F.linear(x, weight)
        assert "cute_kernels::linear" in seen.names
        got = torch.mm(x.to_sparse(), weight.detach().mT)
    assert (got - x @ weight.detach().mT).abs().max() < 1e-5
