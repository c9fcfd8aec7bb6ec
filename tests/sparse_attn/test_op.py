"""The torch ops: opcheck, torch.compile, autograd, AMP, caches, and the determinism flag."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.library import opcheck
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
from cute_kernels.sparse_attn import checks, cpu, lowering, masks, op
from cute_kernels.sparse_attn.api import block_sparse_attention
from tests.contract import same_bytes
from tests.sparse_attn import cases

B, H, HKV, SQ, SK, D = 2, 4, 2, 150, 200, 64


def tensors(dtype=torch.bfloat16, seed=0) -> cases.Inputs:
    return cases.inputs(B, H, HKV, SQ, SK, D, dtype, seed)


def documents() -> BlockMask:
    """Bits, for two batches."""
    q, kv = torch.arange(SQ)[:, None], torch.arange(SK)
    return BlockMask.from_dense(torch.stack([q // 40 == kv // 40, q // 70 == kv // 70])[:, None])


MASKS = {
    "none": lambda: BlockMask.full(SQ, SK),
    "band": lambda: BlockMask.causal(SQ, SK),
    "bits": documents,
}


def operands(mask: BlockMask) -> tuple:
    """What follows q, k and v in the ops."""
    out = lowering.build_lists(mask.handle, False, "spt", True, (B, SQ, SK, H, HKV, D), "cpu")
    return (*out, True, D**-0.5, 0.0, None)


def forms_and_sinks() -> Iterator:
    """Every form without sinks, and one with them; all others by night."""
    for form, sinks in itertools.product(MASKS, (None, torch.bfloat16, torch.float32)):
        often = sinks is None or (form, sinks) == ("bits", torch.bfloat16)
        yield pytest.param(form, sinks, marks=() if often else pytest.mark.nightly)


@pytest.mark.parametrize(("form", "sinks"), list(forms_and_sinks()), ids=str)
def test_opcheck(form, sinks):
    x, rest = tensors(), operands(MASKS[form]())
    if sinks is not None:
        rest = (*rest[:-1], torch.linspace(-1, 2, H).to(sinks).requires_grad_())
    assert masks.lower(MASKS[form]()).form == form
    verdicts = opcheck(torch.ops.cute_kernels.block_sparse_attention.default, (*x.leaves(), *rest))
    assert set(verdicts.values()) == {"SUCCESS"}
    plain = [t.detach() for t in x.leaves()]
    rest = (*rest[:-1], rest[-1] if sinks is None else rest[-1].detach())
    out, lse = op.block_sparse_attention(*plain, *rest)
    for dlse in (None, x.dlse):
        args = (x.dout, dlse, *plain, out, lse, *rest)
        verdicts = opcheck(torch.ops.cute_kernels.block_sparse_attention_backward.default, args)
        assert set(verdicts.values()) == {"SUCCESS"}


def test_every_op_is_pt2_compliant():
    ops = torch.ops.cute_kernels
    for packet in (ops.block_sparse_attention, ops.block_sparse_attention_backward):
        assert torch.Tag.pt2_compliant_tag in packet.default.tags


def step(q, k, v, dout, mask, schedule="auto"):
    """Ops before and after, out and lse both used, gradients of all three."""
    out, lse = block_sparse_attention(q * 2, k, v, mask, schedule=schedule, return_lse=True)
    return (out * dout).float().sum() + lse.sin().nan_to_num(0.0).sum()


def results(run, mask, schedule="auto", seed=0):
    x = tensors(seed=seed)
    loss = run(*x.leaves(), x.dout, mask, schedule)
    return (loss.detach(), *torch.autograd.grad(loss, x.leaves()))


NO_COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="inductor on a CPU needs g++")


# Of what inductor adds, the C++ of the loss around the op, nothing is ours: nightly, 20 s.
@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=[NO_COMPILER, pytest.mark.nightly])],
)
def test_compiled_bits_are_eager_bits(backend):
    torch.compiler.reset()
    want = results(step, None)
    got = results(torch.compile(step, fullgraph=True, backend=backend), None)
    # The loss is a sum of inductor's own; the gradients are the op's.
    for eager, compiled in zip(want[1:], got[1:], strict=True):
        assert same_bytes(eager, compiled)


def test_a_compiled_function_sees_every_new_mask():
    """The operands are constants of the graph, guarded by the mask: none is used for another."""
    torch.compiler.reset()
    run = torch.compile(step, fullgraph=True, backend="aot_eager")
    recorded = []
    for make in (*MASKS.values(), MASKS["none"]):
        mask = make()
        want, got = results(step, mask), results(run, mask)
        assert all(same_bytes(a, b) for a, b in zip(want, got, strict=True))
        recorded.append(want[1])
    assert not same_bytes(recorded[0], recorded[1]) and not same_bytes(recorded[1], recorded[2])
    schedule = kinds.lpt(masks.lower(mask).mask, heads=B * HKV)
    other = kinds.left_to_right(masks.lower(mask).mask, heads=B * HKV)
    for kind in (schedule, other, schedule):
        want, got = results(step, mask, kind), results(run, mask, kind)
        assert all(same_bytes(a, b) for a, b in zip(want, got, strict=True))


def test_dynamic_shapes():
    """Each shape has a mask and a schedule of its own, and right bits."""
    torch.compiler.reset()
    run = torch.compile(block_sparse_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, heads, size in ((1, 2, 100), (2, 4, 100), (2, 4, 140), (1, 2, 100)):
        x = cases.inputs(batch, heads, 2, size, size, D)
        want, got = (f(*x.leaves(), causal=True) for f in (block_sparse_attention, run))
        assert same_bytes(got, want)
        want, got = (torch.autograd.grad(out, x.leaves(), x.dout) for out in (want, got))
        assert all(same_bytes(a, b) for a, b in zip(got, want, strict=True))


def test_a_compiled_causal_attention_serves_every_length():
    """No length compiles anew once sizes are dynamic, in training too."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    run = torch.compile(block_sparse_attention, fullgraph=True, backend="aot_eager")
    for size in (100, 140, 180, 90, 129, 30):
        x = cases.inputs(1, 2, 1, size, size, D)
        want, got = (f(*x.leaves(), causal=True) for f in (block_sparse_attention, run))
        want, got = ((out, *torch.autograd.grad(out, x.leaves(), x.dout)) for out in (want, got))
        assert all(same_bytes(a, b) for a, b in zip(got, want, strict=True))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("kind", [list, torch.tensor, np.asarray])
def test_a_column_order_is_not_frozen_into_a_graph(kind):
    """Later orders got the bytes of the first; now the first is refused, and a Schedule works."""
    torch.compiler.reset()
    x, order = tensors(), kind([1, 0])
    run = torch.compile(block_sparse_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"a name or a Schedule under torch.compile"):
        run(*x.leaves(), schedule=order)
    out = kinds.permutation(BlockMask.full(SQ, SK), order=order, heads=B * HKV)
    want = torch.autograd.grad(
        block_sparse_attention(*x.leaves(), schedule=order), x.leaves(), x.dout
    )
    got = torch.autograd.grad(run(*x.leaves(), schedule=out), x.leaves(), x.dout)
    assert all(same_bytes(a, b) for a, b in zip(got, want, strict=True))


def test_compiled_without_gradients():
    torch.compiler.reset()
    x = tensors()
    plain = [t.detach() for t in x.leaves()]
    run = torch.compile(block_sparse_attention, fullgraph=True, backend="aot_eager")
    assert same_bytes(run(*plain, causal=True), block_sparse_attention(*plain, causal=True))


def test_only_the_gradients_asked_for():
    x = tensors()
    for wanted in range(3):
        leaves = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(x.leaves())]
        out = block_sparse_attention(*leaves)
        (got,) = torch.autograd.grad(out, [leaves[wanted]], x.dout)
        want = torch.autograd.grad(block_sparse_attention(*x.leaves()), x.leaves(), x.dout)
        assert same_bytes(got, want[wanted])
    assert not block_sparse_attention(*(t.detach() for t in x.leaves())).requires_grad


def test_lse_alone_and_out_alone():
    """lse is differentiable; a part that is not used sends back exactly nothing."""
    x = tensors()
    out, lse = block_sparse_attention(*x.leaves(), causal=True, return_lse=True)
    both = torch.autograd.grad((out, lse), x.leaves(), (x.dout, 0 * x.dlse), retain_graph=True)
    alone = torch.autograd.grad(out, x.leaves(), x.dout, retain_graph=True)
    # dlse = 0 is subtracted from delta: the same bits.
    assert all(same_bytes(a, b) for a, b in zip(both, alone, strict=True))
    dq, dk, dv = torch.autograd.grad(lse, x.leaves(), x.dlse)
    assert dq.abs().sum() > 0 and dk.abs().sum() > 0 and (dv == 0).all()


def test_no_schedule_is_made_without_a_gradient(monkeypatch):
    """Inference pays for no schedule; a wrong one is an error all the same."""
    x = tensors()
    plain = [t.detach() for t in x.leaves()]

    def refuse(*args):
        raise AssertionError("asked for")

    monkeypatch.setattr(checks.config, "auto", refuse)
    mask = BlockMask.sliding_window(SQ, SK, left=33, right=3)
    block_sparse_attention(*plain, mask)
    with torch.no_grad():
        block_sparse_attention(*x.leaves(), mask)
    with pytest.raises(AssertionError, match="asked for"):
        block_sparse_attention(*x.leaves(), mask)


def test_masks_and_schedules_are_built_once(monkeypatch):
    """Per content, not per object: layers and steps share them."""
    built = {"mask": 0, "schedule": 0}
    true_lower, true_order = masks.lower, masks.order_of

    def lower(mask):
        built["mask"] += 1
        return true_lower(mask)

    def order_of(*args):
        built["schedule"] += 1
        return true_order(*args)

    monkeypatch.setattr(masks, "lower", lower)
    monkeypatch.setattr(masks, "order_of", order_of)
    x = tensors()
    for _ in range(3):
        mask = BlockMask.sliding_window(SQ, SK, left=44, right=4)
        for _ in range(2):
            block_sparse_attention(*x.leaves(), mask).sum().backward()
    assert built == {"mask": 1, "schedule": 1}
    block_sparse_attention(*x.leaves(), BlockMask.sliding_window(SQ, SK, left=45, right=4))
    assert built["mask"] == 2
    words = {id(t) for _ in range(2) for t in lowering.lower(mask).tensors()}
    assert len(words) == len(masks.TENSORS) - 1  # both tile tensors are one where unread


def test_a_mask_of_inference_mode_has_gradients():
    """Its lists are kept from the first use, and saved for the backward of a later one."""
    x = tensors()
    dense = torch.rand(SQ, SK, generator=torch.Generator().manual_seed(46)) < 0.5
    bits, band = BlockMask.from_dense(dense), BlockMask.sliding_window(SQ, SK, left=46, right=4)
    for known in (bits, band):
        with torch.inference_mode():
            mask = known & BlockMask.causal(SQ, SK)
            want = block_sparse_attention(*x.leaves(), mask)
        out = block_sparse_attention(*x.leaves(), mask)
        assert all(not t.is_inference() for t in masks.lower(mask).tensors())
        grads = torch.autograd.grad(out, x.leaves(), x.dout)
        assert same_bytes(out, want) and all(g.abs().sum() > 0 for g in grads)


@pytest.mark.parametrize("schedule", ["auto", "spt", "lpt", [1, 0]], ids=str)
def test_a_schedule_of_inference_mode_has_gradients(schedule):
    """An order that is made while no gradient is asked for is kept for a backward, too."""
    x, mask = tensors(), BlockMask.sliding_window(SQ, SK, left=47, right=4)
    for block_mask in (mask, None):
        lowering.cache.clear()
        with torch.inference_mode():
            want = block_sparse_attention(*x.leaves(), block_mask, schedule=schedule)
        out = block_sparse_attention(*x.leaves(), block_mask, schedule=schedule)
        grads = torch.autograd.grad(out, x.leaves(), x.dout)
        assert same_bytes(out, want) and all(g.abs().sum() > 0 for g in grads)


def test_masks_of_equal_blocks_do_not_share_bits():
    """Two masks with the same blocks and other bits inside: schedule shared, bits not."""
    generator = torch.Generator().manual_seed(3)
    x, found = tensors(), []
    for _ in range(2):
        mask = BlockMask.from_dense(torch.rand(1, H, SQ, SK, generator=generator) < 0.5)
        out = block_sparse_attention(*x.leaves(), mask)
        (dq,) = torch.autograd.grad(out, x.q, x.dout)
        allowed = mask.to_dense()[0, :, 7]
        found.append((mask, out, dq, allowed))
    assert found[0][0].block_hash() == found[1][0].block_hash()
    assert not same_bytes(found[0][1], found[1][1]) and not same_bytes(found[0][2], found[1][2])


def test_masks_of_one_shape_do_not_share_their_causal_part():
    generator, x = torch.Generator().manual_seed(9), tensors()
    found = []
    for _ in range(2):
        mask = BlockMask.from_dense(torch.rand(SQ, SK, generator=generator) < 0.5)
        out = block_sparse_attention(*x.leaves(), mask, causal=True)
        assert same_bytes(out, block_sparse_attention(*x.leaves(), mask & BlockMask.causal(SQ, SK)))
        found.append(out)
    assert not same_bytes(*found)


def test_what_select_returns_is_a_schedule():
    x, mask = tensors(), BlockMask.causal(SQ, SK)
    selection = select(mask, heads=B * HKV)
    grads = [
        torch.autograd.grad(
            block_sparse_attention(*x.leaves(), mask, schedule=order), x.leaves(), x.dout
        )
        for order in (selection, selection.schedule)
    ]
    assert all(same_bytes(a, b) for a, b in zip(*grads, strict=True))


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
    for grads in zip(*found, strict=True):
        assert all(same_bytes(g, grads[0]) for g in grads)


def test_autocast_casts_the_three_inputs():
    x = tensors(torch.bfloat16)
    wide = [t.detach().float().requires_grad_() for t in x.leaves()]
    with torch.autocast("cpu", torch.bfloat16):
        out = block_sparse_attention(*wide, causal=True)
        mixed = block_sparse_attention(x.q, *wide[1:], causal=True)
    plain = block_sparse_attention(*x.leaves(), causal=True)
    assert out.dtype == torch.bfloat16
    assert same_bytes(out, plain) and same_bytes(mixed, plain)
    got = torch.autograd.grad(out, wide, x.dout)
    want = torch.autograd.grad(plain, x.leaves(), x.dout)
    assert all(same_bytes(a, b.float()) for a, b in zip(got, want, strict=True))


def test_checkpointing():
    """The recomputed forward makes the schedule that the first one, without grad, did not."""
    x = tensors()
    run = lambda *leaves: block_sparse_attention(*leaves, causal=True)  # noqa: E731
    want = torch.autograd.grad(run(*x.leaves()), x.leaves(), x.dout)
    for reentrant in (True, False):
        out = checkpoint(run, *x.leaves(), use_reentrant=reentrant)
        leaves = [t.detach().requires_grad_() for t in x.leaves()]
        out = checkpoint(run, *leaves, use_reentrant=reentrant)
        out.backward(x.dout)
        assert all(same_bytes(a.grad, b) for a, b in zip(leaves, want, strict=True))


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
    assert same_bytes(again[0], out) and same_bytes(again[1], lse)
    assert all(same_bytes(a, b) for a, b in zip(got, want, strict=True))


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
    out = block_sparse_attention(*x.leaves())
    row = x.dout[:, :1]
    want = torch.autograd.grad(out, x.leaves(), row.expand_as(out).contiguous(), retain_graph=True)
    got = torch.autograd.grad(out, x.leaves(), row.expand_as(out))
    assert all(same_bytes(a, b) for a, b in zip(got, want, strict=True))


def test_fake_and_meta():
    from torch._subclasses import FakeTensorMode

    mask = BlockMask.sliding_window(SQ, SK, left=55, right=5)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k = torch.empty(B, SQ, H, D).bfloat16(), torch.empty(B, SK, HKV, D).bfloat16()
        out, lse = block_sparse_attention(q, k, k, mask, return_lse=True)
        assert out.shape == q.shape and lse.shape == (B, H, SQ) and lse.dtype == torch.float32
    q, k = (t.detach().to("meta") for t in tensors().leaves()[:2])
    for block_mask in (mask, None):
        out, lse = block_sparse_attention(q, k, k, block_mask, return_lse=True)
        assert out.shape == q.shape and out.device.type == "meta" and lse.shape == (B, H, SQ)
    plain = [t.detach() for t in tensors().leaves()]
    assert block_sparse_attention(*plain, mask).isfinite().all()


def test_a_default_device_is_not_taken():
    """Tensors inside are made where the inputs are."""
    x = tensors()
    want = block_sparse_attention(*x.leaves(), BlockMask.causal(SQ, SK))
    grads = torch.autograd.grad(want, x.leaves(), x.dout)
    with torch.device("meta"):
        mask = BlockMask.sliding_window(SQ, SK, left=None, right=0, device="cpu")
        out = block_sparse_attention(*x.leaves(), mask, schedule="spt")
        got = torch.autograd.grad(out, x.leaves(), x.dout)
    assert same_bytes(out, want)
    assert all(same_bytes(a, b) for a, b in zip(got, grads, strict=True))


def test_double_backward_is_refused():
    x = tensors()
    out = block_sparse_attention(*x.leaves())
    (dq,) = torch.autograd.grad(out, x.q, x.dout, create_graph=True)
    with pytest.raises(UnsupportedTransformError, match="double backward"):
        dq.float().square().sum().backward()


def test_vmap_is_refused():
    x = tensors()
    stacked = torch.stack([x.q.detach()] * 2)
    run = lambda q: block_sparse_attention(q, x.k.detach(), x.v.detach())  # noqa: E731
    with pytest.raises(UnsupportedTransformError, match="batch"):
        torch.func.vmap(run)(stacked)


def test_the_op_without_a_schedule_has_no_gradient():
    x, (mask, facts, _, kind, *rest) = tensors(), operands(BlockMask.full(SQ, SK))
    out, _ = op.block_sparse_attention(*x.leaves(), mask, facts, [], kind, *rest)
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
    torch.use_deterministic_algorithms(False)
    out = block_sparse_attention(*x.leaves(), deterministic=False)
    torch.use_deterministic_algorithms(True)
    # The flag is read when backward runs, too.
    with pytest.raises(NondeterministicError):
        out.backward(x.dout)


def test_ordered_runs_under_the_flag(determinism):
    x = tensors()
    out = block_sparse_attention(*x.leaves())
    got = torch.autograd.grad(out, x.leaves(), x.dout)
    torch.use_deterministic_algorithms(False)
    fast = block_sparse_attention(*x.leaves(), deterministic=False)
    # On a CPU the unordered variant is the ordered one.
    want = torch.autograd.grad(fast, x.leaves(), x.dout)
    assert same_bytes(out, fast) and all(same_bytes(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("b", "sq", "sk"), [(0, SQ, SK), (B, 0, SK), (B, SQ, 0), (0, 0, 0), (B, 0, 0)]
)
def test_sizes_of_zero(b, sq, sk):
    x = cases.inputs(b, H, HKV, sq, sk, D)
    for options in (
        {},
        {"causal": True},
        {"schedule": "lpt"},
        {"block_mask": BlockMask.full(sq, sk)},
    ):
        out, lse = block_sparse_attention(*x.leaves(), return_lse=True, **options)
        assert out.shape == (b, sq, H, D) and (out == 0).all()
        assert lse.shape == (b, H, sq) and (lse == -math.inf).all()
        grads = torch.autograd.grad((out, lse), x.leaves(), (x.dout, x.dlse))
        assert all(
            (g == 0).all() and g.shape == t.shape for g, t in zip(grads, x.leaves(), strict=True)
        )


def test_a_row_that_sees_nothing():
    """More queries than keys, causal: the first rows are empty, whatever they hold."""
    x = cases.inputs(1, 2, 1, 300, 140, D)
    with torch.no_grad():
        x.q[:, :160] = math.nan
    out, lse = block_sparse_attention(*x.leaves(), causal=True, return_lse=True)
    assert (out[:, :160] == 0).all() and (lse[:, :, :160] == -math.inf).all()
    assert out[:, 160:].isfinite().all() and (out[:, 160:] != 0).any(-1).all()
    dq, _, dv = torch.autograd.grad(out, x.leaves(), x.dout)
    assert (dq[:, :160] == 0).all() and (dq[:, 161:] != 0).any(-1).all()
    assert dv.isfinite().all() and dq.isfinite().all()


def test_guarantees_and_contract_id():
    guarantees = contracts.guarantees(op.NAME, "cpu")
    assert guarantees == {"run_to_run", "batch_invariant", "schedule_invariant"}
    assert contracts.contract_id(op.NAME, "cpu").startswith(f"{op.NAME}/cpu/")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        other = contracts.contract_id(op.NAME, "cpu")
    finally:
        torch.set_num_threads(before)
    assert other != contracts.contract_id(op.NAME, "cpu")


def test_other_backends_say_why():
    for name in (op.NAME, f"{op.NAME}_backward"):
        reasons = dispatch.reasons(name, "cpu", torch.bfloat16)
        assert reasons["cpu"] is None and reasons["cute_sm90"] and reasons["triton"]
        assert "does not take" in dispatch.reasons(name, "cpu", torch.float32)["cpu"]
    assert dispatch.launcher(op.NAME, torch.device("cpu"), torch.float16) is cpu.forward


@pytest.mark.parametrize(("device", "chosen"), [("cpu", "spt"), ("cuda", "select")])
def test_auto(device, chosen, monkeypatch):
    """A cheap kind on a CPU; on a GPU what ``select`` finds.  Both pass the gate."""
    from cute_kernels.schedulers.model.selection import select
    from cute_kernels.schedulers.order.safety import admit

    mask = BlockMask.causal(700, 700)
    out = checks.config.auto(mask, 4, 128, device)
    assert admit(out, mask).any_residency and out.heads == 4
    if chosen == "spt":
        assert out.hash == kinds.spt(mask, heads=4).hash
    else:
        assert out.hash == select(mask, heads=4, machine="h200_d128").schedule.hash
