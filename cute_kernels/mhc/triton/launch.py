"""Launches the Triton kernels of mhc: outputs, parts, grids, compiler options.

The functions are those of `cpu`: their arguments and results.  Each runs on the device of its
tensors and that device's current stream; the first launch of a (dtype, n, layout, alignment) class
compiles, so do that before a CUDA graph is captured.
"""

from __future__ import annotations

from typing import Any

import torch

from ..config import TOKENS, WIDTH, chunk_channels, mappings
from ..tensors import (
    Coefficients,
    Combined,
    Expand,
    Gates,
    Mapping,
    Parts,
    Projected,
    ProjectionGradients,
    Reduced,
    Sinkhorn,
    Streams,
    Upstream,
)
from . import kernel as kernels
from . import kernel_tokens as token_kernels
from .plan import DOT_WIDTH, SIZES, TRITON

# ---- forward -------------------------------------------------------------------------------------


def project(
    x: torch.Tensor, mapping: Mapping, streams: Streams, expand: Expand | None = None
) -> Projected:
    """Run `cpu.project` as one kernel, after `combine` of an ``expand``."""
    y = None if expand is None else combine(x, streams, None, expand).y
    m, channels = len(x), x.shape[1] // streams.n
    size = chunk_channels(streams.n, mapping.precision)
    chunks, (block_m, block_k) = _tiles(channels, size), TRITON.project
    projected = Projected(_fp32(x, chunks, m, len(mapping.phi)), _fp32(x, chunks, m), y)
    operands = (x if y is None else y, mapping.phi, mapping.norm_weight, *projected[:2])
    tiles = {"CHUNK": size, "BLOCK_M": block_m, "BLOCK_K": block_k}
    options = tiles | _streams(streams) | _product(streams.n)
    blocks = _tiles(m, block_m) * chunks
    _launch(kernels.project_kernel, blocks, operands, m, channels, chunks, **options)
    return projected


def add_chunks(projected: Projected, size: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `cpu.add_chunks` as one kernel."""
    sums, squares = projected.sums, projected.squares
    chunks, m, columns = sums.shape
    h, ms = _fp32(sums, m, WIDTH[n]), _fp32(sums, m)
    options = {"COLUMNS": columns, "WIDTH": WIDTH[n], "ROWS": TRITON.gate_tokens} | _options()
    blocks = _tiles(m, TRITON.gate_tokens)
    operands = (sums, squares, h, ms)
    _launch(token_kernels.add_chunks_kernel, blocks, operands, m, chunks, float(size), **options)
    return h, ms


def gate(
    h: torch.Tensor, ms: torch.Tensor, gates: Gates, n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run `cpu.gate` as one kernel."""
    m = len(h)
    pre, post, res = _fp32(h, m, n), _fp32(h, m, n), _fp32(h, m, n * n)
    operands = (h, ms, gates.alpha, gates.beta, pre, post, res)
    numbers = (m, h.stride(0), gates.eps, gates.pre_eps, gates.post_scale)
    blocks = _tiles(m, TRITON.gate_tokens)
    _launch(token_kernels.gate_kernel, blocks, operands, *numbers, **_gates(n))
    return pre, post, res


def sinkhorn(z: torch.Tensor, n: int, form: Sinkhorn) -> torch.Tensor:
    """Run `cpu.sinkhorn` as one kernel."""
    p = _fp32(z, len(z), n * n)
    blocks, numbers = _tiles(len(z), SIZES.sinkhorn_tokens), (len(z), z.stride(0), form.iterations)
    _launch(token_kernels.sinkhorn_kernel, blocks, (z, p), *numbers, **_sinkhorn(n, form))
    return p


def coefficients(
    projected: Projected, size: int, gates: Gates, n: int, form: Sinkhorn
) -> Coefficients:
    """`add_chunks`, `gate` and `sinkhorn` of res, one after another."""
    h, ms = add_chunks(projected, size, n)
    pre, post, z = gate(h, ms, gates, n)
    return Coefficients(h, ms, pre, post, sinkhorn(z, n, form))


def combine(
    x: torch.Tensor, streams: Streams, pre: torch.Tensor | None, expand: Expand | None
) -> Combined:
    """Run `cpu.combine` as one kernel."""
    m, channels = len(x), x.shape[1] // streams.n
    y = None if expand is None else torch.empty_like(x)
    out = None if pre is None else x.new_empty(m, channels)
    f, bias, post, res = expand or (None,) * 4
    rows, block = SIZES.combine
    operands = (x, f, bias, post, res, pre, y, out)
    strides = (_stride(post), _stride(res), _stride(pre))
    options = {"ROWS": rows, "BLOCK": block} | _streams(streams) | _options()
    blocks = _tiles(m, rows) * _tiles(channels, block)
    _launch(kernels.combine_kernel, blocks, operands, m, channels, *strides, **options)
    return Combined(y, out)


def recompute(x: torch.Tensor, streams: Streams, sites: tuple[Expand, ...]) -> list[torch.Tensor]:
    """Run `combine` of each site."""
    ys = []
    for site in sites:
        x = combine(x, streams, None, site).y
        ys.append(x)
    return ys


# ---- backward ------------------------------------------------------------------------------------


def gate_backward(
    h: torch.Tensor, ms: torch.Tensor, gates: Gates, n: int, *upstream: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Parts]:
    """Run `cpu.gate_backward` as one kernel."""
    d_pre, d_post, d_res = upstream
    m = len(h)
    d_h, d_ms = _fp32(h, m, WIDTH[n]), _fp32(h, m)
    parts = _parts(h, m, TRITON.gate_tokens, 3 + mappings(n))
    operands = (h, ms, gates.alpha, gates.beta, *upstream, d_h, d_ms, parts.values)
    strides = (h.stride(0), d_pre.stride(0), d_post.stride(0), d_res.stride(0))
    numbers = (m, *strides, gates.eps, gates.post_scale)
    blocks = _tiles(m, TRITON.gate_tokens)
    _launch(token_kernels.gate_backward_kernel, blocks, operands, *numbers, **_gates(n))
    return d_h, d_ms, parts


def sinkhorn_backward(z: torch.Tensor, d_p: torch.Tensor, n: int, form: Sinkhorn) -> torch.Tensor:
    """Run `cpu.sinkhorn_backward` as one kernel."""
    d_z = _fp32(z, len(z), n * n)
    numbers = (len(z), z.stride(0), d_p.stride(0), form.iterations)
    options = {"SEGMENT": SIZES.segment} | _sinkhorn(n, form)
    blocks = _tiles(len(z), SIZES.sinkhorn_tokens)
    _launch(token_kernels.sinkhorn_backward_kernel, blocks, (z, d_p, d_z), *numbers, **options)
    return d_z


def coefficients_backward(
    h: torch.Tensor, ms: torch.Tensor, gates: Gates, n: int, form: Sinkhorn, *upstream: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Parts]:
    """`gate_backward` of `sinkhorn_backward`, of logits that `gate` makes again."""
    d_pre, d_post, d_res = upstream
    *_, z = gate(h, ms, gates, n)
    return gate_backward(h, ms, gates, n, d_pre, d_post, sinkhorn_backward(z, d_res, n, form))


def reduce_channels(
    x: torch.Tensor | None,
    streams: Streams,
    upstream: Upstream,
    expand: Expand | None = None,
    want_dx: bool = False,
) -> Reduced:
    """Run `cpu.reduce_channels` as one kernel."""
    n, (dy, d_out, res, pre) = streams.n, upstream
    like = d_out if dy is None else dy
    m, channels = len(like), like.shape[1] // (n if dy is not None else 1)
    f, bias, post, _ = expand or (None,) * 4
    rows, block = TRITON.reduce
    reduced = Reduced(
        df=None if f is None else torch.empty_like(f),
        dx=like.new_empty(m, n * channels) if want_dx else None,
        d_pre=None if x is None or d_out is None else _fp32(like, m, n),
        d_post=None if f is None else _fp32(like, m, n),
        d_res=None if x is None or dy is None else _fp32(like, m, n * n),
        d_bias=None if bias is None else _parts(like, m, rows, channels),
    )
    d_bias = None if bias is None else reduced.d_bias.values
    operands = (x, dy, d_out, f, bias, post, res, None if d_out is None else pre)
    operands += (*reduced[:5], d_bias)
    strides = (_stride(post), _stride(res), _stride(pre))
    tiles = {"ROWS": rows, "BLOCK": block}
    options = tiles | _streams(streams) | _options(_backward_warps(like))
    blocks = _tiles(m, rows)
    _launch(kernels.reduce_kernel, blocks, operands, m, channels, *strides, **options)
    return reduced


def project_backward(
    x: torch.Tensor,
    d_h: torch.Tensor,
    d_ms: torch.Tensor,
    mapping: Mapping,
    streams: Streams,
    upstream: Upstream,
    want: tuple[bool, bool],
) -> ProjectionGradients:
    """Run `cpu.project_backward` as one kernel."""
    (m, k), n = x.shape, streams.n
    chunks, (block_m, block_c) = _tiles(m, TOKENS), TRITON.back
    dx = torch.empty_like(x) if want[0] else None
    d_psi = _fp32(x, chunks, len(mapping.phi), k) if want[1] else None
    dy, d_out, res, pre = upstream if want[0] else Upstream()
    operands = (
        *(x, d_h, d_ms, mapping.phi, mapping.norm_weight, dy, d_out),
        *(None if dy is None else res, None if d_out is None else pre, dx, d_psi),
    )
    numbers = (m, k // n, d_h.stride(0), _stride(res), _stride(pre), 2.0 / k)
    tiles = {"BLOCK_M": block_m, "BLOCK_C": block_c}
    options = tiles | _streams(streams) | _product(n) | _options(_backward_warps(x))
    blocks = chunks * _tiles(k // n, block_c)
    _launch(kernels.project_backward_kernel, blocks, operands, *numbers, **options)
    return ProjectionGradients(dx, None if d_psi is None else Parts(d_psi))


def weights(
    parts: Parts, mapping: Mapping, into_phi: torch.Tensor, into_weight: torch.Tensor | None
) -> None:
    """Run `cpu.weights` as one kernel."""
    phi, weight, _ = mapping
    chunks, columns, k = parts.values.shape
    operands = (parts.values, phi, weight, into_phi, None if weight is None else into_weight)
    tiles = {"COLUMNS": columns, "WIDTH": _power(columns), "BLOCK": SIZES.sum_columns}
    blocks = _tiles(k, SIZES.sum_columns)
    _launch(token_kernels.weights_kernel, blocks, operands, chunks, k, **(tiles | _options()))


def add_parts(parts: Parts, into: torch.Tensor) -> None:
    """Run `cpu.add_parts` as one kernel, or as two if parts are in groups."""
    values = parts.values.view(-1, into.numel())
    if parts.group > 1:
        sums = _fp32(values, len(values) // parts.group, into.numel())
        _add(values, parts.group, sums, False)
        values = sums
    _add(values, len(values), into, True)


# ---- pieces --------------------------------------------------------------------------------------


def _launch(
    kernel: Any, blocks: int, operands: tuple, *numbers: float, **constants: object
) -> None:
    """Launch ``blocks`` programs on the device of the operands."""
    device = next(t.device for t in operands if t is not None)
    with torch.cuda.device(device):
        kernel[(blocks,)](*operands, *numbers, **constants)


def _add(values: torch.Tensor, count: int, out: torch.Tensor, accumulate: bool) -> None:
    """out [T, L] (+)= the sums of count parts each of values [T count, L]."""
    columns = values.shape[1]
    blocks = len(values) // count * _tiles(columns, SIZES.sum_columns)
    options = {"ACCUMULATE": accumulate, "BLOCK": SIZES.sum_columns} | _options()
    _launch(token_kernels.add_parts_kernel, blocks, (values, out), count, columns, **options)


def _parts(like: torch.Tensor, m: int, tokens: int, columns: int) -> Parts:
    """Partial sums of chunks of ``tokens``; those after the last token are zeros."""
    group = TOKENS // tokens
    values = _fp32(like, _tiles(m, TOKENS) * group, columns)
    values[_tiles(m, tokens) :] = 0.0
    return Parts(values, group)


def _fp32(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _stride(rows: torch.Tensor | None) -> int:
    """Between rows of coefficients."""
    return 0 if rows is None else rows.stride(0)


def _streams(streams: Streams) -> dict[str, int | bool]:
    return {"N": streams.n, "CN": streams.layout == "cn"}


def _gates(n: int) -> dict[str, int | bool]:
    """Compile-time options of a kernel of gates."""
    sizes = {"N": n, "COLUMNS": mappings(n), "WIDTH": WIDTH[n], "ROWS": TRITON.gate_tokens}
    return sizes | _options()


def _sinkhorn(n: int, form: Sinkhorn) -> dict[str, float]:
    """Compile-time options of a kernel of sinkhorn; the form "log" adds 0 to its divisors."""
    epsilon = form.form == "epsilon"
    chosen = {"eps": form.eps if epsilon else 0.0, "EPSILON": epsilon}
    return chosen | {"N": n, "ROWS": SIZES.sinkhorn_tokens} | _options()


def _product(n: int) -> dict[str, object]:
    """Compile-time options of a kernel with products: the width of H, the instruction."""
    chosen = {"COLUMNS": mappings(n), "WIDTH": DOT_WIDTH[n]}
    chosen |= {"INPUT_PRECISION": TRITON.input_precision} | _options()
    if torch.version.hip is not None:
        chosen["matrix_instr_nonkdim"] = TRITON.hip_matrix_instr_nonkdim
        chosen["kpack"] = TRITON.hip_kpack
    return chosen


def _options(num_warps: int | None = None) -> dict[str, int | bool]:
    """The compiler options that every launch names."""
    return {"num_warps": num_warps or SIZES.num_warps, "enable_fp_fusion": TRITON.fp_fusion}


def _backward_warps(x: torch.Tensor) -> int:
    """Warps of a backward pass over streams."""
    return SIZES.fp32_warps if x.dtype == torch.float32 else SIZES.num_warps


def _power(size: int) -> int:
    """The power of two at or above ``size``."""
    return 1 << (size - 1).bit_length()


def _tiles(size: int, block: int) -> int:
    return -(-size // block)
