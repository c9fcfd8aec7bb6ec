"""Operands for f32 instructions: normal numbers of many magnitudes, and every special one."""

import numpy as np

from .lanes import N, run_lanes

SPECIAL = [0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3.4e38, -3.4e38]
SPECIAL += [0.5, 2.5, -2.5, 1.5, 65504, 65536, 448, 1e-8]


def floats(seed):
    """Normal numbers of many magnitudes, and every special one in a random place."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(N) * 10.0 ** rng.integers(-6, 6, N)).astype(np.float32)
    x[: len(SPECIAL)] = rng.permutation(np.array(SPECIAL, np.float32))
    return x


X, Y, Z = floats(4), floats(5), floats(6)


def run(code, x, y=Y, z=Z, result="f"):
    """Runs code on f32 operands; the result as uint64 patterns."""
    return run_lanes(code, *(v.view(np.uint32).astype(np.uint64) for v in (x, y, z)), result)
