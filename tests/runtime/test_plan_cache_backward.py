"""Plans of backward passes: made once, found by what they depend on, and by nobody else."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.runtime import dispatch, plan_cache
from cute_kernels.sparse_attn import api, lowering
from cute_kernels.sparse_attn import op as attention_op
from cute_kernels.sparse_attn.kv_ranges import op as kv_ranges_op
from cute_kernels.sparse_attn.kv_ranges import ranges
from tests.contract import same_bytes
from tests.ptxsim.available import requires_sim
from tests.runtime.cached_calls import CASES, drawn, rewritten
from tests.runtime.pretended_sm90 import pretended, simulated

pytestmark = [requires_sim, pytest.mark.sim]


def causal(length: int, window: int | None = None) -> torch.Tensor:
    """Spans of one sequence of a batch of 2, whose query i sees the keys up to i."""
    row = torch.arange(length).expand(2, -1)
    first = torch.zeros_like(row) if window is None else (row - window + 1).clamp(0)
    none = torch.zeros_like(row)
    return torch.stack((none, none, first, row + 1), -1).int()[:, None]


def attended(x, spans):
    q = x.view(2, 130, 2, 64)
    keys = q[:, :, :1].contiguous()
    return api.sequence_attention(q, keys, keys * 0.5, spans, scale=0.2)


def packed(x, lengths=(100, 60, 100), **window):
    """Sequences one behind another, where they lie."""
    q = x.view(260, 2, 64)
    keys = q[:, :1].contiguous()
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return ck.block_sparse_attention_varlen(q, keys, keys * 0.5, offsets, causal=True, **window)


SPANS = causal(130)
BACKWARDS = {
    **{
        name: CASES[name]
        for name in (
            "linear, bias",
            "linear of three dimensions",
            "rms_norm, residual",
            "layer_norm",
            "attention, mask",
            "attention, rule",
            "attention, lse",
        )
    },
    "spans": (lambda x: attended(x, SPANS), (2 * 130, 2 * 64)),
    "pack": (packed, (260, 2 * 64)),
}


@pytest.fixture
def planned(monkeypatch):
    """The names of what is planned from now on."""
    with pretended(monkeypatch):
        monkeypatch.setattr(plan_cache, "on_gpu", lambda t: t.dtype != torch.int32)
        names: list[str] = []
        for ask in ("plan", "launcher"):
            true = getattr(dispatch, ask)
            monkeypatch.setattr(
                dispatch, ask, lambda name, *a, true=true: (names.append(name), true(name, *a))[1]
            )
        lowering.cache.clear()
        yield names


def results(run, shape) -> tuple[torch.Tensor, ...]:
    x = drawn(*shape, seed=5).requires_grad_()
    y = run(x)
    return y.detach(), *torch.autograd.grad(y, x, drawn(*y.shape, seed=9, dtype=y.dtype))


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_is_planned_once_with_the_bytes_of_each_plan(planned, name):
    with simulated():
        first = results(*BACKWARDS[name])
        count = len(planned)
        assert count
        later = results(*BACKWARDS[name])
        assert len(planned) == count, planned[count:]
        plan_cache.clear()
        anew = results(*BACKWARDS[name])
        assert len(planned) == 2 * count
    assert all(map(same_bytes, first, later)) and all(map(same_bytes, first, anew))


def test_other_spans_have_other_plans(planned):
    """Of one shape: what they say is part of a plan's name, and so is what was written to them."""
    written = causal(130)
    with simulated():
        whole = results(lambda x: attended(x, written), (260, 128))
        window = results(lambda x: attended(x, causal(130, 40)), (260, 128))
        assert not any(map(same_bytes, whole, window))
        written.copy_(causal(130, 40))
        again = results(lambda x: attended(x, written), (260, 128))
    assert all(map(same_bytes, window, again))


@pytest.mark.parametrize(
    ("module", "name", "part"),
    [
        (ranges, "content_of", " or content.version != spans._version"),
        (kv_ranges_op, "_find", " ranges.content_of(spans).name,"),
    ],
)
def test_what_would_mistake_spans_is_noticed(planned, monkeypatch, module, name, part):
    monkeypatch.setattr(module, name, rewritten(getattr(module, name), part))
    with pytest.raises(AssertionError):
        test_other_spans_have_other_plans(planned)


def test_other_packs_share_a_plan_and_other_windows_do_not(planned):
    """Where sequences lie is read on the device."""
    other = {"lengths": (30, 130, 100)}
    with simulated():
        first = results(packed, (260, 128))
        count = len(planned)
        shared = results(lambda x: packed(x, **other), (260, 128))
        assert len(planned) == count
        window = results(lambda x: packed(x, window_size=(40, 0)), (260, 128))
        assert len(planned) > count
        plan_cache.clear()
        anew = results(lambda x: packed(x, **other), (260, 128))
    assert all(map(same_bytes, shared, anew))
    assert not any(map(same_bytes, first, shared)) and not any(map(same_bytes, first, window))


def test_other_masks_have_other_plans(planned):
    """Two masks of one shape and one number of blocks."""
    masks = [ck.BlockMask.sliding_window(130, 130, left=left, right=0) for left in (20, 40)]

    def run(mask):
        def attention(x):
            q = x.view(1, 130, -1, 64)
            kv = q[:, :, :1].contiguous()
            return ck.block_sparse_attention(q, kv, kv, mask)

        return attention

    with simulated():
        one, other, again = (results(run(masks[i]), (130, 128)) for i in (0, 1, 0))
    assert all(map(same_bytes, one, again)) and not any(map(same_bytes, one, other))


@pytest.mark.parametrize("name", ["attention, mask", "attention, rule", "spans"])
def test_plans_go_with_the_lists_that_they_keep(planned, name):
    with simulated():
        results(*BACKWARDS[name])
    kept = [attention_op._backwards, kv_ranges_op._plans._plans]
    assert any(kept)
    lowering.cache.clear()
    assert not any(kept)


@pytest.mark.parametrize("name", ["attention, mask", "attention, rule", "spans"])
def test_a_graph_that_is_captured_keeps_the_lists(planned, monkeypatch, name):
    """Captured calls ask the cache, which then drops none of what replays read."""
    with simulated():
        first = results(*BACKWARDS[name])
        count = len(planned)
        for module in (attention_op, kv_ranges_op):
            monkeypatch.setattr(module, "capturing", lambda: True)
        captured = results(*BACKWARDS[name])
    assert len(planned) > count and all(map(same_bytes, first, captured))


def test_a_gradient_of_a_gradient_is_refused_as_before(planned):
    x = drawn(260, 128, seed=5).requires_grad_()
    with simulated():
        results(*BACKWARDS["spans"])
        y = BACKWARDS["spans"][0](x)
        (grad,) = torch.autograd.grad(y.float().sum(), x.requires_grad_(), create_graph=True)
        with pytest.raises(ck.errors.UnsupportedTransformError):
            grad.float().sum().backward()
