"""Rivals of the bench of mixtures: each gives products and moves as calls on one input set."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch

from ..core.rival import Absent, Call, Rival, Start, by_name, module
from .cases import MOVES, PRODUCTS, Case, Inputs


def _starts(names: tuple[str, ...], load: Callable[[Case], dict[str, Call]]) -> dict[str, Start]:
    """A start for each name; ``load`` gives the calls of one case."""
    return {name: lambda case, which=name: load(case)[which] for name in names}


def _ours(case: Case) -> dict[str, Call]:
    import cute_kernels as ck

    linear, moe, experts = ck.grouped_linear, ck.moe, case.sizes[0]
    ops = torch.ops.cute_kernels
    permutations: dict[int, object] = {}

    def permute(t: Inputs) -> torch.Tensor:
        return moe.permute(t["x"], t["indices"], experts)[0]

    def combine(t: Inputs) -> torch.Tensor:
        key = id(t["rows"])
        if key not in permutations:
            # A layer has it from its permute; its rows are not read here.
            one_column = t["rows"].new_zeros(case.tokens, 8)
            permutations[key] = moe.permute(one_column, t["indices"], experts)[1]
        return moe.combine(t["rows"], t["weights"], permutations[key])

    return {
        "fwd": lambda t: linear(t["x"], t["w"], t["offsets"]),
        "dx": lambda t: ops.grouped_dx(t["dy"], t["w"], t["offsets"], "chain"),
        "dw": lambda t: ops.grouped_dw(t["dy"], t["x"], t["offsets"], "chain"),
        "permute": permute,
        "combine": combine,
    }


def _many_rows(case: Case) -> Call:
    """The SM90 kernel with tiles of 128 rows, also where few rows take another one."""
    launch, tiles = module("cute_kernels.moe.launch"), module("cute_kernels.moe.tiles")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise Absent("it needs an SM90 GPU")
    plans: list[Callable] = []

    def call(t: Inputs) -> torch.Tensor:
        operands = t["x"], t["w"], t["offsets"], None
        if not plans:
            with mock.patch.object(tiles, "few", lambda *sizes: None):
                plans.append(launch.plan_grouped_gemm(*operands).run)
        return plans[0](*operands)

    return call


def _ours_triton(case: Case) -> dict[str, Call]:
    launch = module("cute_kernels.moe.triton.launch")
    return {
        "fwd": lambda t: launch.grouped_gemm(t["x"], t["w"], t["offsets"], None),
        "dx": lambda t: launch.grouped_gemm(t["dy"], t["w"].mT, t["offsets"], None),
        "dw": lambda t: launch.grouped_dw(t["dy"], t["x"], t["offsets"], None),
    }


def _torch(case: Case) -> dict[str, Call]:
    experts, chosen, _, _ = case.sizes
    product = getattr(torch.nn.functional, "grouped_mm", None) or getattr(
        torch, "_grouped_mm", None
    )
    if product is None:
        raise Absent(f"torch {torch.__version__} has no grouped_mm")

    def ends(t: Inputs) -> torch.Tensor:
        return t["offsets"][1:]

    all_experts: list[torch.Tensor] = []

    def permute(t: Inputs) -> torch.Tensor:
        if not all_experts:
            all_experts.append(torch.arange(experts + 1, device=t["x"].device))
        sorted_indices, order = t["indices"].flatten().sort(stable=True)
        # The offsets; bincount would wait for the host.
        torch.searchsorted(sorted_indices.long(), all_experts[0])
        return t["x"].index_select(0, order // chosen)

    orders: dict[int, torch.Tensor] = {}

    def combine(t: Inputs) -> torch.Tensor:
        key = id(t["rows"])
        if key not in orders:
            order = t["indices"].flatten().argsort(stable=True)
            orders[key] = torch.empty_like(order)
            orders[key][order] = torch.arange(len(order), device=order.device)
        rows = t["rows"].index_select(0, orders[key]).view(case.tokens, chosen, -1)
        return (rows * t["weights"][..., None].to(rows.dtype)).sum(1)

    return {
        "fwd": lambda t: product(t["x"], t["w"].mT, offs=ends(t)),
        "dx": lambda t: product(t["dy"], t["w"], offs=ends(t)),
        "dw": lambda t: product(t["dy"].mT, t["x"], offs=ends(t)),
        "permute": permute,
        "combine": combine,
    }


def _dense(case: Case) -> dict[str, Call]:
    """One product of as many operations by cuBLAS, as if all rows were one expert's."""
    return {
        "fwd": lambda t: torch.mm(t["x"], t["w"][0].mT),
        "dx": lambda t: torch.mm(t["dy"], t["w"][0]),
        "dw": lambda t: torch.mm(t["dy"].mT, t["x"]),
    }


def _copied(case: Case) -> Call:
    """A copy of as many bytes as the case moves: about the least that a kernel of its size takes.

    The others' operands, which are several times the L2, pass between two calls.
    """
    buffers: dict[str, torch.Tensor] = {}

    def call(t: Inputs) -> None:
        if not buffers:
            some = next(v for v in t.values() if v.dtype == torch.bfloat16)
            pair = some.new_empty(2, case.work.bytes // 4).normal_()
            buffers["from"], buffers["to"] = pair
        buffers["to"].copy_(buffers["from"])

    return call


RIVALS = by_name(
    Rival("ours", _starts(PRODUCTS + MOVES, _ours), promised=True, ordered=True),
    Rival("ours_triton", _starts(PRODUCTS, _ours_triton), promised=True, ordered=True),
    Rival("many_rows", {"fwd": _many_rows}, promised=True, ordered=True),
    Rival("torch", _starts(PRODUCTS + MOVES, _torch)),
    Rival("dense", _starts(PRODUCTS, _dense)),
    Rival("copy", dict.fromkeys(PRODUCTS + MOVES, _copied)),
)
DEFAULT = ("ours", "many_rows", "torch", "dense", "copy")


def fitting(case: Case, names: list[str]) -> list[str]:
    """The rivals that say something of a case.

    Decoding and moves take as long as a copy, and products of training as one dense product.  The
    kernel of many rows is a rival where few rows take another one.
    """
    read = case.decode or case.product in MOVES
    others = ("dense",) if read else ("copy", "many_rows")
    return [name for name in names if name not in others and case.product in RIVALS[name].start]
