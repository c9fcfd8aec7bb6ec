"""Rivals of the bench of mixtures: each gives products and moves as calls on one input set."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch

from ..core.passes import Suite, copied
from ..core.rival import Absent, Call, Rival, Start, by_name, module
from . import check
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

    def both(t: Inputs) -> torch.Tensor:
        rows, permutation = moe.permute(t["x"], t["indices"], experts)
        return moe.combine(rows, t["weights"], permutation)

    return {
        "fwd": lambda t: linear(t["x"], t["w"], t["offsets"]),
        "dx": lambda t: ops.grouped_dx(t["dy"], t["w"], t["offsets"], "chain"),
        "dw": lambda t: ops.grouped_dw(t["dy"], t["x"], t["offsets"], "chain"),
        "permute": permute,
        "combine": combine,
        "permute+combine": both,
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

    def sort(t: Inputs) -> torch.Tensor:
        if not all_experts:
            all_experts.append(torch.arange(experts + 1, device=t["indices"].device))
        sorted_indices, order = t["indices"].flatten().sort(stable=True)
        # The offsets; bincount would wait for the host.
        torch.searchsorted(sorted_indices.long(), all_experts[0])
        return order

    def positions(order: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(len(order), device=order.device)
        return torch.empty_like(order).scatter_(0, order, slots)

    def permute(t: Inputs) -> torch.Tensor:
        return t["x"].index_select(0, sort(t) // chosen)

    def weighted(t: Inputs, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        rows = rows.index_select(0, places).view(case.tokens, chosen, -1)
        return (rows * t["weights"][..., None].to(rows.dtype)).sum(1)

    def both(t: Inputs) -> torch.Tensor:
        order = sort(t)
        return weighted(t, t["x"].index_select(0, order // chosen), positions(order))

    orders: dict[int, torch.Tensor] = {}

    def combine(t: Inputs) -> torch.Tensor:
        key = id(t["rows"])
        if key not in orders:
            orders[key] = positions(t["indices"].flatten().argsort(stable=True))
        return weighted(t, t["rows"], orders[key])

    return {
        "fwd": lambda t: product(t["x"], t["w"].mT, offs=ends(t)),
        "dx": lambda t: product(t["dy"], t["w"], offs=ends(t)),
        "dw": lambda t: product(t["dy"].mT, t["x"], offs=ends(t)),
        "permute": permute,
        "combine": combine,
        "permute+combine": both,
    }


class _Spread:
    """Rows of a result in which each expert's rows begin at a multiple of the tile."""

    def __init__(self, out: torch.Tensor, places: torch.Tensor):
        self._out, self._places = out, places

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return self._out[self._places[rows]]


def _deepgemm(case: Case) -> dict[str, Call]:
    """DeepGEMM's m-grouped contiguous products in bf16; its padding of rows is made before."""
    deep_gemm = module("deep_gemm")
    tile = deep_gemm.get_mk_alignment_for_contiguous_layout()
    spread: dict[int, tuple[torch.Tensor, ...]] = {}

    def padded(t: Inputs, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(rows with padding, expert of each or -1, the place of each row)."""
        counts = t["offsets"].diff().long()
        heights = (counts + tile - 1) // tile * tile
        expert = torch.arange(len(counts), device=rows.device).repeat_interleave(counts)
        first = heights.cumsum(0) - heights - t["offsets"][:-1]
        places = torch.arange(len(rows), device=rows.device) + first[expert]
        out = rows.new_zeros(int(heights.sum()), rows.shape[1])
        experts = torch.full((len(out),), -1, dtype=torch.int32, device=rows.device)
        out[places], experts[places] = rows, expert.int()
        return out, experts, places

    def product(name: str, rows: str, n: int) -> Call:
        multiply = getattr(deep_gemm, f"m_grouped_bf16_gemm_{name}_contiguous")

        def call(t: Inputs) -> _Spread:
            key = id(t[rows])
            if key not in spread:
                spread[key] = padded(t, t[rows])
            a, experts, places = spread[key]
            out = a.new_empty(len(a), n)
            multiply(a, t["w"], out, experts)
            return _Spread(out, places)

        return call

    _, _, k, n = case.sizes
    return {"fwd": product("nt", "x", n), "dx": product("nn", "dy", k)}


def _dense(case: Case) -> dict[str, Call]:
    """One product of as many operations by cuBLAS, as if all rows were one expert's."""
    return {
        "fwd": lambda t: torch.mm(t["x"], t["w"][0].mT),
        "dx": lambda t: torch.mm(t["dy"], t["w"][0]),
        "dw": lambda t: torch.mm(t["dy"].mT, t["x"]),
    }


RIVALS = by_name(
    Rival("ours", _starts(PRODUCTS + MOVES, _ours), promised=True, ordered=True),
    Rival("ours_triton", _starts(PRODUCTS, _ours_triton), promised=True, ordered=True, op=None),
    Rival("many_rows", {"fwd": _many_rows}, promised=True, ordered=True, op=None),
    Rival("torch", _starts(PRODUCTS + MOVES, _torch)),
    Rival("deepgemm", _starts(("fwd", "dx"), _deepgemm)),
    Rival("dense", _starts(PRODUCTS, _dense)),
    Rival("copy", dict.fromkeys(PRODUCTS + MOVES, copied)),
)
DEFAULT = "ours,many_rows,torch,deepgemm,dense,copy"


def fitting(case: Case, names: list[str]) -> list[str]:
    """The rivals that say something of a case.

    Decoding and moves take as long as a copy, and products of training as one dense product.  The
    kernel of many rows is a rival where few rows take another one.
    """
    read = case.decode or case.product in MOVES
    others = ("dense", "deepgemm") if read else ("copy", "many_rows")
    return [name for name in names if name not in others and case.product in RIVALS[name].start]


def facts(case: Case, median_us: float, ceilings: dict[str, float]) -> dict:
    """Bandwidth, over the weights in decoding, and its share of a copy's."""
    gbs = (case.weight_bytes if case.decode else case.work.bytes) / median_us / 1e3
    field = "weight_gbs" if case.decode else "gbs"
    return {field: gbs, "of_copy": gbs / ceilings["copy_gbs"]}


SUITE = Suite(
    "moe",
    "grouped_linear",
    RIVALS,
    check.verdict,
    facts,
    compares=False,
    ops=dict.fromkeys(MOVES, "moe"),
    fitting=fitting,
    # The bytes that are read, not those of experts without rows.
    set_bytes=lambda case: case.work.bytes,
    timed_in=torch.inference_mode,
    patience_s=100.0,
)
