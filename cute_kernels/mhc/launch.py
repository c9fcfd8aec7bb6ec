"""Launch plans of the SM90 kernels of mhc: outputs and workspace, a compiled kernel, its grid."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .. import settings
from ..compile import cache
from ..compile.call import allocator, bind
from ..runtime.operands import matrix, most_ctas
from ..runtime.plan_cache import Plan
from . import config
from .catalogue import Common, by_tma, entry, project_backward_config, project_config
from .catalogue import catalogue as catalogue
from .config import (
    DTYPE_NAMES,
    TOKENS,
    WIDTH,
    CoefficientsConfig,
    CombineConfig,
    ProjectBackwardConfig,
    ProjectBackwardWgmmaConfig,
    RecomputeConfig,
    ReduceConfig,
    SumConfig,
    mappings,
    project_backward_wgmma_config,
)
from .tensors import (
    ALIGN,
    Coefficients,
    Combined,
    Expand,
    Gates,
    Mapping,
    Padding,
    Parts,
    Projected,
    ProjectionGradients,
    Reduced,
    Sinkhorn,
    Streams,
    Upstream,
)

_TILE = 16
#: Tokens of one part of dalpha and dbeta.
_PART = 64
#: CTAs of a grid without a cap.
_MOST = 2**31 - 1


def _on_vectors(planner: Callable[..., Plan]) -> Callable[..., Plan]:
    """Planner whose kernels read vectors: rows that these do not fit are copied before."""

    @functools.wraps(planner)
    def plan(*operands):
        padding = Padding.needed(*operands)
        if padding is None:
            return planner(*operands)
        launch = planner(*padding.pad(*operands)).run
        run = lambda *operands: padding.cut(launch(*padding.pad(*operands)))  # noqa: E731
        return Plan(run, fresh=False)

    return plan


# ---- forward -------------------------------------------------------------------------------------


def plan_project(
    x: torch.Tensor, mapping: Mapping, streams: Streams, expand: Expand | None = None
) -> Plan:
    """Launch plan of `cpu.project`."""
    if expand is None or Padding.needed(x, mapping, streams, expand) is None:
        return _plan_project(x, mapping, streams, expand)
    # Streams of padded operands are NaN behind the last channel, where post or res is infinite:
    # they are made in a pass of their own.
    combine = plan_combine(x, streams, None, expand).run
    project = _plan_project(x, mapping, streams).run

    def run(x, mapping, streams, expand):
        y, _ = combine(x, streams, None, expand)
        return project(y, mapping, streams)._replace(y=y)

    return Plan(run, fresh=False)


@_on_vectors
def _plan_project(
    x: torch.Tensor, mapping: Mapping, streams: Streams, expand: Expand | None = None
) -> Plan:
    (m, k), n = x.shape, streams.n
    expanded, weighted = expand is not None, mapping.norm_weight is not None
    chunks = -(-k // n // config.chunk_channels(n, mapping.precision))
    bias = expanded and expand.bias is not None
    chosen = project_config(*_common(x, streams), mapping.precision, expanded, bias)
    # A CTA has one chunk; at most one CTA per tile shares a chunk.
    sharers = min(max(most_ctas(x.device) // chunks, 1), -(-m // (_TILE * chosen.warps)))
    ctas = min(most_ctas(x.device), chunks * sharers)
    new_sums = _floats(x, chunks, m, mappings(n))
    new_squares = _floats(x, chunks, m)
    new_y = _if(expanded, allocator(x.shape, x.dtype, x.device))
    launch = bind(x.device, _kernel(chosen))

    def run(x, mapping, streams, expand=None):
        psi = mapping.phi * mapping.norm_weight if weighted else mapping.phi
        projected = Projected(new_sums(), new_squares(), new_y())
        sums, squares, y = projected
        launch(x, psi, sums, squares, *(expand or (None,) * 4), y, ctas)
        return projected

    return Plan(run)


def plan_add_chunks(projected: Projected, size: int, n: int) -> Plan:
    """Launch plan of `cpu.add_chunks`."""
    chosen = CoefficientsConfig(n, "chunks", False, False)
    run = _of_tokens(
        projected.sums, projected.sums.shape[1], chosen, ("h", "ms"), _numbers(), size, 1
    )
    return Plan(lambda projected, size, n: run(sums=projected.sums, squares=projected.squares))


def plan_gate(h: torch.Tensor, ms: torch.Tensor, gates: Gates, n: int) -> Plan:
    """Launch plan of `cpu.gate`."""
    chosen = CoefficientsConfig(n, "h", True, False)
    run = _of_tokens(h, len(h), chosen, ("pre", "post", "res"), _numbers(gates), 1, 1)
    return Plan(lambda h, ms, gates, n: run(h=h, ms=ms, alpha=gates.alpha, beta=gates.beta))


def plan_sinkhorn(z: torch.Tensor, n: int, form: Sinkhorn) -> Plan:
    """Launch plan of `cpu.sinkhorn`."""
    chosen = CoefficientsConfig(n, "z", False, True, form.form)
    run = _of_tokens(z, len(z), chosen, ("res",), _numbers(form=form), 1, form.iterations)
    return Plan(lambda z, n, form: run(z=z)[0])


def plan_coefficients(
    projected: Projected, size: int, gates: Gates, n: int, form: Sinkhorn
) -> Plan:
    """Launch plan of `cpu.coefficients`: one kernel."""
    m, results = projected.sums.shape[1], Coefficients._fields
    chosen = CoefficientsConfig(n, "chunks", True, True, form.form)
    numbers = _numbers(gates, form), size, form.iterations
    compute = _of_tokens(projected.sums, m, chosen, results, *numbers)

    def run(projected, size, gates, n, form):
        sums, squares, _ = projected
        made = compute(sums=sums, squares=squares, alpha=gates.alpha, beta=gates.beta)
        return Coefficients(*made)

    return Plan(run)


@_on_vectors
def plan_combine(
    x: torch.Tensor, streams: Streams, pre: torch.Tensor | None, expand: Expand | None
) -> Plan:
    """Launch plan of `cpu.combine`: one kernel."""
    m, channels = len(x), x.shape[1] // streams.n
    expanded, collapsed = expand is not None, pre is not None
    bias = expanded and expand.bias is not None
    chosen = CombineConfig(*_common(x, streams), expanded, bias, expanded and collapsed)
    new_y = _if(expanded, allocator(x.shape, x.dtype, x.device))
    new_out = _if(collapsed, allocator((m, channels), x.dtype, x.device))
    ctas = _grid_size(x.device, m)
    launch = bind(x.device, _kernel(chosen))

    def run(x, streams, pre, expand):
        y, out = new_y(), new_out()
        launch(x, pre, out, *(expand or (None,) * 4), y, ctas)
        return Combined(y, out)

    return Plan(run)


@_on_vectors
def plan_recompute(x: torch.Tensor, streams: Streams, sites: tuple[Expand, ...]) -> Plan:
    """Launch plan of `cpu.recompute`: one kernel of 2 to `config.MOST_SITES` sites."""
    bias = sites[0].bias is not None
    chosen = RecomputeConfig(*_common(x, streams), len(sites), bias)
    ctas = _grid_size(x.device, len(x))
    new_y = allocator(x.shape, x.dtype, x.device)
    launch = bind(x.device, _kernel(chosen))
    absent = (None,) * (5 * (config.MOST_SITES - len(sites)))

    def run(x, streams, sites):
        ys = [new_y() for _ in sites]
        tensors = [t for site, y in zip(sites, ys, strict=True) for t in (*site, y)]
        launch(x, *tensors, *absent, ctas)
        return ys

    return Plan(run)


# ---- backward ------------------------------------------------------------------------------------


def plan_gate_backward(
    h: torch.Tensor, ms: torch.Tensor, gates: Gates, n: int, *upstream: torch.Tensor
) -> Plan:
    """Launch plan of `cpu.gate_backward`."""
    run = _gates_backward(CoefficientsConfig(n, "h", True, False, backward=True), h, gates)
    return Plan(lambda h, ms, gates, n, *upstream: run(h, ms, gates, *upstream))


def plan_sinkhorn_backward(z: torch.Tensor, d_p: torch.Tensor, n: int, form: Sinkhorn) -> Plan:
    """Launch plan of `cpu.sinkhorn_backward`."""
    chosen = CoefficientsConfig(n, "z", False, True, form.form, True, form.iterations)
    run = _of_tokens(z, len(z), chosen, ("d_z",), _numbers(form=form), form.iterations)
    return Plan(lambda z, d_p, n, form: run(z=z, d_res=d_p)[0])


def plan_coefficients_backward(
    h: torch.Tensor, ms: torch.Tensor, gates: Gates, n: int, form: Sinkhorn, *upstream: torch.Tensor
) -> Plan:
    """Launch plan of `cpu.coefficients_backward`: one kernel."""
    chosen = CoefficientsConfig(n, "h", True, True, form.form, True, form.iterations)
    run = _gates_backward(chosen, h, gates, form)
    return Plan(lambda h, ms, gates, n, form, *upstream: run(h, ms, gates, *upstream))


def _gates_backward(
    chosen: CoefficientsConfig, h: torch.Tensor, gates: Gates, form: Sinkhorn | None = None
) -> Callable[..., tuple[torch.Tensor, torch.Tensor, Parts]]:
    """Make ``run(h, ms, gates, d_pre, d_post, d_res)`` of both backwards of gates."""
    iterations = 1 if form is None else form.iterations
    results = ("d_h", "d_ms", "parts")
    compute = _of_tokens(h, len(h), chosen, results, _numbers(gates, form), iterations)

    def run(h, ms, gates, *upstream):
        inputs = dict(zip(("d_pre", "d_post", "d_res"), upstream, strict=True))
        d_h, d_ms, parts = compute(h=h, ms=ms, alpha=gates.alpha, beta=gates.beta, **inputs)
        return d_h, d_ms, Parts(parts, TOKENS // _PART)

    return run


@_on_vectors
def plan_reduce_channels(
    x: torch.Tensor | None,
    streams: Streams,
    upstream: Upstream,
    expand: Expand | None = None,
    want_dx: bool = False,
) -> Plan:
    """Launch plan of `cpu.reduce_channels`."""
    dy, d_out, _, _ = upstream
    like, n = x if x is not None else dy, streams.n
    assert like is not None, "a pass reads x or dy"
    m, channels = len(like), like.shape[1] // n
    f, bias = (None, None) if expand is None else (expand.f, expand.bias)
    present = (x is not None, dy is not None, d_out is not None, f is not None, bias is not None)
    chosen = ReduceConfig(*_common(like, streams), *present, want_dx)
    blocks = -(-m // chosen.tokens) if bias is not None else m

    new = (
        _if(f is not None, allocator((m, channels), like.dtype, like.device)),
        _if(want_dx, allocator(like.shape, like.dtype, like.device)),
        _if(f is not None, _floats(like, m, n)),
        _if(x is not None and dy is not None, _floats(like, m, n * n)),
        _if(x is not None and d_out is not None, _floats(like, m, n)),
        _if(bias is not None, _floats(like, blocks, channels)),
    )
    launch = bind(like.device, _kernel(chosen))
    numbers = m, channels, _grid_size(like.device, blocks)
    group = TOKENS // chosen.tokens

    def run(x, streams, upstream, expand=None, want_dx=False):
        dy, d_out, res, pre = upstream
        f, bias, post, _ = (None,) * 4 if expand is None else expand
        df, dx, d_post, d_res, d_pre, parts = (make() for make in new)
        by = (post, res if want_dx and dy is not None else None, pre if want_dx else None)
        launch(x, dy, d_out, f, bias, *by, df, dx, d_post, d_res, d_pre, parts, *numbers)
        d_bias = None if parts is None else Parts(parts, group)
        return Reduced(df, dx, d_pre, d_post, d_res, d_bias)

    return Plan(run)


def plan_project_backward(
    x: torch.Tensor,
    d_h: torch.Tensor,
    d_ms: torch.Tensor,
    mapping: Mapping,
    streams: Streams,
    upstream: Upstream,
    want: tuple[bool, bool],
) -> Plan:
    """Launch plan of `cpu.project_backward`; both results are always computed."""
    (m, k), n = x.shape, streams.n
    dy, d_out, res, _ = upstream
    weighted = mapping.norm_weight is not None
    chunks = -(-m // TOKENS)
    mode = "" if dy is None else "add" if res is None else "res"
    fields = (*_common(x, streams), mapping.precision, mode, d_out is not None)
    tma = by_tma(DTYPE_NAMES[x.dtype], streams.layout, mapping.precision)
    # TMA takes rows of any length at multiples of 16 bytes; vectors must be whole.
    rows = {"x": x, "dy": dy, "d_out": d_out}
    copied = tma and any(_for_tma(name, t) is not t for name, t in rows.items())
    padding = None if tma else Padding.needed(x, mapping, streams, upstream)
    width = k if padding is None else n * padding.width
    chosen: ProjectBackwardConfig | ProjectBackwardWgmmaConfig
    if tma:
        work = chunks, k, most_ctas(x.device)
        chosen = project_backward_wgmma_config(n, mode, d_out is not None, *work)
        slab = chosen.slab
    else:
        chosen = project_backward_config(*fields)
        slab = 64 * chosen.warps
    # Rows that TMA stores to begin at multiples of 16 bytes.
    dx_width = -(-k // 8) * 8 if tma else width
    new_dx = allocator((m, dx_width), x.dtype, x.device)
    new_parts = _floats(x, chunks, mappings(n), width)
    ctas = _grid_size(x.device, chunks * -(-width // slab))
    launch = bind(x.device, _kernel(chosen))
    sizes = (ctas,) if tma else (k, ctas)

    def run(x, d_h, d_ms, mapping, streams, upstream, want):
        if padding is not None:
            x, mapping, upstream = padding.pad(x, mapping, upstream)
        dy, d_out, res, pre = upstream
        psi = mapping.phi * mapping.norm_weight if weighted else mapping.phi
        dx, parts = new_dx(), new_parts()
        dx = dx[:, :k] if tma and k % 8 else dx
        d_h, res, pre = (_aligned(t) for t in (d_h[:, : WIDTH[n]], res, pre))
        d_ms, dy, d_out = (None if t is None else t.contiguous() for t in (d_ms, dy, d_out))
        if copied:
            x, dy, d_out = _for_tma("x", x), _for_tma("dy", dy), _for_tma("d_out", d_out)
        res = res if mode == "res" else None
        pre = pre if d_out is not None else None
        launch(x, d_h, d_ms, psi, dy, res, d_out, pre, dx, parts, *sizes)
        parts = Parts(parts) if want[1] else None
        gradients = ProjectionGradients(dx.contiguous() if want[0] else None, parts)
        return gradients if padding is None else padding.cut(gradients)

    return Plan(run, fresh=padding is None)


def plan_weights(
    parts: Parts, mapping: Mapping, into_phi: torch.Tensor, into_weight: torch.Tensor | None
) -> Plan:
    """Launch plan of `cpu.weights`."""
    norm = mapping.norm_weight is not None
    launch = bind(into_phi.device, _kernel(SumConfig(True, norm)))

    def run(parts, mapping, into_phi, into_weight):
        norm_args = (None,) * 3
        if norm:
            weight = mapping.norm_weight
            into = torch.zeros_like(weight) if into_weight is None else into_weight
            norm_args = (mapping.phi, weight, into)
        launch(parts.values, into_phi, *norm_args, 1)

    return Plan(run)


def plan_add_parts(parts: Parts, into: torch.Tensor) -> Plan:
    """Launch plan of `cpu.add_parts`."""
    launch = bind(into.device, _kernel(SumConfig(False)))

    def run(parts, into):
        launch(parts.values, into.view(-1), None, None, None, parts.group)

    return Plan(run)


# ---- what calls share ----------------------------------------------------------------------------

#: Operands of the kernels of coefficients and of their backward, in order; numbers follow.
_FORWARD = ("sums", "squares", "h", "ms", "alpha", "beta", "pre", "post", "z", "res")
_BACKWARD = (
    *("h", "ms", "alpha", "beta", "z", "d_pre", "d_post", "d_res"),
    *("d_h", "d_ms", "parts", "d_z"),
)


def _of_tokens(
    like: torch.Tensor,
    m: int,
    chosen: CoefficientsConfig,
    results: tuple[str, ...],
    *numbers: object,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """``run(**inputs)`` of a kernel of coefficients of m tokens: allocates ``results``, launches.

    numbers: The kernel's arguments after its operands.
    """
    n = chosen.n
    shapes = {"h": (m, WIDTH[n]), "pre": (m, n), "post": (m, n), "res": (m, n * n), "ms": (m,)}
    shapes |= {"d_h": (m, WIDTH[n]), "d_ms": (m,), "d_z": (m, n * n)}
    shapes["parts"] = -(-m // _PART), 3 + mappings(n)
    new = [_floats(like, *shapes[name]) for name in results]
    launch = bind(like.device, _kernel(chosen), tuples=True)
    order = _BACKWARD if chosen.backward else _FORWARD

    def run(**operands):
        made = tuple(make() for make in new)
        operands.update(zip(results, made, strict=True))
        launch(*map(operands.get, order), *numbers)
        return made

    return run


def _numbers(gates: Gates | None = None, form: Sinkhorn | None = None) -> tuple[float, ...]:
    """Numbers of a coefficient kernel; 0 where it has no gates, or no Sinkhorn-Knopp."""
    of_gates = (0.0,) * 3 if gates is None else (gates.eps, gates.pre_eps, gates.post_scale)
    return *of_gates, 0.0 if form is None else form.eps


def _if(needed: bool, make: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor | None]:
    """Return the allocator, or one of None."""
    return make if needed else lambda: None


def _floats(like: torch.Tensor, *shape: int) -> Callable[[], torch.Tensor]:
    """Allocator of fp32 tensors on the device of ``like``."""
    return allocator(shape, torch.float32, like.device)


def _common(x: torch.Tensor, streams: Streams) -> Common:
    """Return the first fields of a configuration."""
    return DTYPE_NAMES[x.dtype], streams.n, streams.layout


def _aligned(t: torch.Tensor | None) -> torch.Tensor | None:
    """Return a contiguous tensor at a multiple of 16 bytes; a row of a wider one may not be."""
    if t is None:
        return None
    t = t.contiguous()
    return t if t.data_ptr() % ALIGN == 0 else t.clone()


def _for_tma(name: str, t: torch.Tensor | None) -> torch.Tensor | None:
    """Return rows that TMA can address: a copy with padding where these are not."""
    adapt = None if t is None else matrix(t, "mhc_project_backward", name, k_major=True).adapt
    return t if adapt is None else adapt(t)


def _grid_size(device: torch.device, work: int) -> int:
    """Grid size: one CTA for each part of the work, unless CUTE_KERNELS_MAX_CTAS caps the grid."""
    return min(work, most_ctas(device) if settings.max_ctas() else _MOST)


@functools.cache
def _kernel(chosen: object) -> Callable:
    return cache.get(entry(chosen), "sm_90a")
