"""The demo at a size that takes seconds."""

from __future__ import annotations

from cute_kernels.demo.compare import Setup
from cute_kernels.demo.model import Size
from cute_kernels.demo.rollout import Batching
from cute_kernels.demo.training import Split

SIZE = Size(hidden=128, inner=128, layers=2, heads=2, key_heads=1, capacity=64)

SETUP = Setup(
    size=SIZE,
    prompts=(11, 3, 17, 8),
    new=(4, 7, 3, 5),
    batchings=(
        Batching("4 at once, left-padded", batch=4, chunk=None),
        Batching("3 at once, chunks of 5", batch=3, chunk=5),
        Batching("1 at a time, chunks of 7", batch=1, chunk=7),
    ),
    splits=(
        Split("4 at once", (4,)),
        Split("2 of 2", (2, 2)),
        Split("4 of 1", (1, 1, 1, 1)),
        Split("1, 2 and 1", (1, 2, 1)),
    ),
)

#: Everything once, for tests of what surrounds it.
LEAST = Setup(
    size=SIZE,
    prompts=(9, 3),
    new=(2, 3),
    batchings=(SETUP.batchings[0], SETUP.batchings[2]),
    splits=(Split("2 at once", (2,)), Split("2 of 1", (1, 1))),
)
