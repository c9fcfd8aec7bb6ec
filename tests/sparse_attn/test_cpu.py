"""The CPU backend under the bitwise battery, and beside float64; float64 beside other oracles."""

from __future__ import annotations

import collections
import math

import pytest
import torch

from cute_kernels.errors import BackendUnavailable
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import checks, cpu
from cute_kernels.sparse_attn.api import block_sparse_attention
from tests import contract
from tests.contract import ContractViolation, same_bytes
from tests.oracles import sparse_attn as reference
from tests.sparse_attn import cases, wild
from tests.sparse_attn.against_float64 import checked
from tests.sparse_attn.battery import (
    CUTS,
    MASKS,
    SEED,
    SequenceOp,
    battery,
    check_chunks,
    check_untouched,
    rows_op,
    same_elements_have_the_same_bits,
    sequence,
    sequence_op,
    window,
)

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("mask", MASKS)
def test_sequences(mask):
    assert battery(sequence_op(mask), sequence()) > 50


#: By day without padding, and padded with a v of its own width; all by night.
DIMS = {64: BF16, 192: BF16, 96: FP16, 128: BF16, 256: FP16}
OTHERS = [pytest.param(d, marks=() if d in (64, 192) else pytest.mark.nightly) for d in DIMS]


@pytest.mark.parametrize("dim", OTHERS[1:])
def test_sequences_of_other_sizes(dim):
    op = sequence_op("causal", softcap=4.0, scale=0.2)
    assert battery(op, sequence(dim=dim, dtype=DIMS[dim])) > 50


@pytest.mark.parametrize("dim", OTHERS)
def test_rows(dim):
    """Queries without positions are rows: the battery of every row op."""
    softcap = 2.0 if DIMS[dim] == FP16 else 0.0
    assert contract.check_rows(rows_op(dim, DIMS[dim], softcap), 150, SEED) > 60


def untouched() -> int:
    """Rows 198 to 255 see keys from 128 on; their query block visits keys 0 to 127 too."""
    x = tuple(t[:1] for t in sequence())
    return check_untouched(sequence_op("window"), x, slice(198, 256), slice(0, 128))


def test_a_block_that_a_row_does_not_touch():
    assert untouched() == 3


def test_the_same_elements_have_the_same_bits():
    same_elements_have_the_same_bits()


def test_thread_counts_keep_their_own_bits():
    """The row battery holds for one thread and for two."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            contract.check_population(rows_op(), 130, SEED, [1, 63, 64, 65, 127, 128, 129])
    finally:
        torch.set_num_threads(before)


def test_a_blas_that_depends_on_the_row_is_refused(monkeypatch):
    """The self-proof is not for show: a product with a row-dependent order fails the call."""
    true_mm = cpu.mm

    def mm(a, b):
        out = true_mm(a, b)
        out[1::2] = true_mm(a.flip(1), b.flip(0))[1::2]
        return out

    monkeypatch.setattr(cpu, "mm", mm)
    cpu._prove_row_position.cache_clear()
    try:
        with pytest.raises(BackendUnavailable, match="batch_invariant"):
            rows_op().run(torch.randn(4, 128).bfloat16())
    finally:
        cpu._prove_row_position.cache_clear()


def test_blocks_that_begin_with_the_chunk_are_killed():
    """Mutant of the meaning: keys counted from the first one the chunk can see."""

    def run(q, k, v, mask, **options):
        first = max(0, k.shape[1] - q.shape[1] - 70)
        mask = window(q.shape[1], k.shape[1] - first, 0)
        return block_sparse_attention(q, k[:, first:], v[:, first:], mask, **options)

    x = tuple(t[:1] for t in sequence())
    check_chunks(sequence_op("window"), x, CUTS)
    with pytest.raises(ContractViolation):
        check_chunks(SequenceOp("moved", run, window, {}), x, CUTS)


@pytest.mark.parametrize("softcap", [0.0, checks.LEAST, checks.MOST_SOFTCAP])
@pytest.mark.parametrize("scale", [checks.LEAST, checks.MOST])
def test_the_limits_of_scale_and_softcap_are_finite(scale, softcap):
    """Scores of zero included: beyond the limits a constant is infinite, and its product NaN."""
    x = cases.inputs(1, 1, 1, 140, 140, 64)
    with torch.no_grad():
        x.q[:, ::3], x.k[:, ::5] = 0, 0
    out, lse = block_sparse_attention(
        *x.leaves(), causal=True, scale=scale, softcap=softcap, return_lse=True
    )
    torch.autograd.backward([out, lse], [x.dout, x.dlse])
    for t in (out, lse, *(leaf.grad for leaf in x.leaves())):
        assert t.isfinite().all()


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_a_masked_key_beyond_range_sends_back_nothing(softcap):
    """dS is selected, not multiplied: P is 0 there, dP infinite and the softcap's slope NaN."""
    x = cases.inputs(1, 2, 1, 150, 150, 64)
    mask = BlockMask.sliding_window(150, 150, left=20, right=0)
    want = results(x, mask, softcap)
    with torch.no_grad():
        x.v[:, 30] = 3e38
    got = results(x, mask, softcap)
    for t, clean in zip(got, want, strict=True):
        # Queries from 51 on, and keys that only they can see.
        assert same_bytes(t[:, 51:], clean[:, 51:])
    assert not got[0][:, 30:51].isfinite().all()
    with torch.no_grad():
        x.v[:, 30], x.k[:, 30] = 0, math.nan
    unseen = BlockMask.sliding_window(150, 150, left=20, right=0) & no_key(30)
    dk = results(x, unseen, softcap)[1]
    assert not dk[:, 30].any()


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_masked_rows_of_any_content_reach_no_result(softcap):
    """NaN at a position that the mask takes out, in a block that others visit."""
    x = cases.inputs(1, 4, 2, wild.SIZE, wild.SIZE, 64)

    def gradients(*operands):
        leaves = [t.detach().requires_grad_() for t in operands[:3]]
        return results(cases.Inputs(*leaves, operands[3], x.dlse), wild.mask(), softcap)

    wild.check(gradients, (*x.leaves(), x.dout), {index: {} for index in wild.REACHES})
    dq, dk, dv, out = gradients(*x.leaves(), x.dout)
    assert not any(t.any() for t in (dq[:, wild.ROW], out[:, wild.ROW]))
    assert not any(t.any() for t in (dk[:, wild.KEY], dv[:, wild.KEY]))


def no_key(at: int) -> BlockMask:
    dense = torch.ones(150, 150, dtype=torch.bool)
    dense[:, at] = False
    return BlockMask.from_dense(dense)


def results(x: cases.Inputs, mask: BlockMask, softcap: float) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv and out."""
    out = block_sparse_attention(*x.leaves(), mask, softcap=softcap)
    return *torch.autograd.grad(out, x.leaves(), x.dout), out.detach()


# ---- float64 -------------------------------------------------------------------------------------

DRAWN, BY_DAY, PER_TEST = 320, 80, 20
FIRSTS = [
    first if first < BY_DAY else pytest.param(first, marks=pytest.mark.nightly)
    for first in range(0, DRAWN, PER_TEST)
]


@pytest.mark.parametrize("first", FIRSTS)
def test_drawn_cases_against_float64(first):
    """Forward and gradients of every drawn case lie within the rounding bound, element by element.

    ``pytest -s`` shows the largest share of each bound that was used.
    """
    worst = collections.Counter()
    for seed in range(first, first + PER_TEST):
        case = cases.draw(seed)
        out = checked(case)
        assert max(out.values()) <= 1, f"{case}: {out}"
        worst |= collections.Counter(out)
    print({name: round(share, 3) for name, share in worst.items()})
    # A bound that nothing comes near would let mistakes pass.
    assert worst["out"] > 0.2 and worst["dv"] > 0.2 and worst["dq"] > 0.02 and worst["dk"] > 0.02


def test_the_draw_covers_what_it_claims():
    drawn = [cases.draw(seed) for seed in range(BY_DAY)]
    assert {case.kind for case in drawn} == set(cases.KINDS)
    assert {case.dim for case in drawn} == set(cases.HEAD_DIMS)
    assert {case.dtype for case in drawn} == set(cases.DTYPES)
    assert {(case.heads, case.kv_heads) for case in drawn} == set(cases.HEADS)
    assert {case.q_len for case in drawn} == {case.kv_len for case in drawn} == set(cases.LENGTHS)
    assert {type(case.schedule) for case in drawn} == {str, list}
    assert any(case.softcap for case in drawn) and any(case.causal for case in drawn)


def windowed(seed: int, q_len: int, kv_len: int, dim: int, softcap: float) -> cases.Case:
    window = BlockMask.sliding_window(q_len, kv_len, left=90, right=40)
    sizes = 2, 4, 2, q_len, kv_len, dim
    return cases.Case(seed, "by hand", *sizes, torch.bfloat16, softcap, "lpt", True, window)


CASE, WIDE = windowed(7, 200, 300, 64, 3.0), windowed(9, 100, 200, 192, 0.0)


@pytest.mark.parametrize("case", [CASE, WIDE], ids=["64", "192"])
def test_the_cases_of_the_mutants_are_right(case):
    assert max(checked(case).values()) <= 1


def test_against_torch_in_float64():
    """scaled_dot_product_attention with the same dense mask, values and gradients."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 50, 6, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    k, v = (
        torch.randn(2, 70, 3, 16, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    allowed = torch.rand(2, 6, 50, 70, generator=generator) < 0.5
    allowed[..., 0] = True
    ours = reference.attention(q, k, v, allowed, scale=0.3)[0]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=allowed, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    assert (ours - theirs).abs().max() < 1e-12
    dout = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    for actual, other in zip(
        *(torch.autograd.grad(t, (q, k, v), dout) for t in (ours, theirs)), strict=True
    ):
        assert (actual - other).abs().max() < 1e-12


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_gradcheck(softcap):
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(1, 4, 2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    k, v = (
        torch.randn(1, 5, 1, 3, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    allowed = torch.rand(4, 5, generator=generator) < 0.6
    allowed[2] = False

    def run(*leaves):
        out, lse = reference.attention(*leaves, allowed, softcap=softcap)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(run, (q, k, v))


def test_no_keys_at_all():
    q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 0, 1, 8)
    out, lse = reference.attention(q, k, k, torch.ones(3, 0, dtype=torch.bool))
    assert (out == 0).all() and (lse == -math.inf).all()
