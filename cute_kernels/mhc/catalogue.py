"""Choice of configurations of the SM90 kernels of mhc, and the catalogue of all of them."""

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
    RecomputeConfig,
    ReduceConfig,
    SumConfig,
    wgmma_configs,
)

#: Class of a configuration -> name and module of its kernel.
_KERNELS = {
    ProjectConfig: "project",
    CombineConfig: "combine",
    RecomputeConfig: "recompute",
    ReduceConfig: "reduce",
    ProjectBackwardConfig: "project_bwd",
    ProjectBackwardWgmmaConfig: "project_bwd_wgmma",
    CoefficientsConfig: "coefficients",
    SumConfig: "sums",
}

#: First fields of a configuration of rows of streams: dtype, n, layout.
Common = tuple[str, int, str]


def entry(chosen: object) -> Kernel:
    """Return the cache and catalogue entry of one configuration of a kernel."""
    name = _KERNELS[type(chosen)]
    if isinstance(chosen, CoefficientsConfig) and chosen.backward:
        name = "coefficients_bwd"
    return Kernel.in_file(__package__, f"{name}_sm90", chosen)


# ---- the choice ----------------------------------------------------------------------------------


def project_config(
    dtype: str,
    n: int,
    layout: str,
    precision: str,
    expand: bool = False,
    bias: bool = False,
) -> ProjectConfig:
    """Configuration of the projection, with warps that do not spill."""
    few = expand or dtype == "fp32" or layout == "nc"
    warps = 8 if few else 12
    return ProjectConfig(dtype, n, layout, precision, expand, bias, warps)


def project_backward_config(
    dtype: str, n: int, layout: str, precision: str, dy: str, d_out: bool
) -> ProjectBackwardConfig:
    """Configuration of a projection's backward on ``mma.sync``, with enough registers."""
    plain = dtype == "bf16" and precision == "bf16x2" and dy != "res"
    blocks = 5 if plain else 4
    return ProjectBackwardConfig(dtype, n, layout, precision, dy, d_out, blocks=blocks)


def by_tma(dtype: str, layout: str, precision: str) -> bool:
    """Whether the backward of a projection runs on TMA and WGMMA; the bytes do not depend on it."""
    return (dtype, layout, precision) == ("bf16", "cn", "bf16x2")


# ---- the catalogue -------------------------------------------------------------------------------


def _commons() -> Iterator[Common]:
    """Yield the first fields of every configuration of rows of streams."""
    return itertools.product(DTYPE_NAMES.values(), config.STREAMS, config.LAYOUTS)


def _projections(common: Common, precision: str) -> Iterator[tuple[object, Expect]]:
    """Yield the kernels of the projection, and of its backward."""
    dtype, n, layout = common

    def expect(mma: str | tuple[str, ...], spills: int = 0) -> Expect:
        return Expect(mma, max_registers=255, max_shared=232448, max_step=1024, spills=spills)

    # Of more than two terms, or of fp32 streams, registers spill.
    spills = 0 if dtype == "bf16" and precision == "bf16x2" else 256
    for flags in ((False, False), (True, False), (True, True)):
        yield project_config(*common, precision, *flags), expect("16816", spills)
    for dy, d_out in itertools.product(("", "add", "res"), (False, True)):
        if by_tma(dtype, layout, precision):
            for chosen in wgmma_configs(n, dy, d_out):
                yield chosen, expect((f"64x{chosen.slab}x16", f"64x{8 * chosen.n}x16"))
        else:
            # k16 and k8; 24 columns are one of both, 8 columns the latter.
            chosen = project_backward_config(*common, precision, dy, d_out)
            yield chosen, expect(("16816", "1688"))


def _row_kernels(common: Common) -> Iterator[tuple[object, Expect]]:
    """Yield the kernels of one layout of rows."""
    for precision in config.PRECISIONS:
        yield from _projections(common, precision)
    for flags in ((False,) * 3, *((True, b, c) for b in (False, True) for c in (False, True))):
        combine = CombineConfig(*common, *flags)
        yield combine, Expect(None, max_registers=128, max_shared=1024)
    for sites, bias in itertools.product(range(2, config.MOST_SITES + 1), (False, True)):
        recompute = RecomputeConfig(*common, sites, bias)
        yield recompute, Expect(None, max_registers=255, max_shared=1024)
    # x, dy, d_out, f, bias, dx
    for present in ("x.o..d", "x.o...", "xy.f.d", "xy.fbd", ".y.f..", ".y.fb.", "xyo...", "xy...."):
        x, dy, d_out, f, bias, dx = (letter != "." for letter in present)
        chosen = ReduceConfig(*common, x, dy, d_out, f, bias, dx)
        yield chosen, Expect(None, max_registers=255)


def catalogue() -> Iterator[Entry]:
    """Yield every kernel that the launcher can use, with 20 iterations."""
    for common in _commons():
        for kernel, expect in _row_kernels(common):
            yield Entry(entry(kernel), "A", expect)
    for n, form in itertools.product(config.STREAMS, config.FORMS):
        of_chunks = [(False, False), (True, True)] if form == "log" else [(True, True)]
        forward = [("chunks", *flags) for flags in of_chunks] + [("z", False, True)]
        backward = [("z", False, True), ("h", True, True)]
        if form == "log":
            forward.append(("h", True, False))
            backward.append(("h", True, False))
        for source, gate, sinkhorn in forward:
            chosen = CoefficientsConfig(n, source, gate, sinkhorn, form=form)
            yield Entry(entry(chosen), "A", Expect(None, max_registers=128, max_shared=8192))
        for source, gate, sinkhorn in backward:
            iterations = 20 if sinkhorn else 0
            chosen = CoefficientsConfig(n, source, gate, sinkhorn, form, True, iterations)
            yield Entry(entry(chosen), "A", Expect(None, max_registers=168, max_shared=65536))
    for sums in (SumConfig(False), SumConfig(True), SumConfig(True, True)):
        yield Entry(entry(sums), "A", Expect(None, max_registers=128, max_shared=2048))
