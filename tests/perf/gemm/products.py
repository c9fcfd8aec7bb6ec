"""Calls that keep every promise on a CPU, and mutants that break one each."""

from __future__ import annotations

import itertools

import torch

from perf.core.rival import Call
from perf.gemm import check
from perf.gemm.cases import Case, Inputs

M, K, N = 48, 32, 40


def case(product: str) -> Case:
    return Case(product, "qkv", M, K, N)


def inputs(product: str, seed: int = 0) -> Inputs:
    return case(product).inputs(seed, "cpu")


def chained(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
    """acc + a b^T, one k at a time: elementwise, so no bit depends on a neighbour."""
    for k in range(a.shape[1]):
        acc = acc + a[:, k : k + 1].float() * b[:, k].float()
    return acc


def honest(product: str) -> Call:
    """One fp32 accumulator per output, ascending k, one rounding; dW starts from main_grad."""

    def call(t: Inputs) -> torch.Tensor:
        a, b, c = check.operands(product, t)
        if c is not None:
            return c.copy_(chained(a, b, c))
        return chained(a, b, torch.zeros(a.shape[0], b.shape[0])).to(a.dtype)

    return call


def drops_the_last_k(product: str) -> Call:
    def call(t: Inputs) -> torch.Tensor:
        a, b, c = check.operands(product, t)
        if c is not None:
            return c.copy_(chained(a[:, :-1], b[:, :-1], c))
        return chained(a[:, :-1], b[:, :-1], torch.zeros(a.shape[0], b.shape[0])).to(a.dtype)

    return call


def leaves_a_column_unwritten(product: str) -> Call:
    def call(t: Inputs) -> torch.Tensor:
        out = honest(product)(t)
        out[:, -1] = float("nan")  # what poisoned memory shows
        return out

    return call


def rounds_partial_sums(product: str) -> Call:
    """Two halves of K, each rounded to bf16 before they are added."""

    def call(t: Inputs) -> torch.Tensor:
        a, b, c = check.operands(product, t)
        half = a.shape[1] // 2
        zero = torch.zeros(a.shape[0], b.shape[0])
        parts = [chained(a[:, s], b[:, s], zero).bfloat16() for s in _halves(half)]
        total = parts[0].float() + parts[1].float()
        return c.add_(total) if c is not None else total.to(a.dtype)

    return call


def _halves(half: int) -> tuple[slice, slice]:
    return slice(0, half), slice(half, None)


def few_rows_split_k(product: str) -> Call:
    """Another sum where there are few rows, as a plan that reads M would choose."""

    def call(t: Inputs) -> torch.Tensor:
        small = check.operands(product, t)[0].shape[0] < 8
        return (rounds_partial_sums if small else honest)(product)(t)

    return call


def adds_at_the_end(product: str) -> Call:
    """main_grad is added to a sum that started from zero."""

    def call(t: Inputs) -> torch.Tensor:
        a, b, c = check.operands(product, t)
        return c.add_(chained(a, b, torch.zeros_like(c)))

    return call


def sum_changes(product: str) -> Call:
    """Every third call adds up in another way."""
    calls = itertools.count(1)

    def call(t: Inputs) -> torch.Tensor:
        other = next(calls) % 3 == 0
        return (rounds_partial_sums if other else honest)(product)(t)

    return call
