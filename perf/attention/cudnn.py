"""The rival cuDNN, through torch's SDPA: the backward that most trainers on Hopper run today.

It has no block lists: full and causal masks alone.
"""

from __future__ import annotations

import functools

from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..core.rival import Absent, Call
from . import graphs
from .cases import Problem
from .targets import CUDNN_MASKS


def attention(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by cuDNN alone, [B, S, H, Dv]: torch raises where cuDNN does not take the case."""
    case = problem.case
    if case.mask not in CUDNN_MASKS:
        raise Absent(f"SDPA gives cuDNN no {case.mask} mask without a dense bias")
    options = {"is_causal": case.mask == "causal", "scale": case.scale}
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = functional.scaled_dot_product_attention(
            *heads_first, enable_gqa=case.heads != case.kv_heads, **options
        )
    return out.transpose(1, 2)


def _needs_cuda(problem: Problem) -> None:
    if problem.device.type != "cuda":
        raise Absent("cuDNN needs a CUDA GPU")


def backward(problem: Problem) -> Call:
    """(dq, dk, dv) of an input set."""
    _needs_cuda(problem)
    return graphs.backward(functools.partial(attention, problem))
