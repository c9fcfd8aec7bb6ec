"""Drawn problems of linear_logp, calls of it, and what calls have in common."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch

import cute_kernels as ck
from cute_kernels.cpu.c_library import functions
from tests.oracles import logp as reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
IGNORED = -100


class Case(NamedTuple):
    """tokens x width, a head of ``rows`` of which ``vocab`` are entries."""

    seed: int
    tokens: int
    width: int
    vocab: int
    rows: int
    dtype: torch.dtype
    order: str
    bias: bool
    softcap: float
    temperature: str  # "one", "number" or "tensor"
    masked: bool
    scale: float

    def options(self, temperature) -> dict:
        """The keyword arguments of a call."""
        made = {"order": self.order, "softcap": self.softcap, "temperature": temperature}
        return made | {"vocab_size": None if self.vocab == self.rows else self.vocab}


class Inputs(NamedTuple):
    """Tensors of a case; ``upstream``: of log p and of the entropy."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: torch.Tensor
    temperature: float | torch.Tensor
    upstream: tuple[torch.Tensor, torch.Tensor]


class Results(NamedTuple):
    """Of a forward and a backward."""

    logp: torch.Tensor
    entropy: torch.Tensor
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


def draw(seed: int) -> Case:
    """A case of sizes around units, leaves and blocks, with every option."""
    drawn = random.Random(seed)
    vocab = drawn.choice([1, 2, 15, 16, 17, 100, 127, 128, 129, 250, 256, 1000, 1023, 1040])
    return Case(
        seed,
        drawn.choice([1, 2, 3, 5, 16, 17]),
        drawn.choice([1, 7, 16, 33, 48, 150]),
        vocab,
        vocab + drawn.choice([0, 0, 1, 16, 47]),
        drawn.choice(DTYPES),
        drawn.choice(["chain", "tree"]),
        drawn.random() < 0.5,
        drawn.choice([0.0, 0.0, 3.0, 30.0]),
        drawn.choice(["one", "number", "tensor"]),
        drawn.random() < 0.5,
        drawn.choice([0.05, 0.3, 1.0, 3.0]),
    )


def inputs_of(case: Case, dirty: float = 0.0) -> Inputs:
    """Its tensors; ``dirty``: what padding of the vocabulary, and of masked rows, holds."""
    generator = torch.Generator().manual_seed(case.seed)
    drawn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    hidden = (drawn(case.tokens, case.width) * case.scale).to(case.dtype)
    weight = drawn(case.rows, case.width).to(case.dtype)
    bias = drawn(case.rows).to(case.dtype)
    target = torch.randint(0, case.vocab, (case.tokens,), generator=generator)
    each = (drawn(case.tokens) * 0.4).exp()
    upstream = drawn(case.tokens), drawn(case.tokens)
    if case.masked:
        gone = drawn(case.tokens) > 0
        target[gone], hidden[gone] = IGNORED, dirty
    weight[case.vocab :], bias[case.vocab :] = dirty, dirty
    temperature = {"one": 1.0, "number": 0.7, "tensor": each}[case.temperature]
    return Inputs(hidden, weight, bias if case.bias else None, target, temperature, upstream)


def to(device: str, x: Inputs) -> Inputs:
    """The same tensors on a device."""
    moved = [t.to(device) if isinstance(t, torch.Tensor) else t for t in x[:5]]
    return Inputs(*moved, tuple(t.to(device) for t in x.upstream))


def run(case: Case, x: Inputs, **options) -> Results:
    """Forward and backward through the op."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in x[:3]]
    hidden, weight, bias = leaves
    given = case.options(x.temperature) | options
    logp, entropy = ck.linear_logp(hidden, weight, x.target, bias, return_entropy=True, **given)
    torch.autograd.backward((logp, entropy), x.upstream)
    gradients = [None if t is None else t.grad for t in leaves]
    return Results(logp.detach(), entropy.detach(), *gradients)


def exact(case: Case, x: Inputs) -> tuple[Results, reference.Bounds]:
    """The same in float64, and the bounds."""
    temperature = x.temperature
    options = reference.Options(temperature, case.softcap, IGNORED, case.vocab, case.order)
    kept = (x.target != IGNORED)[:, None]
    seen = torch.where(kept, x.hidden, 0.0)
    logp, entropy = reference.linear_logp(seen, x.weight, x.target, x.bias, options)
    tensors = (seen, x.weight, x.bias)
    made = reference.gradients(tensors, x.target, x.upstream, options)
    bounds = reference.error_bounds(tensors, x.target, x.upstream, options)
    return Results(logp, entropy, *made), bounds


def shares(got: Results, want: Results, bounds: reference.Bounds) -> dict[str, float]:
    """The largest |error| / bound of each result, with ½ulp of its dtype in the bound."""
    found = {}
    for name, a, e, bound in zip(Results._fields, got, want, bounds, strict=True):
        if a is None:
            continue
        limit = bound * (1 + 2.0**-7)
        if name not in ("logp", "entropy"):
            limit = limit + torch.finfo(a.dtype).eps / 2 * (e.abs() + limit)
            limit = limit + torch.finfo(a.dtype).smallest_normal * torch.finfo(a.dtype).eps
        error = (a.double() - e).abs()
        found[name] = (error / limit.clamp(min=1e-45)).nan_to_num(nan=1e9).max().item()
    return found


NEAREST, DOWN, UP = 0, 0x400, 0x800
#: (setter, value, the default): settings of the process that no bit may follow.
SETTINGS = [
    (torch.set_default_dtype, torch.float64, FP32),
    (torch.set_default_device, "meta", None),
    (torch.set_flush_denormal, True, False),
    (torch.set_float32_matmul_precision, "medium", "highest"),
    (torch.use_deterministic_algorithms, True, False),
    (functions().fesetround, DOWN, NEAREST),
    (functions().fesetround, UP, NEAREST),
]
