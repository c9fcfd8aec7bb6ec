"""The torch ops of linear_logp: opcheck, changing numbers, masked tokens, tied weights."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch.library import opcheck

import cute_kernels as ck
import cute_kernels.logp.op  # registers the ops that the cases name
from cute_kernels.logp import op as _op  # noqa: F401  (defines the ops)
from tests.contract import same_bytes
from tests.logp.cases import BF16, FP32, IGNORED

T, V, D = 7, 50, 24
OPS = (
    "linear_logp",
    "linear_logp_backward",
    "log_probs",
    "log_probs_backward",
)


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


# ---- opcheck ------------------------------------------------------------------------------------


def opcheck_cases() -> dict[str, tuple]:
    h, w, b = tensors()
    plain = [t.detach() for t in (h, w, b)]
    target, each, g = targets(), torch.rand(T) + 0.5, drawn(T, dtype=FP32)
    numbers = (0.7, 0, V - 3, IGNORED, 2.0, "tree")
    ops = torch.ops.cute_kernels
    lse2, none = torch.full((T,), 7.0), torch.empty(0)
    logits = drawn(T, V, seed=3)
    nd = (h.detach().view(1, T, D), w, b, target.view(1, T), None, None, *numbers, True)
    saved = (*plain, target, None, lse2)
    empty = (plain[0][:0], plain[1], plain[2], target[:0], None)
    column = plain[1].mT.contiguous().mT
    forward, backward = ops.linear_logp, ops.linear_logp_backward
    sums = torch.randn(4, -(-V // 4) * 4)
    of_logits = (0.7, V - 3, IGNORED, 2.0)
    return {
        "forward": (forward, (h, w, b, target, None, None, *numbers, False, 0)),
        "entropy": (forward, (h, w, b, target, None, None, *numbers, True, 0)),
        "no bias": (forward, (h, w, None, target, None, None, *numbers, True, 0)),
        "N-D": (forward, (*nd, 0)),
        "temperatures": (forward, (h, w, b, target, each, None, *numbers, True, 0)),
        # Of a frozen weight: autograd.grad, which opcheck uses, leaves main_grad alone; a graph of
        # it does not (test_compiled_bits_are_eager_bits).
        "main_grad": (
            forward, (h, plain[1], b, target, None, torch.zeros(V, D), *numbers, False, 0)
        ),
        "fp32": (forward, (*(t.float() for t in plain), target, None, None, *numbers, True, 0)),
        "int32": (forward, (h, w, b, target.int(), None, None, *numbers, False, 0)),
        "empty": (forward, (*empty, None, *numbers, True, 0)),
        "backward": (backward, (g, None, None, *saved, none, None, *numbers, [True] * 3)),
        "backward of both": (backward, (g, g, None, *saved, g.abs(), None, *numbers, [True] * 3)),
        "backward of some": (
            backward,
            (g, None, None, *saved, none, None, *numbers, [False, True, False]),
        ),
        "backward of strides": (
            backward,
            (g, None, None, plain[0].mT.contiguous().mT, column, *plain[2:], target, None, lse2,
             none, None, *numbers, [True] * 3),
        ),
        "backward into main_grad": (
            backward,
            (g, None, None, *saved, none, torch.ones(V, D), *numbers, [True] * 3),
        ),
        "backward, empty": (
            backward,
            (g[:0], None, None, *empty, lse2[:0], none, torch.ones(V, D), *numbers, [True] * 3),
        ),
        "backward, empty, strides": (
            backward,
            (g[:0], None, None, plain[0][:0], column, *empty[2:], lse2[:0], none, None, *numbers,
             [True] * 3),
        ),
        "keeping": (forward, (h, w, b, target, each, None, *numbers, True, 4 * 4 * (V + 3))),
        "keeping, N-D": (forward, (*nd, 1 << 20)),
        "keeping, empty": (forward, (*empty, None, *numbers, True, 1 << 20)),
        "backward of kept": (backward, (g, g, sums, *saved, g.abs(), None, *numbers, [True] * 3)),
        "backward of kept into main_grad": (
            backward,
            (g, None, sums, *saved, none, torch.ones(V, D), *numbers, [True] * 3),
        ),
        "log_probs": (ops.log_probs, (logits.requires_grad_(), target, None, *of_logits, False)),
        "log_probs, entropy": (ops.log_probs, (logits, target, each, *of_logits, True)),
        "log_probs, empty": (ops.log_probs, (logits[:0], target[:0], None, *of_logits, True)),
        "log_probs_backward": (
            ops.log_probs_backward,
            (g, g, logits.detach(), target, None, lse2, g.abs(), *of_logits),
        ),
        "log_probs_backward, column-major": (
            ops.log_probs_backward,
            (g, None, logits.detach().mT.contiguous().mT, target, each, lse2, none, *of_logits),
        ),
        "log_probs_backward, N-D": (
            ops.log_probs_backward,
            (g.view(T, 1), None, logits.detach().view(T, 1, V), target.view(T, 1), None,
             lse2.view(T, 1), none, *of_logits),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("case", list(opcheck_cases()))
def test_opcheck(case):
    target, args = opcheck_cases()[case]
    assert set(opcheck(target.default, args).values()) == {"SUCCESS"}


def test_every_op_is_checked_and_pt2_compliant():
    assert {target for target, _ in opcheck_cases().values()} == {
        getattr(torch.ops.cute_kernels, name) for name in OPS
    }
    for name in OPS:
        overload = getattr(torch.ops.cute_kernels, name).default
        assert torch.Tag.pt2_compliant_tag in overload.tags


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
