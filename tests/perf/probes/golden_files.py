"""The golden vectors that a card wrote."""

from __future__ import annotations

from perf.probes import runner

GOLDEN_FILES = sorted(runner.GOLDEN.glob("wgmma_*.npz"))
