"""Catalogue of the SM90 kernels of mhc: every configuration that the launcher can use."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ..compile.kernel import Entry, Expect, Kernel
from . import config
from .config import (
    DTYPE_NAMES,
    CoefficientsConfig,
    CombineConfig,
    ProjectBackwardConfig,
    ProjectBackwardWgmmaConfig,
    ProjectConfig,
    ProjectWgmmaConfig,
    ReduceConfig,
    SumConfig,
    by_tma,
    combine_config,
    project_backward_config,
    project_by_tma,
    project_config,
    project_wgmma_config,
    wgmma_configs,
)

#: Class of a configuration -> name and module of its kernel.
_KERNELS = {
    ProjectConfig: "project",
    ProjectWgmmaConfig: "project_wgmma",
    CombineConfig: "combine",
    ReduceConfig: "reduce",
    ProjectBackwardConfig: "project_bwd",
    ProjectBackwardWgmmaConfig: "project_bwd_wgmma",
    CoefficientsConfig: "coefficients",
    SumConfig: "sums",
}


def entry(chosen: object) -> Kernel:
    """Return the cache and catalogue entry of one configuration of a kernel."""
    name = _KERNELS[type(chosen)]
    if isinstance(chosen, CoefficientsConfig) and chosen.backward:
        name = "coefficients_bwd"
    return Kernel.of(f"mhc_{name}_sm90", f"{__package__}.kernel_{name}_sm90", chosen)


# ---- the catalogue -------------------------------------------------------------------------------


#: First fields of a configuration of rows of streams: dtype, n, layout, wide.
Common = tuple[str, int, str, bool]


def _commons() -> Iterator[Common]:
    """Yield the first fields of every configuration of rows of streams."""
    return itertools.product(DTYPE_NAMES.values(), config.STREAMS, config.LAYOUTS, (False, True))


def _projections(common: Common, precision: str) -> Iterator[tuple[object, Expect]]:
    """Yield the kernels of the projection, and of its backward."""
    dtype, n, layout, wide = common
    # Narrow accesses and more terms spill registers.
    fast = wide and dtype == "bf16" and precision == "bf16x2"
    spills = 0 if fast else 256

    def expect(mma: str | tuple[str, ...]) -> Expect:
        return Expect(mma, max_registers=255, max_shared=232448, max_step=1024, spills=spills)

    terms = config.PRECISIONS.index(precision) + 2
    of_y = [(True, *flags) for flags in itertools.product((False, True), (False, True))]
    for flags in ((False, False, False), *of_y):
        if project_by_tma(dtype, layout, wide, flags[0], 8):
            for weighted in (False, True):
                by_wgmma = project_wgmma_config(n, layout, precision, weighted, *flags)
                yield by_wgmma, expect(f"64x{terms * config.mappings(n)}x16")
        # TMA does not take rows of f of any number of channels.
        if not project_by_tma(dtype, layout, wide, flags[0], 1):
            yield project_config(*common, precision, *flags), expect("16816")
    for dy, d_out in itertools.product(("", "add", "res"), (False, True)):
        fields = (*common, precision, dy, d_out)
        if by_tma(*fields, 8):
            for back in wgmma_configs(n, dy, d_out):
                yield back, expect((f"64x{back.slab}x16", f"64x{8 * back.n}x16"))
        # TMA does not take rows of any number of channels.
        if not by_tma(*fields, 1):
            # k16 and k8; 24 columns are one of both, 8 columns the latter.
            yield project_backward_config(*fields), expect(("16816", "1688"))


def _row_kernels(common: Common) -> Iterator[tuple[object, Expect]]:
    """Yield the kernels of one layout of rows."""
    for precision in config.PRECISIONS:
        yield from _projections(common, precision)
    for expand, bias in ((False, False), (True, False), (True, True)):
        # Numbers of channels by which every one of ``AHEAD`` is chosen.
        vectors = [1024 * ahead // common[1] for ahead in config.AHEAD]
        of_packed = [combine_config(*common, expand, bias, True, count) for count in vectors]
        unpacked = combine_config(*common, expand, bias, False, 8)
        for combine in dict.fromkeys((unpacked, *of_packed)):
            yield combine, Expect(None, max_registers=128, max_shared=1024)
    # x, dy, d_out, f, bias, dx
    for present in ("x.o..d", "x.o...", "xy.f.d", "xy.fbd", ".y.f..", ".y.fb.", "xyo...", "xy...."):
        x, dy, d_out, f, bias, dx = (letter != "." for letter in present)
        for packed in (False, True) if common[3] and (f or dx) else (False,):
            chosen = ReduceConfig(*common, x, dy, d_out, f, bias, dx, packed)
            yield chosen, Expect(None, max_registers=255)


def catalogue() -> Iterator[Entry]:
    """Yield every kernel that this launcher can use, with 20 iterations."""
    for common in _commons():
        for chosen, expect in _row_kernels(common):
            yield Entry(entry(chosen), "A", expect)
    for n, form in itertools.product(config.STREAMS, config.FORMS):
        of_chunks = [(False, False), (True, True)] if form == "log" else [(True, True)]
        forward = [("chunks", *flags) for flags in of_chunks] + [("z", False, True)]
        backward = [("z", False, True), ("h", True, True)]
        if form == "log":
            forward.append(("h", True, False))
            backward.append(("h", True, False))
        for source, gate, sinkhorn in forward:
            for packed in (False,) if source == "chunks" else (False, True):
                chosen = CoefficientsConfig(n, source, gate, sinkhorn, form, packed=packed)
                yield Entry(entry(chosen), "A", Expect(None, max_registers=128, max_shared=8192))
        for source, gate, sinkhorn in backward:
            iterations = 20 if sinkhorn else 0
            chosen = CoefficientsConfig(n, source, gate, sinkhorn, form, True, iterations)
            yield Entry(entry(chosen), "A", Expect(None, max_registers=168, max_shared=65536))
    for chosen in (SumConfig(False), SumConfig(True), SumConfig(True, True)):
        yield Entry(entry(chosen), "A", Expect(None, max_registers=128, max_shared=2048))
