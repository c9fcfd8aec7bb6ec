"""The SM90 launcher: outputs and workspace, a compiled kernel, one call."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import torch

from .. import settings
from ..compile import cache
from ..compile.call import call
from ..compile.kernel import Entry, Expect, Kernel
from ..runtime.operands import most_ctas
from . import config
from .config import (
    DTYPE_NAMES,
    TOKENS,
    WIDTH,
    CoefficientsConfig,
    CombineConfig,
    ProjectBackwardConfig,
    ProjectConfig,
    ReduceConfig,
    SumConfig,
    mappings,
)
from .tensors import (
    Coefficients,
    Expand,
    Gates,
    Mapping,
    Parts,
    Projected,
    Reduced,
    Sinkhorn,
    Streams,
    Upstream,
)

_TILE = 16
#: Tokens of one part of dalpha and dbeta.
_PART = 64
#: Bytes of the widest access; and CTAs of a grid that nothing caps.
_ALIGN, _MOST = 16, 2**31 - 1


# ---- forward -------------------------------------------------------------------------------------


def project(
    x: torch.Tensor,
    mapping: Mapping,
    streams: Streams,
    expand: Expand | None = None,
    pre: torch.Tensor | None = None,
) -> Projected:
    """SM90 implementation of `cpu.project`."""
    (m, k), n = x.shape, streams.n
    psi = mapping.phi
    if mapping.norm_weight is not None:
        psi = psi * mapping.norm_weight
    step = config.chunk_channels(n, mapping.precision)
    chunks = -(-k // n // step)
    sums = x.new_empty(chunks, m, mappings(n), dtype=torch.float32)
    squares = x.new_empty(chunks, m, dtype=torch.float32)
    made, collapse = (None,) * 5, (None, None)
    if expand is not None:
        made = (*expand, torch.empty_like(x))
        if pre is not None:
            collapse = (pre, torch.empty_like(expand.f))
    wide = _wide(streams, k // n, x, psi, *made[:2], made[4], collapse[1])
    bias = expand is not None and expand.bias is not None
    chosen = project_config(
        *_common(x, streams, wide), mapping.precision, expand is not None, bias, pre is not None
    )
    # A CTA has one chunk, and no more share it than have a tile each.
    sharers = min(max(most_ctas(x.device) // chunks, 1), -(-m // (_TILE * chosen.warps)))
    ctas = min(most_ctas(x.device), chunks * sharers)
    call(x.device, _kernel(chosen), x, psi, sums, squares, *made, *collapse, ctas)
    return Projected(sums, squares, made[4], collapse[1])


def add_chunks(projected: Projected, size: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """SM90 implementation of `cpu.add_chunks`."""
    h, ms = _of_chunks(projected, n)
    chosen = CoefficientsConfig(n, "chunks", False, False)
    args = (projected.sums, projected.squares, h, ms, *(None,) * 6)
    call(h.device, _kernel(chosen), *args, _NO_NUMBERS, size, 1)
    return h, ms


def gate(
    h: torch.Tensor, ms: torch.Tensor, gates: Gates, n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """SM90 implementation of `cpu.gate`."""
    made = _of_tokens(h, n)
    chosen = CoefficientsConfig(n, "h", True, False)
    args = (None, None, h, ms, gates.alpha, gates.beta, *made[:2], None, made[2])
    call(h.device, _kernel(chosen), *args, _numbers(gates), 1, 1)
    return made


def sinkhorn(z: torch.Tensor, n: int, form: Sinkhorn) -> torch.Tensor:
    """SM90 implementation of `cpu.sinkhorn`."""
    p = z.new_empty(z.shape)
    chosen = CoefficientsConfig(n, "z", False, True, form.form)
    numbers = (0.0, 0.0, 0.0, form.eps)
    call(z.device, _kernel(chosen), *(None,) * 8, z, p, numbers, 1, form.iterations)
    return p


def coefficients(
    projected: Projected, size: int, gates: Gates, n: int, form: Sinkhorn
) -> Coefficients:
    """SM90 implementation of `cpu.coefficients`, in one kernel."""
    h, ms = _of_chunks(projected, n)
    pre, post, res = _of_tokens(h, n)
    chosen = CoefficientsConfig(n, "chunks", True, True, form.form)
    call(
        h.device, _kernel(chosen), projected.sums, projected.squares, h, ms, gates.alpha,
        gates.beta, pre, post, None, res, _numbers(gates, form), size, form.iterations,
    )  # fmt: skip
    return Coefficients(h, ms, pre, post, res)


def combine(
    x: torch.Tensor, streams: Streams, pre: torch.Tensor | None, expand: Expand | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """SM90 implementation of `cpu.combine`, of one of the two."""
    m, channels = len(x), x.shape[1] // streams.n
    if expand is None:
        out = x.new_empty(m, channels)
        chosen = CombineConfig(*_common(x, streams, _wide(streams, channels, x, out)), False)
        call(x.device, _kernel(chosen), x, pre, out, *(None,) * 5, _rows_of(x.device, m))
        return None, out
    y = torch.empty_like(x)
    wide = _wide(streams, channels, x, y, expand.f, expand.bias)
    chosen = CombineConfig(*_common(x, streams, wide), True, expand.bias is not None)
    call(x.device, _kernel(chosen), x, None, None, *expand, y, _rows_of(x.device, m))
    return y, None


# ---- backward ------------------------------------------------------------------------------------


def gate_backward(
    h: torch.Tensor,
    ms: torch.Tensor,
    gates: Gates,
    n: int,
    d_pre: torch.Tensor,
    d_post: torch.Tensor,
    d_res: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, Parts]:
    """SM90 implementation of `cpu.gate_backward`."""
    chosen = CoefficientsConfig(n, "h", True, False, backward=True)
    return _gates_backward(chosen, h, ms, gates, (d_pre, d_post, d_res), None)


def sinkhorn_backward(z: torch.Tensor, d_p: torch.Tensor, n: int, form: Sinkhorn) -> torch.Tensor:
    """SM90 implementation of `cpu.sinkhorn_backward`."""
    d_z = z.new_empty(z.shape)
    chosen = CoefficientsConfig(n, "z", False, True, form.form, True, form.iterations)
    numbers = (0.0, 0.0, 0.0, form.eps)
    args = (*(None,) * 4, z, None, None, d_p, None, None, None, d_z)
    call(z.device, _kernel(chosen), *args, numbers, form.iterations)
    return d_z


def coefficients_backward(
    h: torch.Tensor,
    ms: torch.Tensor,
    gates: Gates,
    n: int,
    form: Sinkhorn,
    d_pre: torch.Tensor,
    d_post: torch.Tensor,
    d_res: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, Parts]:
    """SM90 implementation of `cpu.coefficients_backward`, in one kernel."""
    chosen = CoefficientsConfig(n, "h", True, True, form.form, True, form.iterations)
    return _gates_backward(chosen, h, ms, gates, (d_pre, d_post, d_res), form)


def _gates_backward(chosen: CoefficientsConfig, h, ms, gates: Gates, given: tuple, form):
    m, n = len(h), chosen.n
    d_h, d_ms = h.new_empty(m, WIDTH[n]), h.new_empty(m)
    parts = h.new_empty(-(-m // _PART), 3 + mappings(n))
    iterations = 1 if form is None else form.iterations
    call(
        h.device, _kernel(chosen), h, ms, gates.alpha, gates.beta, None, *given,
        d_h, d_ms, parts, None, _numbers(gates, form), iterations,
    )  # fmt: skip
    return d_h, d_ms, Parts(parts, TOKENS // _PART)


def reduce_channels(
    x: torch.Tensor | None,
    streams: Streams,
    upstream: Upstream,
    expand: Expand | None = None,
    want_dx: bool = False,
) -> Reduced:
    """SM90 implementation of `cpu.reduce_channels`."""
    dy, d_out, res, pre = upstream
    like, n = x if x is not None else dy, streams.n
    m, channels = len(like), like.shape[1] // n
    f, bias, post, _ = (None,) * 4 if expand is None else expand
    there = [t is not None for t in (x, dy, d_out, f, bias)]

    def sums(wanted: bool, columns: int) -> torch.Tensor | None:
        return like.new_empty(m, columns, dtype=torch.float32) if wanted else None

    df = None if f is None else torch.empty_like(f)
    dx = torch.empty_like(like) if want_dx else None
    d_post = sums(f is not None, n)
    d_res = sums(x is not None and dy is not None, n * n)
    d_pre = sums(x is not None and d_out is not None, n)
    wide = _wide(streams, channels, x, dy, d_out, f, bias, df, dx)
    chosen = ReduceConfig(*_common(like, streams, wide), *there, want_dx)
    blocks = -(-m // chosen.tokens) if bias is not None else m
    parts = None
    if bias is not None:
        parts = like.new_empty(blocks, channels, dtype=torch.float32)
    by = (post, res if want_dx and dy is not None else None, pre if want_dx else None)
    call(
        like.device, _kernel(chosen), x, dy, d_out, f, bias, *by, df, dx, d_post, d_res, d_pre,
        parts, m, channels, _rows_of(like.device, blocks),
    )  # fmt: skip
    d_bias = None if parts is None else Parts(parts, TOKENS // chosen.tokens)
    return Reduced(df, dx, d_pre, d_post, d_res, d_bias)


def project_backward(
    x: torch.Tensor,
    d_h: torch.Tensor,
    d_ms: torch.Tensor,
    mapping: Mapping,
    streams: Streams,
    upstream: Upstream,
    want: tuple[bool, bool],
) -> tuple[torch.Tensor | None, Parts | None]:
    """SM90 implementation of `cpu.project_backward`; both results are computed in any case."""
    (m, k), n = x.shape, streams.n
    dy, d_out, res, pre = upstream
    psi = mapping.phi
    if mapping.norm_weight is not None:
        psi = psi * mapping.norm_weight
    dx = torch.empty_like(x)
    chunks = -(-m // TOKENS)
    parts = x.new_empty(chunks, mappings(n), k, dtype=torch.float32)
    mode = "" if dy is None else "add" if res is None else "res"
    wide = _wide(streams, k // n, x, dy, d_out, dx)
    of_dh, res, pre = (_aligned(t) for t in (d_h[:, : WIDTH[n]], res, pre))
    d_ms, dy, d_out = (None if t is None else t.contiguous() for t in (d_ms, dy, d_out))
    chosen = project_backward_config(
        *_common(x, streams, wide), mapping.precision, mode, d_out is not None
    )
    res = res if mode == "res" else None
    slab = 64 // n
    ctas = _rows_of(x.device, chunks * -(-(k // n) // (slab * chosen.warps)))
    args = (x, of_dh, d_ms, psi, dy, res, d_out, pre if d_out is not None else None, dx, parts)
    call(x.device, _kernel(chosen), *args, ctas)
    return (dx if want[0] else None), (Parts(parts) if want[1] else None)


def weights(
    parts: Parts, mapping: Mapping, into_phi: torch.Tensor, into_weight: torch.Tensor | None
) -> None:
    """SM90 implementation of `cpu.weights`."""
    norm = mapping.norm_weight is not None
    others = (None,) * 3
    if norm:
        own = into_weight
        own = torch.zeros_like(mapping.norm_weight) if own is None else own
        others = (mapping.phi, mapping.norm_weight, own)
    call(into_phi.device, _kernel(SumConfig(True, norm)), parts.values, into_phi, *others, 1)


def add_parts(parts: Parts, into: torch.Tensor) -> None:
    """SM90 implementation of `cpu.add_parts`."""
    flat = into.view(-1)
    args = (parts.values, flat, None, None, None, parts.group)
    call(into.device, _kernel(SumConfig(False)), *args)


# ---- what calls share ----------------------------------------------------------------------------

_NO_NUMBERS = (0.0, 0.0, 0.0, 0.0)


def _numbers(gates: Gates, form: Sinkhorn | None = None) -> tuple[float, ...]:
    eps = 0.0 if form is None else form.eps
    return gates.eps, gates.pre_eps, gates.post_scale, eps


def _of_chunks(projected: Projected, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    _, m, _ = projected.sums.shape
    return projected.sums.new_empty(m, WIDTH[n]), projected.sums.new_empty(m)


def _of_tokens(like: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    return tuple(like.new_empty(len(like), size) for size in (n, n, n * n))


def _common(x: torch.Tensor, streams: Streams, wide: bool) -> tuple:
    """The first fields of a configuration."""
    return DTYPE_NAMES[x.dtype], streams.n, streams.layout, wide


def _wide(streams: Streams, channels: int, *tensors: torch.Tensor | None) -> bool:
    """Whether whole units are one access, wherever they lie."""
    unit = 8 // streams.n if streams.layout == "cn" else 8
    there = (t for t in tensors if t is not None)
    return channels % unit == 0 and all(t.data_ptr() % _ALIGN == 0 for t in there)


def _aligned(t: torch.Tensor | None) -> torch.Tensor | None:
    """Contiguous at a multiple of 16 bytes, which one row of a wider tensor need not be."""
    if t is None:
        return None
    t = t.contiguous()
    return t if t.data_ptr() % _ALIGN == 0 else t.clone()


def project_config(*fields: object) -> ProjectConfig:
    """`ProjectConfig` of its fields up to ``collapse``, with warps that spill no register."""
    chosen = ProjectConfig(*fields)
    few = chosen.expand or chosen.dtype == "fp32" or chosen.layout == "nc"
    return dataclasses.replace(chosen, warps=8) if few else chosen


def project_backward_config(*fields: object) -> ProjectBackwardConfig:
    """`ProjectBackwardConfig` of its fields up to ``d_out``, with enough registers a thread."""
    chosen = ProjectBackwardConfig(*fields)
    plain = chosen.dtype == "bf16" and chosen.precision == "bf16x2" and chosen.dy != "res"
    return chosen if plain else dataclasses.replace(chosen, blocks=4)


def _rows_of(device: torch.device, work: int) -> int:
    """CTAs for so much work: one for each, unless CUTE_KERNELS_MAX_CTAS caps the grid."""
    return min(work, most_ctas(device) if settings.max_ctas() else _MOST)


#: A configuration's class -> the kernel's name, and its module.
_KERNELS = {
    ProjectConfig: "project",
    CombineConfig: "combine",
    ReduceConfig: "reduce",
    ProjectBackwardConfig: "project_bwd",
    CoefficientsConfig: "coefficients",
    SumConfig: "sums",
}


@functools.cache
def _kernel(chosen: object) -> Callable:
    return cache.get(entry(chosen), "sm_90a")


def entry(chosen: object) -> Kernel:
    """One configuration of a kernel as the cache and the catalogue know it."""
    name = _KERNELS[type(chosen)]
    if name == "coefficients" and chosen.backward:
        name = "coefficients_bwd"
    return Kernel.of(f"mhc_{name}_sm90", f"{__package__}.kernel_{name}_sm90", chosen)


# ---- the catalogue -------------------------------------------------------------------------------


def _commons() -> Iterator[tuple]:
    """The first fields of every kernel of rows of streams."""
    return itertools.product(DTYPE_NAMES.values(), config.STREAMS, config.LAYOUTS, (False, True))


def _of_rows(common: tuple) -> Iterator[tuple[object, Expect]]:
    """The kernels of one layout of rows."""
    # k16 and k8; 24 columns are one of both, 8 columns the latter.
    of_dx = ("16816", "1688")
    dtype, wide = common[0], common[3]
    for precision in config.PRECISIONS:
        # Rows that are not wide, and more terms, take more registers than there are.
        fast = wide and dtype == "bf16" and precision == "bf16x2"
        limits = {"max_registers": 255, "max_shared": 232448, "max_step": 1024}
        limits["spills"] = 0 if fast else 256
        for made in ((False,) * 3, *((True, b, c) for b in (False, True) for c in (False, True))):
            chosen = project_config(*common, precision, *made)
            yield chosen, Expect("16816", **limits)
        for dy, d_out in itertools.product(("", "add", "res"), (False, True)):
            chosen = project_backward_config(*common, precision, dy, d_out)
            yield chosen, Expect(of_dx, **limits)
    for made in ((False, False), (True, False), (True, True)):
        yield CombineConfig(*common, *made), Expect(None, max_registers=128, max_shared=1024)
    # x, dy, d_out, f, bias, dx
    for read in ("x.o..d", "x.o...", "xy.f.d", "xy.fbd", ".y.f..", ".y.fb.", "xyo...", "xy...."):
        flags = (letter != "." for letter in read)
        yield ReduceConfig(*common, *flags), Expect(None, max_registers=255)


def catalogue() -> Iterator[Entry]:
    """Every kernel that this launcher can ask for, of 20 iterations."""
    for common in _commons():
        for chosen, expect in _of_rows(common):
            yield Entry(entry(chosen), "A", expect)
    for n, form in itertools.product(config.STREAMS, config.FORMS):
        of_chunks = [(False, False), (True, True)] if form == "log" else [(True, True)]
        forward = [("chunks", *made) for made in of_chunks] + [("z", False, True)]
        backward = [("z", False, True), ("h", True, True)]
        if form == "log":
            forward.append(("h", True, False))
            backward.append(("h", True, False))
        for chosen in forward:
            chosen = CoefficientsConfig(n, *chosen, form=form)
            yield Entry(entry(chosen), "A", Expect(None, max_registers=128, max_shared=8192))
        for source, gate_, sinkhorn_ in backward:
            iterations = 20 if sinkhorn_ else 0
            chosen = CoefficientsConfig(n, source, gate_, sinkhorn_, form, True, iterations)
            yield Entry(entry(chosen), "A", Expect(None, max_registers=168, max_shared=65536))
    for chosen in (SumConfig(False), SumConfig(True), SumConfig(True, True)):
        yield Entry(entry(chosen), "A", Expect(None, max_registers=128, max_shared=2048))
