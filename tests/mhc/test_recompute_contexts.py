"""`recompute_streams` as a context: nesting, errors, threads, and other tools around sites."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import cute_kernels as ck
from cute_kernels.errors import ArgumentTypeError, ArgumentValueError
from cute_kernels.mhc import recompute, recompute_streams
from tests.contract import same_bytes
from tests.mhc.stacks import (
    C,
    cotangent,
    forward,
    gradients,
    recorded,
    results,
    same,
    stack,
    streams,
)

# ---- contexts ------------------------------------------------------------------------------------


def test_a_context_is_of_its_thread(monkeypatch):
    modules, x, got = stack(3), streams(), []
    want = results(modules, x)
    with recorded(monkeypatch) as (sizes, _), recompute_streams(3):
        thread = threading.Thread(target=lambda: got.append(results(modules, x)))
        thread.start()
        thread.join()
    assert same(got[0], want) and sizes == []


def test_the_innermost_context_counts(monkeypatch):
    modules, x = stack(6), streams()
    want = results(modules, x)
    with recorded(monkeypatch) as (sizes, _), recompute_streams(6):
        y = forward(modules[:2], x)
        y = forward(modules[2:4], y, 1)
        y = forward(modules[4:], y)
        assert same([y.detach(), *gradients(modules, y, x)], want)
    assert sizes == [1, 1]


def test_an_error_closes_the_context(monkeypatch):
    modules, x = stack(3), streams()
    want = results(modules, x)

    def planted(_):
        raise KeyError("planted")

    failing = ck.mhc.HyperConnection(planted, C)
    with pytest.raises(KeyError), recompute_streams(3):
        failing(modules[0](x))
    assert recompute.current() is None and recompute._open == 0
    with recorded(monkeypatch) as (sizes, _):
        assert same(results(modules, x), want) and sizes == []
        with recompute_streams(3):
            y = modules[0](x)
            with pytest.raises(KeyError):
                failing(y)
            y = forward(modules[1:], y)
        assert same([y.detach(), *gradients(modules, y, x)], want)
    assert sizes == [1]  # the failed site has ended the first group


def test_as_a_decorator_and_without_gradients(monkeypatch):
    modules, x = stack(3), streams()
    want = results(modules, x)
    decorated = recompute_streams(3)(forward)
    with recorded(monkeypatch) as (sizes, _):
        for _ in range(2):
            y = decorated(modules, x)
            assert same([y.detach(), *gradients(modules, y, x)], want)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert same_bytes(forward(modules, x, 3), want[0])
    assert sizes == [2, 2]


def test_a_context_is_entered_again_and_within_itself(monkeypatch):
    modules, x = stack(6), streams()
    want, context = results(modules, x), recompute_streams(6)
    with recorded(monkeypatch) as (sizes, _):
        for _ in range(2):
            with context:
                y = forward(modules[:2], x)
                with context:
                    y = forward(modules[2:4], y)
                y = forward(modules[4:], y)
            assert recompute.current() is None and recompute._open == 0
            assert same([y.detach(), *gradients(modules, y, x)], want)
        assert same(context(results)(modules, x), want)
    assert sizes == [1, 1, 1] * 2 + [5]


@pytest.mark.parametrize(
    ("sites", "error"),
    [(0, ArgumentValueError), (True, ArgumentTypeError), (2.0, ArgumentTypeError)],
)
def test_numbers_of_sites_are_checked(sites, error):
    with pytest.raises(error, match=r"^sites: "):
        recompute_streams(sites)


# ---- beside other tools --------------------------------------------------------------------------


@pytest.mark.parametrize("within", [False, True], ids=["backward after", "backward within"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_of_a_block(reentrant, within):
    modules, x = stack(6), streams()
    want = results(modules, x)

    def block(x):
        return forward(modules[2:4], x)

    with contextlib.ExitStack() as stacked:
        stacked.enter_context(recompute_streams(3))
        y = checkpoint(block, forward(modules[:2], x), use_reentrant=reentrant)
        y = forward(modules[4:], y)
        if not within:
            stacked.close()
        modules.zero_grad()
        x.grad = None
        y.backward(cotangent(y))
    assert same([y.detach(), x.grad, *(w.grad for w in modules.parameters())], want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_of_sublayers(reentrant, monkeypatch):
    modules, x = stack(4), streams()
    want = results(modules, x)
    for module in modules:
        plain = module.sublayer.forward

        def checkpointed(out, plain=plain):
            return checkpoint(plain, out, use_reentrant=reentrant)

        module.sublayer.forward = checkpointed
    with recorded(monkeypatch) as (sizes, _):
        y = forward(modules, x, 4)
        modules.zero_grad()
        x.grad = None
        y.backward(cotangent(y))
    assert same([y.detach(), x.grad, *(w.grad for w in modules.parameters())], want)
    assert sizes == [3]


def test_a_context_within_activation_checkpointing():
    modules, x = stack(4), streams()
    want = results(modules, x)
    y = checkpoint(lambda x: forward(modules, x, 2), x, use_reentrant=False)
    assert same([y.detach(), *gradients(modules, y, x)], want)


def test_offloading_keeps_what_it_kept(monkeypatch):
    modules, x = stack(3), streams()
    want = results(modules, x)
    with recorded(monkeypatch) as (sizes, _):
        with torch.autograd.graph.save_on_cpu():
            y = forward(modules, x, 3)
        assert same([y.detach(), *gradients(modules, y, x)], want)
    assert sizes == []


def test_compiled_sites_are_refused_and_compiled_sublayers_are_not(monkeypatch):
    modules, x = stack(3), streams()
    want = results(modules, x)
    stacked = nn.Sequential(*modules)
    whole = torch.compile(stacked, fullgraph=True, backend="aot_eager")
    assert same_bytes(whole(x), want[0])
    with recompute_streams(3), pytest.raises(Exception, match="recompute_streams") as caught:
        whole(x)
    assert type(caught.value).__module__.startswith(("torch._dynamo", "cute_kernels"))
    assert same_bytes(whole(x), want[0])
    torch._dynamo.reset()
    broken = torch.compile(stacked, backend="aot_eager")  # runs uncompiled within the context
    with recorded(monkeypatch) as (sizes, _):
        with recompute_streams(3):
            y = broken(x)
        assert same([y.detach(), *gradients(modules, y, x)], want) and sizes == [2]
    for module in modules:
        module.sublayer.compile(fullgraph=True, backend="aot_eager")
    with recorded(monkeypatch) as (sizes, _):
        assert same(results(modules, x, 3), want) and sizes == [2]
