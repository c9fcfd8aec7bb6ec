"""The checks before any timing, and a mutant for each."""

from __future__ import annotations

import pytest
import torch

from perf.attention import check, targets
from perf.attention.cases import Problem
from perf.attention.rivals import RIVALS
from perf.core.rival import Rival
from tests.perf.attention import stand_ins

MASKS = (*targets.MASKS, targets.PACK)
#: Rivals that promise the bound, with the masks that they take.
OURS = [*(("ours", mask) for mask in MASKS), ("ours_pack", "pack"), ("ours_runs", "pack")]


def found(start, which: str, mask: str = "causal") -> tuple[Rival, dict]:
    out = Rival("made", {which: start}, promised=True)
    case = stand_ins.case(mask, heads=2)
    return out, check.whole(out, which, case, "cpu")


@pytest.mark.parametrize(("name", "mask"), OURS)
@pytest.mark.parametrize("which", ["fwd", "bwd"])
def test_ours_keeps_its_bound(name, mask, which):
    ours = RIVALS[name]
    got = check.whole(ours, which, stand_ins.case(mask), "cpu")
    assert check.wrong(ours, got) == ""
    assert 0 < got["of_bound"] <= 1 and 1e-4 < got["rel_error"] < check.REL_ERROR


def test_a_few_elements_beyond_the_bound_are_found():
    out, got = found(stand_ins.changed("bwd", stand_ins.slightly_off), "bwd")
    assert got["rel_error"] < check.REL_ERROR
    assert "beyond the bound" in check.wrong(out, got)
    rival = Rival("rival", out.start)
    assert check.wrong(rival, got) == ""


def zero_a_tile(dq, dk, dv):
    dk[0, :64, 0] = 0.0


def poison(dq, dk, dv):
    dv[0, 7, 0, 3] = float("nan")


def wrong_lse(out, lse):
    lse[0, 0, 100] += 0.1


@pytest.mark.parametrize(
    ("which", "change", "word"),
    [("bwd", zero_a_tile, "rel_error"), ("bwd", poison, "NaN"), ("fwd", wrong_lse, "bound")],
)
def test_wrong_results_are_found(which, change, word):
    out, got = found(stand_ins.changed(which, change), which)
    assert word in check.wrong(out, got)


@pytest.mark.parametrize("which", ["fwd", "bwd"])
def test_a_mask_that_is_off_by_one_is_found(which):
    shifted = stand_ins.with_mask(which, lambda dense: dense.roll(1, dims=-1) & dense)
    out, got = found(shifted, which, "window")
    assert check.wrong(out, got)


def test_empty_rows_are_no_error():
    """-inf equals -inf, and their outputs are compared like the others."""
    value = torch.tensor([1.0, float("-inf")])
    assert check._relative(value, value.double()) == 0.0
    assert check._relative(torch.tensor([1.0, 0.0]), value.double()) != 0.0


def sampled(start, which: str, mask: str = "causal", kv_heads: int = 1) -> float:
    problem = Problem(stand_ins.case(mask, heads=4, kv_heads=kv_heads), "cpu")
    t = stand_ins.inputs(problem)
    return check.sampled(problem, which, t, start(problem)(t))


@pytest.mark.parametrize(("name", "mask"), [("ours", "document"), *OURS[-2:]])
@pytest.mark.parametrize("which", ["fwd", "bwd"])
def test_sampled_rows_of_ours_are_right(name, mask, which):
    assert sampled(RIVALS[name].start[which], which, mask, kv_heads=2) < check.REL_ERROR


def no_dq_of_the_last_half(dq, dk, dv):
    dq[:, 128:] *= 0.8


def heads_mixed(dq, dk, dv):
    dk.copy_(dk.flip(2))


def batches_mixed(out, lse):
    out.copy_(out.flip(0))


@pytest.mark.parametrize(
    ("which", "change"),
    [("bwd", no_dq_of_the_last_half), ("bwd", heads_mixed), ("fwd", batches_mixed)],
)
def test_sampled_rows_find_what_is_wrong_at_full_size(which, change):
    start = stand_ins.changed(which, change)
    assert sampled(start, which, kv_heads=2) > 2 * check.REL_ERROR


@pytest.mark.parametrize("which", ["fwd", "bwd"])
def test_sampled_rows_find_a_missing_key_block(which):
    def short(dense):
        dense = dense.clone()
        dense[..., :128] = False
        dense[..., 0] = True  # no empty rows
        return dense

    assert sampled(stand_ins.with_mask(which, short), which) > 2 * check.REL_ERROR


def test_two_orders_of_a_sum_are_near_and_a_lost_part_is_far():
    generator = torch.Generator().manual_seed(3)
    parts = torch.randn(64, 512, 64, generator=generator)
    up, down = torch.zeros(512, 64), torch.zeros(512, 64)
    for i in range(64):
        up, down = up + parts[i], down + parts[63 - i]
    assert not torch.equal(up, down)
    one, two = (up.bfloat16(),), (down.bfloat16(),)
    assert check.apart(one, two) == 0
    lost = up.clone()
    lost[128:192] -= parts[40, 128:192]
    assert check.apart(one, (lost.bfloat16(),)) > 1000
    lost[:] = float("nan")
    assert check.apart(one, (lost.bfloat16(),)) == lost.numel()
