"""Loads of a projection: panels of phi for all consumers, of x and f for each."""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...dsl import tma
from ..config import ProjectWgmmaConfig
from .panels import PANEL, TILE, UNIT, Panels


@dataclass(frozen=True)
class Sources:
    """Tensors as TMA addresses them, the contiguous dimension first.

    x:      in boxes of a whole tile of tokens.
    unit:   x in boxes of one unit.
    weight: norm_weight, or None.  f, f_unit: likewise of f, or None without an expand.
    """

    x: tma.Source
    unit: tma.Source
    phi: tma.Source
    weight: tma.Source | None
    f: tma.Source | None
    f_unit: tma.Source | None


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA.

    x_full, x_empty:     mbarriers [stage, consumer].
    phi_full, phi_empty: mbarriers [stage], of phi as loaded.
    psi_full, psi_empty: mbarriers [stage], of its terms.
    sX:      bf16 [box, stage and consumer].
    sPhi:    fp32 [box, stage]; sWeight likewise, or None.
    sPsi:    bf16 [row of a term, element, stage], elements in the order of `psi.split`.
    sF:      bf16 [channel, token, stage and consumer], and sFUnits, the same in units; or None.
    """

    x_full: cute.Pointer
    x_empty: cute.Pointer
    phi_full: cute.Pointer
    phi_empty: cute.Pointer
    psi_full: cute.Pointer
    psi_empty: cute.Pointer
    sX: cute.Tensor
    sPhi: cute.Tensor
    sWeight: cute.Tensor | None
    sPsi: cute.Tensor
    sF: cute.Tensor | None
    sFUnits: cute.Tensor | None


@dataclass(frozen=True)
class Group:
    """Neighbouring units of one chunk, which a CTA processes at once.

    unit:   the first.
    count:  panels of all groups before this one.
    """

    chunk: cutlass.Int32
    unit: cutlass.Int32
    units: cutlass.Int32
    panels: cutlass.Int32
    count: cutlass.Int32


@cute.jit
def ring_stage(
    count: cutlass.Int32, stages: cutlass.Constexpr[int]
) -> tuple[cutlass.Int32, cutlass.Int32]:
    """(stage, phase) of the ``count``-th panel of a ring."""
    return count % stages, count // stages % 2


@dataclass(frozen=True)
class Loader:
    """The loading warp; ``columns``: rows of phi."""

    config: ProjectWgmmaConfig
    panels: Panels
    columns: int

    @property
    def channels(self) -> int:
        """Channels of a panel in "cn"."""
        return PANEL // self.config.n

    @cute.jit
    def load(self, group: Group, sources: Sources, shared: Shared, sUnits: cute.Tensor):
        """Loading warp: panels of phi and of x, in bursts of neighbouring panels."""
        config = self.config
        phi = self.panels.tiles(
            sources.phi, shared.sPhi, self.panels.box(self.columns), cutlass.Int32(0)
        )
        weight = None
        if cutlass.const_expr(config.weighted):
            weight = self.panels.tiles(
                sources.weight, shared.sWeight, self.panels.box(1), cutlass.Int32(0)
            )
        rows = [(group.unit + w * (TILE // UNIT)) * UNIT for w in range(config.warpgroups)]
        wholes = [
            self.panels.tiles(sources.x, shared.sX, self.panels.box(TILE), row) for row in rows
        ]
        parts = [
            self.panels.tiles(sources.unit, sUnits, self.panels.box(UNIT, 1), row) for row in rows
        ]
        for first in cutlass.range(0, group.panels, config.burst, unroll=1):
            last = cutlass.min(first + config.burst, group.panels)
            for panel in cutlass.range(first, last, unroll=1):
                stage, phase = ring_stage(group.count + panel, config.psi_stages)
                cute.arch.mbarrier_wait(shared.phi_empty + stage, 1 - phase)
            for panel in cutlass.range(first, last, unroll=1):
                self.load_phi(group, panel, sources, shared, phi, weight)
            for w in cutlass.range_constexpr(config.warpgroups):
                for panel in cutlass.range(first, last, unroll=1):
                    stage, phase = ring_stage(group.count + panel, config.x_stages)
                    empty = shared.x_empty + (w * config.x_stages + stage)
                    cute.arch.mbarrier_wait(empty, 1 - phase)
                for panel in cutlass.range(first, last, unroll=1):
                    self.load_x(group, panel, sources, shared, w, wholes[w], parts[w])

    @cute.jit
    def load_phi(
        self,
        group: Group,
        panel: cutlass.Int32,
        sources: Sources,
        shared: Shared,
        phi: tuple[cute.Tensor, cute.Tensor],
        weight: tuple[cute.Tensor, cute.Tensor] | None,
    ):
        """Load one panel of phi, and of norm_weight, into its stage."""
        stage, _ = ring_stage(group.count + panel, self.config.psi_stages)
        full = shared.phi_full + stage
        rows = self.columns + (1 if self.config.weighted else 0)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, rows * PANEL * 4)
        for source, tiles in ((sources.phi, phi), (sources.weight, weight)):
            if cutlass.const_expr(source is not None):
                tXsX, tXgX = tiles
                box = self.panels.coord(group.chunk, panel, 0)
                cute.copy(source.atom, tXgX[box], tXsX[None, stage], tma_bar_ptr=full)

    @cute.jit
    def load_x(
        self,
        group: Group,
        panel: cutlass.Int32,
        sources: Sources,
        shared: Shared,
        w: cutlass.Constexpr[int],
        whole: tuple[cute.Tensor, cute.Tensor],
        parts: tuple[cute.Tensor, cute.Tensor],
    ):
        """Load one panel of consumer w's tokens into its stage: a tile, or the units there are."""
        stages, per_tile = self.config.x_stages, TILE // UNIT
        stage, _ = ring_stage(group.count + panel, stages)
        slot = w * stages + stage
        full = shared.x_full + slot
        units = cutlass.max(cutlass.min(group.units - w * per_tile, per_tile), 0)
        with cute.arch.elect_one():
            elements = PANEL + (self.channels if self.config.expand else 0)
            cute.arch.mbarrier_arrive_and_expect_tx(full, units * (UNIT * elements * 2))
        if units == per_tile:
            tXsX, tXgX = whole
            box = self.panels.coord(group.chunk, panel, 0)
            cute.copy(sources.x.atom, tXgX[box], tXsX[None, slot], tma_bar_ptr=full)
            if cutlass.const_expr(sources.f is not None):
                self.load_f(group, panel, sources.f, shared.sF, w, slot, full)
        else:
            tXsX, tXgX = parts
            for i in cutlass.range(units, unroll=1):
                for step in cutlass.range_constexpr(self.panels.steps):
                    box = self.panels.coord(group.chunk, panel, i, step)
                    target = tXsX[None, (slot * self.panels.steps + step) * per_tile + i]
                    cute.copy(sources.unit.atom, tXgX[box], target, tma_bar_ptr=full)
                if cutlass.const_expr(sources.f is not None):
                    part = w * per_tile + i
                    slot_of_f = slot * per_tile + i
                    self.load_f(group, panel, sources.f_unit, shared.sFUnits, part, slot_of_f, full)

    @cute.jit
    def load_f(
        self,
        group: Group,
        panel: cutlass.Int32,
        source: tma.Source,
        sF: cute.Tensor,
        index: cutlass.Int32,
        slot: cutlass.Int32,
        full: cute.Pointer,
    ):
        """Load box ``index`` of the group's rows of f."""
        box = (self.channels, cute.size(sF, mode=[1]))
        start = (0, group.unit * UNIT)
        gF = cute.local_tile(cute.domain_offset(start, source.tensor), box, (None, None))
        tFsF, tFgF = tma.partition(source.atom, 0, cute.make_layout(1), sF, gF)
        column = group.chunk * (self.panels.chunk // self.channels) + panel
        cute.copy(source.atom, tFgF[None, column, index], tFsF[None, slot], tma_bar_ptr=full)
