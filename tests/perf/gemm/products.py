"""Calls that keep every promise on a CPU, and mutants that break one each."""

from __future__ import annotations

import itertools
from collections.abc import Callable

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


def summed(sums) -> Callable[[str], Call]:
    """Calls of a product that add `sums(a, b, c)`, with c zeros or main_grad, and round once."""

    def of(product: str) -> Call:
        def call(t: Inputs) -> torch.Tensor:
            a, b, c = check.operands(product, t)
            if c is not None:
                return c.copy_(sums(a, b, c))
            return sums(a, b, torch.zeros(a.shape[0], b.shape[0])).to(a.dtype)

        return call

    return of


def _halves(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
    """Two halves of K, each rounded to bf16 before they are added."""
    half, zero = a.shape[1] // 2, torch.zeros_like(acc)
    parts = [chained(a[:, s], b[:, s], zero) for s in (slice(0, half), slice(half, None))]
    return acc + (parts[0].bfloat16().float() + parts[1].bfloat16().float())


#: One fp32 accumulator per output, ascending k, one rounding; dW starts from main_grad.
honest = summed(chained)
rounds_partial_sums = summed(_halves)
drops_the_last_k = summed(lambda a, b, acc: chained(a[:, :-1], b[:, :-1], acc))
#: main_grad is added to a sum that started from zero.
adds_at_the_end = summed(lambda a, b, acc: acc + chained(a, b, torch.zeros_like(acc)))


def leaves_a_column_unwritten(product: str) -> Call:
    def call(t: Inputs) -> torch.Tensor:
        out = honest(product)(t)
        out[:, -1] = float("nan")  # what poisoned memory shows
        return out

    return call


def few_rows_split_k(product: str) -> Call:
    """Another sum where there are few rows, as a plan that reads M would choose."""

    def call(t: Inputs) -> torch.Tensor:
        small = check.operands(product, t)[0].shape[0] < 8
        return (rounds_partial_sums if small else honest)(product)(t)

    return call


def sum_changes(product: str) -> Call:
    """Every third call adds up in another way."""
    calls = itertools.count(1)

    def call(t: Inputs) -> torch.Tensor:
        other = next(calls) % 3 == 0
        return (rounds_partial_sums if other else honest)(product)(t)

    return call
