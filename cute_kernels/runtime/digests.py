"""Digests of tensors' bytes, by which ranks compare values without exchanging them.

A tensor's bytes are read as signed integers v_i of at most 32 bits, and

    digest = n + 1 + Σ m_i v_i  mod 2^64,    i < n,    m_i odd, a hash of i

Integer addition that wraps around has no order, so a digest has the same bits on every device and
for every tiling.  Multipliers depend on the position, so the same values in other positions have
another digest.  Longer tensors are cut into blocks, and the blocks' digests are digested again.
A digest detects mistakes; it is no protection against values that were chosen to collide.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

#: Elements of a block, which has one multiplier for each.
BLOCK = 4096
#: Blocks that are multiplied at once: a temporary of 32 MiB.
_BLOCKS_AT_ONCE = 1024
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}


def digests(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """A digest of each tensor's bytes as 64-bit integers, 0 for None.

    Tensors of equal shapes, dtypes and values have equal digests, whatever their strides.  Those
    of a GPU come to the host in one copy, which waits for the GPU.
    """
    values = [None if t is None else digest(t) for t in tensors]
    known = [value for value in values if value is not None]
    numbers = iter(torch.stack(known).tolist() if known else ())
    return [0 if value is None else next(numbers) for value in values]


def digest(t: torch.Tensor) -> torch.Tensor:
    """The digest of a tensor's bytes: int64, without dimensions, on the tensor's device."""
    t = t.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if t.dtype is torch.bool:
        t = t.view(torch.uint8)
    numbers = t.view(_INTEGERS[t.element_size()])
    blocks = _blocks(numbers)
    while len(blocks) > 1:
        # As halves: a multiple of 2^32 would keep only the low bits of its multiplier.
        blocks = _blocks(blocks.view(torch.int32))
    return blocks[0] + (len(numbers) + 1)


def _blocks(numbers: torch.Tensor) -> torch.Tensor:
    """Σ m_i v_i of each block of integers; the last block may be shorter."""
    multipliers = _multipliers(numbers.device)
    sums = []
    for part in numbers.split(BLOCK * _BLOCKS_AT_ONCE):
        whole = len(part) // BLOCK * BLOCK
        if whole:
            sums.append((part[:whole].view(-1, BLOCK) * multipliers).sum(1))
        if whole < len(part):
            rest = part[whole:]
            sums.append((rest * multipliers[: len(rest)]).sum(0, keepdim=True))
    return torch.cat(sums) if sums else numbers.new_zeros(1, dtype=torch.int64)


@functools.cache
def _multipliers(device: torch.device) -> torch.Tensor:
    """Odd pseudo-random int64 multipliers of the positions in a block: SplitMix64 of 0, 1, ..."""
    mask = (1 << 64) - 1
    values = []
    for i in range(1, BLOCK + 1):
        z = i * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        z = (z ^ z >> 31) | 1
        values.append(z - (1 << 64) if z >> 63 else z)
    return torch.tensor(values, dtype=torch.int64, device=device)
