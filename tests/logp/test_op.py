"""The torch ops of linear_logp: changing numbers, masked tokens, tied weights."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

import cute_kernels as ck
import cute_kernels.logp.op  # registers the ops that the cases name
from cute_kernels.logp import op as _op  # noqa: F401  (defines the ops)
from tests.contract import same_bytes
from tests.logp.cases import BF16, FP32, IGNORED

T, V, D = 7, 50, 24


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(dtype: torch.dtype = BF16, grad: bool = True) -> list[torch.Tensor]:
    """hidden, weight, bias."""
    made = drawn(T, D), drawn(V, D, seed=1) * 0.3, drawn(V, seed=2)
    return [t.to(dtype).requires_grad_(grad) for t in made]


def targets() -> torch.Tensor:
    target = torch.arange(T) * 7 % V
    target[2] = IGNORED
    return target


# ---- graphs -------------------------------------------------------------------------------------


def test_a_temperature_that_changes_compiles():
    torch.compiler.reset()
    run = torch.compile(ck.linear_logp, fullgraph=True, backend="aot_eager")
    h, w, b = tensors(grad=False)
    for temperature in (1.0, 0.7, 0.9, 2):
        got = run(h, w, targets(), b, temperature=temperature)
        assert same_bytes(got, ck.linear_logp(h, w, targets(), b, temperature=temperature))


# ---- autograd -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_no_tokens(shape):
    h = torch.zeros(*shape, D).requires_grad_()
    _, w, b = tensors(FP32)
    target = torch.zeros(shape, dtype=torch.long)
    logp, entropy = ck.linear_logp(h, w, target, b, return_entropy=True)
    assert logp.shape == entropy.shape == shape
    (logp.sum() + entropy.sum()).backward()
    assert h.grad.shape == h.shape and not w.grad.any() and not b.grad.any()
    state = torch.ones(V, D)
    w.grad = None
    ck.linear_logp(h, w, target, b, main_grad=state).sum().backward()
    assert w.grad is None and (state == 1).all()
    logits = torch.zeros(*shape, V).requires_grad_()
    ck.log_probs(logits, target).sum().backward()
    assert logits.grad.shape == logits.shape


def test_all_tokens_masked():
    h, w, b = tensors()
    h.data[:] = float("nan")
    logp, entropy = ck.linear_logp(h, w, torch.full((T,), IGNORED), b, return_entropy=True)
    (logp.sum() + entropy.sum()).backward()
    for t in (logp, entropy, h.grad, w.grad, b.grad):
        assert not t.any()


# ---- tied embeddings ----------------------------------------------------------------------------


def test_tied_embeddings_have_the_same_bytes_in_every_run_and_order_of_use():
    """The head's gradient flows through the embedding, and both meet in ``weight.grad``.

    Of one backward they are two terms of one addition, which is commutative.
    """
    tokens = torch.randint(0, V, (33,), generator=torch.Generator().manual_seed(1))
    made = []
    for head_first in (True, False, True):
        weight = torch.nn.Parameter(drawn(V, D, seed=1))
        of_head = lambda weight=weight: ck.linear_logp(drawn(32, D), weight, tokens[1:]).sum()  # noqa: E731
        ahead = of_head() if head_first else 0.0
        below = (torch.nn.functional.embedding(tokens[:-1], weight).float().sin() * 3).sum()
        (below + (ahead if head_first else of_head())).backward()
        made.append(weight.grad)
    assert all(same_bytes(made[0], other) for other in made[1:])


def test_tied_with_main_grad_keeps_the_head_apart():
    """The head's share is in main_grad, the embedding's in .grad: a trainer adds them."""
    tokens = torch.randint(0, V, (33,), generator=torch.Generator().manual_seed(1))
    weight, state = torch.nn.Parameter(drawn(V, D, seed=1)), torch.zeros(V, D)
    hidden = torch.nn.functional.embedding(tokens[:-1], weight).tanh()
    ck.linear_logp(hidden, weight, tokens[1:], main_grad=state).sum().backward()
    other = weight.detach().clone().requires_grad_()
    head = torch.zeros(V, D)
    leaf = hidden.detach().requires_grad_()
    ck.linear_logp(leaf, other, tokens[1:], main_grad=head).sum().backward()
    assert same_bytes(state, head) and other.grad is None
    torch.nn.functional.embedding(tokens[:-1], other).tanh().backward(leaf.grad)
    assert same_bytes(weight.grad, other.grad)
