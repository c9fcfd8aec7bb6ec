"""Who is measured: each rival gives the three products as functions of one input set.

An input set is a dict of x [M, K], w [N, K], dy [M, N] (bf16) and main_grad [N, K] (fp32); a case
has the entries its product reads.  `fwd` and `dx` return a new tensor; `dw` adds to main_grad in
place and returns it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

Inputs = dict[str, torch.Tensor]
Product = Callable[[Inputs], torch.Tensor]


class Absent(RuntimeError):
    """A rival that cannot run here; the message says why and goes into the record."""


@dataclass(frozen=True)
class Rival:
    """load() gives its products or raises Absent.

    promised: its results must keep the error bound and the bitwise guarantees.  environment:
    variables of a process of its own, for a rival that needs other ones than ours.
    """

    name: str
    load: Callable[[], dict[str, Product]]
    promised: bool = False
    environment: tuple[str, ...] = ()


def _module(name: str):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Absent(f"{name} cannot be imported: {error}") from None


def _ours() -> dict[str, Product]:
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


def _ours_triton() -> dict[str, Product]:
    gemm = _module("cute_kernels.gemm.triton.kernel").gemm

    def dw(t: Inputs) -> torch.Tensor:
        gemm(t["dy"].mT, t["x"].mT, None, t["main_grad"])
        return t["main_grad"]

    return {
        "fwd": lambda t: gemm(t["x"], t["w"], None, None),
        "dx": lambda t: gemm(t["dy"], t["w"].mT, None, None),
        "dw": dw,
    }


def _cublas() -> dict[str, Product]:
    return {
        "fwd": lambda t: torch.mm(t["x"], t["w"].mT),
        "dx": lambda t: torch.mm(t["dy"], t["w"]),
        "dw": lambda t: t["main_grad"].add_(torch.mm(t["dy"].mT, t["x"])),
    }


def _quack(tuned: bool) -> dict[str, Product]:
    interface = _module("quack.gemm_interface")

    def dw(t: Inputs) -> torch.Tensor:
        interface.gemm_add_inplace(t["dy"].mT, t["x"], t["main_grad"], tuned=tuned)
        return t["main_grad"]

    return {
        "fwd": lambda t: interface.gemm(t["x"], t["w"].mT, tuned=tuned),
        "dx": lambda t: interface.gemm(t["dy"], t["w"], tuned=tuned),
        "dw": dw,
    }


RIVALS = {
    rival.name: rival
    for rival in (
        Rival("ours", _ours, promised=True),
        Rival("ours_triton", _ours_triton, promised=True),
        Rival("cublas", _cublas),
        Rival(
            "cublas_starved",
            _cublas,
            environment=("CUBLAS_WORKSPACE_CONFIG=:16:8", "CUBLASLT_WORKSPACE_SIZE=1"),
        ),
        Rival("quack", lambda: _quack(tuned=True)),
        Rival("quack_untuned", lambda: _quack(tuned=False)),
    )
}
#: quack's own autotuner compiles dozens of kernels for each shape; ask for `quack` by name.
DEFAULT = ("ours", "ours_triton", "cublas", "cublas_starved", "quack_untuned")
