"""Problems of the SM90 kernel, and the bytes that it must give."""

from __future__ import annotations

import torch

from cute_kernels.testing import gemm as reference
from cute_kernels.testing import moe as oracle

from . import cases

BF16 = cases.BF16


def problem(load: str, n: int, k: int, dtype=BF16, major: str = "k", bias: bool = False):
    """(x, weight, offsets, bias or None) with the weights of experts row- or column-major."""
    x, weight, offsets, bias_rows, _ = cases.operands(load, dtype, n, k)
    weight = weight if major == "k" else weight.mT.contiguous().mT
    return x, weight, offsets, bias_rows if bias else None


def chain(x, weight, offsets, bias=None) -> torch.Tensor:
    """Rows by ``chain``, expert by expert."""
    out = torch.empty(len(x), weight.shape[1], dtype=x.dtype)
    for expert, rows in oracle.experts(offsets):
        bias_e = None if bias is None else bias[expert]
        out[rows] = reference.chain(x[rows], weight[expert], bias_e).to(x.dtype)
    return out
