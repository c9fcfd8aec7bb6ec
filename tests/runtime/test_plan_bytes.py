"""Cached plans have the bytes of fresh ones: forward, backward and in compiled graphs.

The SM90 launchers run here in the simulator, on CPU tensors that are taken for those of a GPU.
"""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.runtime import dispatch, plan_cache, torch_ops
from cute_kernels.runtime.caching import ByteCache
from cute_kernels.sparse_attn import api, lowering
from cute_kernels.sparse_attn import op as attention_op
from cute_kernels.sparse_attn.kv_ranges import ranges
from ptxsim.skips import requires_sim
from tests.contract import same_bytes
from tests.runtime.cached_calls import CASES, attention, drawn, one_mask, rewritten
from tests.runtime.pretended_sm90 import idle, pretended, simulated

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
#: Calls whose backward is run as well.  At night: kernels that no other case compiles.
BACKWARDS = {
    **{
        name: CASES[name]
        for name in (
            "linear, bias",
            "linear of three dimensions",
            "rms_norm, residual",
            "layer_norm",
            "attention, rule",
            "attention, lse",
        )
    },
    "attention, mask": (
        lambda x: attention(x, block_mask=one_mask(x.device), scale=0.3),
        (130, 2 * 64),
    ),
    "spans": (lambda x: attended(x, SPANS), (2 * 130, 2 * 64)),
    "pack": (packed, (260, 2 * 64)),
    "attention, softcap": CASES["attention, mask"],
}
#: Calls of a forward alone: two kinds by day, all at night.
FORWARDS = ("linear, tree", "spans of one row")
FORWARDS += ("linear", "rms_norm", "spans", "spans of one row, groups")


def by_day(names, *nightly: str):
    return [pytest.param(n, marks=[pytest.mark.nightly] * (n in nightly)) for n in names]


@pytest.fixture
def launched(monkeypatch):
    """The names of what is planned from now on."""
    with pretended(monkeypatch):
        names: list[str] = []
        for ask in ("plan", "launcher"):
            true = getattr(dispatch, ask)
            monkeypatch.setattr(
                dispatch, ask, lambda name, *a, true=true: (names.append(name), true(name, *a))[1]
            )
        lowering.cache.clear()
        yield names


@pytest.fixture
def planned(launched, monkeypatch):
    """The same where spans lie on the host, which lowers them to lists of blocks."""
    monkeypatch.setattr(plan_cache, "on_gpu", lambda t: t.dtype != torch.int32)
    return launched


def results(run, shape, seed: int = 5) -> tuple[torch.Tensor, ...]:
    x = drawn(*shape, seed=seed).requires_grad_()
    y = run(x)
    return y.detach(), *torch.autograd.grad(y, x, drawn(*y.shape, seed=9, dtype=y.dtype))


def require_one_plan(planned: list[str], run) -> None:
    """``run(seed)`` is planned once for all values, with the bytes of each plan."""
    with simulated():
        first, count = run(5), len(planned)
        later = run(5), run(6)
        assert len(planned) == count > 0, planned[count:]
        plan_cache.clear()
        anew = run(5), run(6)
        assert len(planned) == 2 * count
    assert all(map(same_bytes, first, later[0]))
    for one, other in zip(later, anew, strict=True):
        assert all(map(same_bytes, one, other))
    assert not same_bytes(later[0][0], later[1][0])


@pytest.mark.parametrize("name", by_day(BACKWARDS, "attention, softcap", "pack"))
def test_a_backward_is_planned_once_with_the_bytes_of_each_plan(planned, name):
    require_one_plan(planned, lambda seed: results(*BACKWARDS[name], seed))


@pytest.mark.parametrize("name", by_day(FORWARDS, *FORWARDS[2:]))
def test_a_forward_is_planned_once_with_the_bytes_of_each_plan(launched, name):
    run, shape = CASES[name]
    require_one_plan(launched, lambda seed: (run(drawn(*shape, seed=seed)),))


@pytest.mark.parametrize(
    ("norm", "added"),
    [
        (ck.rms_norm, True),
        (ck.layer_norm, False),
        *(  # kernels that no other test by day compiles
            pytest.param(*more, marks=pytest.mark.nightly)
            for more in ((ck.rms_norm, False), (ck.layer_norm, True))
        ),
    ],
)
def test_gradients_of_a_norms_weight_are_planned_once(launched, norm, added):
    """Of such a call its node has no tensors for what is not there, and counts its inputs."""
    options = {"residual": drawn(5, 64, seed=4)} if added else {}
    if norm is ck.layer_norm:
        options |= {"bias": drawn(64, seed=7)}

    def run(seed):
        x, weight = drawn(5, 64, seed=seed), drawn(64, seed=6).requires_grad_()
        y = norm(x, weight, **options)
        y = torch.stack(y) if added else y
        return y.detach(), torch.autograd.grad(y, weight, drawn(*y.shape, seed=9))[0]

    require_one_plan(launched, run)


@pytest.mark.parametrize("name", ["linear of three dimensions", "rms_norm", "layer_norm"])
def test_results_of_first_and_cached_calls_may_be_written_in_place(launched, name):
    run, shape = CASES[name]

    def step(write) -> torch.Tensor:
        x = drawn(*shape, seed=5).requires_grad_()
        y = run(x)
        factor = drawn(*y.shape, seed=6)
        return torch.autograd.grad(write(y, factor), x, drawn(*y.shape, seed=9))[0]

    with simulated():
        copied = step(torch.mul)
        plan_cache.clear()
        written = [step(torch.Tensor.mul_) for _ in range(2)]
    assert all(same_bytes(copied, each) for each in written)


def by_numpy(into: torch.Tensor, spans: torch.Tensor) -> None:
    into.numpy()[:] = spans.numpy()


@pytest.mark.parametrize("write", [torch.Tensor.copy_, by_numpy])
def test_other_spans_have_other_plans(planned, write):
    """Of one shape: what they say is part of a plan's name, and so is what was written to them."""
    written = causal(130)
    with simulated():
        whole = results(lambda x: attended(x, written), (260, 128))
        window = results(lambda x: attended(x, causal(130, 40)), (260, 128))
        assert not any(map(same_bytes, whole, window))
        write(written, causal(130, 40))
        again = results(lambda x: attended(x, written), (260, 128))
    assert all(map(same_bytes, window, again))


def test_what_would_mistake_spans_is_noticed(planned, monkeypatch):
    mutant = rewritten(ranges.runs_of, '("runs", name, device)', '("runs", device)')
    monkeypatch.setattr(ranges, "runs_of", mutant)
    with pytest.raises(AssertionError):
        test_other_spans_have_other_plans(planned, by_numpy)


class Reading(torch.autograd.Function):
    """A layer whose backward reads spans."""

    @staticmethod
    def forward(ctx, x, spans, contents):
        ctx.spans, ctx.contents = spans, contents
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.contents.append(ranges.content_of(ctx.spans))
        return dy, None, None


def test_spans_are_read_in_every_call_and_once_in_a_backward_pass():
    """Replays of a CUDA graph write them without a version, as NumPy does."""
    spans = causal(20)
    before = ranges.content_of(spans)
    by_numpy(spans, causal(20, 5))
    assert ranges.content_of(spans).name != before.name
    x, spans, contents = drawn(4, 8).requires_grad_(), causal(20), []
    for window in (None, 5):
        by_numpy(spans, causal(20, window))
        y = Reading.apply(Reading.apply(x, spans, contents), spans, contents)
        y.sum().backward()
    assert contents[0] is contents[1] and contents[2] is contents[3]
    for content, window in zip(contents[::2], (None, 5), strict=True):
        assert content.raw == causal(20, window)[:, 0].numpy().tobytes()


@pytest.mark.parametrize(
    ("part", "by"),
    [
        (" and -1 not in (version, backward)", ""),
        (
            "(content.version, content.backward) == (version, backward)",
            "content.version == version",
        ),
    ],
)
def test_what_would_read_spans_too_rarely_is_noticed(monkeypatch, part, by):
    monkeypatch.setattr(ranges, "content_of", rewritten(ranges.content_of, part, by))
    with pytest.raises(AssertionError):
        test_spans_are_read_in_every_call_and_once_in_a_backward_pass()


def sink_gradient(spans: torch.Tensor) -> torch.Tensor:
    q, sinks = drawn(2, 130, 2, 64), drawn(2).requires_grad_()
    y = api.sequence_attention(q, q[:, :, :1], q[:, :, :1], spans, sinks=sinks)
    return torch.autograd.grad(y, sinks, torch.zeros_like(y))[0]


def test_the_gradient_of_sinks_has_the_zeros_of_several_runs():
    several = causal(130)
    several[1, 0, :, 0] = several[1, 0, :, 2] = 3
    several[1, 0, :, 3].clamp_(min=3)
    one = sink_gradient(SPANS)
    assert not one.any() and same_bytes(one, sink_gradient(several))


def other_packs(planned, kernels) -> list[tuple[torch.Tensor, ...]]:
    """Results of a pack, of another with its plan, of that with another window and planned anew."""
    other = {"lengths": (30, 130, 100)}
    with kernels:
        out, count = [results(packed, (260, 128))], len(planned)
        out += [results(lambda x: packed(x, **other), (260, 128))]
        assert len(planned) == count > 0
        out += [results(lambda x: packed(x, window_size=(40, 0)), (260, 128))]
        assert len(planned) > count
        plan_cache.clear()
        return [*out, results(lambda x: packed(x, **other), (260, 128))]


def test_other_packs_share_a_plan_and_other_windows_do_not(planned):
    """Their bytes: the next test."""
    other_packs(planned, idle())


@pytest.mark.nightly
def test_a_shared_plan_reads_where_sequences_lie_on_the_device(planned):
    first, shared, window, anew = other_packs(planned, simulated())
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
    ops = attention_op.block_sparse_attention, attention_op.block_sparse_attention_backward
    assert all(op.planned.cache._plans for op in ops)
    lowering.cache.clear()
    assert not any(op.planned.cache._plans for op in ops)


@pytest.mark.parametrize("name", ["attention, mask", "attention, rule", "spans"])
def test_a_graph_that_is_captured_keeps_the_lists(planned, monkeypatch, name):
    """Captured calls ask the cache, which then drops none of what replays read."""
    with simulated():
        first = results(*BACKWARDS[name])
        count = len(planned)
        monkeypatch.setattr(torch_ops, "capturing", lambda: True)
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


def test_hooks_of_saved_tensors_copy_no_lists(planned):
    """As those of an offload do: the plan of a backward knows its lists by identity."""
    run, shape = BACKWARDS["attention, mask"]

    def hooked(x):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            return run(x)

    with simulated():
        first = results(run, shape)
        count = len(planned)
        assert all(map(same_bytes, first, results(hooked, shape))) and len(planned) == count


def test_ever_new_packs_of_documents_are_forgotten(monkeypatch):
    packs = ByteCache("packs of a test", 3 * 16 * 400)
    monkeypatch.setattr(ranges, "_documents", packs)
    for cut in range(1, 40):
        spans = ranges.of_varlen(torch.tensor([0, cut, 400]), None, 0)
        assert ranges.documents_of(spans).bounds == ((0, cut), (cut, 400))
    assert packs.size()["entries"] == 3
    assert max(len(digest) for _, digest in packs._entries) < 100


# ---- compiled graphs -----------------------------------------------------------------------------


def composed(x, weight):
    """Of four ops two are alike; some results are not there."""
    y, h = ck.rms_norm(ck.linear(x, weight), weight[2], residual=x)
    return ck.layer_norm(ck.linear(y, weight), weight[0], weight[1]) + h


def graph_of(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_ops_of_a_compiled_graph_are_planned_once(launched):
    graph, weight = graph_of(composed), drawn(64, 64, seed=1)
    require_one_plan(launched, lambda seed: (graph(drawn(2, 3, 64, seed=seed), weight),))
    # The second product is like the first.
    assert launched[:3] == ["gemm", "norm_forward", "norm_forward"]
    with simulated():
        x = drawn(2, 3, 64, seed=5)
        assert same_bytes(graph(x, weight), composed(x, weight))


def test_a_training_step_of_a_compiled_graph_is_planned_once(launched):
    graph = graph_of(composed)

    def step(seed):
        x = drawn(3, 64, seed=seed).requires_grad_()
        weight = drawn(64, 64, seed=1).requires_grad_()
        y = graph(x, weight)
        return y.detach(), *torch.autograd.grad(y, (x, weight), drawn(3, 64, seed=9))

    require_one_plan(launched, step)
    assert {"gemm", "norm_forward", "norm_backward"} <= set(launched)


def test_attention_in_a_compiled_graph_is_planned_once(launched):
    """One token each of two sequences."""
    graph = graph_of(lambda q, k, spans: api.sequence_attention(q, k, k * 0.5, spans) + 1)
    rest = drawn(2, 150, 3, 64), torch.tensor([[[[0, 0, 0, 150]]], [[[40, 0, 40, 150]]]]).int()
    require_one_plan(launched, lambda seed: (graph(drawn(2, 1, 6, 64, seed=seed), *rest),))


def test_sinks_are_operands_of_a_plan(launched):
    attend = torch.ops.cute_kernels.sequence_attention
    q, k = drawn(1, 1, 2, 64), drawn(1, 150, 1, 64, seed=1)
    spans = torch.tensor([[[[0, 0, 0, 150]]]], dtype=torch.int32)
    one, other = torch.tensor([3.0, -1.0]), torch.tensor([-1.0, 3.0])
    with simulated():
        results = [attend(q, k, k, spans, 0.2, 0.0, sinks)[0] for sinks in (one, one, other, None)]
    assert launched == ["block_sparse_attention"] * 2
    assert same_bytes(results[0], results[1])
    assert not any(same_bytes(results[0], out) for out in results[2:])
