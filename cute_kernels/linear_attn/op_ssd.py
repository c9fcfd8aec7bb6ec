"""The torch ops of Mamba-2's scan, of rows [B, T, ...] and states [S, H, P, N]: `ssd_scan`."""

from __future__ import annotations

import torch

from . import checks, config
from .op_scan import Scan
from .tensors import StateSpace, StateSpaceSaved


class _Ssd(Scan):
    entry, public, chunk = "ssd_scan", "mamba_chunk_scan_combined", config.SSD_CHUNK
    triton, dtypes = "ssd*", frozenset({torch.bfloat16})
    facts, check = staticmethod(config.ssd_facts), staticmethod(checks.state_space)

    def state(self, operands: StateSpace) -> tuple[int, int, int]:
        return *operands.x.shape[2:], operands.B.shape[3]

    def saved_tensors(self, operands: StateSpace, slots: int, on_cpu: bool) -> StateSpaceSaved:
        x, rows = operands.x, operands.x.shape[0] * operands.x.shape[1]
        states = slots, *self.state(operands)
        if on_cpu:
            return StateSpaceSaved(
                x.new_empty(states, dtype=torch.float32), *(x.new_empty(0) for _ in "sdu")
            )
        return StateSpaceSaved(
            x.new_empty(states),
            *(x.new_empty((x.shape[2], rows), dtype=torch.float32) for _ in "sd"),
            x.new_empty(0 if operands.z is None else (rows, *x.shape[2:])),
        )


SCAN = _Ssd()
ssd_scan, ssd_scan_backward = SCAN.define()
