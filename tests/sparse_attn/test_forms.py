"""The ops of attention over every kind of keys: opcheck, fakes, compiled, transformed, traced."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from cute_kernels.errors import (
    UnsupportedTransformError,
)
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import api, op
from cute_kernels.sparse_attn.api import (
    block_sparse_attention,
    block_sparse_attention_varlen,
    paged_attention,
)
from tests.contract import same_bytes
from tests.sparse_attn import cases, paged_cases
from tests.sparse_attn.forms import (
    FORMS,
    HKV,
    OPS,
    PADDING,
    RANGES,
    RULES,
    D,
    H,
    compiled,
    results,
    same,
    sinks_of,
)

NIGHT = pytest.mark.nightly


def require_opcheck(name: str, *operands) -> None:
    overload = getattr(OPS, name).default
    assert torch.Tag.pt2_compliant_tag in overload.tags
    assert set(opcheck(overload, operands).values()) == {"SUCCESS"}, name


#: By day each op once.
BY_DAY = [("bits", 64, "bfloat16"), ("varlen", 192, "float32"), ("ranges", 192, None)]
ALL = itertools.product(FORMS, (64, 192, 256), (None, "float32", "bfloat16"))


@pytest.mark.parametrize(
    ("name", "dim", "sinks"),
    [*BY_DAY, *(pytest.param(*case, marks=NIGHT) for case in ALL if case not in BY_DAY)],
)
def test_opcheck(name, dim, sinks):
    form = FORMS[name]
    x, numbers = form.leaves(dim), (*form.keys(dim), dim**-0.5, 0.0)
    sinks = None if sinks is None else sinks_of(getattr(torch, sinks))
    require_opcheck(form.op, *x.leaves(), *numbers, sinks)
    plain = [t.detach() for t in x.leaves()]
    rest = *numbers, None if sinks is None else sinks.detach()
    out, lse = getattr(OPS, form.op)(*plain, *rest)
    for dlse in (None, x.dlse):
        require_opcheck(f"{form.op}_backward", x.dout, dlse, *plain, out, lse, *rest)


@pytest.mark.parametrize("name", RULES[:2])
def test_a_fake_of_the_width_of_q_is_killed(monkeypatch, name):
    monkeypatch.setattr(op, "shape_of_out", lambda q, v: q.shape)
    with pytest.raises(Exception, match=r"192.*128|128.*192"):
        test_opcheck(name, 192, None)


def test_opcheck_of_what_makes_the_keys_and_of_pages():
    batch = paged_cases.drawn([(1, 20), (5, 9)], (4, 2, D), 16, with_sinks=True, poison=0.0)
    q, *paged, scale, window, softcap, sinks = batch.operands()
    paged = q, *paged, scale, *window, softcap, sinks, "NHD"
    token, cpu_device = (batch.keys[0][:3], batch.values[0][:3]), torch.device("cpu")
    dense = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    sizes = 2, 40, 40, True
    require_opcheck("seen_columns", dense, cpu_device)
    require_opcheck("kv_ranges", None, PADDING, torch.tensor(0), 0, *sizes, cpu_device)
    require_opcheck("paged_attention", *paged)
    require_opcheck("paged_attention_out", torch.zeros_like(q), *paged)
    slots = torch.tensor([3, -1, 17])
    require_opcheck("write_kv_cache", *token, batch.k_cache, batch.v_cache, slots)


NO_COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="inductor on a CPU needs g++")


# Of what inductor adds, the C++ of the loss around the op, nothing is ours: nightly, 20 s.
@pytest.mark.parametrize(
    ("name", "dim", "backend"),
    [
        *((name, 192 if name in RULES else 64, "aot_eager") for name in FORMS),
        *(pytest.param(name, 64, "aot_eager", marks=NIGHT) for name in RULES),
        pytest.param("band", 64, "inductor", marks=[NO_COMPILER, NIGHT]),
    ],
)
def test_compiled_bits_are_eager_bits(name, dim, backend):
    """With ops before and after, which are exact; for q of 192 and v of 128, too, and sinks."""
    form, sinks = FORMS[name], sinks_of()

    def run(q, k, v, sinks):
        return [t * 2 for t in form.call(q * 2, k, v, sinks=sinks)]

    want, step = results(form, dim, run, sinks), compiled(run, backend)
    assert same(results(form, dim, step, sinks), want)
    assert want[0].shape[-1] == cases.VALUE_DIMS[dim]
    plain = [t.detach() for t in form.leaves(dim).leaves()]
    if name == "causal":
        assert same_bytes(step(*plain, sinks=None)[0], run(*plain, sinks=None)[0])


@pytest.mark.parametrize("name", RULES)
def test_the_scale_is_of_q_and_k(name):
    form = FORMS[name]
    want = results(form, 192)
    assert same(results(form, 192, scale=192**-0.5), want)
    assert not same_bytes(results(form, 192, scale=128**-0.5)[0], want[0])


SMALL = 6
CALLS = {
    "none": lambda q: block_sparse_attention(q, q, q),
    "mask": lambda q: block_sparse_attention(q, q, q, BlockMask.causal(SMALL, SMALL)),
    "varlen": lambda q: block_sparse_attention_varlen(*[q[0]] * 3, torch.tensor([0, 2, SMALL])),
    "ranges": lambda q: api.sequence_attention(q, q, q, RANGES[:1, :, :SMALL]),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "jacrev", "hessian", "vmap"])
def test_transforms_of_torch_func_are_refused(transform, name):
    """Of few numbers: a Hessian has their square."""
    q, function = torch.randn(1, SMALL, 2, D).bfloat16(), getattr(torch.func, transform)
    attend = lambda q: CALLS[name](q).float().sum()  # noqa: E731
    calls = {
        "vjp": lambda: function(attend, q)[1](torch.ones(())),
        "jvp": lambda: function(attend, (q,), (q,)),
        "vmap": lambda: function(attend)(q[None]),
    }
    with pytest.raises(UnsupportedTransformError, match="not supported"):
        calls.get(transform, lambda: function(attend)(q))()
    # Of another tensor they may hold an attention that is constant to them.
    scaled = torch.func.grad(lambda w: (w * attend(q)).sum())(torch.ones(2))
    assert same_bytes(scaled, attend(q).expand(2).contiguous())


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
