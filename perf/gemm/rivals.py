"""Rivals of the GEMM bench: each gives the three products as calls on one input set.

`fwd` and `dx` return a new tensor; `dw` adds to main_grad in place and returns it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..core.rival import Call, Rival, Start, by_name, module
from .cases import Inputs
from .targets import PRODUCTS


def _products(load: Callable[[], dict[str, Call]]) -> dict[str, Start]:
    """A start for each product; the calls of `load` fit every case."""
    return {product: lambda case, which=product: load()[which] for product in PRODUCTS}


def _ours() -> dict[str, Call]:
    import cute_kernels as ck

    linear = ck.linear  # loads the system, which registers its ops
    ops = torch.ops.cute_kernels

    def dw(t: Inputs) -> torch.Tensor:
        ops.linear_dw_(t["dy"], t["x"], t["main_grad"], "chain")
        return t["main_grad"]

    return {
        "fwd": lambda t: linear(t["x"], t["w"]),
        "dx": lambda t: ops.linear_dx(t["dy"], t["w"], "chain"),
        "dw": dw,
    }


def _ours_triton() -> dict[str, Call]:
    gemm = module("cute_kernels.gemm.triton.launch").gemm

    def dw(t: Inputs) -> torch.Tensor:
        gemm(t["dy"].mT, t["x"].mT, None, t["main_grad"])
        return t["main_grad"]

    return {
        "fwd": lambda t: gemm(t["x"], t["w"], None, None),
        "dx": lambda t: gemm(t["dy"], t["w"].mT, None, None),
        "dw": dw,
    }


def _cublas() -> dict[str, Call]:
    return {
        "fwd": lambda t: torch.mm(t["x"], t["w"].mT),
        "dx": lambda t: torch.mm(t["dy"], t["w"]),
        "dw": lambda t: t["main_grad"].add_(torch.mm(t["dy"].mT, t["x"])),
    }


def _quack(tuned: bool) -> dict[str, Call]:
    interface = module("quack.gemm_interface")

    def dw(t: Inputs) -> torch.Tensor:
        interface.gemm_add_inplace(t["dy"].mT, t["x"], t["main_grad"], tuned=tuned)
        return t["main_grad"]

    return {
        "fwd": lambda t: interface.gemm(t["x"], t["w"].mT, tuned=tuned),
        "dx": lambda t: interface.gemm(t["dy"], t["w"], tuned=tuned),
        "dw": dw,
    }


RIVALS = by_name(
    Rival("ours", _products(_ours), promised=True),
    Rival("ours_triton", _products(_ours_triton), promised=True, op=None),
    Rival("cublas", _products(_cublas)),
    Rival(
        "cublas_starved",
        _products(_cublas),
        environment=("CUBLAS_WORKSPACE_CONFIG=:16:8", "CUBLASLT_WORKSPACE_SIZE=1"),
        program="cublas",
    ),
    Rival("quack", _products(lambda: _quack(tuned=True))),
    Rival("quack_untuned", _products(lambda: _quack(tuned=False))),
)
#: quack's own autotuner compiles dozens of kernels for each shape; ask for `quack` by name.
DEFAULT = "ours,ours_triton,cublas,cublas_starved,quack_untuned"
