"""The modules of ``ck.nn``: the op's bytes, torch's constructors, keys and initialisation."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import ArgumentTypeError, ArgumentValueError, ShapeError

from .contract import same_bytes

BF16, FP32 = torch.bfloat16, torch.float32


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = FP32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def ids(*shape: int, entries: int = 20) -> torch.Tensor:
    return torch.randint(entries, shape, generator=torch.Generator().manual_seed(7))


#: Name -> (arguments, inputs, the op on the module and the inputs).
CASES = {
    "Linear": ((32, 24), [draw(3, 5, 32)], lambda m, x: ck.linear(x, m.weight, m.bias)),
    "RMSNorm": ((48,), [draw(3, 5, 48)], lambda m, x: ck.rms_norm(x, m.weight, 2.0**-23)),
    "LayerNorm": (
        (48,),
        [draw(3, 5, 48)],
        lambda m, x: ck.layer_norm(x, m.weight, m.bias, 1e-5),
    ),
    "Embedding": (
        (20, 16, 3),
        [ids(3, 5)],
        lambda m, i: ck.embedding(i, m.weight, padding_idx=3),
    ),
    "LinearLogp": (
        (32, 40),
        [draw(3, 5, 32), ids(3, 5, entries=40)],
        lambda m, x, target: ck.linear_logp(x, m.weight, target, m.bias),
    ),
}
each = pytest.mark.parametrize("name", CASES)


def fill(module: torch.nn.Module) -> torch.nn.Module:
    """Give every parameter random values: a norm's are ones and zeros at first."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=seed))
    return module


def make(name: str, dtype: torch.dtype = FP32, **options) -> torch.nn.Module:
    return fill(getattr(ck.nn, name)(*CASES[name][0], dtype=dtype, **options))


def inputs(name: str, dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    tensors = CASES[name][1]
    return [t.to(dtype).requires_grad_() if t.is_floating_point() else t for t in tensors]


def gradients(out: torch.Tensor, module: torch.nn.Module, *args: torch.Tensor):
    wanted = [*module.parameters(), *(t for t in args if t.requires_grad)]
    return torch.autograd.grad(out, wanted, draw(*out.shape, seed=3).to(out.dtype))


def torchs(name: str) -> type[torch.nn.Module]:
    return getattr(torch.nn, "Linear" if name == "LinearLogp" else name)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@each
def test_results_and_gradients_are_the_ops(name, dtype):
    module, args = make(name, dtype), inputs(name, dtype)
    got, want = module(*args), CASES[name][2](module, *args)
    assert same_bytes(got, want)
    pairs = zip(gradients(got, module, *args), gradients(want, module, *args), strict=True)
    assert all(same_bytes(a, b) and a.any() for a, b in pairs)


@each
def test_signatures_initial_values_and_states_are_torchs(name):
    own, theirs = getattr(ck.nn, name), torchs(name)
    mine, want = (inspect.signature(cls).parameters.values() for cls in (own, theirs))
    extra = {p.name for p in mine if p.kind is p.KEYWORD_ONLY}
    described = [(p.name, p.default) for p in mine if p.name not in extra]
    assert described == [(p.name, p.default) for p in want] and "main_grad" in extra
    modules = []
    for cls in (own, theirs):
        torch.manual_seed(5)
        modules.append(cls(*CASES[name][0]))
    again, plain = modules
    both = [m.state_dict() for m in modules]
    assert list(both[0]) == list(both[1])
    assert all(same_bytes(a, b) for a, b in zip(both[0].values(), both[1].values(), strict=True))
    assert isinstance(again, theirs)
    assert repr(again).startswith(repr(plain).removesuffix(")").replace("Linear", name))
    source, args = make(name), inputs(name)
    assert not any(plain.load_state_dict(source.state_dict()))
    assert not any(again.load_state_dict(plain.state_dict()))
    assert same_bytes(again(*args), source(*args))


@each
def test_copies_pickles_and_meta_modules(name):
    """They keep options and bytes; a module on meta runs, and becomes a real one."""
    options = {"order": "tree"} if "Linear" in name else {}
    module, args = make(name, BF16, main_grad=False, **options), inputs(name, BF16)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    meta = copy.deepcopy(module).to("meta")
    want, out = module(*args), meta(*(t.to("meta") for t in args))
    assert out.is_meta and out.shape == want.shape and out.dtype == want.dtype
    real = meta.to_empty(device="cpu")
    real.load_state_dict(module.state_dict())
    loaded = torch.load(saved, weights_only=False)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded, real):
        assert repr(other) == repr(module) and "main_grad=False" in repr(other)
        assert same_bytes(other(*args), want)


@each
def test_a_compiled_graph_has_the_bytes(name):
    module, args = make(name), inputs(name)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    got, want = compiled(*args), module(*args)
    assert same_bytes(got, want)
    pairs = zip(gradients(got, module, *args), gradients(want, module, *args), strict=True)
    assert all(same_bytes(a, b) for a, b in pairs)
    # An attribute that is set after the first call is found by the next.
    upstream, totals = draw(*got.shape, seed=3).to(got.dtype), []
    for run in (compiled, module):
        module.weight.main_grad = torch.zeros(module.weight.shape)
        run(*args).backward(upstream)
        totals.append(module.weight.main_grad)
    assert same_bytes(*totals) and totals[0].any() and module.weight.grad is None


@each
def test_main_grad_is_written_where_the_module_says_so(name):
    args = inputs(name)
    results = []
    for wanted in (False, True):
        module = make(name, main_grad=wanted)
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)
        out = module(*args)
        out.backward(draw(*out.shape, seed=3))
        written = {n for n, p in module.named_parameters() if p.main_grad.any()}
        assert {n for n, p in module.named_parameters() if p.grad is None} == written
        into = {"weight", "bias"} if name == "LayerNorm" else {"weight"}
        assert written == (into if wanted else set())
        results.append(module.weight.main_grad if wanted else module.weight.grad)
    assert same_bytes(*results)
    with torch.no_grad():
        assert module(*args).grad_fn is None


@pytest.mark.parametrize("order", ["chain", "tree"])
def test_orders(order):
    x, target = draw(3, 256).requires_grad_(), ids(3, entries=40)
    linear = fill(ck.nn.Linear(256, 40, order=order))
    assert same_bytes(linear(x), ck.linear(x, linear.weight, linear.bias, order=order))
    other = ck.linear(x, linear.weight, linear.bias, order="tree" if order == "chain" else "chain")
    assert not same_bytes(linear(x), other)
    head = fill(ck.nn.LinearLogp(256, 40, order=order))
    want = ck.linear_logp(x, head.weight, target, head.bias, order=order)
    assert same_bytes(head(x, target), want)
    assert same_bytes(head.logits(x), ck.linear(x, head.weight, head.bias, order=order))


def test_options_of_the_head():
    options = {"temperature": 0.7, "softcap": 30.0, "ignore_index": 2, "vocab_size": 33}
    head = fill(ck.nn.LinearLogp(32, 40, False, **options))
    x, target = draw(6, 32), ids(6, entries=33)
    want = ck.linear_logp(x, head.weight, target, return_entropy=True, **options)
    for a, b in zip(head(x, target, return_entropy=True), want, strict=True):
        assert same_bytes(a, b)
    options["temperature"] = torch.linspace(0.5, 2, 6)
    want = ck.linear_logp(x, head.weight, target, **options)
    assert same_bytes(head(x, target, temperature=options["temperature"]), want)
    assert "vocab_size=33" in repr(head) and "softcap=30.0" in repr(head)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("affine", [False, True])
def test_several_dimensions_are_one_row(name, affine):
    module = fill(getattr(ck.nn, name)((4, 12), elementwise_affine=affine))
    x, residual = draw(5, 4, 12), draw(5, 4, 12, seed=1)
    flat = fill(getattr(ck.nn, name)(48, elementwise_affine=affine))
    if affine:
        flat.load_state_dict({k: v.flatten() for k, v in module.state_dict().items()})
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros(4, 12)
    got, want = module(x), flat(x.flatten(1))
    assert same_bytes(got.flatten(1), want)
    both = module(x, residual=residual)
    pair = flat(x.flatten(1), residual=residual.flatten(1))
    assert all(same_bytes(a.flatten(1), b) for a, b in zip(both, pair, strict=True))
    if affine:
        upstream = draw(5, 4, 12, seed=2)
        got.backward(upstream)
        want.backward(upstream.flatten(1))
        assert same_bytes(module.weight.main_grad.flatten(), flat.weight.grad)
        module.weight.main_grad = torch.zeros(12, 4).mT
        with pytest.raises(ShapeError, match=r"^main_grad: expected contiguous"):
            module(x)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32], ids=str)
def test_rms_norm_without_an_eps_takes_torchs(dtype):
    """Rows so small that the eps of the dtype would give other numbers than that of fp32."""
    x = (draw(4, 48) * 3e-4).to(dtype)
    want = torch.nn.RMSNorm(48, dtype=dtype)(x)
    got = ck.nn.RMSNorm(48, dtype=dtype)(x)
    assert torch.equal(got.sign(), want.sign())
    # Two roundings of one number are neighbours; with the eps of bf16 it is 60 times smaller.
    ratio = (got.double() / want.double()).nan_to_num(1)
    assert (ratio - 1).abs().max() <= 2 * torch.finfo(dtype).eps


REFUSED = {
    "max_norm": lambda: ck.nn.Embedding(4, 8, max_norm=1.0),
    "scale_grad_by_freq": lambda: ck.nn.Embedding(4, 8, scale_grad_by_freq=True),
    "sparse": lambda: ck.nn.Embedding.from_pretrained(draw(4, 8), sparse=True),
    "order": lambda: ck.nn.Linear(4, 8, order="any"),
    "main_grad": lambda: ck.nn.LayerNorm(8, main_grad=torch.zeros(8)),
    "x": lambda: ck.nn.RMSNorm(8, elementwise_affine=False)(draw(2, 16)),
    "input": lambda: ck.nn.LayerNorm((2, 8))(draw(8)),
    "residual": lambda: ck.nn.LayerNorm(8)(draw(2, 8), residual=draw(2, 4)),
}


def sparse_later() -> torch.Tensor:
    module = make("Embedding")
    module.sparse = True
    return module(ids(2))


REFUSED["sparse: expected False"] = sparse_later


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    with pytest.raises((ArgumentValueError, ArgumentTypeError, ShapeError), match=f"^{name}"):
        REFUSED[name]()


def test_from_pretrained_and_tied_weights():
    table = draw(20, 32)
    embedding = ck.nn.Embedding.from_pretrained(table, freeze=False)
    head = ck.nn.LinearLogp(32, 20, bias=False)
    head.weight = embedding.weight
    hidden = embedding(ids(6))
    head(hidden, ids(6)).sum().backward()
    assert same_bytes(hidden, table[ids(6)]) and embedding.weight.grad.any()


def test_patch_leaves_them_and_counts_them():
    linear = ck.nn.Linear(128, 128, order="tree", main_grad=False)
    model = torch.nn.Sequential(ck.nn.Embedding(20, 128), linear, ck.nn.LayerNorm(128))
    model.append(torch.nn.Linear(128, 8))
    report = ck.patch(model, main_grad=True, strict=True)
    assert report.complete and [one.name for one in report.replaced] == ["3"]
    assert type(model[1]) is ck.nn.Linear and model[1].order == "tree"
    assert set(report.main_grad_left) == {"1.weight", "1.bias", "3.bias"}
    assert report.granularity == 256


@pytest.mark.parametrize("mode", ["no_grad", "enable_grad"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [8, (2, 8)])
def test_results_may_be_written(shape, mode, residual):
    """With gradients recorded, whether a graph was made of them or not."""
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))
    norm = ck.nn.RMSNorm(shape)
    with getattr(torch, mode)():
        results = norm(x, residual=x * 0.5) if residual else (norm(x),)
    for out in results if mode == "no_grad" else results[:1]:
        factor = torch.randn(3, 2, 8).requires_grad_()
        before = out.detach().clone()
        out.mul_(factor)
        assert out.requires_grad and same_bytes(out.detach(), (before * factor).detach())
