"""``integrations.flex`` against torch's flex_attention, and its refusals."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref

import pytest
import torch
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    and_masks,
    create_block_mask,
    flex_attention,
)

from cute_kernels.errors import ArgumentTypeError, ArgumentValueError, ShapeError
from cute_kernels.integrations import flex
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn.api import block_sparse_attention
from tests.contract import same_bytes
from tests.sparse_attn import cases

B, H, HKV, S, D = 2, 4, 2, 200, 64


def heads_first(dim: int = D) -> tuple[torch.Tensor, ...]:
    x = cases.inputs(B, H, HKV, S, S, dim)
    return tuple(t.detach().transpose(1, 2).contiguous() for t in x.leaves())


def windowed(b, h, q, kv):
    return (q >= kv) & (q - kv < 40 + 30 * b + h)


MASKS = {
    "none": lambda: None,
    "causal": lambda: create_block_mask(lambda b, h, q, kv: q >= kv, None, None, S, S, "cpu"),
    "by batch and head": lambda: create_block_mask(windowed, B, H, S, S, "cpu"),
}


@pytest.mark.parametrize(
    ("mask", "dim"), [*((mask, D) for mask in MASKS), ("causal", 192), ("by batch and head", 256)]
)
def test_values_and_gradients(mask, dim):
    """torch's result on the same inputs in fp32; the op's bytes, and those of its gradients."""
    leaves, given = [t.requires_grad_() for t in heads_first(dim)], MASKS[mask]()
    options = {"block_mask": given, "scale": 0.1, "enable_gqa": True, "return_lse": True}
    got, lse = flex.flex_attention(*leaves, **options)
    want, theirs = flex_attention(*(t.detach().float() for t in leaves), **options)
    assert got.shape == want.shape and (got - want).abs().max() < 2e-2
    assert (lse - theirs).abs().max() < 1e-4
    ours = None if given is None else BlockMask.from_flex(given)
    rows = [t.detach().transpose(1, 2).requires_grad_() for t in leaves]
    out, lse_of_op = block_sparse_attention(*rows, ours, scale=0.1, return_lse=True)
    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    grads = torch.autograd.grad(got, leaves, dout)
    grads_of_op = torch.autograd.grad(out, rows, dout.transpose(1, 2))
    assert same_bytes(got.transpose(1, 2), out) and same_bytes(lse, lse_of_op)
    for mine, other in zip(grads, grads_of_op, strict=True):
        assert same_bytes(mine.transpose(1, 2), other)
    again = flex.flex_attention(*leaves, **options | {"block_mask": ours, "schedule": "lpt"})
    assert same_bytes(again[0], got)


class Offset:
    """A mask_mod with an attribute, and as a method of one."""

    def __init__(self, offset):
        self.offset, self.nested = offset, {"offset": [offset]}

    def __call__(self, b, h, q, kv):
        return kv <= q + self.offset

    def nested_mod(self, b, h, q, kv):
        return kv <= q + self.nested["offset"][0]


def _closure(offset):
    def causal(b, h, q, kv):
        return kv <= q + offset

    def grow(n):
        nonlocal offset
        offset = n

    return and_masks(causal, lambda b, h, q, kv: kv >= 0), grow


def _default(offset):
    return lambda b, h, q, kv, off=offset: kv <= q + off


def _changes():
    """Name -> a BlockMask, and what changes the elements that it allows."""
    t, method, grown = torch.tensor(-5), Offset(-5), _closure(-5)
    mods = {
        "closure": _closure(t)[0],
        "partial": functools.partial(lambda off, b, h, q, kv: kv <= q + off, t),
        "default": _default(t),
        "keyword": lambda b, h, q, kv, *, off=t: kv <= q + off,
        "object": Offset(t),
    }
    cases = {name: (mod, lambda m: t.add_(9)) for name, mod in mods.items()}
    nested = method.nested_mod

    def wrapped(b, h, q, kv):
        return nested(b, h, q, kv)

    return cases | {
        "method": (wrapped, lambda m: method.nested["offset"].__setitem__(0, 4)),
        "attribute": (method, lambda m: setattr(method, "offset", 4)),
        "number": (grown[0], lambda m: grown[1](4)),
        "mask_mod": (Offset(-5), lambda m: setattr(m, "mask_mod", Offset(4))),
        "lists": (Offset(-5), lambda m: m.kv_num_blocks.zero_()),
    }


@pytest.mark.parametrize(
    ("name", "inference"), [*((name, False) for name in _changes()), ("closure", True)]
)
def test_a_mask_that_changes_is_converted_anew(name, inference):
    with torch.inference_mode(inference):
        mask_mod, change = _changes()[name]
        theirs = create_block_mask(mask_mod, None, None, S, S, "cpu")
        q, k, v = heads_first()
        options = {"block_mask": theirs, "enable_gqa": True}
        before = flex.flex_attention(q, k, v, **options)
        assert flex.mask_of(theirs) is flex.mask_of(theirs)
        change(theirs)
        after = flex.flex_attention(q, k, v, **options)
        assert not same_bytes(after, before)
        ours = BlockMask.from_flex(theirs)
        assert same_bytes(after, flex.flex_attention(q, k, v, **options | {"block_mask": ours}))


def test_a_compiled_call_sees_a_change():
    offset = torch.tensor(-5)
    theirs = create_block_mask(_default(offset), None, None, S, S, "cpu")
    q, k, v = heads_first()
    torch._dynamo.reset()
    call = torch.compile(
        lambda: flex.flex_attention(q, k, v, block_mask=theirs, enable_gqa=True),
        backend="eager",
    )
    for _ in range(2):
        want = flex.flex_attention(q, k, v, block_mask=BlockMask.from_flex(theirs), enable_gqa=True)
        assert same_bytes(call(), want)
        offset += 9


def test_a_mask_that_is_gone_is_kept_by_nothing():
    theirs = create_block_mask(_default(torch.tensor(1)), None, None, S, S, "cpu")
    theirs.mask_mod.__kwdefaults__ = {"mask": theirs}
    flex.mask_of(theirs)
    gone = weakref.ref(theirs)
    del theirs
    gc.collect()
    assert gone() is None


def test_the_signature_begins_as_torch_s():
    """By position and by name: arguments of torch's function mean the same here."""
    theirs = inspect.signature(flex_attention).parameters
    ours = inspect.signature(flex.flex_attention).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name


def test_options_that_are_unset_and_results_that_are_requested():
    q, k, v = heads_first()
    out, lse = flex.flex_attention(q, k, v, None, None, None, True, True)
    named = flex.flex_attention(q, k, v, enable_gqa=True, kernel_options=None, return_aux=None)
    assert same_bytes(named, out)
    assert same_bytes(flex.flex_attention(q, k, v, enable_gqa=True, kernel_options={}), out)
    for request in (AuxRequest(lse=True), AuxRequest()):
        got, aux = flex.flex_attention(q, k, v, enable_gqa=True, return_aux=request)
        assert same_bytes(got, out) and isinstance(aux, AuxOutput) and aux.max_scores is None
        assert same_bytes(aux.lse, lse) if request.lse else aux.lse is None


DENSE = torch.ones(S, S, dtype=torch.bool).tril()
BOTH, MAXIMA = {"return_aux": AuxRequest(lse=True), "return_lse": True}, AuxRequest(max_scores=True)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"score_mod": lambda s, b, h, i, j: s}, ArgumentTypeError, "score_mod: expected None"),
        ({"enable_gqa": False}, ShapeError, "key: .*enable_gqa=True"),
        ({"enable_gqa": "no"}, ArgumentTypeError, "enable_gqa: expected True or False"),
        ({"return_lse": 1}, ArgumentTypeError, "return_lse: expected True or False"),
        ({"kernel_options": {"BLOCK_M": 64}}, ArgumentValueError, "kernel_options: .*BLOCK_M"),
        ({"return_aux": True}, ArgumentTypeError, "return_aux: .*AuxRequest.*bool"),
        ({"return_aux": MAXIMA}, ArgumentValueError, r"return_aux\.max_scores: "),
        (BOTH, ArgumentValueError, "return_lse: expected False"),
        ({"block_mask": DENSE}, ArgumentTypeError, r"block_mask: .*from_dense.*got Tensor"),
        ({"block_mask": "causal"}, ArgumentTypeError, "block_mask: .*got str"),
        ({"scal": 1.0}, TypeError, r"flex_attention\(\) got an unexpected keyword"),
        ({"query": [1.0]}, ArgumentTypeError, "query: .*got list"),
        ({"value": torch.ones(S, D)}, ShapeError, r"value: .*4 dimensions \[B, H, S, D\]"),
    ],
)
def test_refusals(changes, error, says):
    q, k, v = heads_first()
    good = {"query": q, "key": k, "value": v, "enable_gqa": True}
    assert flex.flex_attention(**good).shape == q.shape
    with pytest.raises(error, match=f"^{says}"):
        flex.flex_attention(**good | changes)
