"""The battery of drawn routings: a layer of experts, forward and backward, on any device.

Each draw has sizes, loads and options of its own: empty experts, one expert with all tokens, the
same expert twice in a token, k = E, ties.  Values and gradients are those of float64, tokens have
the bytes that they have alone, in other batches and with their choices in another order, and
gradients of weights those of `ck.linear` with the rows of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

import cute_kernels as ck
from tests.contract import same_bytes
from tests.oracles import moe as oracle

from . import cases
from .cases import BF16, FP16, FP32

DRAWS = 1000
#: Tokens of a draw that also run alone, at most.
ALONE = 3
#: Relative error of a layer against float64: every operand and result is rounded to the dtype.
TOLERANCE = {FP32: 2e-5, BF16: 4e-2, FP16: 5e-3}
_CHOICES = ("drawn", "chosen", "ties")


@dataclass(frozen=True)
class Draw:
    """One layer: its tokens, parameters and options.

    indices: The experts of each token; None: those that `route` chooses.
    """

    x: torch.Tensor
    dy: torch.Tensor
    parameters: dict[str, torch.Tensor]
    indices: torch.Tensor | None
    k: int
    score: str
    normalize: bool

    @property
    def experts(self) -> int:
        return len(self.parameters["router"])

    def part(self, tokens: list[int]) -> Draw:
        """The same layer with some of the tokens."""
        indices = None if self.indices is None else self.indices[tokens]
        return replace(self, x=self.x[tokens], dy=self.dy[tokens], indices=indices)


def draw(seed: int, device: str = "cpu") -> Draw:
    """The layer of a seed; every kind of `cases.KINDS` has every dtype and choice."""
    indices, experts = cases.routing(seed, most_tokens=24)
    tokens, k = indices.shape
    turn = seed // len(cases.KINDS)
    dtype = (FP32, BF16, FP16)[turn % 3]
    choice = _CHOICES[turn // 3 % 3]
    width, inner = ((40, 24), (57, 16), (128, 72))[turn // 9 % 3]
    g = cases.generator(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g) * shape[-1] ** -0.5

    parameters = {
        "router": 4 * normal(experts, width),
        "up": normal(experts, 2 * inner, width),
        "up_bias": normal(experts, 2 * inner),
        "down": normal(experts, width, inner),
    }
    if choice == "ties":
        parameters["router"][1::2] = parameters["router"][: experts // 2]
    x, dy = (torch.randn(tokens, width, generator=g) for _ in range(2))
    return Draw(
        x.to(device, dtype),
        dy.to(device, dtype),
        {name: t.to(device, dtype) for name, t in parameters.items()},
        indices.to(device) if choice == "drawn" else None,
        k,
        ("softmax", "sigmoid")[turn % 2],
        bool(seed % 3),
    )


@dataclass(frozen=True)
class Outcome:
    """Tensors of a forward and backward: y, indices, and gradients by the name of the input.

    rows, inner: What the two grouped products multiplied; d_up, d_down: gradients of their results.
    """

    y: torch.Tensor
    indices: torch.Tensor
    gradients: dict[str, torch.Tensor]
    permutation: object
    rows: torch.Tensor
    inner: torch.Tensor
    d_up: torch.Tensor
    d_down: torch.Tensor


def run(case: Draw) -> Outcome:
    """The layer's forward and backward."""
    leaves = {"x": case.x, **case.parameters}
    leaves = {name: t.clone().requires_grad_() for name, t in leaves.items()}
    logits = ck.linear(leaves["x"], leaves["router"])
    routing = ck.moe.route(
        logits, case.k, score=case.score, normalize=case.normalize, indices=case.indices
    )
    rows, permutation = ck.moe.permute(leaves["x"], routing.indices, case.experts)
    up = ck.grouped_linear(rows, leaves["up"], permutation.offsets, leaves["up_bias"])
    inner = ck.silu_mul(*up.chunk(2, -1))
    down = ck.grouped_linear(inner, leaves["down"], permutation.offsets)
    y = ck.moe.combine(down, routing.weights, permutation)
    wanted = [*leaves.values(), logits, up, down]
    *of_leaves, d_logits, d_up, d_down = torch.autograd.grad(y, wanted, case.dy)
    gradients = dict(zip(leaves, of_leaves, strict=True)) | {"logits": d_logits}
    return Outcome(
        y.detach(),
        routing.indices,
        gradients,
        permutation,
        rows.detach(),
        inner.detach(),
        d_up,
        d_down,
    )


def exact(case: Draw, indices: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(y, gradients) of the layer in float64, with these experts."""
    leaves = {"x": case.x, **case.parameters}
    leaves = {name: t.double().requires_grad_() for name, t in leaves.items()}
    logits = leaves["x"] @ leaves["router"].mT
    scores = logits.softmax(-1) if case.score == "softmax" else logits.sigmoid()
    index = indices.long()
    weights = scores.gather(1, index)
    if case.normalize:
        weights = weights / weights.sum(1, keepdim=True)
    up = torch.einsum("td,tknd->tkn", leaves["x"], leaves["up"][index]) + leaves["up_bias"][index]
    gate, linear = up.chunk(2, -1)
    inner = torch.nn.functional.silu(gate) * linear
    each = torch.einsum("tkn,tkdn->tkd", inner, leaves["down"][index])
    y = (each * weights[..., None]).sum(1)
    gradients = torch.autograd.grad(y, [*leaves.values(), logits], case.dy.double())
    return y.detach(), dict(zip((*leaves, "logits"), gradients, strict=True))


def check(case: Draw) -> Outcome:
    """Every promise of one draw."""
    got = run(case)
    if case.indices is None:
        _chosen(case, got)
    _moves(case, got)
    _values(case, got)
    _weights_of_linear(case, got)
    tokens = len(case.x)
    for some in [*([t] for t in _spread(tokens)), list(range(tokens))[::-2]]:
        part = run(case.part(some))
        assert same_bytes(part.y, got.y[some]), f"y of tokens {some}"
        assert same_bytes(part.indices, got.indices[some]), f"experts of tokens {some}"
        for name in ("x", "logits"):
            same = same_bytes(part.gradients[name], got.gradients[name][some])
            assert same, f"the gradient of {name} of tokens {some}"
    flipped = run(replace(case, indices=got.indices.flip(1)))
    for name, value in ({"y": got.y} | got.gradients).items():
        other = flipped.y if name == "y" else flipped.gradients[name]
        assert same_bytes(other, value), f"{name} follows the order of a token's choices"
    return got


def _spread(tokens: int) -> list[int]:
    return sorted({0, tokens // 2, tokens - 1})[:ALONE]


def _chosen(case: Draw, got: Outcome) -> None:
    """The chosen experts are the written choice of the scores, ties by the lowest index."""
    logits = ck.linear(case.x, case.parameters["router"])
    routing = ck.moe.route(logits, case.k, score=case.score)
    want = oracle.choice(routing.scores.cpu(), None, case.k, 1, 1)
    assert got.indices.tolist() == want


def _moves(case: Draw, got: Outcome) -> None:
    """The sort is Python's stable one, and rows are copies."""
    wanted = oracle.permutation(got.indices.cpu(), case.experts)
    for t, want in zip(got.permutation, wanted, strict=True):
        assert same_bytes(t.cpu(), want)
    assert same_bytes(got.rows, case.x[got.permutation.order.long() // case.k])


def _values(case: Draw, got: Outcome) -> None:
    """y and every gradient are float64's, within the rounding of the dtype."""
    y, gradients = exact(case, got.indices)
    size = case.dy.double().norm()
    for name, value, want in (
        ("y", got.y, y),
        *((name, got.gradients[name], want) for name, want in gradients.items()),
    ):
        error = (value.double() - want).norm()
        # Gradients of normalised weights cancel: one expert's is 0.
        assert error <= TOLERANCE[case.x.dtype] * (want.norm() + size), f"{name}: {error:.1e}"


def _weights_of_linear(case: Draw, got: Outcome) -> None:
    """Gradients of an expert's weights have the bytes of `ck.linear` with its rows alone."""
    names = (("up", got.rows, got.d_up), ("down", got.inner, got.d_down))
    for expert, span in oracle.experts(got.permutation.offsets.cpu()):
        for name, x, dy in names:
            into = got.gradients[name][expert]
            if span.start == span.stop:
                assert not into.any(), f"dW of {name} of an expert without rows"
                continue
            weight = case.parameters[name][expert].clone().requires_grad_()
            bias = case.parameters["up_bias"][expert].clone().requires_grad_()
            ck.linear(x[span], weight, bias if name == "up" else None).backward(dy[span])
            assert same_bytes(weight.grad, into), f"dW of {name} of expert {expert}"
            if name == "up":
                assert same_bytes(bias.grad, got.gradients["up_bias"][expert])
