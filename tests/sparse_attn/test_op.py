"""The torch ops of attention: graphs, gradients, masks and schedules."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from cute_kernels import contracts
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
)
from cute_kernels.sparse_attn.tensors import Grads, Saved
from tests import plans
from tests.contract import same_bytes
from tests.sparse_attn import cases
from tests.sparse_attn.forms import (
    FORMS,
    HKV,
    MASKS,
    OPS,
    RULES,
    SK,
    SQ,
    B,
    D,
    H,
    compiled,
    same,
    tensors,
)

# ---- graphs --------------------------------------------------------------------------------------


def test_a_compiled_function_sees_every_new_mask_and_schedule():
    """The operands are constants of the graph, guarded by the mask: none is used for another."""

    def step(attend, mask, schedule):
        out = attend(*x.leaves(), mask, schedule=schedule)
        return [out.detach(), *torch.autograd.grad(out, x.leaves(), x.dout)]

    eager, graph = block_sparse_attention, compiled(block_sparse_attention)
    x, recorded = tensors(), []
    made = [make() for make in (*MASKS.values(), MASKS["none"])]
    for mask in made:
        want = step(eager, mask, "auto")
        assert same(step(graph, mask, "auto"), want)
        recorded.append(want[0])
    assert not same_bytes(*recorded[:2]) and not same_bytes(*recorded[1:3])
    lowered = masks.lower(made[-1]).mask
    orders = [kind(lowered, heads=B * HKV) for kind in (kinds.lpt, kinds.left_to_right)]
    selection = select(lowered, heads=B * HKV)
    for kind in (*orders, orders[0], selection):
        want = step(eager, made[-1], getattr(kind, "schedule", kind))
        assert all(same(step(run, made[-1], kind), want) for run in (eager, graph))


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


# ---- gradients -----------------------------------------------------------------------------------


def test_only_the_gradients_asked_for():
    x = tensors()
    want = torch.autograd.grad(block_sparse_attention(*x.leaves()), x.leaves(), x.dout)
    for wanted in range(3):
        leaves = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(x.leaves())]
        out = block_sparse_attention(*leaves)
        (got,) = torch.autograd.grad(out, [leaves[wanted]], x.dout)
        assert same_bytes(got, want[wanted])
    assert not block_sparse_attention(*(t.detach() for t in x.leaves())).requires_grad


def test_lse_alone_and_out_alone():
    """lse is differentiable; a part that is not used sends back exactly nothing."""
    x = tensors()
    out, lse = block_sparse_attention(*x.leaves(), causal=True, return_lse=True)
    both = torch.autograd.grad((out, lse), x.leaves(), (x.dout, 0 * x.dlse), retain_graph=True)
    # dlse = 0 is subtracted from delta: the same bits.
    assert same(both, torch.autograd.grad(out, x.leaves(), x.dout, retain_graph=True))
    dq, dk, dv = torch.autograd.grad(lse, x.leaves(), x.dlse)
    assert dq.abs().sum() > 0 and dk.abs().sum() > 0 and (dv == 0).all()


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


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    """The recomputed forward makes the schedule that the first one, without grad, did not."""
    x = tensors()
    run = lambda *leaves: block_sparse_attention(*leaves, causal=True)  # noqa: E731
    want = torch.autograd.grad(run(*x.leaves()), x.leaves(), x.dout)
    leaves = [t.detach().requires_grad_() for t in x.leaves()]
    checkpoint(run, *leaves, use_reentrant=reentrant).backward(x.dout)
    assert same((t.grad for t in leaves), want)


LAYOUTS = {
    "BHSD": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "D first": lambda t: t.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "rows apart": lambda t: torch.nn.functional.pad(t, (1, 2))[..., 1:-2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_do_not_follow_strides(layout):
    """Inputs and incoming gradients of other strides: the same bytes."""
    x, view = tensors(), LAYOUTS[layout]
    out, lse = block_sparse_attention(*x.leaves(), causal=True, return_lse=True)
    want = torch.autograd.grad((out, lse), x.leaves(), (x.dout, x.dlse))
    leaves = [view(t.detach()).requires_grad_() for t in x.leaves()]
    again = block_sparse_attention(*leaves, causal=True, return_lse=True)
    dlse = torch.nn.functional.pad(x.dlse, (3, 4))[..., 3:-4]
    got = torch.autograd.grad(again, leaves, (view(x.dout), dlse))
    assert same(again, (out, lse)) and same(got, want)


def test_another_order_for_other_strides_is_killed(monkeypatch):
    """Mutant: strided inputs take a path that visits key blocks backwards."""
    true_blocked, true_lists, strided = cpu._blocked, cpu._lists, []

    def blocked(t):
        strided.append(t.stride(-1) != 1)
        return true_blocked(t)

    def lists(mask, batch, heads):
        step = -1 if any(strided) else 1
        out = true_lists(mask, batch, heads)
        return [[[visits[::step] for visits in h] for h in b] for b in out]

    monkeypatch.setattr(cpu, "_blocked", blocked)
    monkeypatch.setattr(cpu, "_lists", lists)
    test_gradients_do_not_follow_strides("BHSD")
    with pytest.raises(AssertionError):
        test_gradients_do_not_follow_strides("D first")


def test_expanded_gradients():
    x = tensors()
    out, rows = block_sparse_attention(*x.leaves()), x.dout[:, :1].expand_as(x.dout)
    want = torch.autograd.grad(out, x.leaves(), rows.contiguous(), retain_graph=True)
    assert same(torch.autograd.grad(out, x.leaves(), rows), want)


def test_v_beside_k_in_one_buffer():
    """As DeepSeek's models make them: what stands behind v's columns, NaN here, is not read."""
    q, k, v = (t.detach() for t in tensors(dim=192).leaves())
    want = block_sparse_attention(q, k, v, causal=True)
    both = torch.full((*k.shape[:3], 320), torch.nan).bfloat16()
    both[..., :192], both[..., 192:] = k, v
    around = torch.full((*v.shape[:3], 256), torch.nan).bfloat16()
    around[..., 64:192] = v
    for keys, values in ((both[..., :192], both[..., 192:]), (k, around[..., 64:192])):
        assert same_bytes(block_sparse_attention(q, keys, values, causal=True), want)


def test_stacked_heads_keep_their_widths():
    """What a backward of SM90 makes of masks by query head: rows of dout have v's columns."""
    x, of = cases.inputs(1, 4, 2, 40, 70, 192), pack_gqa.PackedGqa.of_blocks(40, 4, 2)
    q, k, v = (t.detach() for t in x.leaves())
    out, lse = block_sparse_attention(q, k, v, causal=True, return_lse=True)
    grads, saved = of.operands(Grads(x.dout, x.dlse), Saved(q, k, v, out, lse))
    assert saved.k is k and saved.v is v and saved.q.shape == (1, 256, 2, 192)
    assert saved.out.shape == grads.dout.shape == (1, 256, 2, 128)
    for made, t in ((saved.q, q), (saved.out, out), (grads.dout, x.dout)):
        assert same_bytes(of.unpack(made), t)


@pytest.mark.parametrize("name", ["none", *RULES])
def test_double_backward_is_refused(name):
    form = FORMS[name]
    x = form.leaves(D)
    (dq,) = torch.autograd.grad(form.call(*x.leaves())[0], x.q, x.dout, create_graph=True)
    with pytest.raises(UnsupportedTransformError, match="double backward"):
        dq.float().square().sum().backward()


def test_the_op_without_a_schedule_has_no_gradient():
    x, (mask, facts, _, *rest) = tensors(), FORMS["none"].keys(D)
    out, _ = op.block_sparse_attention(*x.leaves(), mask, facts, [], *rest, D**-0.5, 0.0, None)
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
    generator, x, found = torch.Generator().manual_seed(3), tensors(), []
    for _ in range(2):
        mask = BlockMask.from_dense(torch.rand(1, H, SQ, SK, generator=generator) < 0.5)
        out = block_sparse_attention(*x.leaves(), mask)
        causal = block_sparse_attention(*x.leaves(), mask, causal=True)
        both = block_sparse_attention(*x.leaves(), mask & BlockMask.causal(SQ, SK))
        assert same_bytes(causal, both)
        found.append((mask.block_hash(), out, causal, *torch.autograd.grad(out, x.q, x.dout)))
    assert found[0][0] == found[1][0]
    assert not any(same_bytes(a, b) for a, b in zip(found[0][1:], found[1][1:], strict=True))


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
    found = []
    for mask in (each, one, each):
        out = block_sparse_attention(*x.leaves(), mask, schedule=schedule)
        found.append(torch.autograd.grad(out, x.leaves(), x.dout))
    tiles = [masks.order_of(masks.lower(mask), schedule).tile for mask in (one, each)]
    assert schedule.num_lists == B and not torch.equal(*tiles)
    assert all(same(grads, found[0]) for grads in found)


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
    q, made = torch.randn(1, 60, 2, 64).bfloat16(), []

    def attend(q):
        made.append(BlockMask.causal(60, 60))
        return block_sparse_attention(q, q, q, made[-1])

    inside = torch.func.functionalize(attend)(q)
    assert same_bytes(inside, block_sparse_attention(q, q, q, made[0]))
    assert made[0].hash() == BlockMask.causal(60, 60).hash()
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


def test_a_default_device_is_not_taken():
    """Tensors inside are made where the inputs are."""
    x = tensors()
    want = block_sparse_attention(*x.leaves(), BlockMask.causal(SQ, SK))
    grads = torch.autograd.grad(want, x.leaves(), x.dout)
    with torch.device("meta"):
        mask = BlockMask.sliding_window(SQ, SK, left=None, right=0, device="cpu")
        out = block_sparse_attention(*x.leaves(), mask, schedule="spt")
        got = torch.autograd.grad(out, x.leaves(), x.dout)
    assert same_bytes(out, want) and same(got, grads)


# ---- plans ---------------------------------------------------------------------------------------


def test_guarantees_and_contract_id(monkeypatch):
    guarantees = contracts.guarantees(op.NAME, "cpu")
    assert guarantees == {"run_to_run", "batch_invariant", "schedule_invariant"}
    before = contracts.contract_id(op.NAME, "cpu")
    assert before.startswith(f"{op.NAME}/cpu/")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        assert contracts.contract_id(op.NAME, "cpu") != before


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
