"""Launches the SM90 kernels of norm: operands, outputs, grids, and the catalogue."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn.functional import pad

from ..compile import cache
from ..compile.call import call
from ..compile.kernel import Entry, Expect, Kernel
from ..log import contiguous, copied
from ..operands import most_ctas
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


def forward(x: torch.Tensor, residual: torch.Tensor | None, scale: Scale, rule: Rule) -> Normed:
    """As `cpu.forward`."""
    m, width = x.shape
    x, residual, weight, bias = taken(x, residual, scale, rule)
    y = torch.empty_like(x, memory_format=_DENSE)
    h = None if residual is None else torch.empty_like(y)
    rstd = x.new_empty(m, dtype=torch.float32)
    mean = torch.empty_like(rstd) if rule.kind == LAYER else None
    kernel, ctas = forward_kernel(x, residual, weight, rule.kind, width)
    args = (x, residual, weight, bias, h, y, mean, rstd)
    call(x.device, kernel, *args, *forward_numbers(rule, width), ctas)
    return Normed(_whole(y, width), None if h is None else _whole(h, width), mean, rstd)


def taken(
    x: torch.Tensor, residual: torch.Tensor | None, scale: Scale, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """x, residual, weight and bias as the kernels take them; themselves where they need no copy."""
    added = None if residual is None else _rows(residual, "residual")
    return _rows(x, "x"), added, *_scale(scale, x, rule)


def forward_numbers(rule: Rule, width: int) -> tuple[float, float, float, int]:
    """What a forward kernel takes between its tensors and its CTAs."""
    return rule.eps, rule.offset, 1 / width, width


def forward_kernel(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, kind: str, width: int
) -> tuple[Callable, int]:
    """The compiled kernel, and its CTAs, for operands that were `taken`, of rows of ``width``."""
    chosen, at_once, held = _forward(kind, x.dtype, weight.dtype, residual is not None, width)
    return _kernel(chosen), _forward_ctas(x.shape[0], at_once, held, x.device)


@functools.cache
def _forward(*what: object) -> tuple[ForwardConfig, int, int | None]:
    """(configuration, rows of a CTA at once, CTAs of an SM that stay or None), of
    `forward_config`'s arguments."""
    chosen = forward_config(*what)
    held = forward_residency(chosen)
    return chosen, held.threads // chosen.threads, held.ctas if held.stages else None


def _forward_ctas(m: int, at_once: int, held: int | None, device: torch.device) -> int:
    """Of m rows."""
    ctas = -(-m // at_once)
    return ctas if held is None else min(ctas, most_ctas(device) * held)


def backward(
    upstream: Upstream,
    h: torch.Tensor,
    stats: tuple[torch.Tensor | None, torch.Tensor],
    scale: Scale,
    rule: Rule,
    parts: bool,
) -> tuple[torch.Tensor, Parts | None]:
    """As `cpu.backward`; the parts are made whether wanted or not."""
    m, width = h.shape
    h, dy = _rows(h, "h"), _rows(upstream.dy, "dy")
    dh = None if upstream.dh is None else _rows(upstream.dh, "dh")
    dx = torch.empty_like(h, memory_format=_DENSE)
    count = -(-m // part_rows(width))
    shape = (2 if rule.kind == LAYER else 1, count, h.shape[1])
    sums = h.new_empty(shape, dtype=torch.float32)
    of_bias = sums[1] if rule.kind == LAYER else None
    weight, _ = _scale(scale, h, rule)
    chosen = backward_config(rule.kind, h.dtype, weight.dtype, dh is not None, width)
    ctas = min(count, most_ctas(h.device))
    args = (dy, dh, h, *stats, weight, dx, sums[0], of_bias)
    call(h.device, _kernel(chosen), *args, rule.offset, 1 / width, ctas)
    return _whole(dx, width), Parts(sums[0], of_bias)


def add_parts(
    parts: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor | None],
    like: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """As `cpu.add_parts`; two sums of one kind in one launch."""
    made = [torch.empty_like(t) if old is None else None for old, t in zip(into, like, strict=True)]
    targets = [new if old is None else old for old, new in zip(into, made, strict=True)]
    flat = [t.contiguous() for t in targets]
    names = [
        config.DTYPE_NAMES[t.dtype] if old is None else "add"
        for old, t in zip(into, like, strict=True)
    ]
    sums = list(zip(parts, flat, strict=True))
    if len(sums) == 2 and names[0] == names[1]:
        call(parts[0].device, _kernel(SumConfig(names[0], True)), *sums[0], *sums[1])
    else:
        for name, one in zip(names, sums, strict=True):
            call(one[0].device, _kernel(SumConfig(name, False)), *one, None, None)
    for target, t in zip(targets, flat, strict=True):
        if t is not target:
            target.copy_(t)
    return made


def _rows(t: torch.Tensor, name: str) -> torch.Tensor:
    """[M, 8 ⌈D / 8⌉] whose rows begin at multiples of 16 bytes, zeros behind D."""
    row, column = t.stride()
    whole = t.shape[1] % UNIT == 0
    if whole and column == 1 and (row * t.itemsize | t.data_ptr()) % _ALIGN == 0:
        return t
    copied("norm", name, t, "whole units of 8, rows at multiples of 16 bytes")
    return _padded(t)


def _vector(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A [D] likewise, in ``dtype``."""
    if t.dtype == dtype and t.stride(0) == 1 and not (t.data_ptr() % _ALIGN or len(t) % UNIT):
        return t
    return _padded(t.to(dtype))


def _padded(t: torch.Tensor) -> torch.Tensor:
    """A copy with zeros up to whole units."""
    return pad(t, (0, -t.shape[-1] % UNIT)) if t.shape[-1] % UNIT else t.clone(memory_format=_DENSE)


def _whole(t: torch.Tensor, width: int) -> torch.Tensor:
    if t.shape[1] == width:
        return t
    return contiguous("norm", "out", t[:, :width], "contiguous; its rows were padded to units of 8")


def _scale(scale: Scale, x: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias as the kernels take them: both there, of one dtype, that of x or fp32."""
    weight, bias = scale
    if bias is None and rule.kind == RMS and weight is not None and weight.dtype == x.dtype:
        return _vector(weight, x.dtype), None
    if weight is None:
        weight = x.new_ones(x.shape[1])
    if rule.kind == LAYER and bias is None:
        bias = torch.zeros_like(weight)
    given = [t for t in (weight, bias) if t is not None]
    dtype = x.dtype if all(t.dtype == x.dtype for t in given) else torch.float32
    return _vector(weight, dtype), None if bias is None else _vector(bias, dtype)


def forward_config(
    kind: str, dtype: torch.dtype, weight: torch.dtype, residual: bool, width: int
) -> ForwardConfig:
    """The configuration of kernel_fwd_sm90 for rows of ``width``."""
    names, plan = config.DTYPE_NAMES, row_plan(width)
    return ForwardConfig(kind, names[dtype], names[weight], residual, plan.threads, plan.units)


@functools.cache
def backward_config(
    kind: str, dtype: torch.dtype, weight: torch.dtype, upstream: bool, width: int
) -> BackwardConfig:
    """The configuration of kernel_bwd_sm90 for rows of ``width``."""
    names, plan = config.DTYPE_NAMES, row_plan(width)
    return BackwardConfig(kind, names[dtype], names[weight], upstream, plan.threads, plan.units)


#: A configuration's class -> what its kernel is called.
_KERNELS = {ForwardConfig: "fwd_sm90", BackwardConfig: "bwd_sm90", SumConfig: "sums_sm90"}


@functools.cache
def _kernel(chosen: object) -> Callable:
    return cache.get(entry(chosen), "sm_90a")


def entry(chosen: object) -> Kernel:
    """One configuration of a kernel as the cache and the catalogue know it."""
    name = _KERNELS[type(chosen)]
    return Kernel.of(f"norm_{name}", f"{__package__}.kernel_{name}", chosen)


def catalogue() -> Iterator[Entry]:
    """Every kernel that this launcher can ask for."""
    half = (torch.bfloat16, torch.float16)
    dtypes = [(d, w) for d in half for w in (d, torch.float32)] + [(torch.float32,) * 2]
    widths = [1 << i for i in range(6, 17)]
    for kind, (dtype, weight), more, width in itertools.product(
        config.KINDS, dtypes, (False, True), widths
    ):
        chosen = forward_config(kind, dtype, weight, more, width)
        limits = {"max_registers": 128, "spills": 0 if width <= 8192 else 4096}
        yield Entry(entry(chosen), "A", Expect(None, max_shared=_MOST_SHARED, **limits))
        chosen = backward_config(kind, dtype, weight, more, width)
        # fp32 may spill, and so may threads of wider rows.
        fast = dtype.itemsize == 2 and width <= 8192
        limits = {"max_registers": 128, "spills": 0 if fast else 4096}
        yield Entry(entry(chosen), "A", Expect(None, max_shared=_MOST_SHARED, **limits))
    limits = {"max_registers": 64, "max_shared": 64 << 10}
    for into, pair in itertools.product(("add", *config.DTYPE_NAMES.values()), (False, True)):
        yield Entry(entry(SumConfig(into, pair)), "A", Expect(None, pdl=True, **limits))
