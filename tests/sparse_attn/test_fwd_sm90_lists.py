"""CTAs of the SM90 forward: tile after tile, of three consumers with lists of their own.

Which CTA takes which tile is no row's business: few CTAs have the bytes of one for each tile.
Three consumers have 192 rows, of two blocks of the mask: a row's bytes are those of two consumers,
of a CTA with one list, whatever the other list is; with overlap (heads of 64) and without (of 96).
"""

from __future__ import annotations

import dataclasses
import math
from unittest import mock

import pytest
import torch

import ptxsim
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import launch
from cute_kernels.sparse_attn.config import HEAD_DIMS, configure_forward
from ptxsim import modes
from tests import certified, contract
from tests.kernels.ring_defects import LIMITS, SETTINGS
from tests.sparse_attn.simulated_fwd import (
    BLOCK,
    EVERY,
    LISTS,
    MASKS,
    OFTEN,
    Case,
    by_two,
    case,
    chain,
    dense,
    listed,
    run,
    same,
)

#: What runs at every commit while the kernels are proved.
pytestmark = certified.marks("sparse_attn", "test_lists test_every_mode")
NIGHT = pytest.mark.nightly


def require_bytes_of_two(inputs: Case, label: object = None) -> None:
    """In the card's arithmetic."""
    card = {"wgmma_math": "hopper", **LIMITS}
    assert same(run(inputs, **card), by_two(inputs, **card)), label


def lists_and_sizes():
    """Each list with whole blocks or with bits for every commit, and with the others nightly."""
    for index, name in enumerate(LISTS):
        for bits in (False, True):
            yield pytest.param(name, bits, 64, marks=() if bits == bool(index % 2) else NIGHT)
            often = name in OFTEN[1:] and not bits
            yield pytest.param(name, bits, 96, marks=() if often else NIGHT)


@pytest.mark.parametrize(("name", "bits", "dim"), list(lists_and_sizes()))
def test_lists(name, bits, dim):
    """The order in torch, and the bytes of two consumers."""
    inputs = listed(LISTS[name], bits=bits, shape=(1, 2, 1, dim))
    assert same(run(inputs, **LIMITS), chain(inputs))
    assert ptxsim.report()["fence_warnings"]["count"] == 0
    require_bytes_of_two(inputs)


@pytest.mark.parametrize("dim", [64, 96])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("causal", "random") else NIGHT) for n in MASKS]
)
def test_the_bytes_of_two_consumers(name, dim):
    """Tails around every multiple of 64 rows, groups of heads, masks by head."""
    for q_len in (1, 63, 65, 127, 129, 191, 192, 193, 255, 257):
        require_bytes_of_two(case(MASKS[name](q_len, 300), (1, 2, 1, dim), seed=q_len), q_len)


def test_drawn_lists():
    """Random lists of two heads and two batches, sparse and dense, and any length."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        rows, share = 1 + seed % 5, (0.12, 0.25, 0.6)[seed % 3]
        blocks = torch.rand(2, 2, rows, 16, generator=generator) < share
        allowed = blocks.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)
        cut = torch.randint(0, BLOCK, (2,), generator=generator).tolist()
        allowed = allowed[..., : rows * BLOCK - cut[0], : 16 * BLOCK - cut[1]]
        if seed % 2:
            allowed = allowed & (torch.rand(allowed.shape, generator=generator) < 0.7)
        require_bytes_of_two(case(BlockMask.from_dense(allowed), (2, 2, 1, 64), seed=seed), seed)


@pytest.mark.parametrize("dim", [64, 96])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in OFTEN else NIGHT) for n in LISTS]
)
def test_schedules(name, dim):
    """Every mode: late and early data, random warps, 1, 2, 7 and 132 CTAs in any order."""
    inputs = listed(LISTS[name], bits=name == "away in turns", shape=(2, 2, 1, dim))
    seven = modes.Mode("resident-7", SETTINGS[-1] | {"resident_ctas": 7})
    modes.run_modes(lambda: run(inputs, **LIMITS), [*modes.QUICK_MODES, seven])


@pytest.mark.parametrize("name", ["alternate", "away for long", "away in turns", "first empty"])
def test_values_of_others_stay_out(name):
    """V that is NaN in every block that a row's list does not have."""
    inputs = listed(LISTS[name])
    want = run(inputs)
    for m, row in enumerate(LISTS[name]):
        v = inputs.v.clone()
        for n in set(EVERY) - set(row):
            v[:, n * BLOCK : (n + 1) * BLOCK] = math.nan
        out, lse = run(dataclasses.replace(inputs, v=v))
        rows = slice(m * BLOCK, (m + 1) * BLOCK)
        assert contract.same_bytes(out[:, rows], want[0][:, rows])
        assert contract.same_bytes(lse[..., rows], want[1][..., rows])


# ---- few CTAs ------------------------------------------------------------------------------------

#: CTAs of one tile after another; with the last there are some left over.
FEW = (1, 2, 3, 7)


def tiles_of(inputs: Case) -> int:
    rows = configure_forward("bf16", inputs.q.shape[3], "none").rows
    return inputs.q.shape[0] * inputs.q.shape[2] * -(-inputs.q.shape[1] // rows)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ["causal", "random", pytest.param("full", marks=NIGHT)])
def test_few_ctas(name, head_dim):
    """Long tiles and short ones, tiles without blocks, tails."""
    inputs = case(MASKS[name](520, 400), (1, 2, 1, head_dim), seed=head_dim)
    assert tiles_of(inputs) > max(FEW[:3])
    want = run(inputs)
    for ctas in FEW:
        assert same(run(inputs, ctas=ctas), want), ctas


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_mode(head_dim):
    """Two CTAs of many tiles: late and early data, random warps, any residency, races."""
    inputs = case(dense(300, 383), (1, 2, 1, head_dim), seed=3)
    modes.run_modes(lambda: run(inputs, ctas=2), modes.MODES)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_counter_is_zero_for_each_launch(head_dim):
    """Or tiles are left out; where each tile has a CTA there is none."""
    inputs = case(BlockMask.causal(400, 400), (1, 3, 1, head_dim), seed=1)
    want, out = run(inputs), []
    true = torch.zeros

    def ones(*size, **options):
        out.append(size)
        return true(*size, **options) + 1

    with mock.patch.object(launch.torch, "zeros", ones):
        assert same(run(inputs, ctas=tiles_of(inputs)), want) and not out[1:]
        assert not same(run(inputs, ctas=2), want) and out[-1] == (1,)
    again = launch.torch.zeros is true and run(inputs, ctas=2)
    assert same(again, want)
