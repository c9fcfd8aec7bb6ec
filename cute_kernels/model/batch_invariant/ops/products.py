"""Overrides of aten's products that add to something, or are of batches.

matmul, einsum, tensordot, inner and bilinear are made of products.  ``why_...`` say what is not
covered; the other functions have the signatures of aten.
"""

from __future__ import annotations

import torch

from ....gemm import api
from ....gemm import checks as gemm_checks
from .. import checks
from .definitions import batched_product


def why_linear(x, weight, bias=None) -> str | None:
    """Why a linear is not covered, or None: other ranks are compositions of torch."""
    if weight.dim() != 2 or x.dim() == 0 or (bias is not None and bias.dim() != 1):
        return checks.EXACT
    return checks.tensors(x, weight, bias)


def why_vector(a, v) -> str | None:
    """Why a product with a vector is not covered, or None."""
    return checks.tensors(a, v) if v.dim() == 1 else checks.EXACT


def why_addmv(base, a, v, *, beta=1, alpha=1) -> str | None:
    """Why a product that is added to a vector is not covered, or None."""
    return why_vector(a, v) if base.dim() < 2 else checks.EXACT


def addmm(base, a, b, *, beta=1, alpha=1) -> torch.Tensor:
    """Compute beta base + alpha a b."""
    if beta == 1 and alpha == 1 and list(base.shape) == [b.shape[-1]] and b.dim() == 2:
        return api.linear(a, b.mT, base)
    gemm_checks.matmul(a, b, "chain")
    base = checks.expand_base(base, a, b)
    return _batched(a[None], b[None], base, beta, alpha)[0]


def bmm(a, b) -> torch.Tensor:
    """Compute a_i b_i."""
    checks.batch(a, b)
    return _batched(a, b, None, 0, 1)


def baddbmm(base, a, b, *, beta=1, alpha=1) -> torch.Tensor:
    """Compute beta base_i + alpha a_i b_i."""
    checks.batch(a, b)
    return _batched(a, b, checks.expand_base(base, a, b), beta, alpha)


def addmv(base, a, v, *, beta=1, alpha=1) -> torch.Tensor:
    """Compute beta base + alpha a v."""
    product = addmm(base.unsqueeze(-1), a, v.unsqueeze(-1), beta=beta, alpha=alpha)
    return product.squeeze(-1)


def _batched(a, b, base, beta, alpha) -> torch.Tensor:
    # As in torch, a base times 0 is not read.
    return batched_product(a, b, None if beta == 0 else base, float(beta), float(alpha))
