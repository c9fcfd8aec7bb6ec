"""`recompute_streams`: fewer streams are kept, and no byte is another."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import cute_kernels as ck
from cute_kernels.errors import ArgumentTypeError, ArgumentValueError, UnsupportedTransformError
from cute_kernels.mhc import Options, api, op, recompute
from tests.contract import same_bytes
from tests.mhc.stacks import (
    STREAMS,
    C,
    M,
    N,
    context,
    cotangent,
    drawn,
    forward,
    gradients,
    kept_bytes,
    recorded,
    results,
    same,
    stack,
    streams,
)

# ---- bytes and memory ----------------------------------------------------------------------------

NC = Options(layout="nc", iterations=3, form="epsilon", pre_eps=0.01)
CASES = {
    "plain": {},
    "no bias": {"biased": (False,)},
    "some biases": {"biased": (True, False)},
    "bf16": {"dtype": torch.bfloat16},
    "nc": {"options": NC, "norm_weight": True},
    "two streams": {"n": 2, "biased": (False, True)},
}


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_have_the_same_bytes(case, monkeypatch):
    options = CASES[case]
    modules, n = stack(7, **options), options.get("n", N)
    x = streams(n, options.get("options", Options()).layout)
    x = x.detach().to(options.get("dtype", torch.float32)).requires_grad_()
    want = results(modules, x)
    assert all(t.any() for t in want)
    # Made again: all streams but those before the first site of each group, in one call a group.
    for sites, sizes in {1: [], 2: [1, 1, 1], 3: [2, 2], 5: [1, 4], 9: [6]}.items():
        with recorded(monkeypatch) as (got, _):
            assert same(results(modules, x, sites), want), sites
        assert got == sizes


def test_streams_are_not_kept_and_not_kept_again(monkeypatch):
    modules, x = stack(6, biased=(False,)), streams()
    plain = kept_bytes(forward(modules, x))
    for sites, kept in {1: 6, 2: 3, 3: 2, 6: 1}.items():
        after = []

        def note(_, y, after=after):
            after.append(StorageWeakRef(y.untyped_storage()))
            return y

        with recorded(monkeypatch) as (_, made):
            y = forward(modules, x, sites, note)
            assert plain - kept_bytes(y) == (6 - kept) * STREAMS
            # Of x and 6 results, x and the last result are the caller's.
            assert sum(not t.expired() for t in after) == kept
            loss = (y * cotangent(y)).sum()
            loss.backward()
        assert len(made) == 6 - kept and all(t.expired() for t in made)
        assert sum(not t.expired() for t in after) == 1  # y


def test_a_graph_is_freed_without_the_garbage_collector():
    gc.disable()
    try:
        modules, x = stack(4), streams()
        y = forward(modules, x, 2)
        kept = StorageWeakRef(y.grad_fn.next_functions[0][0].saved_tensors[0].untyped_storage())
        for module in modules:
            del module.sublayer.f
        assert not kept.expired()
        del y
        assert kept.expired()
    finally:
        gc.enable()


def test_main_grads_have_the_same_bytes():
    out = []
    for sites in (None, 3):
        modules = stack(4)
        for module in modules:
            module.phi.main_grad = torch.zeros_like(module.phi)
            module.bias.main_grad = torch.zeros_like(module.bias)
        y = forward(modules, streams(), sites)
        y.backward(cotangent(y))
        out.append([main for one in modules for main in (one.phi.main_grad, one.bias.main_grad)])
    assert same(*out) and all(t.any() for t in out[0])


def test_the_cpu_generator_is_untouched():
    modules, x = stack(4), streams()
    modules.insert(1, nn.Identity())
    y = forward(modules, x, 4)
    state = torch.get_rng_state()
    y.backward(cotangent(y))
    assert torch.equal(torch.get_rng_state(), state)


# ---- mutants -------------------------------------------------------------------------------------


def test_the_streams_of_the_neighbour_are_noticed(monkeypatch):
    modules, x = stack(5), streams()
    want, plain = results(modules, x), recompute.Position.take

    def of_the_neighbour(position):
        own = plain(position)
        return position.streams.by_index.get(position.index - 1, own)

    monkeypatch.setattr(recompute.Position, "take", of_the_neighbour)
    assert not same(results(modules, x, 5), want)


def test_the_f_of_the_next_site_is_noticed(monkeypatch):
    modules, x = stack(5), streams()
    want, plain = results(modules, x), op.recompute

    def of_the_next(x, fs, *others):
        return plain(x, [*fs[1:], fs[-1]], *others)

    monkeypatch.setattr(op, "recompute", of_the_next)
    assert not same(results(modules, x, 5), want)


def test_a_chain_that_is_not_checked_is_noticed(monkeypatch):
    modules, x = stack(3), streams()
    want = results(modules, x, None, scaled_in_place)
    assert same(results(modules, x, 3, scaled_in_place), want)
    monkeypatch.setattr(recompute, "_view_of", lambda rows: rows.shape)
    assert not same(results(modules, x, 3, scaled_in_place), want)


# ---- sites that do not follow each other ---------------------------------------------------------


def scaled_in_place(i: int, y: torch.Tensor) -> torch.Tensor:
    return y.mul_(0.5) if i == 0 else y


#: What happens to y of the first site of three -> what is made again in groups of three.
BETWEEN = {
    "scaled": (lambda y: y * 0.5, [1]),
    "scaled in place": (lambda y: y.mul_(0.5), [1]),
    "copied": (lambda y: y.clone(), [1]),
    "other tokens": (lambda y: y.flip(0), [1]),
    "part of the tokens": (lambda y: y[:4], [1]),
    "not contiguous": (lambda y: y.mT.contiguous().mT, [1]),
    "a view": (lambda y: y.view(2, 3, C, N), [2]),
    "views of views": (lambda y: y.view(2, 3, C, N).view(M, 1, C, N), [2]),
    "a hook": (lambda y: y.register_hook(lambda g: g * 2) and y, [2]),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_a_site_that_reads_something_else_starts_a_group(name, monkeypatch):
    change, sizes = BETWEEN[name]
    modules, x = stack(3), streams()

    def between(i, y):
        return change(y) if i == 0 else y

    want = results(modules, x, None, between)
    with recorded(monkeypatch) as (got, _):
        assert same(results(modules, x, 3, between), want)
    assert got == sizes


def test_detached_streams_start_a_group(monkeypatch):
    """Two graphs, the first of which is freed before the second one is needed."""
    modules, x, out = stack(2), streams(), []
    for sites in (None, 2):
        with context(sites), recorded(monkeypatch) as (sizes, _):
            first = modules[0](x)
            middle = first.detach().requires_grad_()
            second = modules[1](middle)
            before = torch.autograd.grad(first, x, cotangent(first))
            out.append([*before, *torch.autograd.grad(second, middle, cotangent(second))])
            assert sizes == []
    assert same(*out)


def test_an_address_that_is_used_again_starts_a_group():
    """Freed streams, and others of the same shape in their place."""
    modules, x = stack(2), streams()

    def run(sites):
        with context(sites):
            y = modules[0](x)
            scaled = y.detach() * 3 + 0 * y.sum()
            del y
            others = [scaled * factor for factor in (2.0, 5.0, 7.0)]
            y = sum(modules[1](t) for t in others)
        return [y.detach(), *gradients(modules, y, x)]

    assert same(run(2), run(None))


def test_sites_of_other_layouts_start_a_group(monkeypatch):
    modules = stack(2)
    modules[1].options = Options(layout="nc")

    def between(i, y):
        return y.view(M, N, C) if i == 0 else y  # the same bytes, read in another way

    want = results(modules, streams(), None, between)
    with recorded(monkeypatch) as (sizes, _):
        assert same(results(modules, streams(), 2, between), want)
    assert sizes == []


def test_streams_that_are_used_elsewhere_too():
    modules, x = stack(5), streams()

    def run(sites):
        used = []
        y = forward(modules, x, sites, lambda i, y: used.append(y) or y)
        total = y + (used[1] * used[2]).sin()
        return [total.detach(), *gradients(modules, total, x), *(t.detach() for t in used)]

    assert same(run(3), run(None))


def test_two_sites_that_read_the_same_streams():
    modules, x = stack(4), streams()

    def run(sites):
        with context(sites):
            y = modules[1](modules[0](x))
            y = modules[2](y) + modules[3](y)
        return [y.detach(), *gradients(modules, y, x)]

    assert same(run(4), run(None))


def test_sites_within_a_sublayer():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = stack(3)

        def forward(self, out):
            inner = ck.mhc.expand_from_embedding(out, N)
            return forward(self.inner, inner).sum(-1)

    modules, x = stack(4), streams()
    modules[1].sublayer = Nested()
    assert same(results(modules, x, 3), results(modules, x))


def test_functions_by_hand_keep_their_streams(monkeypatch):
    module, x = stack(1)[0], streams()
    weights = (module.phi, module.alpha, module.beta)

    def run(sites):
        with context(sites):
            y = module(x)
            out, post, res = ck.mhc.mix_and_aggregate(y, *weights)
            y, out, post, res = ck.mhc.post_pre(out.tanh(), None, post, y, res, *weights)
            y = module(module(ck.mhc.expand_combine(out.tanh(), None, post, y, res, N)))
        return [y.detach(), *torch.autograd.grad(y, [x, *weights], cotangent(y))]

    want = run(None)
    with recorded(monkeypatch) as (sizes, _):
        assert same(run(8), want)
    assert sizes == [1]  # the last of two sites in a row


def test_sites_whose_weights_are_frozen():
    modules, x = stack(5), drawn(M, C, N)
    for module in modules[:3]:
        module.requires_grad_(False)
    modules[1].sublayer.requires_grad_()

    def run(sites):
        y = forward(modules, x, sites)
        inputs = [weight for weight in modules.parameters() if weight.requires_grad]
        return [y.detach(), *torch.autograd.grad(y, inputs, cotangent(y))]

    assert same(run(5), run(None))


def test_inputs_without_tokens():
    modules, x = stack(3), torch.empty(0, C, N, requires_grad=True)
    assert same(results(modules, x, 3), results(modules, x))


def test_a_bias_is_freed_between_forward_and_backward(monkeypatch):
    """As fully_shard frees a module's parameters until the module's own backward."""
    modules, x = stack(3), streams()
    want, biases = results(modules, x), [module.bias.detach().clone() for module in modules]

    def gathered(i, y):
        storage = modules[i].bias.untyped_storage()

        def gather(_):
            storage.resize_(biases[i].nbytes)
            modules[i].bias.data.copy_(biases[i])

        y.register_hook(gather)
        return y

    with recorded(monkeypatch) as (sizes, _):
        y = forward(modules, x, 3, gathered)
        for module in modules:
            module.bias.untyped_storage().resize_(0)
        assert same([y.detach(), *gradients(modules, y, x)], want)
    assert sizes == [2]


# ---- writes in place -----------------------------------------------------------------------------

#: Written between forward and backward, as autograd refuses without the context too.
WRITES = {
    "f": lambda modules, x: modules[0].sublayer.f.detach().mul_(2),
    "bias": lambda modules, x: modules[0].bias.detach().mul_(2),
    "x": lambda modules, x: x.detach().mul_(2),
    "post": lambda modules, x: node_of(modules, 0).saved_tensors[2].detach().mul_(2),
    "res": lambda modules, x: node_of(modules, 0).saved_tensors[4].detach().mul_(2),
}


def node_of(modules: nn.ModuleList, i: int):
    """The node of a site's expand_combine."""
    return modules.nodes[i].next_functions[0][0]


@pytest.mark.parametrize("sites", [None, 3])
@pytest.mark.parametrize("name", WRITES)
def test_writes_are_refused(name, sites):
    modules, x = stack(3), streams()
    modules.nodes = []
    y = forward(modules, x, sites, lambda i, y: modules.nodes.append(y.grad_fn) or y)
    WRITES[name](modules, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(cotangent(y))


@pytest.mark.parametrize("sites", [1, 2, 3])
@pytest.mark.parametrize("site", [0, 1, 2])
def test_a_sublayer_that_writes_its_streams_is_refused(site, sites):
    """Where nothing keeps them no version is checked in the backward: it is where y is made."""
    modules, x = stack(3), streams()
    inputs = [x * 1.0]

    def write(*_):
        inputs[-1].detach().mul_(2)

    modules[site].sublayer.register_forward_pre_hook(write)
    with pytest.raises((RuntimeError, ArgumentValueError), match=r"in.?place"):
        with context(sites):
            for module in modules:
                inputs.append(module(inputs[-1]))
        inputs[-1].backward(cotangent(inputs[-1]))


def test_a_negated_view_starts_a_group():
    """It has the storage, shape and version of y."""
    modules, x = stack(2), streams()

    def negated(i, y):
        return y if i else torch._neg_view(y)

    assert same(results(modules, x, 2, negated), results(modules, x, None, negated))


@pytest.mark.parametrize(
    ("n", "layout", "error"),
    [(3, "cn", ArgumentValueError), (True, "cn", ArgumentTypeError), (N, "xx", ArgumentValueError)],
)
def test_multilayer_recompute_refuses_what_expand_combine_does(n, layout, error):
    x, f, post, res = drawn(M, C, N), drawn(M, C), drawn(M, N), drawn(M, N, N)
    for call in (
        lambda: api.expand_combine(f, None, post, x, res, n, layout=layout),
        lambda: api.multilayer_recompute(x, [(f, None, post, res)], n, layout=layout),
        lambda: api.multilayer_recompute(x, [], n, layout=layout),
    ):
        with pytest.raises(error, match=r"^n: |^layout: "):
            call()


def test_streams_that_are_not_kept_may_be_written():
    modules, x = stack(3), streams()
    want, between = results(modules, x), []
    y = forward(modules, x, 3, lambda i, y: between.append(y) or y)
    for t in between[:2]:
        t.detach().zero_()
    assert same([y.detach(), *gradients(modules, y, x)], want)


# ---- backwards -----------------------------------------------------------------------------------


def test_several_backwards_recompute_again(monkeypatch):
    modules, x = stack(4), streams()
    _, *want = results(modules, x)
    with recorded(monkeypatch) as (sizes, made):
        y = forward(modules, x, 4)
        for retain in (True, True, False):
            assert same(gradients(modules, y, x, retain_graph=retain), want)
            assert all(t.expired() for t in made)
        with pytest.raises(RuntimeError, match="second time"):
            gradients(modules, y, x)
    assert sizes == [3, 3, 3]


def test_a_backward_of_a_part():
    modules, x = stack(4), streams()
    _, *want = results(modules, x)
    y = forward(modules, x, 4)
    last = modules[3].phi
    (grad,) = torch.autograd.grad(y, last, cotangent(y), retain_graph=True)
    got = gradients(modules, y, x)
    assert same(got, want)
    index = [name for name, _ in modules.named_parameters()].index("3.phi")
    assert same_bytes(grad, want[1 + index])


def test_an_error_in_a_backward_leaves_the_next_one_right():
    modules, x = stack(4), streams()
    _, *want = results(modules, x)
    between = []
    y = forward(modules, x, 4, lambda i, y: between.append(y) or y)

    def fail(_):
        raise KeyError("planted")

    hook = between[1].register_hook(fail)
    with pytest.raises(KeyError, match="planted"):
        gradients(modules, y, x, retain_graph=True)
    hook.remove()
    assert same(gradients(modules, y, x), want)


def test_a_double_backward_is_refused():
    modules, x = stack(3), streams()
    y = forward(modules, x, 3)
    with pytest.raises(UnsupportedTransformError, match="double backward"):
        gradients(modules, y, x, create_graph=True)


@pytest.mark.parametrize("sites", [None, 3])
def test_batched_gradients_are_refused(sites):
    modules, x = stack(3), streams()
    y = forward(modules, x, sites)
    batch = drawn(2, *y.shape, seed=4)
    with pytest.raises(UnsupportedTransformError, match="is_grads_batched"):
        torch.autograd.grad(y, [x, modules[0].phi], batch, is_grads_batched=True)


def test_backwards_in_other_threads():
    modules, x = stack(5), streams()
    _, *want = results(modules, x)
    y = forward(modules, x, 5)
    got: list[list[torch.Tensor]] = []
    threads = [
        threading.Thread(target=lambda: got.append(gradients(modules, y, x, retain_graph=True)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 3 and all(same(each, want) for each in got)
