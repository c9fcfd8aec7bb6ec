"""`recompute_streams`: fewer streams are kept, and no byte is another, whatever is around sites."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import cute_kernels as ck
from cute_kernels.errors import ArgumentValueError, UnsupportedTransformError
from cute_kernels.mhc import Options, op, recompute, recompute_streams
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

Tensors = list[torch.Tensor]

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
def test_results_and_gradients_have_the_same_bytes(case):
    options = CASES[case]
    modules, n = stack(7, **options), options.get("n", N)
    x = streams(n, options.get("options", Options()).layout)
    x = x.detach().to(options.get("dtype", torch.float32)).requires_grad_()
    want = results(modules, x)
    assert all(t.any() for t in want)
    # Made again: all streams but those before the first site of each group, in one call a group.
    for sites, sizes in {1: [], 2: [1, 1, 1], 3: [2, 2], 5: [1, 4], 9: [6]}.items():
        with recorded() as (got, _):
            assert same(results(modules, x, sites), want), sites
        assert got == sizes


def test_streams_are_not_kept_and_not_kept_again():
    modules, x = stack(6, biased=(False,)), streams()
    plain = kept_bytes(forward(modules, x))
    for sites, kept in {1: 6, 2: 3, 3: 2, 6: 1}.items():
        after = []

        def note(_, y, after=after):
            after.append(StorageWeakRef(y.untyped_storage()))
            return y

        with recorded() as (_, made):
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


def test_the_cpu_generator_is_untouched():
    modules, x = stack(4), streams()
    modules.insert(1, nn.Identity())
    y = forward(modules, x, 4)
    state = torch.get_rng_state()
    y.backward(cotangent(y))
    assert torch.equal(torch.get_rng_state(), state)


def scaled_in_place(i: int, y: torch.Tensor) -> torch.Tensor:
    return y.mul_(0.5) if i == 0 else y


def unchanged(i: int, y: torch.Tensor) -> torch.Tensor:
    return y


take, made_again = recompute.Position.take, op.recompute
#: What is wrong -> (its home, its name, the bug in its place, what is between sites).
MUTANTS = {
    "streams of the neighbour": (recompute.Position, "take",
        lambda p: p.streams.by_index.get(p.index - 1, take(p)), unchanged),
    "f of the next site": (op, "recompute",
        lambda x, fs, *others: made_again(x, [*fs[1:], fs[-1]], *others), unchanged),
    "chain not checked": (recompute, "_view_of", lambda rows: rows.shape, scaled_in_place),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(name, monkeypatch):
    home, attribute, wrong, between = MUTANTS[name]
    modules, x = stack(5), streams()
    want = results(modules, x, None, between)
    assert same(results(modules, x, 5, between), want)
    monkeypatch.setattr(home, attribute, wrong)
    assert not same(results(modules, x, 5, between), want)


# ---- scenes: what is around sites, with and without the context ----------------------------------

#: Scene -> (results of a run with so many sites a group or without a context, sites, what is made
#: again, or None where that is not the scene's).
SCENES: dict[str, tuple[Callable[[int | None], Tensors], int, list[int] | None]] = {}


def scene(sites: int, *sizes: int, counted: bool = True):
    """Register a scene; ``sizes``: numbers of streams that each recomputation makes."""

    def register(run: Callable) -> Callable:
        SCENES[run.__name__] = (run, sites, list(sizes) if counted else None)
        return run

    return register


#: What happens to y of the first site of three -> what is made again in groups of three.
BETWEEN = {
    "scaled_in_place": (lambda y: y.mul_(0.5), 1),
    "copied": (lambda y: y.clone(), 1),
    "part_of_the_tokens": (lambda y: y[:4], 1),
    "not_contiguous": (lambda y: y.mT.contiguous().mT, 1),
    # It has the storage, shape and version of y.
    "negated": (torch._neg_view, 1),
    "views_of_views": (lambda y: y.view(2, 3, C, N).view(M, 1, C, N), 2),
    "a_hook": (lambda y: y.register_hook(lambda g: g * 2) and y, 2),
}


def _changed(name: str) -> Callable[[int | None], Tensors]:
    def run(sites: int | None) -> Tensors:
        change, _ = BETWEEN[name]
        return results(stack(3), streams(), sites, lambda i, y: y if i else change(y))

    return run


for _name, (_, _size) in BETWEEN.items():
    SCENES[_name] = (_changed(_name), 3, [_size])


@scene(3, 2)
def main_grads(sites):
    modules = stack(4)
    mains = [w for one in modules for w in (one.phi, one.bias)]
    for weight in mains:
        weight.main_grad = torch.zeros_like(weight)
    y = forward(modules, streams(), sites)
    y.backward(cotangent(y))
    assert all(w.main_grad.any() and w.grad is None for w in mains)
    return [w.main_grad for w in mains]


@scene(2)
def detached_streams(sites):
    """Two graphs, the first of which is freed before the second one is needed."""
    modules, x = stack(2), streams()
    with context(sites):
        first = modules[0](x)
        middle = first.detach().requires_grad_()
        second = modules[1](middle)
        before = torch.autograd.grad(first, x, cotangent(first))
        return [*before, *torch.autograd.grad(second, middle, cotangent(second))]


@scene(2, counted=False)
def an_address_that_is_used_again(sites):
    """Freed streams, and others of the same shape in their place."""
    modules, x = stack(2), streams()
    with context(sites):
        y = modules[0](x)
        scaled = y.detach() * 3 + 0 * y.sum()
        del y
        others = [scaled * factor for factor in (2.0, 5.0, 7.0)]
        y = sum(modules[1](t) for t in others)
    return [y.detach(), *gradients(modules, y, x)]


@scene(2)
def sites_of_other_layouts(sites):
    """The same bytes, read in another way."""
    modules = stack(2)
    modules[1].options = Options(layout="nc")
    return results(modules, streams(), sites, lambda i, y: y if i else y.view(M, N, C))


@scene(3, counted=False)
def streams_that_are_used_elsewhere(sites):
    modules, x, used = stack(5), streams(), []
    y = forward(modules, x, sites, lambda i, y: used.append(y) or y)
    total = y + (used[1] * used[2]).sin()
    return [total.detach(), *gradients(modules, total, x), *(t.detach() for t in used)]


@scene(4, counted=False)
def two_sites_that_read_the_same_streams(sites):
    modules, x = stack(4), streams()
    with context(sites):
        y = modules[1](modules[0](x))
        y = modules[2](y) + modules[3](y)
    return [y.detach(), *gradients(modules, y, x)]


class Nested(nn.Module):
    """A sublayer of sites."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = stack(3)

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        return forward(self.inner, ck.mhc.expand_from_embedding(out, N)).sum(-1)


@scene(3, counted=False)
def sites_within_a_sublayer(sites):
    modules = stack(4)
    modules[1].sublayer = Nested()
    return results(modules, streams(), sites)


@scene(8, 1)
def functions_by_hand(sites):
    """They keep their streams: the last of two sites in a row is made again."""
    module, x = stack(1)[0], streams()
    weights = (module.phi, module.alpha, module.beta)
    with context(sites):
        y = module(x)
        out, post, res = ck.mhc.mix_and_aggregate(y, *weights)
        y, out, post, res = ck.mhc.post_pre(out.tanh(), None, post, y, res, *weights)
        y = module(module(ck.mhc.expand_combine(out.tanh(), None, post, y, res, N)))
    return [y.detach(), *torch.autograd.grad(y, [x, *weights], cotangent(y))]


@scene(5, counted=False)
def frozen_weights(sites):
    modules, x = stack(5), drawn(M, C, N)
    for module in modules[:3]:
        module.requires_grad_(False)
    modules[1].sublayer.requires_grad_()
    y = forward(modules, x, sites)
    inputs = [weight for weight in modules.parameters() if weight.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, inputs, cotangent(y))]


@scene(3, counted=False)
def no_tokens(sites):
    return results(stack(3), torch.empty(0, C, N, requires_grad=True), sites)


@scene(3, 2)
def streams_that_are_not_kept_are_written(sites):
    modules, x, between = stack(3), streams(), []
    y = forward(modules, x, sites, lambda i, y: between.append(y) or y)
    for t in between[:2] if sites else ():
        t.detach().zero_()
    return [y.detach(), *gradients(modules, y, x)]


@scene(3, 2)
def a_bias_that_is_freed_until_its_backward(sites):
    """As fully_shard frees a module's parameters until the module's own backward."""
    modules, x = stack(3), streams()
    biases = [module.bias.detach().clone() for module in modules]

    def gathered(i, y):
        storage = modules[i].bias.untyped_storage()

        def gather(_):
            storage.resize_(biases[i].nbytes)
            modules[i].bias.data.copy_(biases[i])

        y.register_hook(gather)
        return y

    y = forward(modules, x, sites, gathered)
    for module in modules:
        module.bias.untyped_storage().resize_(0)
    return [y.detach(), *gradients(modules, y, x)]


@scene(4, counted=False)
def a_backward_of_a_part(sites):
    modules, x = stack(4), streams()
    y = forward(modules, x, sites)
    (grad,) = torch.autograd.grad(y, modules[3].phi, cotangent(y), retain_graph=True)
    return [grad, *gradients(modules, y, x)]


@scene(4, counted=False)
def an_error_in_a_backward(sites):
    """The next backward is right."""
    modules, x, between = stack(4), streams(), []
    y = forward(modules, x, sites, lambda i, y: between.append(y) or y)

    def fail(_):
        raise KeyError("planted")

    hook = between[1].register_hook(fail)
    with pytest.raises(KeyError, match="planted"):
        gradients(modules, y, x, retain_graph=True)
    hook.remove()
    return gradients(modules, y, x)


@scene(5, counted=False)
def backwards_in_other_threads(sites):
    modules, x, got = stack(5), streams(), []
    y = forward(modules, x, sites)
    threads = [
        threading.Thread(target=lambda: got.append(gradients(modules, y, x, retain_graph=True)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 3 and same(got[0], got[1]) and same(got[0], got[2])
    return got[0]


@scene(6, 1, 1)
def the_innermost_context_counts(sites):
    modules, x = stack(6), streams()
    with context(sites):
        y = forward(modules[:2], x)
        y = forward(modules[2:4], y, sites and 1)
        y = forward(modules[4:], y)
        return [y.detach(), *gradients(modules, y, x)]


@scene(3)
def a_context_of_another_thread(sites):
    modules, x, got = stack(3), streams(), []
    with context(sites):
        thread = threading.Thread(target=lambda: got.append(results(modules, x)))
        thread.start()
        thread.join()
    return got[0]


@scene(3, 2, 2)
def a_decorator(sites):
    modules, x, out = stack(3), streams(), []
    decorated = recompute_streams(sites)(forward) if sites else forward
    for _ in range(2):
        y = decorated(modules, x)
        out += [y.detach(), *gradients(modules, y, x)]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out.append(forward(modules, x, sites).clone())
    return out


def of_block(sites: int | None, reentrant: bool, within: bool) -> Tensors:
    """Activation checkpointing of a block of sites, with the backward in the context or after."""
    modules, x = stack(6), streams()
    with contextlib.ExitStack() as stacked:
        stacked.enter_context(context(sites))
        block = lambda x: forward(modules[2:4], x)  # noqa: E731
        y = checkpoint(block, forward(modules[:2], x), use_reentrant=reentrant)
        y = forward(modules[4:], y)
        if not within:
            stacked.close()
        y.backward(cotangent(y))
    return [y.detach(), x.grad, *(w.grad for w in modules.parameters())]


def of_sublayers(sites: int | None, reentrant: bool) -> Tensors:
    """Activation checkpointing of each sublayer."""
    modules, x = stack(4), streams()
    for module in modules:
        plain = module.sublayer.forward
        module.sublayer.forward = lambda out, plain=plain: checkpoint(
            plain, out, use_reentrant=reentrant
        )
    y = forward(modules, x, sites)
    y.backward(cotangent(y))
    return [y.detach(), x.grad, *(w.grad for w in modules.parameters())]


for _reentrant in (False, True):
    for _within in (False, True):
        _run = lambda s, r=_reentrant, w=_within: of_block(s, r, w)  # noqa: E731
        SCENES[f"checkpointed block {_reentrant} {_within}"] = (_run, 3, None)
    _run = lambda s, r=_reentrant: of_sublayers(s, r)  # noqa: E731
    SCENES[f"checkpointed sublayers {_reentrant}"] = (_run, 4, [3])


@scene(2, counted=False)
def a_context_within_activation_checkpointing(sites):
    modules, x = stack(4), streams()
    y = checkpoint(lambda x: forward(modules, x, sites), x, use_reentrant=False)
    return [y.detach(), *gradients(modules, y, x)]


@scene(3)
def offloading(sites):
    """It keeps what it kept."""
    modules, x = stack(3), streams()
    with torch.autograd.graph.save_on_cpu():
        y = forward(modules, x, sites)
    return [y.detach(), *gradients(modules, y, x)]


@scene(3, 2)
def compiled_sublayers(sites):
    modules = stack(3)
    for module in modules:
        module.sublayer.compile(fullgraph=True, backend="aot_eager")
    return results(modules, streams(), sites)


@pytest.mark.parametrize("name", SCENES)
def test_a_scene_has_the_same_bytes(name):
    run, sites, sizes = SCENES[name]
    want = run(None)
    with recorded() as (got, _):
        assert same(run(sites), want)
    assert recompute.current() is None and recompute._open == 0
    assert sizes is None or got == sizes


# ---- contexts ------------------------------------------------------------------------------------


def test_an_error_closes_the_context():
    modules, x = stack(3), streams()
    want = results(modules, x)

    def planted(_):
        raise KeyError("planted")

    failing = ck.mhc.HyperConnection(planted, C)
    with pytest.raises(KeyError), recompute_streams(3):
        failing(modules[0](x))
    assert recompute.current() is None and recompute._open == 0
    with recorded() as (sizes, _):
        assert same(results(modules, x), want) and sizes == []
        with recompute_streams(3):
            y = modules[0](x)
            with pytest.raises(KeyError):
                failing(y)
            y = forward(modules[1:], y)
        assert same([y.detach(), *gradients(modules, y, x)], want)
    assert sizes == [1]  # the failed site has ended the first group


def test_a_context_is_entered_again_and_within_itself():
    modules, x = stack(6), streams()
    want, again = results(modules, x), recompute_streams(6)
    with recorded() as (sizes, _):
        for _ in range(2):
            with again:
                y = forward(modules[:2], x)
                with again:
                    y = forward(modules[2:4], y)
                y = forward(modules[4:], y)
            assert recompute.current() is None and recompute._open == 0
            assert same([y.detach(), *gradients(modules, y, x)], want)
        assert same(again(results)(modules, x), want)
    assert sizes == [1, 1, 1] * 2 + [5]


def test_compiled_sites_are_refused():
    modules, x = stack(3), streams()
    want = results(modules, x)
    stacked = nn.Sequential(*modules)
    whole = torch.compile(stacked, fullgraph=True, backend="aot_eager")
    with recompute_streams(3), pytest.raises(Exception, match="recompute_streams") as caught:
        whole(x)
    assert type(caught.value).__module__.startswith(("torch._dynamo", "cute_kernels"))
    assert same_bytes(whole(x), want[0])
    torch._dynamo.reset()
    broken = torch.compile(stacked, backend="aot_eager")  # runs uncompiled within the context
    with recorded() as (sizes, _):
        with recompute_streams(3):
            y = broken(x)
        assert same([y.detach(), *gradients(modules, y, x)], want) and sizes == [2]


# ---- what is refused -----------------------------------------------------------------------------

#: Written between forward and backward, as autograd refuses without the context too.
WRITES = {
    "f": lambda modules, x, nodes: modules[0].sublayer.f,
    "bias": lambda modules, x, nodes: modules[0].bias,
    "x": lambda modules, x, nodes: x,
    "post": lambda modules, x, nodes: nodes[0].next_functions[0][0].saved_tensors[2],
    "res": lambda modules, x, nodes: nodes[0].next_functions[0][0].saved_tensors[4],
}


@pytest.mark.parametrize("sites", [None, 3])
@pytest.mark.parametrize("name", WRITES)
def test_writes_are_refused(name, sites):
    modules, x, nodes = stack(3), streams(), []
    y = forward(modules, x, sites, lambda i, y: nodes.append(y.grad_fn) or y)
    WRITES[name](modules, x, nodes).detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(cotangent(y))


@pytest.mark.parametrize("sites", [1, 2, 3])
@pytest.mark.parametrize("site", [0, 1, 2])
def test_a_sublayer_that_writes_its_streams_is_refused(site, sites):
    """Where nothing keeps them no version is checked in the backward: it is where y is made."""
    modules, inputs = stack(3), [streams() * 1.0]

    def write(*_):
        inputs[-1].detach().mul_(2)

    modules[site].sublayer.register_forward_pre_hook(write)
    with pytest.raises((RuntimeError, ArgumentValueError), match=r"in.?place"):
        with context(sites):
            for module in modules:
                inputs.append(module(inputs[-1]))
        inputs[-1].backward(cotangent(inputs[-1]))


def test_several_backwards_recompute_again():
    modules, x = stack(4), streams()
    _, *want = results(modules, x)
    with recorded() as (sizes, made):
        y = forward(modules, x, 4)
        for retain in (True, True, False):
            assert same(gradients(modules, y, x, retain_graph=retain), want)
            assert all(t.expired() for t in made)
        with pytest.raises(RuntimeError, match="second time"):
            gradients(modules, y, x)
    assert sizes == [3, 3, 3]


@pytest.mark.parametrize("sites", [None, 3])
def test_double_backwards_and_batched_gradients_are_refused(sites):
    modules, x = stack(3), streams()
    y = forward(modules, x, sites)
    with pytest.raises(UnsupportedTransformError, match="double backward"):
        gradients(modules, y, x, create_graph=True)
    y, batch = forward(modules, x, sites), drawn(2, *y.shape, seed=4)
    with pytest.raises(UnsupportedTransformError, match="is_grads_batched"):
        torch.autograd.grad(y, [x, modules[0].phi], batch, is_grads_batched=True)
