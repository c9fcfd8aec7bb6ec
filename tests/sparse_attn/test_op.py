"""The torch ops of attention: graphs, gradients, masks and schedules."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cute_kernels.errors import (
    ArgumentValueError,
    NondeterministicError,
    UnsupportedTransformError,
)
from cute_kernels.runtime import dispatch
from cute_kernels.schedulers import BlockMask, select
from cute_kernels.schedulers.order import kinds
from cute_kernels.sparse_attn import api, checks, cpu, lowering, masks, op, pack_gqa
from cute_kernels.sparse_attn.api import (
    block_sparse_attention,
    block_sparse_attention_varlen,
    paged_attention,
)
from cute_kernels.sparse_attn.tensors import Grads, Saved
from tests import plans
from tests.contract import same_bytes
from tests.sparse_attn import cases

B, H, HKV, SQ, SK, D = 2, 4, 2, 150, 200, 64
OPS = torch.ops.cute_kernels


def tensors(dtype=torch.bfloat16, seed=0, dim=D) -> cases.Inputs:
    return cases.inputs(B, H, HKV, SQ, SK, dim, dtype, seed)


def same(one, other) -> bool:
    return all(same_bytes(a, b) for a, b in zip(one, other, strict=True))


def sinks_of() -> torch.Tensor:
    return torch.linspace(-1, 2, H).requires_grad_()


def compiled(function, **options):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def documents() -> BlockMask:
    """Bits, for two batches."""
    q, kv = torch.arange(SQ)[:, None], torch.arange(SK)
    return BlockMask.from_dense(torch.stack([q // 40 == kv // 40, q // 70 == kv // 70])[:, None])


MASKS = {
    "none": lambda: BlockMask.full(SQ, SK),
    "band": lambda: BlockMask.causal(SQ, SK),
    "bits": documents,
}

# ---- graphs --------------------------------------------------------------------------------------


def test_a_compiled_function_sees_every_new_mask_and_schedule():
    """The operands are constants of the graph, guarded by the mask: none is used for another."""

    def step(attend, mask, schedule):
        out = attend(*x.leaves(), mask, schedule=schedule)
        return [out.detach(), *torch.autograd.grad(out, x.leaves(), x.dout)]

    eager, graph = block_sparse_attention, compiled(block_sparse_attention)
    x, recorded = tensors(), []
    block_masks = [make() for make in (*MASKS.values(), MASKS["none"])]
    for mask in block_masks:
        want = step(eager, mask, "auto")
        assert same(step(graph, mask, "auto"), want)
        recorded.append(want[0])
    assert not same_bytes(*recorded[:2]) and not same_bytes(*recorded[1:3])
    lowered = masks.lower(block_masks[-1]).mask
    orders = [kind(lowered, heads=B * HKV) for kind in (kinds.lpt, kinds.left_to_right)]
    selection = select(lowered, heads=B * HKV)
    for kind in (*orders, orders[0], selection):
        want = step(eager, block_masks[-1], getattr(kind, "schedule", kind))
        assert all(same(step(run, block_masks[-1], kind), want) for run in (eager, graph))


@pytest.mark.parametrize(
    ("dynamic", "shapes", "graphs"),
    [
        (None, [(1, 2, size) for size in (100, 140, 180, 90, 129, 30)], 2),
        (True, [(1, 2, 100), (2, 4, 100), (2, 4, 140), (1, 2, 100)], 3),
    ],
)
def test_a_compiled_causal_attention_serves_every_length(dynamic, shapes, graphs):
    """No length compiles anew once sizes are dynamic, in training too."""
    counters.clear()
    run = compiled(block_sparse_attention, dynamic=dynamic)
    for batch, heads, size in shapes:
        x = cases.inputs(batch, heads, 1, size, size, D)
        want, got = (f(*x.leaves(), causal=True) for f in (block_sparse_attention, run))
        want, got = ((out, *torch.autograd.grad(out, x.leaves(), x.dout)) for out in (want, got))
        assert same(got, want)
    assert counters["stats"]["unique_graphs"] <= graphs


def test_a_compiled_varlen_attention_serves_every_batch():
    counters.clear()
    run = compiled(block_sparse_attention_varlen, dynamic=True)
    for lengths in ([30, 60], [100, 20, 7], [128, 129]):
        offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        rows = [t.detach()[0] for t in cases.inputs(1, 2, 1, *[sum(lengths)] * 2, D).leaves()]
        want = block_sparse_attention_varlen(*rows, offsets, causal=True)
        assert same_bytes(run(*rows, offsets, causal=True), want)
    assert counters["stats"]["unique_graphs"] <= 2


def test_compiled_ranges_have_eager_bits():
    """With ops before and after, which are exact; of q of 192 and v of 128, and sinks."""
    padding = torch.arange(40)[None] >= torch.tensor([[3], [0]])
    ranges, x = (
        api.kv_ranges(None, padding, 0, 0, (B, 40, 40)),
        cases.inputs(B, H, HKV, 40, 40, 192),
    )

    def step(q, k, v, sinks):
        return api.sequence_attention(q * 2, k, v, ranges, sinks=sinks) * 2

    results = []
    for run in (step, compiled(step)):
        leaves = *x.leaves(), sinks_of()
        out = run(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, x.dout)))
    assert same(*results) and results[0][0].shape[-1] == 128


@pytest.mark.parametrize("kind", [list, torch.tensor, np.asarray])
def test_a_column_order_is_not_frozen_into_a_graph(kind):
    """Later orders got the bytes of the first; now the first is refused, and a Schedule works."""
    x, order, run = tensors(), kind([1, 0]), compiled(block_sparse_attention)
    with pytest.raises(Exception, match=r"a name or a Schedule under torch.compile"):
        run(*x.leaves(), schedule=order)
    schedule = kinds.permutation(BlockMask.full(SQ, SK), order=order, heads=B * HKV)
    want, got = (
        block_sparse_attention(*x.leaves(), schedule=order),
        run(*x.leaves(), schedule=schedule),
    )
    assert same(*(torch.autograd.grad(out, x.leaves(), x.dout) for out in (got, want)))


def traced(name: str, n: int) -> tuple[Callable, tuple]:
    """A call of so many tokens."""
    if name == "lists":
        q = torch.randn(1, n, 2, D).bfloat16()
        return lambda q: block_sparse_attention(q, q, q, causal=True), (q,)
    q = torch.randn(n, 2, D).bfloat16()
    if name == "varlen":
        bounds = torch.tensor([0, 2, n], dtype=torch.int32)
        return lambda q, bounds: block_sparse_attention_varlen(q, q, q, bounds), (q, bounds)
    caches = torch.randn(2, 8, 16, 2, D).bfloat16().unbind()
    numbers = (torch.tensor(t).int() for t in (torch.randperm(8)[None].tolist(), [100], [0, n]))
    return lambda *operands: paged_attention(*operands), (q, *caches, *numbers)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("trace", ["jit", "fx"])
@pytest.mark.parametrize("name", ["lists", "varlen", "paged"])
def test_traces(name, trace):
    """torch.jit.trace and make_fx with symbolic sizes have the bytes of eager calls."""
    call, operands = traced(name, 40)
    if trace == "jit":
        run = torch.jit.trace(call, operands, check_trace=False)
    else:
        run = make_fx(call, tracing_mode="symbolic")(*operands)
    assert same_bytes(run(*operands), call(*operands))
    # The graph of jit keeps numbers; of symbolic sizes another length is another call.
    call, operands = traced(name, 40 if trace == "jit" else 55)
    assert same_bytes(run(*operands), call(*operands))


# ---- gradients -----------------------------------------------------------------------------------


def test_no_schedule_is_made_without_a_gradient(monkeypatch):
    """Inference pays for no schedule; a wrong one is an error all the same."""
    x = tensors()

    def refuse(*args):
        raise AssertionError("asked for")

    monkeypatch.setattr(checks.config, "auto", refuse)
    mask = BlockMask.sliding_window(SQ, SK, left=33, right=3)
    block_sparse_attention(*(t.detach() for t in x.leaves()), mask)
    with torch.no_grad():
        block_sparse_attention(*x.leaves(), mask)
    with pytest.raises(AssertionError, match="asked for"):
        block_sparse_attention(*x.leaves(), mask)


def test_autocast_casts_the_three_inputs():
    x = tensors()
    wide = [t.detach().float().requires_grad_() for t in x.leaves()]
    with torch.autocast("cpu", torch.bfloat16):
        out = block_sparse_attention(*wide, causal=True)
        mixed = block_sparse_attention(x.q, *wide[1:], causal=True)
    plain = block_sparse_attention(*x.leaves(), causal=True)
    assert same_bytes(out, plain) and same_bytes(mixed, plain)
    want = torch.autograd.grad(plain, x.leaves(), x.dout)
    assert same(torch.autograd.grad(out, wide, x.dout), (t.float() for t in want))


def test_stacked_heads_keep_their_widths():
    """What a backward of SM90 makes of masks by query head: rows of dout have v's columns."""
    x, of = cases.inputs(1, 4, 2, 40, 70, 192), pack_gqa.PackedGqa.of_blocks(40, 4, 2)
    q, k, v = (t.detach() for t in x.leaves())
    out, lse = block_sparse_attention(q, k, v, causal=True, return_lse=True)
    grads, saved = of.operands(Grads(x.dout, x.dlse), Saved(q, k, v, out, lse))
    assert saved.k is k and saved.v is v and saved.q.shape == (1, 256, 2, 192)
    assert saved.out.shape == grads.dout.shape == (1, 256, 2, 128)
    for packed, t in ((saved.q, q), (saved.out, out), (grads.dout, x.dout)):
        assert same_bytes(of.unpack(packed), t)


def test_the_op_without_a_schedule_has_no_gradient():
    x, low = tensors(), lowering.lower(MASKS["none"]())
    keys = low.tensors(), low.numbers(), [], "", True
    out, _ = op.block_sparse_attention(*x.leaves(), *keys, D**-0.5, 0.0, None)
    with pytest.raises(ArgumentValueError, match="order"):
        out.backward(x.dout)


@pytest.fixture
def determinism():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_unordered_is_refused_under_the_flag(determinism):
    x = tensors()
    with pytest.raises(NondeterministicError, match="deterministic=True"):
        block_sparse_attention(*x.leaves(), deterministic=False)
    ordered = block_sparse_attention(*x.leaves())
    got = torch.autograd.grad(ordered, x.leaves(), x.dout)
    torch.use_deterministic_algorithms(False)
    out = block_sparse_attention(*x.leaves(), deterministic=False)
    # On a CPU the unordered variant is the ordered one.
    want = torch.autograd.grad(out, x.leaves(), x.dout, retain_graph=True)
    assert same_bytes(out, ordered) and same(got, want)
    # The flag is read when backward runs, too.
    torch.use_deterministic_algorithms(True)
    with pytest.raises(NondeterministicError):
        out.backward(x.dout)


@pytest.mark.parametrize("dim", [64, 192])
@pytest.mark.parametrize(("b", "sq", "sk"), [(0, 40, 70), (2, 0, 70), (2, 40, 0), (0, 0, 0)])
def test_sizes_of_zero(dim, b, sq, sk):
    """All of the weight of a row without keys is its sink's."""
    x, none = cases.inputs(b, H, HKV, sq, sk, dim), torch.full((H,), -math.inf)
    for options in (
        *({}, {"causal": True}, {"schedule": "lpt"}, {"block_mask": BlockMask.full(sq, sk)}),
        *({"sinks": sinks_of()}, {"sinks": none.requires_grad_()}),
    ):
        out, lse = block_sparse_attention(*x.leaves(), return_lse=True, **options)
        assert out.shape == x.dout.shape and not out.any()
        sinks = options.get("sinks", none)
        assert same_bytes(lse, sinks.detach()[None, :, None].expand(x.dlse.shape).contiguous())
        leaves = *x.leaves(), *([sinks] if "sinks" in options else [])
        grads = torch.autograd.grad((out, lse), leaves, (x.dout, x.dlse))
        assert [g.shape for g in grads] == [t.shape for t in leaves]
        assert not any(g.any() for g in grads[:3])
        if "sinks" in options:
            want = x.dlse.double().sum((0, 2)).float()
            assert same_bytes(grads[3], torch.where(sinks.isinf(), 0.0, want))


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_varlen_batches_of_nothing(lengths):
    rows = [t[0] for t in cases.inputs(1, 2, 1, 0, 0, D).leaves()]
    offsets = torch.tensor([0, *lengths], dtype=torch.int32)
    out, lse = block_sparse_attention_varlen(*rows, offsets, return_lse=True)
    grads = torch.autograd.grad(out, rows, torch.zeros_like(out))
    assert out.shape == (0, 2, D) and lse.shape == (2, 0)
    assert [g.shape for g in grads] == [t.shape for t in rows]


# ---- masks and schedules -------------------------------------------------------------------------


def test_masks_and_schedules_are_built_once(monkeypatch):
    """Per content, not per object: layers and steps share them."""
    built = []
    for name in ("lower", "order_of"):
        true = getattr(masks, name)

        def counted(*args, name=name, true=true):
            built.append(name)
            return true(*args)

        monkeypatch.setattr(masks, name, counted)
    x = tensors()
    for _ in range(3):
        mask = BlockMask.sliding_window(SQ, SK, left=44, right=4)
        for _ in range(2):
            block_sparse_attention(*x.leaves(), mask).sum().backward()
    assert sorted(built) == ["lower", "order_of"]
    block_sparse_attention(*x.leaves(), BlockMask.sliding_window(SQ, SK, left=45, right=4))
    assert built.count("lower") == 2
    words = {id(t) for _ in range(2) for t in lowering.lower(mask).tensors()}
    assert len(words) == len(masks.TENSORS) - 1  # both tile tensors are one where unread


@pytest.mark.parametrize("schedule", ["auto", "spt", "lpt", [1, 0]], ids=str)
def test_masks_and_schedules_of_inference_mode_have_gradients(schedule):
    """Their lists are kept from the first use, and saved for the backward of a later one."""
    dense = torch.rand(SQ, SK, generator=torch.Generator().manual_seed(46)) < 0.5
    window = BlockMask.sliding_window(SQ, SK, left=46, right=4)
    x = tensors()
    for known in (BlockMask.from_dense(dense), window, None):
        lowering.cache.clear()
        with torch.inference_mode():
            mask = None if known is None else known & BlockMask.causal(SQ, SK)
            want = block_sparse_attention(*x.leaves(), mask, schedule=schedule)
        out = block_sparse_attention(*x.leaves(), mask, schedule=schedule)
        grads = torch.autograd.grad(out, x.leaves(), x.dout)
        assert same_bytes(out, want) and all(g.abs().sum() > 0 for g in grads)


def test_masks_of_equal_blocks_do_not_share_bits():
    """Two masks with the same blocks and other bits inside: schedule shared, bits not."""
    generator, x, results = torch.Generator().manual_seed(3), tensors(), []
    for _ in range(2):
        mask = BlockMask.from_dense(torch.rand(1, H, SQ, SK, generator=generator) < 0.5)
        out = block_sparse_attention(*x.leaves(), mask)
        causal = block_sparse_attention(*x.leaves(), mask, causal=True)
        both = block_sparse_attention(*x.leaves(), mask & BlockMask.causal(SQ, SK))
        assert same_bytes(causal, both)
        results.append((mask.block_hash(), out, causal, *torch.autograd.grad(out, x.q, x.dout)))
    assert results[0][0] == results[1][0]
    assert not any(same_bytes(a, b) for a, b in zip(results[0][1:], results[1][1:], strict=True))


def test_a_copied_mask_is_a_mask_of_its_own():
    """Its handle in compiled graphs is its own; its content is the same."""
    mask = BlockMask.sliding_window(SQ, SK, left=9, right=0)
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), copy.copy(mask)):
        assert other.handle != mask.handle and other.hash() == mask.hash()


def test_one_schedule_for_two_masks():
    """One mask for all batches, and the same one per batch: a schedule fits both, its tiles not."""
    generator, x = torch.Generator().manual_seed(8), tensors()
    dense = torch.rand(1, 1, SQ, SK, generator=generator) < 0.5
    one, each = BlockMask.from_dense(dense), BlockMask.from_dense(dense.repeat(B, 1, 1, 1))
    schedule = kinds.lpt(each, heads=B * HKV)
    results = []
    for mask in (each, one, each):
        out = block_sparse_attention(*x.leaves(), mask, schedule=schedule)
        results.append(torch.autograd.grad(out, x.leaves(), x.dout))
    tiles = [masks.order_of(masks.lower(mask), schedule).tile for mask in (one, each)]
    assert schedule.num_lists == B and not torch.equal(*tiles)
    assert all(same(grads, results[0]) for grads in results)


@pytest.mark.parametrize("trace", [lambda call: call, make_fx], ids=["call", "make_fx"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_is_whole_behind_functionalize(causal, trace):
    """Neither its hash nor the lists of its first use hold a transform's wrappers."""
    q = torch.randn(1, 201, 2, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    mask, other = (BlockMask.sliding_window(201, 201, left=9, right=2) for _ in range(2))
    attend = functools.partial(block_sparse_attention, q, q, causal=causal)
    lowering.cache.clear()
    inside = trace(torch.func.functionalize(lambda v: attend(v, mask)))(q)
    if trace is not make_fx:
        assert same_bytes(inside, attend(q, other))
    assert same_bytes(attend(q, mask), attend(q, other))
    assert mask.hash() == other.hash()


def test_masks_that_are_made_inside_a_transform():
    """One of numbers is a mask like others; one of tensors that the transform wraps is refused."""
    q, built = torch.randn(1, 60, 2, 64).bfloat16(), []

    def attend(q):
        built.append(BlockMask.causal(60, 60))
        return block_sparse_attention(q, q, q, built[-1])

    inside = torch.func.functionalize(attend)(q)
    assert same_bytes(inside, block_sparse_attention(q, q, q, built[0]))
    assert built[0].hash() == BlockMask.causal(60, 60).hash()
    dense = torch.ones(60, 60, dtype=torch.bool)
    with pytest.raises(UnsupportedTransformError, match="BlockMask: tensors computed"):
        torch.func.functionalize(lambda t: BlockMask.from_dense(t.tril()).kv_count)(dense)


@pytest.mark.parametrize("dim", [64, 192])
def test_fake_and_meta(dim):
    x, mask = tensors(dim=dim), BlockMask.sliding_window(SQ, SK, left=55, right=5)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(t.detach()) for t in x.leaves()]
        out, lse = block_sparse_attention(*fake, mask, return_lse=True)
        assert out.shape == x.dout.shape and lse.shape == (B, H, SQ) and lse.dtype == torch.float32
    for block_mask in (mask, None):
        meta = (t.detach().to("meta") for t in x.leaves())
        out, lse = block_sparse_attention(*meta, block_mask, return_lse=True)
        assert out.shape == x.dout.shape and out.is_meta and lse.shape == (B, H, SQ)
    assert block_sparse_attention(*x.leaves(), mask).isfinite().all()


def test_a_fake_of_the_width_of_q_is_killed(monkeypatch):
    monkeypatch.setattr(op, "shape_of_out", lambda q, v: q.shape)
    with pytest.raises((AssertionError, RuntimeError)):
        test_fake_and_meta(192)


def test_an_attention_may_be_a_constant_of_a_transform():
    """torch.func refuses the attention itself: tests/test_public_calls.py."""
    q = torch.randn(1, 6, 2, D).bfloat16()
    attend = lambda: block_sparse_attention(q, q, q).float().sum()  # noqa: E731
    scaled = torch.func.grad(lambda w: w * attend())(torch.ones(()))
    assert same_bytes(scaled, attend())


# ---- plans ---------------------------------------------------------------------------------------


def test_other_backends_say_why():
    for name in (op.NAME, f"{op.NAME}_backward"):
        reasons = dispatch.reasons(name, "cpu", torch.bfloat16)
        assert reasons["cpu"] is None and reasons["cute_sm90"] and reasons["triton"]
        assert "does not take" in dispatch.reasons(name, "cpu", torch.float32)["cpu"]
    assert dispatch.launcher(op.NAME, torch.device("cpu"), torch.float16) is cpu.forward


@pytest.fixture
def planned(monkeypatch):
    """Names of the kernels that are planned, for CPU tensors that count as a GPU's."""
    with plans.cached(monkeypatch) as names:
        yield names


def passes(facts: list) -> tuple[torch.Tensor, ...]:
    """Results of both ops under a rule, as a compiled graph calls them."""
    x = cases.inputs(1, 4, 2, SQ, SQ, D)
    plain = [t.detach() for t in x.leaves()]
    rest = [], facts, [], lowering.OF_SEQUENCES, True, D**-0.5, 0.0, None
    out, lse = OPS.block_sparse_attention(*plain, *rest)
    grads = OPS.block_sparse_attention_backward(x.dout, None, *plain, out, lse, *rest)
    return out, lse, *grads[:3]


def test_rules_have_plans_of_their_own(planned):
    """And a second call plans nothing."""
    causal, window, wide = (passes(f) for f in ([1], lowering.window(40), lowering.window(SQ)))
    assert planned == [op.NAME, f"{op.NAME}_backward"] * 3
    assert not same_bytes(causal[0], window[0]) and same(wide, causal)
    assert same(passes([1]), causal) and same(passes(lowering.window(40)), window)
    assert len(planned) == 6


@pytest.mark.parametrize("size", [1, 40, 128, SQ - 1, SQ, SQ + 1])
def test_a_window_counts_the_query_itself(size):
    """Forward and backward have the bytes of the mask with the size - 1 keys before a query."""
    x = cases.inputs(1, 4, 2, SQ, SQ, D)
    mask = BlockMask.sliding_window(SQ, SQ, left=size - 1, right=0)
    one = api.causal_attention(*x.leaves(), window=size)
    two = block_sparse_attention(*x.leaves(), mask, schedule="spt")
    assert same(*((out, *torch.autograd.grad(out, x.leaves(), x.dout)) for out in (one, two)))
