"""Tests of main_grads: when they are written, whose flag is set, what may not share memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cute_kernels import mhc
from cute_kernels.errors import AliasError, UnsupportedTransformError
from cute_kernels.mhc import Options
from tests.contract import same_bytes
from tests.mhc import cases, packed
from tests.mhc.cases import BF16, FP32, Case

NAMES = list(packed.WEIGHTS)


def case_of(dtype: torch.dtype = FP32, m: int = 9) -> Case:
    return Case(90, m, 5, 4, "cn", (dtype, dtype), True, True, 1.0, Options(iterations=3))


def start_of(weight: torch.Tensor, seed: int) -> torch.Tensor:
    return cases.normal(*weight.shape, seed=900 + seed)


def inputs(name: str, case: Case) -> cases.Inputs:
    """Weights are parameters as Megatron has them: with a main_grad, not of zeros, and a flag."""
    out = packed.inputs_of(name, case)
    parameters = {}
    for seed, weight in enumerate(packed.WEIGHTS[name]):
        p = torch.nn.Parameter(getattr(out, weight))
        p.main_grad, p.grad_added_to_main_grad = start_of(p, seed), False
        parameters[weight] = p
    return out._replace(**parameters)


def parameters(name: str, i: cases.Inputs) -> dict[str, torch.nn.Parameter]:
    return {weight: getattr(i, weight) for weight in packed.WEIGHTS[name]}


def mains(name: str, i: cases.Inputs) -> dict[str, torch.Tensor]:
    return {weight: p.main_grad for weight, p in parameters(name, i).items()}


def call(name: str, case: Case, i: cases.Inputs, given: dict | None = None) -> list[torch.Tensor]:
    given = mains(name, i) if given is None else given
    return packed.call(name, case, i, slice(0, case.m), given)


def backward(made: list[torch.Tensor], **options) -> None:
    upstream = [cases.normal(*t.shape, seed=80 + j, dtype=t.dtype) for j, t in enumerate(made)]
    torch.autograd.backward(made, upstream, **options)


def gradients(made: list[torch.Tensor], of) -> tuple:
    upstream = [cases.normal(*t.shape, seed=80 + j, dtype=t.dtype) for j, t in enumerate(made)]
    return torch.autograd.grad(made, of, upstream)


def untouched(p: torch.nn.Parameter, seed: int) -> bool:
    same = same_bytes(p.main_grad, start_of(p, seed))
    return same and p.grad_added_to_main_grad is False and p.grad is None


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_it_replaces_the_gradient(name, dtype):
    """One chunk of tokens: the start plus what .grad would be, before its rounding."""
    case = case_of(dtype)
    i = inputs(name, case)
    plain = inputs(name, case)
    backward(call(name, case, i))
    backward(call(name, case, plain, {}))
    for seed, (weight, p) in enumerate(parameters(name, i).items()):
        want = getattr(plain, weight)
        assert p.grad is None and p.grad_added_to_main_grad is True
        assert untouched(want, seed) is False and want.grad_added_to_main_grad is False
        assert same_bytes(want.main_grad, start_of(p, seed))
        added = p.main_grad.double() - start_of(p, seed).double()
        eps = torch.finfo(dtype).eps
        room = eps * want.grad.double().abs() + 2.0**-22 * p.main_grad.abs().amax()
        assert want.grad.any() and ((added - want.grad.double()).abs() <= room).all()
        if dtype is FP32 and weight != "norm_weight":
            assert same_bytes(p.main_grad, start_of(p, seed) + want.grad)


@pytest.mark.parametrize("name", NAMES)
def test_a_bf16_gradient_is_the_fp32_sum_rounded_once(name):
    """Several chunks of tokens, added in fp32 as into a main_grad of zeros."""
    case = case_of(BF16, m=2600)
    i, plain = inputs(name, case), inputs(name, case)
    for main in mains(name, i).values():
        main.zero_()
    backward(call(name, case, i))
    backward(call(name, case, plain, {}))
    for weight, p in parameters(name, i).items():
        assert same_bytes(getattr(plain, weight).grad, p.main_grad.bfloat16()), weight


@pytest.mark.parametrize("name", NAMES)
def test_two_backwards_are_one_behind_the_other(name):
    """Gradient accumulation: all forwards first, then all backwards, or one at a time."""
    case = case_of(m=2 * 1024 + 40)
    cut = [slice(0, 1024), slice(1024, 2048), slice(2048, case.m)]
    out = []
    for schedule in ("one", "each", "forwards first"):
        i = inputs(name, case)
        pieces = [slice(0, case.m)] if schedule == "one" else cut
        made = []
        for piece in pieces:
            results = packed.call(name, case, i, piece, mains(name, i))
            whole = [cases.normal(case.m, *t.shape[1:], seed=80 + j) for j, t in enumerate(results)]
            made.append((results, [g[piece] for g in whole]))
            if schedule == "each":
                torch.autograd.backward(*made.pop())
        for results, given in made:
            torch.autograd.backward(results, given)
        out.append(mains(name, i))
    for weight, want in out[0].items():
        assert all(same_bytes(other[weight], want) for other in out[1:]), weight


@pytest.mark.parametrize("name", NAMES)
def test_some_have_one_and_others_do_not(name):
    """Each weight's alone: its bytes; the others' .grad has theirs."""
    case = case_of()
    every, none = inputs(name, case), inputs(name, case)
    backward(call(name, case, every))
    backward(call(name, case, none, {}))
    for alone in packed.WEIGHTS[name]:
        i = inputs(name, case)
        backward(call(name, case, i, {alone: getattr(i, alone).main_grad}))
        for seed, (weight, p) in enumerate(parameters(name, i).items()):
            if weight == alone:
                assert p.grad is None
                assert same_bytes(p.main_grad, getattr(every, weight).main_grad), weight
            else:
                assert same_bytes(p.grad, getattr(none, weight).grad), weight
                assert same_bytes(p.main_grad, start_of(p, seed))


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_weight_is_left_alone(name):
    case = case_of()
    for frozen in packed.WEIGHTS[name]:
        i = inputs(name, case)
        getattr(i, frozen).requires_grad_(False)
        out = [t for t in call(name, case, i) if t.requires_grad]
        if out:
            backward(out)
        for seed, (weight, p) in enumerate(parameters(name, i).items()):
            assert untouched(p, seed) == (weight == frozen), (weight, frozen)


@pytest.mark.parametrize("name", NAMES)
def test_autograd_grad_returns_gradients_and_adds_none(name):
    case = case_of(BF16)
    i, plain = inputs(name, case), inputs(name, case)
    backward(call(name, case, plain, {}))
    weights = parameters(name, i)
    grads = gradients(call(name, case, i), list(weights.values()))
    for seed, ((weight, p), got) in enumerate(zip(weights.items(), grads, strict=True)):
        assert untouched(p, seed) and same_bytes(got, getattr(plain, weight).grad), weight
        (alone,) = gradients(call(name, case, i), [p])
        assert same_bytes(alone, got) and untouched(p, seed)


@pytest.mark.parametrize("name", NAMES)
def test_backward_of_some_inputs(name):
    """backward(inputs=...) writes the main_grads of those alone."""
    case = case_of()
    every = inputs(name, case)
    backward(call(name, case, every))
    for chosen in packed.WEIGHTS[name]:
        i = inputs(name, case)
        backward(call(name, case, i), inputs=[getattr(i, chosen)])
        for seed, (weight, p) in enumerate(parameters(name, i).items()):
            if weight == chosen:
                assert p.grad_added_to_main_grad is True and p.grad is None
                assert same_bytes(p.main_grad, getattr(every, weight).main_grad)
            else:
                assert untouched(p, seed), (weight, chosen)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["mix_and_aggregate", "post_pre", "connect", "head"])
def test_activation_checkpointing(name, reentrant):
    """The bytes of a plain backward, once."""
    case = case_of()
    want, i = inputs(name, case), inputs(name, case)
    leaf, other = (t.x.clone().requires_grad_() for t in (i, want))
    backward(call(name, case, want._replace(x=other)))
    run = lambda x: tuple(call(name, case, i._replace(x=x)))  # noqa: E731
    backward(list(checkpoint(run, leaf, use_reentrant=reentrant)))
    assert same_bytes(leaf.grad, other.grad)
    for weight, p in parameters(name, i).items():
        assert same_bytes(p.main_grad, getattr(want, weight).main_grad), weight
        assert p.grad_added_to_main_grad is True and p.grad is None


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_that_was_cast(name):
    """The flag is the parameter's, whatever is between it and the function."""
    case = case_of(BF16)
    i, want = inputs(name, case_of(FP32)), inputs(name, case)
    of_case = ("x", "f", "phi", "norm_weight", "alpha", "beta", "bias")
    cast = {field: getattr(i, field).to(BF16) for field in of_case}
    given = mains(name, i)
    backward(call(name, case, i._replace(**cast), given))
    backward(call(name, case, want))
    for weight, p in parameters(name, i).items():
        assert p.grad_added_to_main_grad is True and p.grad is None
        assert same_bytes(p.main_grad, getattr(want, weight).main_grad), weight


@pytest.mark.parametrize("name", NAMES)
def test_strided_main_grads(name):
    """Every second element of a buffer: the bytes of contiguous ones; the others are left."""
    case = case_of()
    i, want = inputs(name, case), inputs(name, case)
    backward(call(name, case, want))
    buffers = {weight: torch.full((*p.shape, 2), 7.0) for weight, p in parameters(name, i).items()}
    for weight, p in parameters(name, i).items():
        buffers[weight][..., 0] = p.main_grad
    backward(call(name, case, i, {weight: b[..., 0] for weight, b in buffers.items()}))
    for weight, b in buffers.items():
        assert (b[..., 1] == 7).all()
        assert same_bytes(b[..., 0].contiguous(), getattr(want, weight).main_grad), weight


@pytest.mark.filterwarnings("ignore:Using backward")
def test_double_backward_is_refused_and_writes_nothing():
    for name in NAMES:
        case = case_of()
        i = inputs(name, case)
        loss = sum(t.square().sum() for t in call(name, case, i))
        with pytest.raises(UnsupportedTransformError, match="double backward"):
            loss.backward(create_graph=True)
        assert all(untouched(p, seed) for seed, p in enumerate(parameters(name, i).values()))


def test_no_tokens_add_nothing():
    for name in NAMES:
        case = case_of(m=0)
        i = inputs(name, case)
        backward(call(name, case, i))
        for seed, p in enumerate(parameters(name, i).values()):
            assert same_bytes(p.main_grad, start_of(p, seed)) and p.grad is None


# ---- memory --------------------------------------------------------------------------------------

OTHER_STORAGE = {
    "itself": lambda t: t.detach(),
    "numpy": lambda t: torch.from_numpy(t.detach().numpy()),
}


@pytest.mark.parametrize("way", list(OTHER_STORAGE))
@pytest.mark.parametrize("name", NAMES)
def test_an_alias_is_refused(name, way):
    """Of each weight, and of the x that backward reads; nothing is written."""
    case = case_of()
    for weight in packed.WEIGHTS[name]:
        i = inputs(name, case)
        own = getattr(i, weight)
        before = own.detach().clone()
        with pytest.raises(AliasError, match="alias of"):
            call(name, case, i, {weight: OTHER_STORAGE[way](own)})
        assert same_bytes(own.detach(), before)
        if name != "scale":
            room = torch.zeros(case.m * 20 + own.numel())
            x = room[: case.m * 20].view(case.m, 5, 4)
            state = room[case.m * 20 - 1 :][: own.numel()].view(own.shape)
            with pytest.raises(AliasError, match="alias of"):
                call(name, case, i._replace(x=x), {weight: state})
            state = room[case.m * 20 :].view(own.shape)
            call(name, case, i._replace(x=x), {weight: state})


def test_one_main_grad_of_two_weights_is_not_read():
    """phi's may be next to norm_weight's in one buffer; they are apart."""
    case = case_of()
    i, want = inputs("projection", case), inputs("projection", case)
    buffer = torch.zeros(24 * 20 + 20)
    given = packed.mains_of("projection", i, buffer)
    for weight, t in given.items():
        t.copy_(getattr(i, weight).main_grad)
    backward(call("projection", case, i, given))
    backward(call("projection", case, want))
    for weight, t in given.items():
        assert same_bytes(t, getattr(want, weight).main_grad)


def test_functions_without_weights_have_none():
    """They take no main_grads: what they are given is a mistake that Python names."""
    for function in (mhc.multilayer_recompute, mhc.sinkhorn, mhc.aggregate):
        with pytest.raises(TypeError, match="main_grads"):
            function(main_grads={})
