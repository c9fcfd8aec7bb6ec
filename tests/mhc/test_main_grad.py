"""Tests of main_grads of several weights: what each gets, and what may not share memory.

Of one weight alone: tests/test_main_grads.py; values: tests/option_table.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cute_kernels import mhc
from cute_kernels.errors import AliasError
from cute_kernels.mhc import Options
from tests.contract import same_bytes
from tests.mhc import calls, cases
from tests.mhc.cases import BF16, FP32, Case

Parameters = dict[str, torch.nn.Parameter]
each_function = pytest.mark.parametrize("name", calls.WEIGHED)


def case_of(dtype: torch.dtype = FP32, m: int = 9) -> Case:
    return Case(90, m, 5, 4, "cn", (dtype, dtype), True, True, 1.0, Options(iterations=3))


def start_of(weight: torch.Tensor, seed: int) -> torch.Tensor:
    return cases.normal(*weight.shape, seed=900 + seed)


def inputs(name: str, case: Case) -> tuple[cases.Inputs, Parameters]:
    """Weights are parameters as Megatron has them: with a main_grad, not of zeros, and a flag."""
    out, parameters = calls.inputs_of(name, case), {}
    for seed, weight in enumerate(calls.CALLS[name].weights):
        p = torch.nn.Parameter(getattr(out, weight))
        p.main_grad, p.grad_added_to_main_grad = start_of(p, seed), False
        parameters[weight] = p
    return out._replace(**parameters), parameters


def mains(parameters: Parameters) -> dict[str, torch.Tensor]:
    return {weight: p.main_grad for weight, p in parameters.items()}


def backward(made: list[torch.Tensor], **options) -> None:
    upstream = [cases.normal(*t.shape, seed=80 + j, dtype=t.dtype) for j, t in enumerate(made)]
    torch.autograd.backward(made, upstream, **options)


def finished(name: str, case: Case, written: bool = True) -> Parameters:
    """Parameters after a backward that writes their main_grads, or their gradients."""
    i, parameters = inputs(name, case)
    backward(calls.call(name, case, i, mains(parameters) if written else {}))
    return parameters


def untouched(p: torch.nn.Parameter, seed: int) -> bool:
    same = same_bytes(p.main_grad, start_of(p, seed))
    return same and p.grad_added_to_main_grad is False and p.grad is None


def added(p: torch.nn.Parameter, want: torch.nn.Parameter) -> bool:
    """Whether the main_grad is that of another parameter, and nothing else was written."""
    flagged = p.grad_added_to_main_grad is True and p.grad is None
    return flagged and same_bytes(p.main_grad, want.main_grad)


@each_function
def test_a_bf16_gradient_is_the_fp32_sum_rounded_once(name):
    """Several chunks of tokens, added in fp32 as into a main_grad of zeros."""
    case = case_of(BF16, m=2600)
    i, parameters = inputs(name, case)
    for main in mains(parameters).values():
        main.zero_()
    backward(calls.call(name, case, i, mains(parameters)))
    for weight, plain in finished(name, case, written=False).items():
        assert same_bytes(plain.grad, parameters[weight].main_grad.bfloat16()), weight


@each_function
def test_two_backwards_are_one_behind_the_other(name):
    """Gradient accumulation: all forwards first, then all backwards, or one at a time."""
    case = case_of(m=2 * 1024 + 40)
    cut = [slice(0, 1024), slice(1024, 2048), slice(2048, case.m)]
    out = []
    for pieces, at_once in (([slice(0, case.m)], True), (cut, False), (cut, True)):
        i, parameters = inputs(name, case)
        made = []
        for piece in pieces:
            results = calls.call(name, case, i, mains(parameters), piece)
            whole = [cases.normal(case.m, *t.shape[1:], seed=80 + j) for j, t in enumerate(results)]
            made.append((results, [g[piece] for g in whole]))
            if not at_once:
                torch.autograd.backward(*made.pop())
        for results, given in made:
            torch.autograd.backward(results, given)
        out.append(mains(parameters))
    for weight, want in out[0].items():
        assert all(same_bytes(other[weight], want) for other in out[1:]), weight


def some_written(name: str, case: Case) -> Iterator[tuple[str, Parameters, set[str]]]:
    """(how, parameters after a backward, those whose main_grads it wrote)."""
    every = calls.CALLS[name].weights
    for weight in every:
        i, parameters = inputs(name, case)
        backward(calls.call(name, case, i, {weight: parameters[weight].main_grad}))
        yield "alone", parameters, {weight}
        i, parameters = inputs(name, case)
        parameters[weight].requires_grad_(False)
        out = calls.call(name, case, i, mains(parameters))
        if out := [t for t in out if t.requires_grad]:
            backward(out)
        yield "frozen", parameters, set(every) - {weight}
        i, parameters = inputs(name, case)
        out = calls.call(name, case, i, mains(parameters))
        backward(out, inputs=[parameters[weight]])
        yield "inputs", parameters, {weight}


@each_function
def test_those_that_are_written(name):
    """One has a main_grad, one is frozen, or backward(inputs=...) has one: its bytes among all."""
    case = case_of()
    full, plain = finished(name, case), finished(name, case, written=False)
    for how, parameters, written in some_written(name, case):
        for seed, (weight, p) in enumerate(parameters.items()):
            if weight in written:
                assert added(p, full[weight]), (how, weight)
            elif how == "alone":
                assert same_bytes(p.grad, plain[weight].grad), weight
                assert same_bytes(p.main_grad, start_of(p, seed))
            else:
                assert untouched(p, seed), (how, weight)


@each_function
def test_strided_main_grads(name):
    """Every second element of a buffer: the bytes of contiguous ones; the others are left."""
    case = case_of()
    i, parameters = inputs(name, case)
    buffers = {weight: torch.full((*p.shape, 2), 7.0) for weight, p in parameters.items()}
    for weight, p in parameters.items():
        buffers[weight][..., 0] = p.main_grad
    backward(calls.call(name, case, i, {weight: b[..., 0] for weight, b in buffers.items()}))
    for weight, p in finished(name, case).items():
        assert (buffers[weight][..., 1] == 7).all()
        assert same_bytes(buffers[weight][..., 0].contiguous(), p.main_grad), weight


@each_function
def test_no_tokens_write_nothing(name):
    for seed, p in enumerate(finished(name, case_of(m=0)).values()):
        assert same_bytes(p.main_grad, start_of(p, seed)) and p.grad is None


# ---- memory --------------------------------------------------------------------------------------


@each_function
def test_an_alias_is_refused(name):
    """Of each weight, by another storage object, and of the x that backward reads."""
    case = case_of()
    for weight in calls.CALLS[name].weights:
        i, parameters = inputs(name, case)
        own = parameters[weight]
        before = own.detach().clone()
        with pytest.raises(AliasError, match="alias of"):
            calls.call(name, case, i, {weight: torch.from_numpy(own.detach().numpy())})
        assert same_bytes(own.detach(), before)
        if name != "scale":
            room = torch.zeros(case.m * 20 + own.numel())
            x = room[: case.m * 20].view(case.m, 5, 4)
            state = room[case.m * 20 - 1 :][: own.numel()].view(own.shape)
            with pytest.raises(AliasError, match="alias of"):
                calls.call(name, case, i._replace(x=x), {weight: state})
            state = room[case.m * 20 :].view(own.shape)
            calls.call(name, case, i._replace(x=x), {weight: state})


@pytest.mark.parametrize("function", [mhc.multilayer_recompute, mhc.sinkhorn, mhc.aggregate])
def test_functions_without_weights_have_none(function):
    """They take no main_grads: what they are given is a mistake that Python names."""
    with pytest.raises(TypeError, match="main_grads"):
        function(main_grads={})
