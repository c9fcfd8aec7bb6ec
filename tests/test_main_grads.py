"""main_grad of every op that has one: when it is written, and whose flag is set.

Memory that a main_grad may not share: tests/test_main_grad_aliases.py.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cute_kernels.errors import UnsupportedTransformError
from tests.contract import same_bytes
from tests.main_grad_calls import BF16, CALLS, CAST, parameter, rows, run, upstream, written


def untouched(name: str, weight: torch.nn.Parameter) -> bool:
    same = same_bytes(weight.main_grad, parameter(name).main_grad)
    return same and weight.grad_added_to_main_grad is False and weight.grad is None


def added(weight: torch.nn.Parameter, want: torch.Tensor) -> bool:
    """Whether the main_grad has these bytes, and only the flag says so."""
    flagged = weight.grad_added_to_main_grad is True and weight.grad is None
    return flagged and same_bytes(weight.main_grad, want)


def moved():
    """Saved tensors that come back as others, as an offload to another memory has it."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone())


#: What lies between the parameter and the op, and around both.
WAYS = {
    "plain": (contextlib.nullcontext, lambda p: p),
    "a view": (contextlib.nullcontext, lambda p: p[:]),
    "transposed twice": (contextlib.nullcontext, lambda p: p.mT.mT if p.dim() > 1 else p.view(-1)),
    "saved tensors moved": (moved, lambda p: p),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_backward_adds_to_it_and_sets_the_parameters_flag(name):
    want = written(name)
    assert not same_bytes(want, parameter(name).main_grad)
    for way, (surroundings, made_of) in WAYS.items():
        weight, x = parameter(name), rows()
        with surroundings():
            y = run(name, x, made_of(weight), weight.main_grad)
            assert untouched(name, weight), way
        y.backward(upstream(y))
        assert added(weight, want), way


@pytest.mark.parametrize("name", CALLS)
def test_a_plain_gradient_has_the_bytes_of_a_main_grad_from_zero(name):
    weight, x = parameter(name), rows()
    weight.main_grad.zero_()
    for main in (None, weight.main_grad):
        y = run(name, x, weight, main)
        y.backward(upstream(y))
    assert same_bytes(weight.grad, weight.main_grad)


@pytest.mark.parametrize("way", ["cast", "autocast", "autocast, moved"])
@pytest.mark.parametrize("name", CAST)
def test_the_flag_is_the_parameters_where_a_cast_is_multiplied(name, way):
    weight, want = parameter(name), parameter(name)
    cast = weight.detach().to(BF16).requires_grad_()
    y = run(name, rows(BF16), cast, want.main_grad)
    y.backward(upstream(y))
    with contextlib.ExitStack() as stack:
        if "autocast" in way:
            stack.enter_context(torch.autocast("cpu", BF16))
        if "moved" in way:
            stack.enter_context(moved())
        used = weight.to(BF16) if way == "cast" else weight
        y = run(name, rows(BF16).to(used.dtype), used, weight.main_grad)
    y.backward(upstream(y))
    assert added(weight, want.main_grad)


@pytest.mark.parametrize("name", CALLS)
def test_autograd_grad_returns_gradients_and_adds_none(name):
    """Nor does a backward whose ``inputs`` leave the weight out."""
    weight, x = parameter(name), rows()
    plain = run(name, x, weight, None)
    want = torch.autograd.grad(plain, (x, weight), upstream(plain), allow_unused=True)
    for inputs in ((x, weight), (weight,), (x,)):
        y = run(name, x, weight, weight.main_grad)
        got = torch.autograd.grad(y, inputs, upstream(y), allow_unused=True)
        for t, grad in zip(inputs, got, strict=True):
            expected = want[t is weight]
            assert expected is grad is None or same_bytes(grad, expected)
        assert untouched(name, weight) and same_bytes(y, plain)
    run(name, x, weight, weight.main_grad).sum().backward(inputs=[x])
    assert untouched(name, weight)
    y = run(name, x, weight, weight.main_grad)
    y.backward(upstream(y), inputs=[weight])
    assert added(weight, written(name))


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("name", CALLS)
def test_what_writes_nothing(name):
    """A second gradient, which would go around main_grad; a frozen weight; no graph."""
    weight, x = parameter(name), rows()
    for call in (
        lambda y: torch.autograd.grad(y.pow(3).sum(), weight, create_graph=True),
        lambda y: y.sum().backward(create_graph=True),
    ):
        with pytest.raises(UnsupportedTransformError, match=r"create_graph=True|double backward"):
            call(run(name, x, weight, weight.main_grad))
        assert untouched(name, weight)
    want = run(name, x, weight, None)
    frozen = run(name, x, weight.detach(), weight.main_grad)
    if frozen.requires_grad:
        frozen.sum().backward()
    results = [frozen]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            results.append(run(name, x, weight, weight.main_grad))
    assert all(same_bytes(y, want) for y in results) and untouched(name, weight)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_activation_checkpointing(name, reentrant):
    """The bytes of a plain backward, once."""
    weight = parameter(name)
    call = functools.partial(run, name, weight=weight, main=weight.main_grad)
    y = checkpoint(call, rows(), use_reentrant=reentrant)
    y.backward(upstream(y))
    assert added(weight, written(name))


def test_a_compiled_graph_adds_the_same_bytes():
    """One graph of all ops: one of each costs seconds.  Those of mhc: tests/mhc/test_op.py."""
    torch.compiler.reset()
    names = [name for name in CALLS if "mhc" not in name]
    weights = [parameter(name) for name in names]

    def step(xs, weights, mains):
        every = zip(names, xs, weights, mains, strict=True)
        return [run(name, x * 1.0, weight, main) * 1.0 for name, x, weight, main in every]

    graph = torch.compile(step, fullgraph=True, backend="aot_eager")
    out = graph([rows() for _ in names], weights, [weight.main_grad for weight in weights])
    torch.autograd.backward(out, list(map(upstream, out)))
    assert [
        name
        for name, weight in zip(names, weights, strict=True)
        if weight.grad is not None or not same_bytes(weight.main_grad, written(name))
    ] == []
