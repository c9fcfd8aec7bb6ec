"""Lists that two blocks of queries have in one tile of three consumers of the SM90 forward."""

from __future__ import annotations

import dataclasses
from unittest import mock

import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import config
from tests.sparse_attn.simulated_fwd import BLOCK, Case, case, run

#: Blocks of keys.  Tiles have rows of lists 0 and 1, and of 1 and 2.
BLOCKS = 11
EVERY = range(BLOCKS)
LISTS = {
    "alternate": ([0, 2, 4, 6], [1, 3, 5, 7], [0, 2, 6]),
    "away for long": ([0, 10], range(1, 10), [0, 6, 10]),
    "away in turns": ([0, 1, 8, 9], [0, 2, 3, 4, 5, 6, 7, 10], [1, 10]),
    "away by as much as is waited for": ([0, 5, 10], [1, 2, 3, 4, 6, 7, 8, 9], [5]),
    "held while another skips": (EVERY, [0, 1, 2, 3, 4, 7, 8, 9, 10], [0, 5, 6, 7]),
    "first empty": ([], EVERY, []),
    "second empty": (EVERY, [], EVERY),
    "all empty": ([], [], []),
    "ends early": ([0, 1], EVERY, [0]),
    "starts late": ([9, 10], EVERY, [10]),
    "one after another": ([0, 1, 2], [3, 4, 5, 6, 7, 8], [9, 10]),
}
#: Skips in both lists, bits, a consumer that another one holds, and one without blocks.
OFTEN = ("alternate", "away in turns", "held while another skips", "second empty")


def listed(lists, *, q_len=3 * BLOCK, bits=False, shape=(1, 2, 1, 64), seed=7) -> Case:
    """Query blocks with the key blocks of ``lists``, whole ones or with a third of the elements."""
    blocks = torch.zeros(len(lists), BLOCKS, dtype=torch.bool)
    for m, row in enumerate(lists):
        blocks[m, list(row)] = True
    allowed = blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:q_len]
    if bits:
        generator = torch.Generator().manual_seed(seed)
        allowed &= torch.rand(allowed.shape, generator=generator) < 0.3
    return case(BlockMask.from_dense(allowed), shape, seed=seed)


def by_two(given: Case, **options) -> tuple:
    """Run a case as `run` does, by two consumers."""
    true = config.configure_forward
    two = mock.patch.object(
        config, "configure_forward", lambda *key: dataclasses.replace(true(*key), consumers=2)
    )
    with two:
        return run(given, **options)
