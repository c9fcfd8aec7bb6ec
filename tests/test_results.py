"""Layouts of results, and operands whose storage is gone (in-place writes: test_in_place.py)."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import ArgumentValueError


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


X, W, V = randn(2, 6, 32), randn(16, 32), randn(32)
Q, K = randn(1, 24, 4, 64).bfloat16(), randn(1, 24, 2, 64).bfloat16()
X24 = randn(1, 24, 3, 32)
TARGET = torch.arange(12).view(2, 6)
OFFSETS = torch.tensor([0, 6], dtype=torch.int32)
CUTS = torch.tensor([0, 9, 24], dtype=torch.int32)


def rotated(x: torch.Tensor) -> torch.Tensor:
    cos, sin = ck.rotary_table(torch.arange(24)[None], randn(16).abs())
    return ck.apply_rotary(x, X24, cos, sin, unsqueeze_dim=2)[0]


def rotated_in_steps(x: torch.Tensor) -> torch.Tensor:
    cos, sin = ck.rotary_table(torch.arange(24)[None], randn(16).abs())
    return ck.apply_rotary_pos_emb(x, X24, cos, sin, 2)[0]


#: Op -> (a function of one tensor that needs a gradient, the tensor).
CALLS = {
    "linear": (lambda x: ck.linear(x, W), X),
    "linear of rows": (lambda x: ck.linear(x, W), X[0]),
    "matmul": (lambda x: ck.matmul(x, W.T), X[0]),
    "skinny_linear": (lambda x: ck.skinny_linear(x, W), X),
    "grouped_linear": (lambda x: ck.grouped_linear(x, W[None], OFFSETS), X[0]),
    "linear_logp": (lambda x: ck.linear_logp(x, W, TARGET), X),
    "linear_policy_loss": (
        lambda x: ck.linear_policy_loss(x, W, TARGET, loss="cross_entropy").loss[None],
        X,
    ),
    "log_probs": (lambda x: ck.log_probs(x, TARGET), X),
    "rms_norm": (lambda x: ck.rms_norm(x, V), X),
    "rms_norm with a residual": (lambda x: ck.rms_norm(x, V, residual=2 * X)[0], X),
    "layer_norm": (lambda x: ck.layer_norm(x, V), X),
    "rms_norm of rows": (lambda x: ck.rms_norm(x, V), X[0]),
    "rms_norm of rows with a residual": (lambda x: ck.rms_norm(x, V, residual=2 * X[0])[1], X[0]),
    "layer_norm of rows": (lambda x: ck.layer_norm(x, V, V), X[0]),
    "silu of rows": (ck.silu, X[0]),
    "softmax of rows": (ck.softmax, X[0]),
    "linear_logp of rows": (lambda x: ck.linear_logp(x, W, TARGET[0]), X[0]),
    "log_probs of rows": (lambda x: ck.log_probs(x, TARGET[0]), X[0]),
    "embedding": (lambda w: ck.embedding(TARGET, w), W),
    "silu": (ck.silu, X),
    "gelu": (ck.gelu, X),
    "silu_mul": (lambda x: ck.silu_mul(x, 2 * X), X),
    "gelu_mul": (lambda x: ck.gelu_mul(x, 2 * X), X),
    "apply_rotary": (rotated, X24),
    "apply_rotary_pos_emb": (rotated_in_steps, X24),
    "softmax": (ck.softmax, X),
    "log_softmax": (ck.log_softmax, X),
    "sigmoid": (ck.sigmoid, X),
    "tanh": (ck.tanh, X),
    "block_sparse_attention": (lambda q: ck.block_sparse_attention(q, K, K, causal=True), Q),
    "block_sparse_attention_varlen": (
        lambda q: ck.block_sparse_attention_varlen(q, K[0], K[0], CUTS, causal=True),
        Q[0],
    ),
}


def test_every_public_op_of_tensors_is_covered():
    mentioned = {name.split()[0] for name in CALLS}
    # Those of mhc: tests/mhc.
    without_gradients = {
        *("rotary_table", "clip_grad_norm_", "mhc", "moe"),
        *("paged_attention", "write_kv_cache"),
    }
    missing = (
        {op for op in ck.systems.PUBLIC if ck.systems.PUBLIC[op]} - mentioned - without_gradients
    )
    assert not missing, f"give these a row in CALLS: {sorted(missing)}"


def test_relu_in_place_after_a_linear():
    layer = torch.nn.Linear(32, 16)
    layer.forward = lambda x: ck.linear(x, layer.weight, layer.bias)
    model = torch.nn.Sequential(layer, torch.nn.ReLU(inplace=True))
    model(X).sum().backward()
    assert layer.weight.grad.abs().sum() > 0


FREED = {
    "linear": lambda w: ck.linear(X, w),
    "skinny_linear": lambda w: ck.skinny_linear(X, w),
    "linear_logp": lambda w: ck.linear_logp(X, w, TARGET),
    "embedding": lambda w: ck.embedding(TARGET, w),
    "rms_norm": lambda w: ck.rms_norm(w, V),
    "softmax": lambda w: ck.softmax(w),
    "attention": lambda w: ck.block_sparse_attention(w.view(1, 1, 8, 64), K, K),
}


@pytest.mark.parametrize("name", FREED)
@pytest.mark.parametrize("bytes_left", [0, 16 * 32 * 4 - 4])
def test_a_tensor_with_freed_storage_is_refused(name, bytes_left):
    weight = torch.nn.Parameter(W.clone())
    weight.untyped_storage().resize_(bytes_left)
    with pytest.raises(ArgumentValueError, match="storage"):
        FREED[name](weight)


def column_major(t: torch.Tensor) -> torch.Tensor:
    """The same values, the last two dimensions stored the other way round."""
    return t.mT.contiguous().mT


LAYOUTS = {
    "column-major": column_major,
    "every second column": lambda t: torch.stack([t, t], -1)[..., 0],
    "batch last": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_contiguous_whatever_the_operands_are(name, layout):
    """As fakes say, so that `.view` works and torch.compile has the strides that it planned."""
    function, x = CALLS[name]
    changed = LAYOUTS[layout](x).detach().requires_grad_()
    y = function(changed)
    assert y.is_contiguous() and torch.equal(bytes_of(y), bytes_of(function(x)))
    upstream = randn(*y.shape).to(y.dtype)
    (plain,) = torch.autograd.grad(function(leaf := x.clone().requires_grad_()), leaf, upstream)
    for dy in (upstream, column_major(upstream) if y.dim() > 1 else upstream):
        (gradient,) = torch.autograd.grad(y, changed, dy, retain_graph=True)
        assert gradient.is_contiguous() and torch.equal(bytes_of(gradient), bytes_of(plain))


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    return t.detach().contiguous().view(torch.uint8)


@pytest.mark.parametrize("per_row", [False, True])
def test_products_of_no_terms_are_contiguous(per_row):
    x, weight = torch.zeros(6, 0), torch.zeros(4, 0)
    bias = column_major(randn(6, 4)) if per_row else randn(4)
    y = ck.skinny_linear(x, weight, bias)
    assert y.is_contiguous() and torch.equal(bytes_of(y), bytes_of(bias.expand(6, 4)))
    y.add_(1)
    if not per_row:
        assert torch.equal(bytes_of(ck.linear(x, weight, bias) + 1), bytes_of(y))
