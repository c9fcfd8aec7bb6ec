"""The SM90 backward in the simulator: gradients against float64, tails, masks, GQA, empty rows."""

from __future__ import annotations

import itertools

import pytest
import torch

import ptxsim
from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.order import kinds
from cute_kernels.sparse_attn import config, launch
from ptxsim import skips
from tests import certified, contract
from tests.sparse_attn import mutated, simulated, wild
from tests.sparse_attn.gpu_cases import HEADS, MASKS, elements

simulated_bwd = skips.import_module("tests.sparse_attn.simulated_bwd")
#: What runs at every commit while the kernels are proved.
pytestmark = certified.marks("sparse_attn", "test_gradients")

HEAD_DIMS, NIGHT = config.HEAD_DIMS, pytest.mark.nightly


def sizes():
    """(mask, head size, heads): all by night, for a changed kernel one of the heads in turn."""
    for (i, mask), (j, dim) in itertools.product(enumerate(MASKS), enumerate(HEAD_DIMS)):
        for k, heads in enumerate(HEADS):
            yield pytest.param(mask, dim, heads, marks=NIGHT if (i + j + k) % 3 else ())


def run(case, kind=kinds.spt, **options):
    return simulated_bwd.backward(case, kind(case.lowered.mask, heads=case.kv_heads), **options)


@pytest.mark.parametrize(("mask", "head_dim", "heads"), list(sizes()), ids=str)
def test_gradients(mask, head_dim, heads):
    block_mask = MASKS[mask]()
    batch, q_heads, kv_heads = heads
    if block_mask.shape[0] > batch:
        batch = block_mask.shape[0]
    dtype = torch.float16 if q_heads == 3 else torch.bfloat16
    case = simulated_bwd.case(
        block_mask, head_dim=head_dim, heads=q_heads, kv_heads=kv_heads, batch=batch, dtype=dtype
    )
    ptxsim.clear_launches()
    results = run(case)
    simulated_bwd.check(case, results)
    for one in ptxsim.launches():
        assert one["report"]["fence_warnings"]["count"] == 0


@pytest.mark.parametrize("head_dim", simulated.widths(64, 128))
@pytest.mark.parametrize("kind", kinds.KINDS)
def test_every_kind_of_schedule(kind, head_dim):
    """Whatever the order, the same sums within the bound."""
    case = simulated_bwd.case(BlockMask.causal(400, 400), head_dim=head_dim, heads=2, kv_heads=1)
    simulated_bwd.check(case, run(case, kinds.KINDS[kind]))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_unordered(head_dim):
    case = simulated_bwd.case(BlockMask.causal(300, 300), head_dim=head_dim, heads=2, kv_heads=2)
    simulated_bwd.check(case, run(case, ordered=False))


def more_entries_than_a_window():
    """34 query blocks to one key block, full and partial ones without a period."""
    generator = torch.Generator().manual_seed(11)
    allowed = torch.rand(1, 1, 33 * 128 + 9, 100, generator=generator) < 0.5
    for block in torch.randperm(34, generator=generator)[:15].tolist():
        allowed[:, :, 128 * block : 128 * (block + 1)] = True
    return simulated_bwd.case(BlockMask.from_dense(allowed), head_dim=64)


def test_lists_longer_than_a_window(tmp_path):
    """And a window that is read too seldom is noticed."""
    case = more_entries_than_a_window()
    simulated_bwd.check(case, run(case))
    seldom = mutated.kernels(tmp_path, "sparse_attn.device.walk", "WINDOW = 32", "WINDOW = 64")
    with pytest.raises(AssertionError):
        simulated_bwd.check(case, run(case, backward=seldom))


def test_the_gradient_of_lse():
    case = simulated_bwd.case(BlockMask.causal(200, 200), heads=2, kv_heads=1)
    dlse = torch.randn(case.lse.shape, generator=torch.Generator().manual_seed(4))
    results = run(case, dlse=dlse)
    simulated_bwd.check(case, results, dlse)
    with pytest.raises(AssertionError):
        simulated_bwd.check(case, results)


@pytest.mark.parametrize(
    ("mask", "head_dim"),
    [
        # Every form and every head size.
        ("full, tails", 128),
        ("causal, tails", 96),
        ("holes", 64),
        ("causal, tails", 192),
        ("full, tails", 256),
        *(pytest.param("holes", d, marks=NIGHT) for d in (128, 192, 256)),
        *(pytest.param("causal, tails", d, marks=NIGHT) for d in (64, 128, 256)),
        pytest.param("full, tails", 64, marks=NIGHT),
    ],
)
def test_softcap(mask, head_dim):
    case = simulated_bwd.case(MASKS[mask](), head_dim=head_dim, heads=2, kv_heads=1, softcap=1.5)
    results = run(case)
    simulated_bwd.check(case, results)
    with pytest.raises(AssertionError):
        simulated_bwd.check(case._replace(softcap=0.0), results)


@pytest.mark.parametrize("head_dim", [192, 128])
def test_full_blocks_beside_partial_ones_of_bits(head_dim):
    """Full ones are of odd and even query blocks: they have no words of their own."""
    allowed = elements(1, 1, 384, 256, seed=8)
    allowed[..., 128:, :128] = allowed[..., :256, 128:] = True
    case = simulated_bwd.case(BlockMask.from_dense(allowed), head_dim=head_dim)
    simulated_bwd.check(case, run(case))


def test_empty_rows_and_columns_are_zero():
    case = simulated_bwd.case(MASKS["holes"](), heads=2, kv_heads=1)
    results = run(case)
    empty = case.lse[0, 0] == -torch.inf
    assert empty.sum() >= 148
    for t in (results.dq[:, empty], results.dk[:, 128:256], results.dv[:, 128:256]):
        assert t.numel() and (t == 0).all()
    assert (results.dq[:, ~empty] != 0).any(-1).all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_strides_and_what_outputs_held_do_not_matter(head_dim):
    case = simulated_bwd.case(
        BlockMask.causal(200, 200), head_dim=head_dim, heads=4, kv_heads=2, batch=2
    )

    def by_heads(t: torch.Tensor) -> torch.Tensor:
        """The same values as [B, H, S, D] in memory, between other values."""
        batch, length, heads, dim = t.shape
        storage = torch.full((batch, heads, length + 3, dim + 8), 7.0, dtype=t.dtype)
        view = storage[:, :, :length, :dim].transpose(1, 2)
        view.copy_(t)
        return view

    names = ("q", "k", "v", "dout", "out")
    other = case._replace(**{name: by_heads(getattr(case, name)) for name in names})
    first, second = run(case), run(other, poison="0x7f")
    assert all(map(contract.same_bytes, first, second))


@pytest.mark.parametrize("head_dim", simulated.widths(128))
def test_a_head_does_not_see_the_others(head_dim):
    """Bits of one (batch, group of heads) are those it has alone."""
    mask = BlockMask.sliding_window(300, 300, left=140, right=0)
    case = simulated_bwd.case(mask, head_dim=head_dim, heads=4, kv_heads=2, batch=2)
    results = run(case)
    for b in range(2):
        for h in range(2):
            q, kv = (slice(b, b + 1), slice(None), slice(2 * h, 2 * h + 2)), slice(h, h + 1)
            alone = case._replace(
                **{n: getattr(case, n)[q].contiguous() for n in ("q", "dout", "out")},
                **{n: getattr(case, n)[b : b + 1, :, kv].contiguous() for n in ("k", "v")},
                lse=case.lse[b : b + 1, 2 * h : 2 * h + 2].contiguous(),
            )
            single = run(alone)
            assert contract.same_bytes(single.dq, results.dq[q])
            assert contract.same_bytes(single.dk, results.dk[b : b + 1, :, kv])
            assert contract.same_bytes(single.dv, results.dv[b : b + 1, :, kv])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_delta_is_added_in_its_order(head_dim):
    """Bit by bit: the columns of a thread in one chain, then neighbours, then pairs of them, ..."""
    case = simulated_bwd.case(BlockMask.full(70, 128), head_dim=head_dim, heads=2, kv_heads=1)
    kernel_config = config.configure("bf16", head_dim, "none", True)
    tile_m, tiles = kernel_config.tile_m, -(-70 // kernel_config.tile_m)
    sizes = (1, 2, tiles), tile_m, head_dim, kernel_config.turns
    workspace = launch.plan_workspace(*sizes, case.q.device)()
    pre = simulated.kernel(config.PreConfig("bf16", head_dim, tile_m, turns=kernel_config.turns))
    of_rows = (t.flatten(2) for t in workspace[:2])
    pre(case.out, case.dout, case.lse, None, *of_rows, *workspace[2:], None)
    # Kept by lanes: rows 2 l, 2 l + 1, 2 l + 8 and 2 l + 9 of every 16 are next to one another.
    by_lane = workspace.delta.flatten(2).unflatten(2, (-1, 4, 2, 2))
    out = by_lane.transpose(3, 4).flatten(2)[..., :70].contiguous()
    # Exact: a product of two bf16 has 16 bits.
    terms = (case.dout.float() * case.out.float()).transpose(1, 2)

    def added(threads: int) -> torch.Tensor:
        parts = terms.unflatten(3, (-1, threads, 8)).transpose(3, 4).flatten(4)
        totals = torch.zeros(parts.shape[:4])
        for i in range(parts.shape[4]):
            totals = totals + parts[..., i]
        while totals.shape[3] > 1:
            totals = totals[..., 0::2] + totals[..., 1::2]
        return totals[..., 0]

    threads = {64: 8, 96: 4, 128: 16, 192: 16, 256: 32}[head_dim]
    assert contract.same_bytes(out, added(threads))
    assert not contract.same_bytes(out, added(threads // 2))


def test_the_check_can_fail():
    """The bound notices a mask that is one key off, and a scale that is off by 2%."""
    case = simulated_bwd.case(BlockMask.causal(200, 200))
    results = run(case)
    simulated_bwd.check(case, results)
    with pytest.raises(AssertionError):
        simulated_bwd.check(case._replace(scale=case.scale * 1.02), results)
    shifted = BlockMask.sliding_window(200, 200, left=None, right=1)
    with pytest.raises(AssertionError):
        simulated_bwd.check(case._replace(mask=shifted), results)


@pytest.mark.parametrize(
    ("head_dim", "softcap"),
    [(64, 0.0), *(pytest.param(*at, marks=NIGHT) for at in ((64, 5.0), (192, 0.0), (192, 5.0)))],
)
def test_nan_in_masked_rows_reaches_the_blocks_that_are_visited(head_dim, softcap):
    """With lse and out of the finite operands: no masked row or key is in them."""
    case = simulated_bwd.case(wild.mask(), head_dim=head_dim, softcap=softcap)
    schedule = kinds.spt(case.lowered.mask, heads=1)

    def gradients(q, k, v, dout):
        changed = case._replace(q=q, k=k, v=v, dout=dout)
        return simulated_bwd.backward(changed, schedule)[:3]

    reaches = wild.REACHES if softcap else wild.REACHES_BY_DS
    wild.check(gradients, (case.q, case.k, case.v, case.dout), reaches)
