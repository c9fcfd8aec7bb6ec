"""Launch the SM90 kernels of norm: operands, outputs, grids, and the catalogue."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn.functional import pad

from ..compile import cache
from ..compile.call import ROWS, Program, allocator, bind
from ..compile.kernel import Entry, Expect, Kernel
from ..log import contiguous, copied
from ..runtime.operands import Matrix, Output, flat_rows, flattened, most_ctas
from ..runtime.plan_cache import Plan, launcher
from . import config
from .config import (
    LAYER,
    RMS,
    UNIT,
    BackwardConfig,
    ForwardConfig,
    SumConfig,
    forward_residency,
    part_rows,
    row_plan,
)
from .tensors import Normed, Parts, Rule, Scale, Upstream

_ALIGN = 16
#: Bytes of shared memory that a CTA may have.
_MOST_SHARED = 227 << 10
_DENSE = torch.contiguous_format


def plan_forward(x: torch.Tensor, residual: torch.Tensor | None, scale: Scale, rule: Rule) -> Plan:
    """Launch plan of the norm of the rows of x [..., D], or of h = x + residual: a `Normed`."""
    width, layer = x.shape[-1], rule.kind == LAYER
    _, adapt_x, flat_x = _rows(x, "x")
    _, adapt_residual, flat_residual = _rows(residual, "residual")
    weight, bias = _scale(scale, x, rule)
    adapt_scale = weight is not scale.weight or bias is not scale.bias
    m, added = x.shape[:-1].numel(), residual is not None
    kernel, ctas = forward_kernel(m, x, added, weight, rule.kind, width)
    new, finish, flat = _output(x)
    new_number = allocator((m,), torch.float32, x.device)
    flatten = itertools.compress((0, 1, 4, 5), (flat_x, flat_residual, flat, flat))
    launch = bind(x.device, kernel, flatten)
    scalars = *forward_numbers(rule, width), ctas

    def run(x, residual, scale, rule):
        weight, bias = _scale(scale, x, rule) if adapt_scale else scale
        x = x if adapt_x is None else adapt_x(x)
        residual = residual if adapt_residual is None else adapt_residual(residual)
        y, rstd = new(), new_number()
        h, mean = new() if added else None, new_number() if layer else None
        launch(x, residual, weight, bias, h, y, mean, rstd, *scalars)
        if finish is not None:
            y, h = finish(y), finish(h) if added else None
        return Normed(y, h, mean, rstd)

    program = None
    if finish is None and not (adapt_x or adapt_residual or adapt_scale):
        # Its arguments are x, residual, weight and bias; its outputs y, rstd, and h and mean.
        positions = 0, 2 if added else None, 2 + added if layer else None, 1
        flats = flat, flat_x, flat_residual
        operands = _forward_operands(bias is not None, positions, flats)
        outputs = (new, new_number, *[new] * added, *[new_number] * layer)
        launches = ((kernel, (*operands, *scalars)),)
        program = Program(None, x.device, outputs, launches, positions)
    return Plan(run, fresh=finish is None, program=program)


def _forward_operands(
    biased: bool, positions: tuple[int | None, ...], flats: tuple[bool, bool, bool]
) -> list[tuple[int, int] | None]:
    """Tensors of a forward launch as a program's operands.

    positions: Of y, h, mean and rstd among the outputs.  flats: Whether the launch flattens y and
    h, x, and the residual.
    """
    flat, flat_x, flat_residual = (f * ROWS for f in flats)
    y, h, mean, rstd = (None if p is None else (-1 - p, 0) for p in positions)
    h, y = None if h is None else (h[0], flat), (y[0], flat)
    residual = None if h is None else (1, flat_residual)
    return [(0, flat_x), residual, (2, 0), (3, 0) if biased else None, h, y, mean, rstd]


forward = launcher(plan_forward)


def _output(x: torch.Tensor) -> Output:
    """Allocator of a result like the rows of ``x``; kernels write whole units of 8."""
    shape, width = x.shape, x.shape[-1]
    if width % UNIT == 0:
        return Output(allocator(shape, x.dtype, x.device), flatten=x.dim() != 2)
    new = allocator((shape[:-1].numel(), width + -width % UNIT), x.dtype, x.device)
    return Output(new, lambda t: _trim_columns(t, width).view(shape))


def forward_numbers(rule: Rule, width: int) -> tuple[float, float, float, int]:
    """Scalar arguments of a forward kernel."""
    return rule.eps, rule.offset, 1 / width, width


def forward_kernel(
    m: int, x: torch.Tensor, added: bool, weight: torch.Tensor, kind: str, width: int
) -> tuple[Callable, int]:
    """Return kernel and grid size for m rows of ``width``; added: with a residual."""
    chosen, at_once, resident = _forward(kind, x.dtype, weight.dtype, added, width)
    return _kernel(chosen), _forward_ctas(m, at_once, resident, x.device)


@functools.cache
def _forward(*config_args: object) -> tuple[ForwardConfig, int, int | None]:
    """Return (configuration, rows of a CTA at once, resident CTAs of an SM or None) for the
    arguments of `forward_config`."""
    chosen = forward_config(*config_args)
    residency = forward_residency(chosen)
    return chosen, residency.threads // chosen.threads, residency.ctas if residency.stages else None


def _forward_ctas(m: int, at_once: int, resident: int | None, device: torch.device) -> int:
    """Grid size for m rows."""
    ctas = -(-m // at_once)
    return ctas if resident is None else min(ctas, most_ctas(device) * resident)


def plan_backward(
    upstream: Upstream,
    h: torch.Tensor,
    stats: tuple[torch.Tensor | None, torch.Tensor],
    scale: Scale,
    rule: Rule,
    parts: bool,
) -> Plan:
    """Launch plan of `cpu.backward` for rows [..., D]; the partial sums are always computed."""
    width, layer, upper = h.shape[-1], rule.kind == LAYER, upstream.dh is not None
    _, adapt_dy, flat_dy = _rows(upstream.dy, "dy")
    _, adapt_h, flat_h = _rows(h, "h")
    _, adapt_dh, flat_dh = _rows(upstream.dh, "dh")
    weight, _ = _scale(scale, h, rule)
    adapt_scale = weight is not scale.weight
    new, finish, flat = _output(h)
    count = -(-h.shape[:-1].numel() // part_rows(width))
    shape = 2 if layer else 1, count, width + -width % UNIT
    new_sums = allocator(shape, torch.float32, h.device)
    chosen = backward_config(rule.kind, h.dtype, weight.dtype, upper, width)
    flatten = itertools.compress((0, 1, 2, 6), (flat_dy, flat_dh, flat_h, flat))
    launch = bind(h.device, _kernel(chosen), flatten)
    scalars = rule.offset, 1 / width, min(count, most_ctas(h.device))

    def run(upstream, h, stats, scale, rule, parts):
        weight = _scale(scale, h, rule)[0] if adapt_scale else scale.weight
        dy, dh = upstream
        dy = dy if adapt_dy is None else adapt_dy(dy)
        dh = dh if adapt_dh is None else adapt_dh(dh)
        h = h if adapt_h is None else adapt_h(h)
        dx, sums = new(), new_sums()
        of_bias = sums[1] if layer else None
        launch(dy, dh, h, *stats, weight, dx, sums[0], of_bias, *scalars)
        return dx if finish is None else finish(dx), Parts(sums[0], of_bias)

    program = None
    if finish is None and not (adapt_dy or adapt_dh or adapt_h or adapt_scale):
        # Its arguments are dy, dh, h, mean, rstd and weight; its outputs dx and the partial sums.
        new_part = allocator(shape[1:], torch.float32, h.device)
        tensors = (
            (0, flat_dy * ROWS), (1, flat_dh * ROWS) if upper else None, (2, flat_h * ROWS),
            (3, 0) if layer else None, (4, 0), (5, 0),
            (-1, flat * ROWS), (-2, 0), (-3, 0) if layer else None,
        )  # fmt: skip
        outputs = (new, new_part, new_part) if layer else (new, new_part)
        launches = ((_kernel(chosen), (*tensors, *scalars)),)
        program = Program(None, h.device, outputs, launches, tuple(range(len(outputs))))
    return Plan(run, fresh=finish is None, program=program)


backward = launcher(plan_backward)


def plan_add_parts(
    parts: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor | None],
    like: Sequence[torch.Tensor],
) -> Plan:
    """Launch plan of `cpu.add_parts`; two sums of one kind take one launch."""
    device = parts[0].device
    names = [
        config.DTYPE_NAMES[t.dtype] if old is None else "add"
        for old, t in zip(into, like, strict=True)
    ]
    pair = len(parts) == 2 and names[0] == names[1]
    launches = [bind(device, _kernel(SumConfig(name, pair))) for name in names]
    new = [
        allocator(t.shape, t.dtype, device) if old is None else None
        for old, t in zip(into, like, strict=True)
    ]

    def run(parts, into, like):
        sums = [None if make is None else make() for make in new]
        targets = [
            old.contiguous() if total is None else total
            for old, total in zip(into, sums, strict=True)
        ]
        if pair:
            launches[0](parts[0], targets[0], parts[1], targets[1])
        else:
            for launch, part, t in zip(launches, parts, targets, strict=True):
                launch(part, t, None, None)
        for old, t in zip(into, targets, strict=True):
            if old is not None and t is not old:
                old.copy_(t)
        return sums

    program = None
    if not any(old is not None for old in into):
        program = Program(None, device, tuple(new), _sum_launches(names, pair), (0, 1)[: len(new)])
    return Plan(run, program=program)


def _sum_launches(names: Sequence[str], pair: bool) -> tuple[tuple, ...]:
    """Launches of a program whose arguments are partial sums, and whose outputs their sums."""
    kernels = [_kernel(SumConfig(name, pair)) for name in names]
    if pair:
        return ((kernels[0], ((0, 0), (-1, 0), (1, 0), (-2, 0))),)
    return tuple([(k, ((i, 0), (-1 - i, 0), None, None)) for i, k in enumerate(kernels)])


add_parts = launcher(plan_add_parts)


def _rows(t: torch.Tensor | None, name: str) -> Matrix:
    """Conversion of ``t`` [..., D] to [M, 8 ⌈D / 8⌉]: zeros past D, rows at 16 bytes."""
    if t is None:
        return Matrix("k")
    rows = flattened(t)
    row, column = rows.stride()
    addressable = column == 1 and (row * t.itemsize | rows.data_ptr()) % _ALIGN == 0
    if t.shape[-1] % UNIT or not addressable:
        return Matrix("k", lambda t: _copied_rows(t, name))
    if t.dim() == 2:
        return Matrix("k")
    if t.is_contiguous():
        return Matrix("k", flatten=True)
    return Matrix("k", lambda t: flat_rows(t, "norm"))


def _copied_rows(t: torch.Tensor, name: str) -> torch.Tensor:
    copied("norm", name, t, "whole units of 8, rows at multiples of 16 bytes")
    return _padded(flat_rows(t, "norm"))


def _vector(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a vector [D] in ``dtype``, padded as the rows are."""
    if t.dtype == dtype and t.stride(0) == 1 and not (t.data_ptr() % _ALIGN or len(t) % UNIT):
        return t
    return _padded(t.to(dtype))


def _padded(t: torch.Tensor) -> torch.Tensor:
    """Return a copy padded with zeros to whole units of 8."""
    return pad(t, (0, -t.shape[-1] % UNIT)) if t.shape[-1] % UNIT else t.clone(memory_format=_DENSE)


def _trim_columns(t: torch.Tensor, width: int) -> torch.Tensor:
    if t.shape[1] == width:
        return t
    return contiguous("norm", "out", t[:, :width], "contiguous; its rows were padded to units of 8")


def _scale(scale: Scale, x: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight and bias for the kernels: both present, in the dtype of x or fp32."""
    weight, bias = scale
    if bias is None and rule.kind == RMS and weight is not None and weight.dtype == x.dtype:
        return _vector(weight, x.dtype), None
    if weight is None:
        weight = x.new_ones(x.shape[-1])
    if rule.kind == LAYER and bias is None:
        bias = torch.zeros_like(weight)
    vectors = [t for t in (weight, bias) if t is not None]
    dtype = x.dtype if all(t.dtype == x.dtype for t in vectors) else torch.float32
    return _vector(weight, dtype), None if bias is None else _vector(bias, dtype)


def forward_config(
    kind: str, dtype: torch.dtype, weight: torch.dtype, residual: bool, width: int
) -> ForwardConfig:
    """Return the configuration of kernel_fwd_sm90 for rows of ``width``."""
    names, plan = config.DTYPE_NAMES, row_plan(width)
    return ForwardConfig(kind, names[dtype], names[weight], residual, plan.threads, plan.units)


@functools.cache
def backward_config(
    kind: str, dtype: torch.dtype, weight: torch.dtype, upstream: bool, width: int
) -> BackwardConfig:
    """Return the configuration of kernel_bwd_sm90 for rows of ``width``."""
    names, plan = config.DTYPE_NAMES, row_plan(width)
    return BackwardConfig(kind, names[dtype], names[weight], upstream, plan.threads, plan.units)


#: Class of a configuration -> name of its kernel.
_KERNELS = {ForwardConfig: "fwd_sm90", BackwardConfig: "bwd_sm90", SumConfig: "sums_sm90"}


@functools.cache
def _kernel(chosen: object) -> Callable:
    return cache.get(entry(chosen), "sm_90a")


def entry(chosen: object) -> Kernel:
    """Return the cache and catalogue entry of one configuration of a kernel."""
    return Kernel.in_file(__package__, _KERNELS[type(chosen)], chosen)


def catalogue() -> Iterator[Entry]:
    """Yield every kernel that this launcher can use."""
    half = (torch.bfloat16, torch.float16)
    dtypes = [(d, w) for d in half for w in (d, torch.float32)] + [(torch.float32,) * 2]
    widths = [1 << i for i in range(6, 17)]
    for kind, (dtype, weight), residual, width in itertools.product(
        config.KINDS, dtypes, (False, True), widths
    ):
        chosen = forward_config(kind, dtype, weight, residual, width)
        limits = {"max_registers": 128, "spills": 0 if width <= 8192 else 4096}
        yield Entry(entry(chosen), "A", Expect(None, max_shared=_MOST_SHARED, **limits))
        chosen = backward_config(kind, dtype, weight, residual, width)
        # fp32 may spill, and so may threads of wider rows.
        fast = dtype.itemsize == 2 and width <= 8192
        limits = {"max_registers": 128, "spills": 0 if fast else 4096}
        yield Entry(entry(chosen), "A", Expect(None, max_shared=_MOST_SHARED, **limits))
    limits = {"max_registers": 64, "max_shared": 64 << 10}
    for into, pair in itertools.product(("add", *config.DTYPE_NAMES.values()), (False, True)):
        yield Entry(entry(SumConfig(into, pair)), "A", Expect(None, pdl=True, **limits))
