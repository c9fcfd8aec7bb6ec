"""NaN in rows and keys that a mask takes out, in the backward of the GPU backends.

docs/attention.md says where it goes: into blocks that are visited, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cute_kernels.schedulers import BlockMask
from tests.contract import same_bytes

#: Two blocks on the diagonal; this row sees nothing, and nobody sees this key.
SIZE, ROW, KEY = 256, 140, 30
FIRST, SECOND = slice(0, 128), slice(128, 256)
#: Which of (q, k, v, dout), and where -> which of (dq, dk, dv), and where, are NaN.
REACHES = {(0, ROW): {1: SECOND}, (3, ROW): {2: SECOND}, (1, KEY): {0: FIRST}}
#: Where dS is P (dP - delta) without a selection behind it: SM90 without a softcap.
REACHES_BY_DS = REACHES | {(3, ROW): {0: slice(ROW, ROW + 1), 1: SECOND, 2: SECOND}}


def mask() -> BlockMask:
    dense = torch.ones(SIZE, SIZE, dtype=torch.bool).tril()
    dense[SECOND, FIRST] = False
    dense[ROW], dense[:, KEY] = False, False
    return BlockMask.from_dense(dense)


def check(
    gradients: Callable[..., Sequence[Tensor]],
    operands: Sequence[Tensor],
    reaches: dict[tuple[int, int], dict[int, slice]],
) -> None:
    """gradients: (q, k, v, dout), each [1, SIZE, H, D] -> (dq, dk, dv)."""
    clean = gradients(*operands)
    assert all(t.isfinite().all() for t in clean)
    for (which, place), wanted in reaches.items():
        wild = [t.detach().clone() for t in operands]
        wild[which][:, place] = math.nan
        out = [t.clone() for t in gradients(*wild)]
        for gradient, block in wanted.items():
            assert out[gradient][:, block].isnan().all(), (which, gradient)
            out[gradient][:, block] = clean[gradient][:, block]
        assert all(map(same_bytes, out, clean)), which
