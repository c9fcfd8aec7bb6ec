"""The torch ops of Mamba-1's scan, of rows [B, D, T] and states [S, D, N]: `selective_scan`."""

from __future__ import annotations

import torch

from . import checks, config
from .op import ChannelLast
from .op_scan import Scan
from .tensors import StateSpace, StateSpaceSaved


class _Selective(ChannelLast, Scan):
    entry, public, chunk = "selective_scan", "selective_scan", config.SELECTIVE_CHUNK
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")
    triton = "selective"
    facts, check = staticmethod(config.selective_facts), staticmethod(checks.selective_scan)

    def rows_of(self, tensors: StateSpace):
        """B and C are [N, G, N_], also of one group."""
        rows = super().rows_of(tensors)
        pairs = ((name, getattr(rows, name)) for name in ("B", "C"))
        return rows._replace(
            **{n: t.unsqueeze(1) for n, t in pairs if t is not None and t.dim() == 2}
        )

    def state(self, operands: StateSpace) -> tuple[int, int]:
        return tuple(operands.A.shape)

    def saved_tensors(self, operands: StateSpace, slots: int, on_cpu: bool) -> StateSpaceSaved:
        x, (channels, size) = operands.x, operands.A.shape
        # On GPUs a state's channels lie side by side.
        state = (channels, size) if on_cpu else (size, channels)
        steps = (0,) if on_cpu else (x.shape[0] * x.shape[2], channels)
        return StateSpaceSaved(
            *(x.new_empty(shape, dtype=torch.float32) for shape in ((slots, *state), steps)),
            *(x.new_empty(0) for _ in "du"),
        )


SCAN = _Selective()
selective_scan, selective_scan_backward = SCAN.define()
