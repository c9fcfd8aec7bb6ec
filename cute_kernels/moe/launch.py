"""The SM90 launcher: operands as TMA can address them, a compiled kernel, outputs, one call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch

from .. import log
from ..compile import cache
from ..compile.call import allocator, bind
from ..compile.kernel import Entry, Expect, Kernel
from ..runtime.operands import ALIGN, matrix, most_ctas, padded_width
from ..runtime.plan_cache import Plan, launcher
from ..schedulers.tiles import leaves
from . import config, tiles
from .config import GroupedConfig, GroupedDwConfig, GroupedFewConfig, GroupedTreeConfig

_WEIGHT = "one stride of 1 in each expert, the others and the address at multiples of 16 bytes"


def plan_grouped_gemm(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
) -> Plan:
    """Launch plan of a [T, K] · b[e] [N, K]ᵀ (+ bias[e] [N]) for the rows of each expert."""
    (t, _), (experts, n, _), device = a.shape, b.shape, a.device
    rows, major = matrix(a, "grouped_gemm", "x", k_major=True), weight_major(b)
    chosen = a.dtype, major or "k", bias is not None
    few = tiles.few(t, experts)
    if few is None:
        tile_n = tiles.width(t, experts, n, most_ctas(device), chosen[-1])
        launch = bind(device, grouped_kernel(*chosen, tile_n))
        tile_m, wide, most = tiles.ROWS, tiles.PAIR * tile_n, most_ctas(device) // tiles.PAIR
    else:
        launch = bind(device, grouped_few_kernel(*chosen, few))
        tile_m, wide, most = few.tile_m, few.tile_n, most_ctas(device)
    most_units = (-(-t // tile_m) + min(t, experts)) * -(-n // wide)
    workers = min(most_units, max(1, most))
    width = padded_width(n, a.dtype)
    new = allocator((t, width), a.dtype, device)
    adapt, copy_bias = rows.adapt, bias is not None and bias.stride(1) != 1

    def run(a, b, offsets, bias):
        a = a if adapt is None else adapt(a)
        b = b if major is not None else _padded_weight(b)
        if copy_bias:
            bias = log.contiguous("grouped_gemm", "bias", bias, "a last stride of 1")
        out = new()
        y = out if width == n else out[:, :n]
        launch(a, b.permute(1, 2, 0), y, offsets.contiguous(), bias, workers)
        if width == n:
            return y
        return log.contiguous("grouped_gemm", "out", y, "contiguous; its rows were padded for TMA")

    return Plan(run, fresh=width == n)


grouped_gemm = launcher(plan_grouped_gemm)


def plan_grouped_tree(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
) -> Plan:
    """Launch plan of `plan_grouped_gemm`'s product in the order ``tree``."""
    n, length = b.shape[1], leaves.length(a.shape[1])
    run_product = _plan_leaves(a, b, "plain" if bias is None else "bias")
    width, copy_bias = padded_width(n, a.dtype), bias is not None and bias.stride(1) != 1
    new = allocator((a.shape[0], width), a.dtype, a.device)

    def run(a, b, offsets, bias):
        if copy_bias:
            bias = log.contiguous("grouped_gemm", "bias", bias, "a last stride of 1")
        out = new()
        y = out if width == n else out[:, :n]
        run_product(a, b, y, offsets, bias, length)
        if width == n:
            return y
        return log.contiguous("grouped_gemm", "out", y, "contiguous; its rows were padded for TMA")

    return Plan(run, fresh=width == n)


grouped_tree = launcher(plan_grouped_tree)


def plan_grouped_leaf_sums(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, length: int
) -> Plan:
    """Launch plan of the chains over leaves of ``length`` of a · b[e]ᵀ: fp32 [leaves, T, N]."""
    (t, k), n = a.shape, b.shape[1]
    run_product = _plan_leaves(a, b, "leaves")
    width = padded_width(n, torch.float32)
    new = allocator((-(-k // length), t, width), torch.float32, a.device)

    def run(a, b, offsets, length):
        out = new()[:, :, :n]
        run_product(a, b, out.permute(1, 2, 0), offsets, None, length)
        return log.contiguous(
            "grouped_gemm", "out", out, "contiguous; its rows were padded for TMA"
        )

    return Plan(run, fresh=False)


grouped_leaf_sums = launcher(plan_grouped_leaf_sums)


def _plan_leaves(a: torch.Tensor, b: torch.Tensor, epilogue: str) -> Callable:
    """Launch ``run(a, b, y, offsets, bias, length)`` of kernel_grouped_tree_sm90."""
    (t, _), (experts, n, _), device = a.shape, b.shape, a.device
    rows, major = matrix(a, "grouped_gemm", "x", k_major=True), weight_major(b)
    tile_n = tiles.tree_width(t, experts, n, most_ctas(device), epilogue)
    launch = bind(device, grouped_tree_kernel(a.dtype, major or "k", epilogue, tile_n))
    most_units = (-(-t // tiles.ROWS) + min(t, experts)) * -(-n // tile_n)
    ctas, adapt = min(most_units, most_ctas(device)), rows.adapt

    def run(a, b, y, offsets, bias, length):
        a = a if adapt is None else adapt(a)
        b = b if major is not None else _padded_weight(b)
        launch(a, b.permute(1, 2, 0), y, offsets.contiguous(), bias, length, ctas)

    return run


def plan_grouped_dw(
    dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, accumulator: torch.Tensor | None
) -> Plan:
    """Launch plan of Σ dy[t] x[t]ᵀ over the rows of each expert: [E, N, K], or added in place."""
    experts, n, k, device = len(offsets) - 1, dy.shape[1], x.shape[1], dy.device
    matrices = [
        matrix(t, "grouped_dw", name, k_major=True).adapt for t, name in ((dy, "dy"), (x, "x"))
    ]
    accumulate = accumulator is not None
    tile_n = tiles.dw_width(n, experts, k, most_ctas(device))
    launch = bind(device, grouped_dw_kernel(dy.dtype, accumulate, tile_n))
    units = experts * -(-n // (tiles.DW_PAIR * tiles.ROWS)) * -(-k // tile_n)
    clusters = min(units, max(1, most_ctas(device) // tiles.DW_PAIR))
    direct = accumulate and weight_major(accumulator) == "k" and k % 2 == 0
    width = padded_width(k, torch.float32 if accumulate else dy.dtype)
    new = allocator((experts, n, width), dy.dtype, device)

    def run(dy, x, offsets, accumulator):
        dy, x = (
            t if adapt is None else adapt(t) for t, adapt in zip((dy, x), matrices, strict=True)
        )
        if not accumulate:
            out = new()[:, :, :k]
        elif direct:
            out = accumulator
        else:
            out = _padded_weight(accumulator, "accumulator")
        launch(dy, x, out, offsets.contiguous(), clusters)
        if accumulate:
            return accumulator if direct else accumulator.copy_(out)
        if width == k:
            return out
        return log.contiguous("grouped_dw", "out", out, "contiguous; its rows were padded for TMA")

    return Plan(run, fresh=False)


grouped_dw = launcher(plan_grouped_dw)


def weight_major(b: torch.Tensor) -> str | None:
    """The major of weights [E, N, K] that TMA can address; None for others."""
    for name, expert in (("k", b), ("mn", b.mT)):
        outer, row, column = expert.stride()
        aligned = (outer * b.itemsize | row * b.itemsize | b.data_ptr()) % ALIGN == 0
        if column == 1 and row >= expert.shape[2] and outer > 0 and aligned:
            return name
    return None


def _padded_weight(b: torch.Tensor, name: str = "weight") -> torch.Tensor:
    log.copied("grouped_gemm", name, b, _WEIGHT)
    experts, n, k = b.shape
    return b.new_empty(experts, n, padded_width(k, b.dtype))[:, :, :k].copy_(b)


def grouped_config(dtype: torch.dtype, b_major: str, bias: bool, tile_n: int) -> GroupedConfig:
    """The configuration of kernel_grouped_sm90 for one product."""
    return GroupedConfig(config.DTYPE_NAMES[dtype], b_major, bias, tile_n)


@functools.cache
def grouped_kernel(*chosen: torch.dtype | str | bool | int) -> Callable:
    """The compiled kernel for the arguments of `grouped_config`."""
    return cache.get(entry(grouped_config(*chosen)), "sm_90a")


def grouped_few_config(
    dtype: torch.dtype, w_major: str, bias: bool, tile: tiles.Few
) -> GroupedFewConfig:
    """The configuration of kernel_grouped_few_sm90 for one product."""
    return GroupedFewConfig(config.DTYPE_NAMES[dtype], w_major, bias, **tile._asdict())


@functools.cache
def grouped_few_kernel(*chosen: torch.dtype | str | bool | tiles.Few) -> Callable:
    """The compiled kernel for the arguments of `grouped_few_config`."""
    return cache.get(entry(grouped_few_config(*chosen)), "sm_90a")


@functools.cache
def grouped_tree_kernel(dtype: torch.dtype, b_major: str, epilogue: str, tile_n: int) -> Callable:
    """The compiled kernel of the order ``tree``."""
    chosen = GroupedTreeConfig(config.DTYPE_NAMES[dtype], b_major, epilogue, tile_n)
    return cache.get(entry(chosen), "sm_90a")


@functools.cache
def grouped_dw_kernel(dtype: torch.dtype, accumulate: bool, tile_n: int) -> Callable:
    """The compiled kernel of the weights' gradients."""
    chosen = GroupedDwConfig(config.DTYPE_NAMES[dtype], accumulate, tile_n)
    return cache.get(entry(chosen), "sm_90a")


#: Class of a configuration -> the end of its kernel's name.
_KERNELS = {
    GroupedConfig: "grouped_sm90",
    GroupedFewConfig: "grouped_few_sm90",
    GroupedTreeConfig: "grouped_tree_sm90",
    GroupedDwConfig: "grouped_dw_sm90",
}


def entry(
    chosen: GroupedConfig | GroupedFewConfig | GroupedTreeConfig | GroupedDwConfig,
) -> Kernel:
    """The cache and catalogue entry of one configuration of a kernel."""
    return Kernel.in_file(__package__, _KERNELS[type(chosen)], chosen)


def dw_configs() -> Iterator[GroupedDwConfig]:
    """Every configuration of kernel_grouped_dw_sm90 that can be chosen."""
    for name, accumulate, tile_n in itertools.product(
        config.DTYPE_NAMES.values(), (False, True), tiles.DW_COST
    ):
        yield GroupedDwConfig(name, accumulate, tile_n)


def configs() -> Iterator[GroupedConfig]:
    """Every configuration of kernel_grouped_sm90 that can be chosen."""
    for dtype, b_major, bias in itertools.product(config.DTYPE_NAMES, ("k", "mn"), (False, True)):
        for tile_n in tiles.widths(bias):
            yield grouped_config(dtype, b_major, bias, tile_n)


def few_configs() -> Iterator[GroupedFewConfig]:
    """Every configuration of kernel_grouped_few_sm90 that can be chosen."""
    majors, biases = ("k", "mn"), (False, True)
    for dtype, major, bias, tile in itertools.product(
        config.DTYPE_NAMES, majors, biases, tiles.FEW
    ):
        yield grouped_few_config(dtype, major, bias, tile)


def tree_configs() -> Iterator[GroupedTreeConfig]:
    """Every configuration of kernel_grouped_tree_sm90 that can be chosen."""
    for name, b_major, epilogue in itertools.product(
        config.DTYPE_NAMES.values(), ("k", "mn"), config.TREE_EPILOGUES
    ):
        for tile_n in tiles.tree_widths(epilogue):
            yield GroupedTreeConfig(name, b_major, epilogue, tile_n)


def catalogue() -> Iterator[Entry]:
    """Every kernel that this launcher can ask for."""
    for chosen in itertools.chain(configs(), tree_configs(), dw_configs()):
        # 168 registers is all that 384 threads can start with; the roles then trade theirs.
        expect = Expect(f"64x{chosen.tile_n}x16", max_registers=168, max_shared=232448)
        yield Entry(entry(chosen), "A", expect)
    for few in few_configs():
        expect = Expect(f"64x{few.tile_m}x16", max_registers=80, max_shared=232448)
        yield Entry(entry(few), "A", expect)
