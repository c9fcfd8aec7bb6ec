"""States of tokens, as the kernels that finish them get them."""

from __future__ import annotations

import torch

from cute_kernels.logp import exact

ROWS = 11


def drawn(parts: int, entropy: bool) -> tuple[torch.Tensor, exact.Rows]:
    """States whose highest bins rise: one row lost, one empty, two without targets.

    Logits are so near to log2 Σ 2^y that log p shows it to 2^-50.
    """
    generator = torch.Generator().manual_seed(parts)
    columns = exact.columns_of_state(entropy)
    states = torch.randint(2**51, 2**55, (parts, ROWS, columns), generator=generator)
    near = torch.randint(-1, 2, (parts, ROWS), generator=generator)
    states[..., exact.TOP] = torch.arange(parts)[:, None] * 6 // parts - 6 + near
    states[..., exact.CHOSEN] = 0
    states[0, 3, exact.TOP] = exact.LOST
    states[:, 4, exact.TOP], states[:, 4, exact.SUMS : exact.CHOSEN] = exact.EMPTY, 0
    target = torch.arange(ROWS)
    target[2], target[6] = exact.MASKED, exact.OUTSIDE
    rows = exact.Rows(target, torch.rand(ROWS, generator=generator) + 0.5)
    logit = (exact.finish(states, rows)[1] / rows.scale).nan_to_num()
    states[parts // 2, :, exact.CHOSEN] = logit.view(torch.int32).to(torch.int64)
    return states, rows
