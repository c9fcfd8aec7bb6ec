"""Results of public ops are the caller's: in-place writes have the gradients of copies."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import cute_kernels as ck
from cute_kernels import mhc, systems
from cute_kernels.integrations import flex
from tests.contract import same_bytes
from tests.public_calls import CASES, IDS, leaves_of, results_of
from tests.runtime.cached_calls import drawn

FP32 = torch.float32
_fp32 = functools.partial(drawn, dtype=FP32)
#: (name, result) that the backward reads: torch refuses a backward after a write, as for its own
#: softmax and logsumexp.
SAVED = {
    ("linear_logp", 1),
    ("log_probs", 1),
    ("rms_norm, residual", 1),
    ("layer_norm, residual", 1),
    ("softmax", 0),
    *((f"block_sparse_attention{kind}", i) for kind in ("", ", mask", "_varlen") for i in (0, 1)),
    *(("mhc.mix_and_aggregate", i) for i in (1, 2)),
    *(("mhc.post_pre", i) for i in (0, 2, 3)),
}
NOT_DIFFERENTIABLE = {
    "paged_attention",
    "write_kv_cache",
    "clip_grad_norm_",
    "rotary_table",
    "causal_conv1d_update",
    "mhc",
    "moe",
    "mhc.multilayer_recompute",
}


def gradients(name: str, index: int, write) -> list[torch.Tensor]:
    leaves = leaves_of(name)
    results = results_of(name, leaves)
    results[index] = write(results[index])
    inputs = [t for t in results if t.requires_grad]
    upstream = [drawn(*t.shape, seed=20 + i, dtype=t.dtype) for i, t in enumerate(inputs)]
    return [t.detach() for t in results] + list(
        torch.autograd.grad(inputs, leaves, upstream, materialize_grads=True)
    )


def test_every_public_op_has_a_case():
    names = set(systems.PUBLIC) | {
        f"mhc.{name}" for name in mhc.__all__ if getattr(mhc, name).__module__ == mhc.api.__name__
    }
    assert names - NOT_DIFFERENTIABLE == {name.split(",")[0] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_results_may_be_written_in_place(name):
    for index, out in enumerate(results_of(name, leaves_of(name))):
        factor = drawn(*out.shape, seed=30, dtype=out.dtype)
        copied = gradients(name, index, lambda t, by=factor: t * by)
        if (name, index) in SAVED:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradients(name, index, lambda t, by=factor: t.mul_(by))
            continue
        written = gradients(name, index, lambda t, by=factor: t.mul_(by))
        assert all(map(same_bytes, written, copied))


def in_the_mode(q, k, v):
    with ck.batch_invariant(strict=True):
        heads = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*heads, is_causal=True)


#: Functions around a public op that give its results another shape.
AROUND = {
    "flex_attention": (
        lambda q, k, v: flex.flex_attention(q, k, v, return_lse=True), *[(1, 2, 5, 64)] * 3,
    ),
    "scaled_dot_product_attention": (in_the_mode, *[(1, 5, 2, 40)] * 3),
}  # fmt: skip
#: Public functions that give an op's results another shape: by a view where gradients are recorded.
RESHAPED = {name for name in CASES if name.startswith("mhc.")}


@pytest.mark.parametrize("mode", ["no_grad", "enable_grad"])
@pytest.mark.parametrize("name", CASES | AROUND)
def test_results_without_a_graph_may_take_one(name, mode):
    """A view made under no_grad may not be written where gradients are recorded."""
    call, *shapes = (CASES | AROUND)[name]
    with getattr(torch, mode)():
        dtype = FP32 if name in RESHAPED else torch.bfloat16
        leaves = [drawn(*s, seed=i, dtype=dtype) for i, s in enumerate(shapes)]
        leaves[0].requires_grad_(mode == "no_grad")
        results = call(*leaves)
    for out in results if isinstance(results, tuple) else [results]:
        assert name in RESHAPED or not out._is_view()
        factor = drawn(*out.shape, seed=30, dtype=out.dtype).requires_grad_()
        before = out.clone()
        out.mul_(factor)
        assert out.requires_grad and same_bytes(out.detach(), (before * factor).detach())


#: Of mhc, with the function of ck.mhc.te that reshapes.
MHC = {name: CASES[name] for name in CASES if name.startswith("mhc.")} | {
    "mhc.te.mhc_fused_scale": (
        lambda *args: mhc.te.mhc_fused_scale(*args, _fp32(3, seed=3).abs(), 4),
        (3, 32), (3,), (1, 24),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MHC)
@pytest.mark.parametrize("mode", ["no_grad", "no leaf", "inference"])
def test_mhc_results_of_every_mode_may_be_written(name, mode):
    """Where no graph is made too: in the mode itself, and with gradients recorded after it."""
    run, *shapes = MHC[name]
    leaves = [_fp32(*s, seed=i) for i, s in enumerate(shapes)]
    inference = mode == "inference"
    with torch.inference_mode(inference), torch.set_grad_enabled(mode == "no leaf"):
        results = run(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        for out in results:
            before = out.clone()
            assert same_bytes(out.mul_(0.5), before * 0.5)
    for out in () if inference else results:
        out.mul_(_fp32(*out.shape).requires_grad_())
        assert out.requires_grad


@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_gradients_is_computed_or_refused_by_name(name):
    """Either the bytes of one call for each, or UnsupportedTransformError."""
    leaves = leaves_of(name)
    out = results_of(name, leaves)[0]
    grads = drawn(2, *out.shape, seed=9, dtype=out.dtype)
    want = [torch.autograd.grad(out, leaves, g, True, allow_unused=True) for g in grads]
    try:
        got = torch.autograd.grad(
            out, leaves, grads, True, is_grads_batched=True, allow_unused=True
        )
    except ck.errors.UnsupportedTransformError as error:
        assert "is_grads_batched" in str(error)
        assert name not in {"linear", "softmax", "silu"}
        return
    for batch, *each in zip(got, *want, strict=True):
        assert batch is None or same_bytes(batch, torch.stack(each))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [0, 8])
def test_freed_storage_is_refused(name, size):
    """Of each operand in turn; the last is freed between forward and backward too."""
    for index in range(len(leaves_of(name))):
        leaves = leaves_of(name)
        leaves[index] = freed = leaves[index].detach().clone()
        freed.untyped_storage().resize_(size if freed.nbytes > size else 0)
        with pytest.raises(ck.errors.ArgumentValueError):
            results_of(name, leaves)


def test_recomputed_streams_may_be_written():
    f, post, x, res = (_fp32(*s, seed=i) for i, s in enumerate(CASES["mhc.expand_combine"][1:]))
    (stream,) = mhc.multilayer_recompute(x, [(f, None, post, res)], 2)
    stream.mul_(_fp32(*stream.shape).requires_grad_())
    assert stream.requires_grad


#: Calls of rows, of which a result has two dimensions.
OF_ROWS = {
    "linear": (ck.linear, (6, 16), (8, 16)),
    "rms_norm, residual": (lambda x, r, w: ck.rms_norm(x, w, residual=r), *[(6, 16)] * 2, (16,)),
    "layer_norm": (ck.layer_norm, (6, 16), (16,), (16,)),
    "softmax": (ck.softmax, (6, 16)),
    "linear_logp": (lambda x, w: ck.linear_logp(x, w, IDS[0]), (3, 16), (8, 16)),
    "log_probs": (lambda x: ck.log_probs(x, IDS[0]), (3, 8)),
}
OTHER_LAYOUTS = CASES | {f"{name} of rows": case for name, case in OF_ROWS.items()}
LAYOUTS = {
    "column-major": lambda t: t.mT.contiguous().mT,
    "every second column": lambda t: torch.stack([t, t], -1)[..., 0],
    "batch last": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "expanded": lambda t: t[:1].expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [n for n in OTHER_LAYOUTS if not n.startswith("mhc.")])
def test_results_and_gradients_are_contiguous_whatever_the_operands_are(name, layout):
    """As fakes say, so that `.view` works and torch.compile has the strides that it planned.  Those
    of mhc: tests/mhc."""
    call, *shapes = OTHER_LAYOUTS[name]
    x, *rest = (drawn(*s, seed=i) for i, s in enumerate(shapes))

    def of(x, change):
        leaf = change(x).detach().requires_grad_()
        results = call(leaf, *rest)
        results = list(results) if isinstance(results, tuple) else [results]
        kept = [t for t in results if t.requires_grad]
        upstream = [drawn(*t.shape, seed=20, dtype=t.dtype) for t in kept]
        upstream = [change(t) if t.dim() > 1 else t for t in upstream]
        return [*results, torch.autograd.grad(kept, leaf, upstream)[0]]

    change = LAYOUTS[layout]
    pairs = zip(of(x, change), of(x, lambda t: change(t).contiguous()), strict=True)
    for out, want in pairs:
        if name in ("causal_conv1d_fn", "selective_scan") and out.dtype == torch.bfloat16:
            out, want = out.mT, want.mT  # channel-last; a state is fp32
        assert out.is_contiguous() and same_bytes(out, want)


@pytest.mark.parametrize("per_row", [False, True])
def test_products_of_no_terms_are_contiguous(per_row):
    x, weight = torch.zeros(6, 0), torch.zeros(4, 0)
    bias = _fp32(4, 6).mT if per_row else _fp32(4)
    y = ck.skinny_linear(x, weight, bias)
    assert y.is_contiguous() and same_bytes(y, bias.expand(6, 4))
    y.add_(1)
    if not per_row:
        assert same_bytes(ck.linear(x, weight, bias) + 1, y)
