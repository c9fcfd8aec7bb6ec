"""Launch the Triton kernels: outputs, workspaces, persistent grids, compiler options.

Every layout is loaded as it lies; what a tensor is known to be aligned to widens loads only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ... import arch
from ...runtime.operands import flat_rows, most_ctas
from ...runtime.triton_products import (
    alignment,
    cdiv,
    dot_options,
    options,
    plan_of,
    stages,
)
from ...schedulers.tiles import leaves
from .. import config
from . import kernel as kernels
from . import plan as plans
from .plan import TRITON, SkinnyPlan


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    accumulator: torch.Tensor | None,
    order: str = config.ORDER,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """a [..., K] · b [N, K]ᵀ + bias [N], or accumulator [M, N] += a · bᵀ in place.

    Args:
        a, b: bf16, fp16 or fp32, of one dtype and device; any strides, sizes above zero.
        bias: The dtype of ``a``; added in fp32 before the one rounding.
        accumulator: fp32, any strides whose elements do not overlap; the chain starts from it.
        order: Of `config.ORDERS`; an accumulator's is a chain.
        out: Where the product goes, [M, N] of the dtype of ``a``; None: into a new tensor.

    Returns:
        [..., N], contiguous, the dtype of ``a``; or ``accumulator``, or ``out``.

    Runs on the device of ``a`` and its current stream.  The first launch of a (dtype, major,
    alignment) class compiles; do that before a CUDA graph is captured.
    """
    rows = flat_rows(a, "gemm")
    with torch.cuda.device(a.device):
        if order != config.ORDER and accumulator is None:
            y = _launch_tree(rows, b, bias, most_ctas(a.device))
        else:
            y = _launch(rows, b, bias, accumulator, most_ctas(a.device))
        if out is not None:
            return out.copy_(y)
        return y if a.dim() == 2 else y.view(*a.shape[:-1], b.shape[0])


def skinny(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, deterministic: bool
) -> torch.Tensor:
    """x [M, K] · weight [N, K]ᵀ (+ bias [M, N]) for at most 128 rows: the bytes of order ``tree``.

    Leaves are split over programs where tiles are few, by way of a workspace of at most
    `plan.WORKSPACE` bytes.  Without ``deterministic`` split leaves are added as they arrive.
    """
    with torch.cuda.device(x.device):
        plan = plans.skinny(arch.describe(x.device).arch, plan_of(x.dtype))
        return _launch_skinny(x, weight, bias, deterministic, plan, most_ctas(x.device))


def leaf_sums(a: torch.Tensor, b: torch.Tensor, length: int) -> torch.Tensor:
    """a [M, K] · b [N, K]ᵀ leaf by leaf: fp32 [ceil(K / length), M, N], each a chain, unrounded.

    K is a slice of a longer one, from the edge of a leaf; ``length``: `leaves.length` of the whole.
    """
    with torch.cuda.device(a.device):
        plan = plans.skinny(arch.describe(a.device).arch, plan_of(a.dtype))
        return _launch_leaf_sums(a, b, length, plan, most_ctas(a.device))


def add_leaves(
    out: torch.Tensor, sums: Sequence[torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    """out [M, N] = the leaves of ``sums`` in ascending order + bias, rounded once, in one launch.

    Args:
        out: Contiguous, sizes above zero; it may be the memory of the first leaf.
        sums: One to three tensors [leaves, M, N] in fp32, at least a leaf each, of which every
            leaf is contiguous.
        bias: [N] or None, of any float dtype.
    """
    with torch.cuda.device(out.device):
        plan = plans.skinny(arch.describe(out.device).arch, TRITON)
        if bias is not None:
            # An expanded bias of one row would have another stride: another binary.
            bias = bias.as_strided(out.shape, (0, bias.stride(0)))
        _launch_root(sums, bias, out, plan)
    return out


def column_sum(rows: torch.Tensor) -> torch.Tensor:
    """Σ over the rows of [M, N], any strides: fp32 in a fixed order, one rounding; [N]."""
    with torch.cuda.device(rows.device):
        return _launch_column_sum(rows)


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    accumulator: torch.Tensor | None,
    programs: int,
    *,
    interpret: bool = False,
) -> torch.Tensor:
    """One launch; ``interpret`` rounds outside the kernel, for Triton's interpreter on a CPU."""
    (m, k), n = a.shape, b.shape[0]
    plan = plan_of(a.dtype)
    accumulate = accumulator is not None
    out = accumulator if accumulate else _empty(a, b, interpret)
    tiles = cdiv(m, plan.block_m) * cdiv(n, plan.block_n)
    kernels.gemm_kernel[(min(tiles, programs),)](
        *(a, b, bias, out, m, n, k),
        *(*a.stride(), *b.stride(), 0 if bias is None else bias.stride(0), *out.stride()),
        ALIGN_M=alignment(m, a.stride(0), out.stride(0)),
        ALIGN_N=alignment(n, b.stride(0), out.stride(1)),
        ALIGN_K=alignment(k, a.stride(1), b.stride(1)),
        GROUP_M=plan.group_m,
        ACCUMULATE=accumulate,
        **dot_options(plan, accumulate, interpret),
    )
    return out if accumulate else out.to(a.dtype)


def _launch_tree(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    programs: int,
    *,
    interpret: bool = False,
) -> torch.Tensor:
    """The order ``tree``, every leaf of a tile in one program."""
    plan, k = plan_of(a.dtype), a.shape[1]
    work = _Work(
        length=leaves.length(k),
        leaves=leaves.count(k),
        share=leaves.count(k),
        tile=(plan.block_m, plan.block_n),
        num_warps=plan.num_warps,
        num_stages=stages(plan, False),
        programs=programs,
    )
    out = _empty(a, b, interpret)
    if bias is not None:
        bias = bias.expand(out.shape)
    _launch_leaves(a, b, bias, out, "tree", work, interpret)
    return out.to(a.dtype)


def _launch_skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    deterministic: bool,
    plan: SkinnyPlan,
    compute_units: int,
    *,
    interpret: bool = False,
) -> torch.Tensor:
    """Split leaves where compute units would idle; a split sum has the bytes of one that is not."""
    (m, k), n = x.shape, weight.shape[0]
    work = _work(m, n, leaves.length(k), leaves.count(k), plan, compute_units)
    out = _empty(x, weight, interpret)
    count = leaves.count(k) if deterministic else 1
    if work.share == work.leaves or 4 * count * m * n > plans.WORKSPACE:
        work = work._replace(share=work.leaves)
        _launch_leaves(x, weight, bias, out, "tree", work, interpret)
        return out.to(x.dtype)
    if deterministic:
        sums = torch.empty(count, m, n, dtype=torch.float32, device=x.device)
        _launch_leaves(x, weight, None, sums, "leaves", work, interpret)
    else:
        # A sum from +0 would lose the sign of leaves of -0.
        sums = torch.full((1, m, n), -0.0, dtype=torch.float32, device=x.device)
        _launch_leaves(x, weight, None, sums, "unordered", work, interpret)
    _launch_root((sums,), bias, out, plan)
    return out.to(x.dtype)


def _launch_leaf_sums(
    a: torch.Tensor,
    b: torch.Tensor,
    length: int,
    plan: SkinnyPlan,
    compute_units: int,
    *,
    interpret: bool = False,
) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[0]
    work = _work(m, n, length, cdiv(k, length), plan, compute_units)
    sums = torch.empty(work.leaves, m, n, dtype=torch.float32, device=a.device)
    _launch_leaves(a, b, None, sums, "leaves", work, interpret)
    return sums


class _Work(NamedTuple):
    """One launch of leaves_kernel: so many leaves, ``share`` of them to an item of a program."""

    length: int
    leaves: int
    share: int
    tile: tuple[int, int]
    num_warps: int
    num_stages: int
    programs: int
    hip: tuple[tuple[str, int], ...] = ()


def _work(m: int, n: int, length: int, count: int, plan: SkinnyPlan, compute_units: int) -> _Work:
    """Choose the tile and the split that fill the compute units; no order depends on them."""
    tiles = plan.tiles
    tile_m, num_warps = next((tile for tile in tiles if tile[0] >= m), tiles[-1])
    programs = compute_units * plan.programs
    shares = max(1, programs // (cdiv(m, tile_m) * cdiv(n, plan.columns)))
    return _Work(
        length=length,
        leaves=count,
        share=cdiv(count, shares),
        tile=(tile_m, plan.columns),
        num_warps=num_warps,
        num_stages=plan.num_stages,
        programs=programs,
        hip=(
            ("matrix_instr_nonkdim", plan.matrix_instr_nonkdim),
            ("waves_per_eu", plan.waves_per_eu),
        ),
    )


def _launch_leaves(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    stage: str,
    work: _Work,
    interpret: bool = False,
) -> None:
    (m, k), n = a.shape, b.shape[0]
    plan, (tile_m, tile_n) = plan_of(a.dtype), work.tile
    items = cdiv(m, tile_m) * cdiv(n, tile_n) * cdiv(work.leaves, work.share)
    compiler = options(plan, work.num_warps)
    if torch.version.hip is not None:
        compiler.update(work.hip)
    kernels.leaves_kernel[(min(items, work.programs),)](
        *(a, b, bias, out, m, n, k, work.length, work.leaves, work.share),
        *(*a.stride(), *b.stride(), *((0, 0) if bias is None else bias.stride())),
        ALIGN_M=alignment(m, a.stride(0)),
        ALIGN_N=alignment(n, 1),
        ALIGN_K=_k_alignment(k, a.stride(1), b.stride(1)),
        ALIGN_A=_row_alignment(a),
        ALIGN_B=_row_alignment(b),
        BLOCK_M=tile_m,
        BLOCK_N=tile_n,
        BLOCK_K=plan.block_k,
        GROUP_M=plan.group_m,
        STAGE=stage,
        INPUT_PRECISION=plan.input_precision,
        UPCAST=interpret,
        num_stages=work.num_stages,
        **compiler,
    )


def _launch_root(
    sums: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    plan: SkinnyPlan,
) -> None:
    """out [M, N] = the leaves of every tensor of ``sums`` in ascending order, and the bias."""
    m, n = out.shape
    first, second, third = (*sums, None, None)[:3]
    strides = [0 if t is None else t.stride(0) for t in (first, second, third)]
    aligned = all(size % 16 == 0 for size in (n, *strides))
    if bias is None:
        m, n = 1, m * n  # rows of N columns may fill a program badly
    columns = plan.root_columns
    kernels.root_kernel[(m * cdiv(n, columns),)](
        *(first, second, third, bias, out, m, n),
        *(*strides, *((0, 0) if bias is None else bias.stride())),
        ALIGN=16 if aligned else 1,
        LEAVES=len(first),
        SECOND=0 if second is None else len(second),
        THIRD=0 if third is None else len(third),
        COLUMNS=columns,
        num_warps=plan.root_warps,
        enable_fp_fusion=False,
    )


def _launch_column_sum(rows: torch.Tensor, *, interpret: bool = False) -> torch.Tensor:
    m, n = rows.shape
    order, plan = config.COLUMN_SUM, plan_of(rows.dtype)
    out = torch.empty(n, dtype=torch.float32 if interpret else rows.dtype, device=rows.device)
    kernels.column_sum_kernel[(cdiv(n, order.columns),)](
        *(rows, out, m, n, *rows.stride()),
        ALIGN_N=alignment(n, rows.stride(1)),
        LANES=order.lanes,
        COLUMNS=order.columns,
        UNROLL=plan.sum_unroll,
        **options(plan, plan.sum_warps),
    )
    return out.to(rows.dtype)


def _empty(a: torch.Tensor, b: torch.Tensor, interpret: bool) -> torch.Tensor:
    """The output; in the interpreter it is rounded outside the kernel."""
    dtype = torch.float32 if interpret else a.dtype
    return torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)


def _k_alignment(k: int, *strides: int) -> int:
    """Alignment of K, where 8 is known too: 16 bytes of a 16-bit dtype."""
    return 8 if k % 16 == 8 and 1 in strides else alignment(k, *strides)


def _row_alignment(t: torch.Tensor) -> int:
    """A known factor of the stride of contiguous rows."""
    return 8 if t.stride(1) == 1 and t.stride(0) % 8 == 0 else 1
