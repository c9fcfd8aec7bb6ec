"""Masks by query head under GQA: gradients in the simulator and on the card, bits, mutants."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

import cute_kernels as ck
from cute_kernels import arch
from cute_kernels.errors import ScheduleError
from cute_kernels.schedulers import BlockMask, spt
from cute_kernels.sparse_attn import lowering, pack_gqa
from tests import certified
from tests.contract import same_bytes
from tests.sparse_attn import cases, pack_cases
from tests.sparse_attn.against_float64 import attended
from tests.sparse_attn.gpu_cases import GPU
from tests.sparse_attn.sink_cases import drawn_sinks, excess

#: While the kernels are proved the first of `test_values` runs at every commit.
SIM = certified.marks("sparse_attn", "test_values")
NIGHT = [*SIM, pytest.mark.nightly]


def simulated(test):
    """A test in the simulator."""
    for mark in SIM:
        test = mark(test)
    return test


S, HEADS, KV_HEADS = 200, 4, 2
NAMES = ("out", "lse", "dq", "dk", "dv")


def dense(batch: int, seed: int = 3) -> torch.Tensor:
    """Other blocks for each head, some of them empty, rows without keys, a causal rule in two."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.rand(batch, HEADS, S, S, generator=generator) < 0.3
    out[:, 0, :, 128:] = False
    out[:, 1] = torch.ones(S, S).tril() > 0
    out[:, 2, 30:40] = out[:, 2, 128:] = False
    out[:, 3] &= torch.ones(S, S).tril() > 0
    return out


def windows() -> BlockMask:
    """A band, in blocks that each head chose for itself."""
    count = torch.tensor([[[1, 2], [1, 1], [1, 2], [1, 1]]], dtype=torch.int32)
    index = torch.tensor([[[[0, 0], [0, 1]], [[0, 0], [1, 0]]] * 2], dtype=torch.int32)
    blocks = BlockMask.from_blocks(count, index, S, S)
    return blocks & BlockMask.sliding_window(S, S, left=90, right=0)


MASKS = {
    "bits of one batch": lambda: BlockMask.from_dense(dense(1)),
    "bits of each batch": lambda: BlockMask.from_dense(dense(2)),
    "windows": windows,
}


@pytest.fixture(autouse=True)
def own_cache():
    """What one way made of a mask is not another's."""
    lowering.cache.clear()
    yield
    lowering.cache.clear()


@contextlib.contextmanager
def on_sm90(**options):
    """In the simulator, of a GPU that stacks."""
    refusal = mock.patch.object(arch, "refusal", lambda backend, device: None)
    with pack_cases.on_sm90(wgmma_math="hopper", **options), refusal:
        yield


def engine(device: str):
    """The simulator for tensors of the CPU."""
    return on_sm90() if device == "cpu" else contextlib.nullcontext()


@pytest.mark.parametrize(
    ("device", "name", "dim", "dtype", "softcap", "with_lse"),
    [
        pytest.param("cpu", "bits of one batch", 64, torch.bfloat16, 0.0, True, marks=SIM),
        pytest.param("cpu", "windows", 128, torch.float16, 3.0, False, marks=SIM),
        pytest.param("cpu", "bits of each batch", 96, torch.float16, 0.0, True, marks=NIGHT),
        pytest.param("cpu", "bits of each batch", 128, torch.bfloat16, 2.0, True, marks=NIGHT),
        pytest.param("cpu", "windows", 64, torch.bfloat16, 0.0, True, marks=NIGHT),
        *(
            pytest.param("cuda", name, dim, dtype, softcap, True, marks=GPU)
            for name in MASKS
            for dim, dtype, softcap in (
                *((64, torch.bfloat16, 0.0), (96, torch.float16, 3.0)),
                (128, torch.bfloat16, 0.0),
            )
        ),
    ],
)
def test_values(device, name, dim, dtype, softcap, with_lse):
    """In the simulator; on the card the bytes repeat, too."""
    x = cases.inputs(2, HEADS, KV_HEADS, S, S, dim, dtype, seed=dim)
    mask, sinks = MASKS[name](), drawn_sinks(HEADS)
    with engine(device):
        out, *again = (
            attended(x, mask, sinks, with_lse, device, softcap=softcap)
            for _ in range(1 if device == "cpu" else 21)
        )
    assert all(all(map(same_bytes, one, out)) for one in again)
    above = excess(out, x, mask, sinks, with_lse, softcap)
    assert all(ratio <= 1 for ratio in above.values()), above


def drawn_blocks(length: int) -> torch.Tensor:
    """Half of the blocks of a causal mask."""
    blocks = -(-length // 128)
    is_allowed = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(8)) < 0.5
    whole = is_allowed.repeat_interleave(128, 0).repeat_interleave(128, 1)[:length, :length]
    return (whole & torch.ones(length, length, dtype=torch.bool).tril())[None, None]


@pytest.mark.parametrize(
    ("device", "dim", "length"),
    [
        pytest.param("cpu", 64, S, marks=SIM),
        *(pytest.param("cuda", d, n, marks=GPU) for d in (64, 128) for n in (S, 2100)),
    ],
)
def test_equal_masks_have_the_bytes_of_one(device, dim, length):
    """One mask for all heads, and the same mask given for each.

    Tickets from the left, each with its rows ascending: a group's heads come one after another
    both ways, so that every sum has one order.
    """
    x = cases.inputs(1, HEADS, KV_HEADS, length, length, dim, seed=1)
    one = dense(1)[:, 3:] if length == S else drawn_blocks(length)
    masks = (BlockMask.from_dense(m) for m in (one, one.expand(1, HEADS, length, length)))
    with engine(device):
        results = [attended(x, m, device=device, schedule="left_to_right") for m in masks]
    assert {n for n, a, b in zip(NAMES, *results, strict=True) if not same_bytes(a, b)} == set()


@simulated
def test_whether_a_gradient_is_wanted_shows_in_no_output():
    """Without one the kernel has the mask's band, with one its bits."""
    x, mask = cases.inputs(1, HEADS, KV_HEADS, S, S, 64, seed=4), windows()
    with on_sm90():
        out = attended(x, mask)
        with torch.no_grad():
            alone = ck.block_sparse_attention(*x.leaves(), mask, return_lse=True)
    assert all(map(same_bytes, out[:2], alone))


@simulated
def test_a_grid_of_any_size_has_the_same_bytes():
    x, mask = cases.inputs(1, HEADS, KV_HEADS, S, S, 64, seed=2), MASKS["bits of one batch"]()
    results = []
    for ctas in (1, 7):
        with on_sm90(ctas=ctas):
            results.append(attended(x, mask))
    assert all(map(same_bytes, *results))


def interleaved(of, t):
    """Mutant: query heads are dealt to KV heads in turn."""
    out = t.new_zeros(t.shape[0], of.group, of.head_rows, of.kv_heads, t.shape[3])
    out[:, :, : of.q_len] = t.unflatten(2, (of.group, of.kv_heads)).permute(0, 2, 1, 3, 4)
    return out.flatten(1, 2)


def without_gaps(of, t):
    """Mutant: a head's rows begin where the last one's end."""
    out = t.new_zeros(t.shape[0], of.group * of.head_rows, of.kv_heads, t.shape[3])
    rows = t.unflatten(2, (of.kv_heads, of.group)).permute(0, 3, 1, 2, 4).flatten(1, 2)
    out[:, : rows.shape[1]] = rows
    return out


def reversed_heads(of, dq):
    """Mutant: a group's heads come back in another order than they went."""
    own = dq.unflatten(1, (of.group, of.head_rows))[:, :, : of.q_len].flip(1)
    return own.permute(0, 2, 3, 1, 4).flatten(2, 3)


@simulated
@pytest.mark.parametrize(
    ("name", "mutant"),
    [("pack", interleaved), ("pack", without_gaps), ("unpack", reversed_heads)],
)
def test_mutants_are_killed(name, mutant):
    with mock.patch.object(pack_gqa.PackedGqa, name, mutant), pytest.raises(AssertionError):
        test_equal_masks_have_the_bytes_of_one("cpu", 64, S)


def test_a_short_mask_is_stacked():
    """Shorter than a block: its bits have fewer rows and words."""
    own = torch.rand(1, HEADS, 40, 50, generator=torch.Generator().manual_seed(5)) < 0.5
    of = pack_gqa.PackedGqa.of_blocks(40, HEADS, 1)
    whole = of.mask(pack_gqa.by_bits(BlockMask.from_dense(own)))
    rows = whole.to_dense().unflatten(2, (HEADS, 128))[:, 0, :, :40]
    assert torch.equal(rows, own)


def test_no_mask_is_stacked_elsewhere():
    """One head's mask, no groups, another backend."""
    assert not pack_gqa.has_group_masks(1, 4, 2) and not pack_gqa.has_group_masks(4, 4, 4)
    x, mask = cases.inputs(1, HEADS, KV_HEADS, S, S, 64), MASKS["windows"]()
    with mock.patch.object(pack_gqa.PackedGqa, "mask", side_effect=AssertionError("stacked")):
        attended(x, mask)


@simulated
def test_a_schedule_of_query_heads_is_refused_and_columns_are_taken():
    x, mask = cases.inputs(1, HEADS, KV_HEADS, S, S, 64), MASKS["windows"]()
    with on_sm90():
        schedule = spt(mask, heads=HEADS)
        with pytest.raises(ScheduleError, match=r"schedule.*KV heads.*got 4"):
            attended(x, mask, schedule=schedule)
        out = attended(x, mask, schedule=[0, 1])
        want = attended(x, mask, schedule="left_to_right")
    assert all(map(same_bytes, out, want))
