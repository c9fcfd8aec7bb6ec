"""The SM90 launcher: operands as TMA can address them, a compiled kernel, outputs, one call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch

from .. import log
from ..compile import cache
from ..compile.call import call
from ..compile.kernel import Entry, Expect, Kernel
from ..operands import ALIGN, matrix, most_ctas, padded_copy, padded_empty, storable
from . import config, tiles
from .config import DTYPE_NAMES, ORDER, UNORDERED, Config, SkinnyConfig
from .tiles import Dense, Skinny

_CTAS_PER_CLUSTER = Config.cluster_m * Config.cluster_n
#: Elements of fp32 that a row of a tensor that TMA stores to is a multiple of.
_FP32_STEP = ALIGN // torch.float32.itemsize


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    accumulator: torch.Tensor | None,
    order: str = ORDER,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """a [M, K] · b [N, K]ᵀ (+ bias [N]), or ``accumulator`` [M, N] fp32 += the same, in place.

    ``out`` [M, N] of the dtype of ``a``: where the product goes; None: into a new tensor.
    """
    a, a_major = matrix(a, "gemm", "a")
    b, b_major = matrix(b, "gemm", "b")
    size = a.shape[0], b.shape[0], a.shape[1]
    if accumulator is not None:
        tile = tiles.dense(*size, order, most_ctas(a.device))
        return _accumulate((a, a_major), (b, b_major), accumulator, tile, order)
    if bias is not None:
        bias = log.contiguous("gemm", "bias", bias, "a stride of 1")
    if order != ORDER and a_major != "k":
        a, a_major = padded_copy(a, "gemm", "a"), "k"
    tile = choose_tile(size, order, a_major, a.device)
    if isinstance(tile, Dense):
        direct = out if out is not None and storable(out) else None
        y = _dense((a, a_major), (b, b_major), bias, tile, order, direct)
    else:
        bias = None if bias is None else bias.expand(size[0], size[1])
        y = _skinny(a, (b, b_major), bias, tile, order)
    return y if out is None or y is out else out.copy_(y)


def choose_tile(
    size: tuple[int, int, int], order: str, a_major: str, device: torch.device
) -> Dense | Skinny:
    """The tile of a product of ``size`` (M, N, K) that starts from nothing."""
    choose = tiles.choose if a_major == "k" else tiles.dense
    return choose(*size, order, most_ctas(device))


def skinny(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, deterministic: bool
) -> torch.Tensor:
    """x [M, K] · weight [N, K]ᵀ (+ bias [M, N]) in the order ``tree``, for few rows."""
    w, w_major = matrix(weight, "skinny", "weight")
    x, x_major = matrix(x, "skinny", "x")
    if x_major != "k":
        x = padded_copy(x, "skinny", "x")
    if bias is not None and bias.stride(1) != 1:
        bias = log.contiguous("skinny", "bias", bias, "a last stride of 1")
    tile = tiles.skinny(x.shape[0], w.shape[0], x.shape[1], "tree", most_ctas(x.device))
    return _skinny(x, (w, w_major), bias, tile, "tree" if deterministic else UNORDERED)


def leaf_sums(a: torch.Tensor, b: torch.Tensor, length: int) -> torch.Tensor:
    """The chains over leaves of ``length`` of a [M, K] · b [N, K]ᵀ: fp32 [leaves, M, N], not added.

    An accumulator that starts from zeros in memory is one that is filled with them: each leaf has
    the bits that it has inside ``order="tree"``.
    """
    (a, a_major), (b, b_major) = matrix(a, "leaf_sums", "a"), matrix(b, "leaf_sums", "b")
    (m, k), n = a.shape, b.shape[0]
    # Rows of whole 16 bytes, that TMA can store to; columns beyond n are not added to.
    out = a.new_zeros(-(-k // length), m, -(-n // _FP32_STEP) * _FP32_STEP, dtype=torch.float32)
    for leaf, first in zip(out[:, :, :n], range(0, k, length), strict=True):
        # A leaf begins at a multiple of 16 elements, so its slice is addressable as well.
        span = slice(first, first + length)
        tile = tiles.dense(m, n, min(length, k - first), ORDER, most_ctas(a.device))
        kernel = gemm_kernel(a.dtype, a_major, b_major, "accumulate", tile, ORDER)
        call(a.device, kernel, a[:, span], b[:, span], leaf, None, max_clusters(a.device))
    return _without_padding(out[:, :, :n])


def _dense(a, b, bias, tile: Dense, order: str, out: torch.Tensor | None) -> torch.Tensor:
    (a, a_major), (b, b_major) = a, b
    given = out
    if given is None:
        out = padded_empty(a, a.shape[0], b.shape[0])
    epilogue = "plain" if bias is None else "bias"
    kernel = gemm_kernel(a.dtype, a_major, b_major, epilogue, tile, order)
    call(a.device, kernel, a, b, out, bias, max_clusters(a.device))
    return _without_padding(out) if given is None else given


def _accumulate(a, b, accumulator, tile: Dense, order: str) -> torch.Tensor:
    (a, a_major), (b, b_major) = a, b
    out = accumulator
    if not storable(out):
        out = padded_copy(out, "gemm", "accumulator")
    kernel = gemm_kernel(a.dtype, a_major, b_major, "accumulate", tile, order)
    call(a.device, kernel, a, b, out, None, max_clusters(a.device))
    return accumulator if out is accumulator else accumulator.copy_(out)


def _skinny(x, w, bias, tile: Skinny, order: str) -> torch.Tensor:
    if tile.split == 1 and order == UNORDERED:
        order = "tree"  # one CTA adds all leaves, and has no reason to add them otherwise
    weight, w_major = w
    out = padded_empty(x, x.shape[0], weight.shape[0])
    kernel = skinny_kernel(x.dtype, w_major, bias is not None, tile, order)
    call(x.device, kernel, weight, x, out, bias)
    return _without_padding(out)


def _without_padding(out: torch.Tensor) -> torch.Tensor:
    return log.contiguous("gemm", "out", out, "contiguous; its rows were padded for TMA")


def column_sum(rows: torch.Tensor) -> torch.Tensor:
    """Σ over the rows of [M, N] -> [N], rounded once to the dtype of ``rows``."""
    rows = rows if storable(rows) else padded_copy(rows, "gemm", "rows")
    out = rows.new_empty(rows.shape[1])
    call(rows.device, _column_sum_kernel(config.DTYPE_NAMES[rows.dtype]), rows, out)
    return out


def max_clusters(device: torch.device) -> int:
    """How many clusters the persistent grid may have: those that fit the device at once."""
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
def gemm_kernel(*chosen: torch.dtype | str | Dense) -> Callable:
    """The compiled kernel for the arguments of `dense_config`."""
    return cache.get(gemm_entry(dense_config(*chosen)), "sm_90a")


@functools.cache
def skinny_kernel(*chosen: torch.dtype | str | bool | Skinny) -> Callable:
    """The compiled kernel for the arguments of `skinny_config`."""
    return cache.get(skinny_entry(skinny_config(*chosen)), "sm_90a")


@functools.cache
def _column_sum_kernel(dtype: str) -> Callable:
    return cache.get(column_sum_entry(dtype), "sm_90a")


def gemm_entry(chosen: Config) -> Kernel:
    """One configuration of the GEMM as the cache and the catalogue know it."""
    return Kernel.of("gemm_sm90", f"{__package__}.kernel_sm90", chosen)


def skinny_entry(chosen: SkinnyConfig) -> Kernel:
    """One configuration of the GEMM for few rows, likewise."""
    return Kernel.of("gemm_skinny_sm90", f"{__package__}.kernel_skinny_sm90", chosen)


def column_sum_entry(dtype: str) -> Kernel:
    """The column sum for one dtype, likewise."""
    chosen = config.ColumnSumConfig(dtype=dtype)
    return Kernel.of("gemm_column_sum_sm90", f"{__package__}.kernel_column_sum_sm90", chosen)


def configs() -> Iterator[Config]:
    """Every configuration of kernel_sm90 that can be chosen."""
    half, majors = (torch.bfloat16, torch.float16), ("k", "mn")
    for order, a_major in ((ORDER, "k"), (ORDER, "mn"), ("tree", "k")):
        epilogues = ("plain", "bias", "accumulate") if order == ORDER else ("plain", "bias")
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
    for chosen in configs():
        # 168 registers is all that 384 threads can start with; the roles then trade theirs.
        mma = f"64x{chosen.tile_n}x{config.K_GROUP}"
        yield Entry(gemm_entry(chosen), "A", Expect(mma, max_registers=168, max_shared=232448))
    for chosen in skinny_configs():
        mma = f"64x{chosen.tile_m}x{config.K_GROUP}"
        shared = 232448 // chosen.ctas_per_sm
        certificate = None if chosen.order == UNORDERED else "A"
        expect = Expect(mma, max_registers=_registers(chosen), max_shared=shared)
        yield Entry(skinny_entry(chosen), certificate, expect)
    for dtype in ("bf16", "fp16"):
        expect = Expect(None, max_registers=64, max_shared=16384)
        yield Entry(column_sum_entry(dtype), "A", expect)


def _registers(chosen: SkinnyConfig) -> int:
    """What a thread may have: each quarter of an SM has 512 for a lane, for every warp it holds."""
    warps = (chosen.tile_n // 16 + 1) * chosen.ctas_per_sm
    return min(248, 512 // -(-warps // 4) // 8 * 8)
