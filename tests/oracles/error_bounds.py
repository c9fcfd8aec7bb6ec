"""Numbers with a bound of their fp32 rounding error: for references, never dispatched.

The model of an implementation (docs/numerics.md has that of a product), U = 2^-24:

    + - * √          one rounding, U
    /                within 2 ulp, 4 U: GPUs have faster divisions than IEEE's
    e^z              2^-22, and 3 U |z| for the scaling of its argument
    σ(z)             U (3 + 4): the sum and the division; (1 - σ) of e^-z's error
    sums             32 or more side by side, then a tree: U (⌈L / 32⌉ + 5), at most U (L - 1),
                     of Σ|terms|
    matrix products  5.25 ⌈L / 16⌉ 2^-23 Σ|a b| for each product of bf16 terms (a Hopper chain
                     truncates), U for each chunk that is added, 2^-17 (bf16x2) or 2^-25 (bf16x3)
                     for what the terms of an operand leave out, once more for products that are
                     dropped where both have several
    stores           half an ulp of the dtype, at its end `Near.stored`
"""

from __future__ import annotations

import math

import torch

U = 2.0**-24
#: Relative errors of e^z (exp2) and of a division.
EXP, DIVISION = 2.0**-22, 4 * U
#: Below it fp32 may be flushed to zero.
TINY = 2.0**-126
#: Second order terms of first order bounds.
SLACK = 1 + 2.0**-7


class Near:
    """Exact real numbers, each with a bound of its error in fp32 arithmetic."""

    def __init__(self, value: torch.Tensor, error: torch.Tensor) -> None:
        self.value, self.error = value, error

    def __iter__(self):
        return iter((self.value, self.error))

    def rounded(self, roundings: float = U) -> Near:
        """Add a relative rounding error of this size."""
        error = self.error + roundings * (self.value.abs() + self.error)
        return Near(self.value, error)

    def __add__(self, other) -> Near:
        other = exact(other, self)
        return Near(self.value + other.value, self.error + other.error).rounded()

    def __sub__(self, other) -> Near:
        return self + -exact(other, self)

    def __neg__(self) -> Near:
        return Near(-self.value, self.error)

    def __mul__(self, other) -> Near:
        other = exact(other, self)
        error = self.value.abs() * other.error + self.error * (other.value.abs() + other.error)
        return Near(self.value * other.value, error).rounded()

    def __truediv__(self, other) -> Near:
        other = exact(other, self)
        value = self.value / other.value
        # |a' / b' - a / b| <= (Δa + |a / b| Δb) / |b'|
        error = (self.error + value.abs() * other.error) / (other.value.abs() - other.error)
        return Near(value, error).rounded(DIVISION)

    def __getitem__(self, index) -> Near:
        return Near(self.value[index], self.error[index])

    @property
    def mT(self) -> Near:
        """Transpose of the last two dimensions."""
        return Near(self.value.mT, self.error.mT)

    def reshape(self, *shape: int) -> Near:
        """Reshape, as torch does."""
        return Near(self.value.reshape(*shape), self.error.reshape(*shape))

    def sqrt(self) -> Near:
        """Square root of positive numbers."""
        value = self.value.sqrt()
        low = (self.value - self.error).clamp(min=0.0).sqrt()
        return Near(value, self.error / (value + low)).rounded()

    def sigmoid(self) -> Near:
        """Compute 1 / (1 + e^-z)."""
        value = torch.sigmoid(self.value)
        # σ' is at most σ (1 - σ) e^Δ within Δ, and e^-z is wrong by a factor.
        moved = torch.sigmoid(-self.value) * value
        wrong = torch.expm1(self.error + EXP + 3 * U * self.value.abs())
        # Where e^-z is inf or 0.
        return Near(value, moved * wrong + 7 * U * value + TINY)

    def sum(self, dim: int, chain: int = 0) -> Near:
        """Sum over a dimension; ``chain``: the most additions of a term, if known."""
        size = self.value.shape[dim]
        depth = min(max(size - 1, 0), chain or math.ceil(size / 32) + 5)
        magnitude = (self.value.abs() + self.error).sum(dim)
        return Near(self.value.sum(dim), self.error.sum(dim) + depth * U * magnitude)

    def stored(self, dtype: torch.dtype) -> Near:
        """Round to ``dtype``: half an ulp more, of a number that has an error already."""
        info = torch.finfo(dtype)
        reach = self.value.abs() + self.error
        half = info.eps / 2 * reach + info.smallest_normal * info.eps
        return Near(self.value, self.error * SLACK + half)


def exact(value, like: Near | None = None) -> Near:
    """Convert a tensor, or a number for use with ``like``, to `Near` without an error."""
    if isinstance(value, Near):
        return value
    if not isinstance(value, torch.Tensor):
        value = like.value.new_tensor(value)
    value = value.double()
    return Near(value, torch.zeros_like(value))


def joined(parts: list[Near], dim: int) -> Near:
    """Concatenate, as torch.cat does."""
    return Near(torch.cat([p.value for p in parts], dim), torch.cat([p.error for p in parts], dim))


def product(a: Near, b: Near, precision: str, chunk: int) -> Near:
    """Compute a [M, L] · b [L, N] of bf16 terms, in chunks of ``chunk`` that are added in fp32."""
    most = {"bf16x2": 2, "bf16x3": 3}[precision]
    length = a.value.shape[1]
    a_terms, b_terms = (_terms(t.value, most) for t in (a, b))
    exact_side = min(a_terms, b_terms) == 1
    chains = max(a_terms, b_terms) if exact_side else most * (most + 1) // 2
    out = 2.0 ** {2: -17, 3: -25}[most]
    loss = 5.25 * math.ceil(min(length, chunk) / 16) * chains * 2.0**-23
    loss += (math.ceil(length / chunk) - 1) * U + (out if exact_side else 3 * out)
    size = a.value.abs(), b.value.abs()
    error = a.error @ (size[1] + b.error) + size[0] @ b.error + loss * (size[0] @ size[1])
    return Near(a.value @ b.value, error * SLACK)


def _terms(t: torch.Tensor, most: int) -> int:
    """Number of bf16 terms that an element is the sum of, at most ``most``."""
    residual = t
    for terms in range(1, most):
        residual = residual - residual.bfloat16().double()
        if not residual.any():
            return terms
    return most
