"""The SM90 launcher: operands as TMA can address them, a compiled kernel, outputs, one call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch

from .. import log
from ..compile import cache
from ..compile.call import ROWS, Program, allocator, bind
from ..compile.kernel import Entry, Expect, Kernel
from ..runtime.operands import (
    ALIGN,
    Matrix,
    Output,
    matrix,
    most_ctas,
    padded_copy,
    padded_width,
    storable,
)
from ..runtime.plan_cache import Plan, launcher
from . import config, tiles
from .config import DTYPE_NAMES, ORDER, UNORDERED, ColumnSumConfig, Config, SkinnyConfig
from .tiles import Dense, Skinny

_CTAS_PER_CLUSTER = Config.cluster_m * Config.cluster_n


def plan_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    accumulator: torch.Tensor | None,
    order: str = ORDER,
    out: torch.Tensor | None = None,
) -> Plan:
    """Launch plan of a [..., K] · b [N, K]ᵀ (+ bias [N]) -> [..., N].

    accumulator: fp32 [M, N], to which the product is added in place instead; ``a`` is [M, K] then.
    out: [M, N] of the dtype of ``a``, contiguous or not: the destination; None: a new tensor.
    """
    if accumulator is not None:
        return _plan_accumulate(a, b, accumulator)
    matrices = _matrices(a, b, order)
    m, n = a.shape[:-1].numel(), b.shape[0]
    tile = choose_tile((m, n, a.shape[-1]), order, matrices[0].major, a.device)
    if isinstance(tile, Dense):
        direct = out is not None and storable(out)
        plan = _plan_dense(a, b, bias, matrices, tile, order, out if direct else None)
        launch = plan.run

        def run(a, b, bias, accumulator=None, order=ORDER, out=None):
            y = launch(a, b, bias, out)
            return y if direct or out is None else out.copy_(y)

        by_program = out is None
    else:
        wide = None if bias is None else bias.expand(m, n)
        plan = _plan_skinny(a, b, wide, matrices, tile, order)
        launch, copy_bias = plan.run, bias is not None and bias.stride(0) != 1

        def run(a, b, bias, accumulator=None, order=ORDER, out=None):
            if copy_bias:
                bias = log.contiguous("gemm", "bias", bias, "a stride of 1")
            y = launch(a, b, None if bias is None else bias.expand(m, n))
            return y if out is None else out.copy_(y)

        by_program = out is None and bias is None
    program = plan.program._replace(run=run) if by_program and plan.program else None
    return Plan(run, fresh=plan.fresh, program=program)


def _matrices(
    a: torch.Tensor,
    b: torch.Tensor,
    order: str,
    kernel: str = "gemm",
    names: tuple[str, str] = ("a", "b"),
) -> tuple[Matrix, Matrix]:
    """How a launch gets both factors of a product; ``names``: of the kernel's arguments."""
    return matrix(a, kernel, names[0], k_major=order != ORDER), matrix(b, kernel, names[1])


def _plan_dense(
    a, b, bias, matrices: tuple[Matrix, Matrix], tile: Dense, order: str, out: torch.Tensor | None
) -> Plan:
    """Launch plan of ``run(a, b, bias, out)`` by kernel_sm90; out: as in `_output`."""
    rows, columns = matrices
    output = _output(a, b.shape[0], out)
    epilogue = "plain" if bias is None else "bias"
    kernel = gemm_kernel(a.dtype, rows.major, columns.major, epilogue, tile, order)
    launch = bind(a.device, kernel, itertools.compress((0, 2), (rows.flatten, output.flatten)))
    clusters = max_clusters(a.device)
    adapt_a, adapt_b, new, finish = rows.adapt, columns.adapt, output.new, output.finish
    copy_bias = bias is not None and bias.stride(0) != 1

    def run(a, b, bias, out):
        a = a if adapt_a is None else adapt_a(a)
        b = b if adapt_b is None else adapt_b(b)
        if copy_bias:
            bias = log.contiguous("gemm", "bias", bias, "a stride of 1")
        y = out if new is None else new()
        launch(a, b, y, bias, clusters)
        return y if finish is None else finish(y)

    program = None
    if out is None and finish is None and not (adapt_a or adapt_b or copy_bias):
        y = -1, output.flatten * ROWS
        operands = (0, rows.flatten * ROWS), (1, 0), y, None if bias is None else (2, 0), clusters
        program = Program(run, a.device, (new,), ((kernel, operands),), 0)
    return Plan(run, fresh=finish is None, program=program)


def _plan_skinny(x, w, bias, matrices: tuple[Matrix, Matrix], tile: Skinny, order: str) -> Plan:
    """Launch plan of ``run(x, w, bias)`` by kernel_skinny_sm90; bias [M, N] or None."""
    if tile.split == 1 and order == UNORDERED:
        order = "tree"  # one CTA adds all leaves, and has no reason to add them otherwise
    rows, columns = matrices
    output = _output(x, w.shape[0])
    kernel = skinny_kernel(x.dtype, columns.major, bias is not None, tile, order)
    launch = bind(x.device, kernel, itertools.compress((1, 2), (rows.flatten, output.flatten)))
    adapt_x, adapt_w, new, finish = rows.adapt, columns.adapt, output.new, output.finish

    def run(x, w, bias):
        x = x if adapt_x is None else adapt_x(x)
        w = w if adapt_w is None else adapt_w(w)
        y = new()
        launch(w, x, y, bias)
        return y if finish is None else finish(y)

    program = None
    if bias is None and finish is None and not (adapt_x or adapt_w):
        operands = (1, 0), (0, rows.flatten * ROWS), (-1, output.flatten * ROWS), None
        program = Program(run, x.device, (new,), ((kernel, operands),), 0)
    return Plan(run, fresh=finish is None, program=program)


gemm = launcher(plan_gemm)


def _plan_accumulate(a: torch.Tensor, b: torch.Tensor, accumulator: torch.Tensor) -> Plan:
    """Launch plan of accumulator [M, N] fp32 += a [M, K] · b [N, K]ᵀ, as one chain."""
    rows, columns = _matrices(a, b, ORDER)
    device = a.device
    tile = tiles.dense(a.shape[0], b.shape[0], a.shape[1], ORDER, most_ctas(device))
    kernel = gemm_kernel(a.dtype, rows.major, columns.major, "accumulate", tile, ORDER)
    launch, clusters = bind(device, kernel), max_clusters(device)
    adapt_a, adapt_b, direct = rows.adapt, columns.adapt, storable(accumulator)

    def run(a, b, bias, accumulator, *_):
        a = a if adapt_a is None else adapt_a(a)
        b = b if adapt_b is None else adapt_b(b)
        total = accumulator if direct else padded_copy(accumulator, "gemm", "accumulator")
        launch(a, b, total, None, clusters)
        return accumulator if direct else accumulator.copy_(total)

    return Plan(run)


def _output(a: torch.Tensor, n: int, out: torch.Tensor | None = None) -> Output:
    """How a launch makes the product [..., N] of ``a`` [..., K]: in ``out``, or in a new tensor."""
    if out is not None:
        return Output(None)
    dtype, device, shape = a.dtype, a.device, (*a.shape[:-1], n)
    if n * dtype.itemsize % ALIGN == 0:
        return Output(allocator(shape, dtype, device), flatten=a.dim() != 2)
    new = allocator((a.shape[:-1].numel(), padded_width(n, dtype)), dtype, device)
    return Output(lambda: new()[:, :n], lambda y: _without_padding(y).view(shape))


def choose_tile(
    size: tuple[int, int, int], order: str, a_major: str, device: torch.device
) -> Dense | Skinny:
    """The tile of a product of ``size`` (M, N, K) that starts from nothing."""
    choose = tiles.choose if a_major == "k" else tiles.dense
    return choose(*size, order, most_ctas(device))


def plan_skinny(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, deterministic: bool
) -> Plan:
    """Launch plan of x [M, K] · weight [N, K]ᵀ (+ bias [M, N]) in the order ``tree``, few rows."""
    matrices = _matrices(x, weight, "tree", "skinny", ("x", "weight"))
    tile = tiles.skinny(x.shape[0], weight.shape[0], x.shape[1], "tree", most_ctas(x.device))
    plan = _plan_skinny(x, weight, bias, matrices, tile, "tree" if deterministic else UNORDERED)
    launch, copy_bias = plan.run, bias is not None and bias.stride(1) != 1

    def run(x, weight, bias, *_):
        if copy_bias:
            bias = log.contiguous("skinny", "bias", bias, "a last stride of 1")
        return launch(x, weight, bias)

    return Plan(run, fresh=plan.fresh)


skinny = launcher(plan_skinny)


def plan_leaf_sums(a: torch.Tensor, b: torch.Tensor, length: int) -> Plan:
    """Launch plan of the chains over leaves of ``length`` of a [M, K] · b [N, K]ᵀ.

    The result is fp32 [leaves, M, N], not added: each leaf is a chain that starts from zeros, as it
    does in ``order="tree"``, and is stored as it is.
    """
    rows, columns = _matrices(a, b, ORDER, "leaf_sums")
    (m, k), n, device = a.shape, b.shape[0], a.device
    launches = []
    # A leaf begins at a multiple of 16 elements, so its slice is addressable as well.
    for first in range(0, k, length):
        tile = tiles.dense(m, n, min(length, k - first), ORDER, most_ctas(device))
        kernel = gemm_kernel(a.dtype, rows.major, columns.major, "fp32", tile, ORDER)
        launches.append((slice(first, first + length), bind(device, kernel)))
    # Rows of whole 16 bytes, that TMA can store to; columns beyond n are not written.
    shape = len(launches), m, padded_width(n, torch.float32)
    new, clusters = allocator(shape, torch.float32, device), max_clusters(device)

    def run(a, b, length):
        a = a if rows.adapt is None else rows.adapt(a)
        b = b if columns.adapt is None else columns.adapt(b)
        out = new()[:, :, :n]
        for leaf, (span, launch) in zip(out, launches, strict=True):
            launch(a[:, span], b[:, span], leaf, None, clusters)
        return _without_padding(out)

    return Plan(run, fresh=False)


leaf_sums = launcher(plan_leaf_sums)


def _without_padding(out: torch.Tensor) -> torch.Tensor:
    return log.contiguous("gemm", "out", out, "contiguous; its rows were padded for TMA")


def plan_column_sum(rows: torch.Tensor) -> Plan:
    """Launch plan of Σ over the rows of [M, N] -> [N], rounded once to the dtype of ``rows``."""
    direct, device = storable(rows), rows.device
    kernel = _column_sum_kernel(config.DTYPE_NAMES[rows.dtype])
    launch, new = bind(device, kernel), allocator(rows.shape[1:], rows.dtype, device)

    def run(rows):
        out = new()
        launch(rows if direct else padded_copy(rows, "gemm", "rows"), out)
        return out

    launches = ((kernel, ((0, 0), (-1, 0))),)
    return Plan(run, program=Program(run, device, (new,), launches, 0) if direct else None)


column_sum = launcher(plan_column_sum)


def max_clusters(device: torch.device) -> int:
    """Cluster count of the persistent grid: those that fit the device at once."""
    return max(1, most_ctas(device) // _CTAS_PER_CLUSTER)


def dense_config(
    dtype: torch.dtype, a_major: str, b_major: str, epilogue: str, tile: Dense, order: str = ORDER
) -> Config:
    """The configuration of kernel_sm90 for one product."""
    return Config(DTYPE_NAMES[dtype], a_major, b_major, epilogue, order, tile_n=tile.tile_n)


def skinny_config(
    dtype: torch.dtype, w_major: str, bias: bool, tile: Skinny, order: str = ORDER
) -> SkinnyConfig:
    """The configuration of kernel_skinny_sm90 for one product."""
    return SkinnyConfig(DTYPE_NAMES[dtype], w_major, bias, order, **tile._asdict())


@functools.cache
def gemm_kernel(*args: torch.dtype | str | Dense) -> Callable:
    """The compiled kernel for the arguments of `dense_config`."""
    return cache.get(entry(dense_config(*args)), "sm_90a")


@functools.cache
def skinny_kernel(*args: torch.dtype | str | bool | Skinny) -> Callable:
    """The compiled kernel for the arguments of `skinny_config`."""
    return cache.get(entry(skinny_config(*args)), "sm_90a")


@functools.cache
def _column_sum_kernel(dtype: str) -> Callable:
    return cache.get(entry(ColumnSumConfig(dtype=dtype)), "sm_90a")


#: Class of a configuration -> the end of its kernel's name.
_KERNELS = {Config: "sm90", SkinnyConfig: "skinny_sm90", ColumnSumConfig: "column_sum_sm90"}


def entry(chosen: Config | SkinnyConfig | ColumnSumConfig) -> Kernel:
    """The cache and catalogue entry of one configuration of a kernel."""
    return Kernel.in_file(__package__, _KERNELS[type(chosen)], chosen)


def configs() -> Iterator[Config]:
    """Every configuration of kernel_sm90 that can be chosen."""
    half, majors = (torch.bfloat16, torch.float16), ("k", "mn")
    for order, a_major in ((ORDER, "k"), (ORDER, "mn"), ("tree", "k")):
        chains = ("plain", "bias", "accumulate", "fp32")
        epilogues = chains if order == ORDER else ("plain", "bias")
        for tile, dtype, b_major, epilogue in itertools.product(
            tiles.dense_tiles(order), half, majors, epilogues
        ):
            yield dense_config(dtype, a_major, b_major, epilogue, tile, order)


def skinny_configs() -> Iterator[SkinnyConfig]:
    """Every configuration of kernel_skinny_sm90 that can be chosen."""
    half = (torch.bfloat16, torch.float16)
    for order in (*config.ORDERS, UNORDERED):
        for tile, dtype, w_major, bias in itertools.product(
            tiles.skinny_tiles(order), half, ("k", "mn"), (False, True)
        ):
            yield skinny_config(dtype, w_major, bias, tile, order)


def catalogue() -> Iterator[Entry]:
    """Every kernel that this launcher can ask for."""
    for kernel_config in configs():
        # 168 registers is all that 384 threads can start with; the roles then trade theirs.
        mma = f"64x{kernel_config.tile_n}x{config.K_GROUP}"
        expect = Expect(mma, max_registers=168, max_shared=232448)
        yield Entry(entry(kernel_config), "A", expect)
    for kernel_config in skinny_configs():
        mma = f"64x{kernel_config.tile_m}x{config.K_GROUP}"
        shared = 232448 // kernel_config.ctas_per_sm
        certificate = None if kernel_config.order == UNORDERED else "A"
        expect = Expect(mma, max_registers=_registers(kernel_config), max_shared=shared)
        yield Entry(entry(kernel_config), certificate, expect)
    for dtype in ("bf16", "fp16"):
        expect = Expect(None, max_registers=64, max_shared=16384)
        yield Entry(entry(ColumnSumConfig(dtype=dtype)), "A", expect)


def _registers(kernel_config: SkinnyConfig) -> int:
    """Registers a thread may have: 512 a lane of each quarter of an SM, for all its warps."""
    warps = (kernel_config.tile_n // 16 + 1) * kernel_config.ctas_per_sm
    return min(248, 512 // -(-warps // 4) // 8 * 8)
