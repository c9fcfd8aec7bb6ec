"""FlashAttention-4 for sm_90 on the simulator; skipped without flash-attn-4."""

import importlib
import importlib.util
import math
from itertools import pairwise

import pytest

import ptxsim
from ptxsim import skips
from ptxsim.modes import ANY_CTA

from .rivals import MARKS, SCHEDULES, bf16, patched, relative, same_bytes

torch = skips.import_module("torch")

pytestmark = MARKS


@pytest.fixture
def flash():
    """FlashAttention's interface, inside `patch`."""
    with patched("flash_attn", "flash-attn-4"):
        yield importlib.import_module("flash_attn.cute.interface")


def attention(q, k, v, causal, dout=None):
    """float64 forward, log-sum-exp and gradients."""
    q, k, v = [t.double().transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        rows, cols = scores.shape[-2:]
        keep = torch.ones(rows, cols, dtype=torch.bool).tril(cols - rows)
        scores = scores.masked_fill(~keep, float("-inf"))
    out = torch.softmax(scores, -1) @ values
    lse = torch.logsumexp(scores, -1)
    grads = ()
    if dout is not None:
        grads = torch.autograd.grad(out, (q, k, v), dout.double().transpose(1, 2))
    return out.transpose(1, 2).detach(), lse.detach(), [g.transpose(1, 2) for g in grads]


def inputs(seqlen, heads, kv_heads, d):
    shapes = (1, seqlen, heads, d), (1, seqlen, kv_heads, d), (1, seqlen, kv_heads, d)
    return [bf16(*shape) for shape in shapes]


@pytest.mark.parametrize(
    "d, seqlen, causal, kv_heads, schedule",
    [
        (64, 128, False, 1, "default"),
        (64, 200, True, 1, "late"),
        (128, 128, True, 2, "default"),
        (128, 256, False, 1, "random"),
        (128, 256, True, 1, "random-two"),
    ],
)
def test_forward(flash, d, seqlen, causal, kv_heads, schedule):
    q, k, v = inputs(seqlen, 2, kv_heads, d)
    with ptxsim.options(**SCHEDULES[schedule]):
        out, lse = flash._flash_attn_fwd(q, k, v, causal=causal, return_lse=True)[:2]
    exact_out, exact_lse, _ = attention(q, k, v, causal)
    assert relative(out, exact_out) < 5e-3
    assert (lse - exact_lse).abs().max() < 1e-4


def test_forward_of_variable_length(flash):
    ends = [0, 70, 150, 280]
    q, k, v = bf16(280, 2, 64), bf16(280, 2, 64), bf16(280, 2, 64)
    offsets = torch.tensor(ends, dtype=torch.int32)
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    with ptxsim.options(**ANY_CTA, seed=11):
        out = flash._flash_attn_fwd(q, k, v, **lengths, causal=True)[0]
    parts = [attention(*[t[None, i:j] for t in (q, k, v)], True)[0][0] for i, j in pairwise(ends)]
    assert relative(out, torch.cat(parts)) < 5e-3


def windowed(scores):
    row, column = torch.arange(192)[:, None], torch.arange(192)[None]
    return scores.masked_fill((column < row - 50) | (column > row + 20), float("-inf"))


@pytest.mark.parametrize(
    "options, changed",
    [
        ({"window_size_left": 50, "window_size_right": 20}, windowed),
        ({"softcap": 5.0}, lambda scores: 5.0 * torch.tanh(scores / 5.0)),
    ],
    ids=["window", "softcap"],
)
def test_forward_options(flash, options, changed):
    q, k, v = inputs(192, 2, 2, 64)
    with ptxsim.options(**ANY_CTA, seed=11):
        out = flash._flash_attn_fwd(q, k, v, **options)[0]
    q, k, v = [t.double().transpose(1, 2) for t in (q, k, v)]
    scores = changed(q @ k.transpose(-1, -2) / 8)
    assert relative(out, (torch.softmax(scores, -1) @ v).transpose(1, 2)) < 5e-3


def backward(flash, q, k, v, causal, deterministic, schedule):
    """dQ, dK and dV, compared with float64."""
    torch.manual_seed(1)
    dout = torch.randn_like(q)
    out, lse, exact = attention(q, k, v, causal, dout)
    options = {"causal": causal, "deterministic": deterministic}
    with ptxsim.options(**SCHEDULES[schedule]):
        found = flash._flash_attn_bwd(q, k, v, out.bfloat16(), dout, lse.float(), **options)[:3]
    for name, x, y in zip(("dq", "dk", "dv"), found, exact, strict=True):
        assert not x.isnan().any(), name
        assert relative(x, y) < 1e-2, name
    return found


@pytest.mark.parametrize(
    "d, seqlen, causal, schedule",
    [
        (64, 128, False, "default"),
        (64, 200, True, "random"),
        (128, 256, False, "late"),
        (128, 256, True, "random-two"),
    ],
)
def test_backward(flash, d, seqlen, causal, schedule):
    backward(flash, *inputs(seqlen, 1, 1, d), causal, False, schedule)


@pytest.mark.parametrize("d, causal", [(64, True), (64, False), (128, True), (128, False)])
def test_deterministic_backward(flash, d, causal):
    """Same bits under every schedule: the semaphores fix the order of the sums."""
    q, k, v = inputs(384, 2, 2, d)
    first = backward(flash, q, k, v, causal, True, "default")
    for schedule in ("one", "two", "late", "random", "two-random-warps", "late-descending"):
        again = backward(flash, q, k, v, causal, True, schedule)
        for name, x, y in zip(("dq", "dk", "dv"), first, again, strict=True):
            assert same_bytes(x, y), (name, schedule)


def test_deterministic_backward_needs_ascending_dispatch(flash, monkeypatch):
    """CTAs wait for lower ones: two resident CTAs dispatched from the top deadlock, and are
    reported."""
    monkeypatch.setitem(SCHEDULES, "two-descending", {"resident_ctas": 2, "cta_order": 2})
    with pytest.raises(ptxsim.PtxsimError, match="deadlock"):
        backward(flash, *inputs(384, 1, 1, 64), False, True, "two-descending")
