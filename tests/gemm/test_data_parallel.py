"""Tests of main_grad under DistributedDataParallel and fully_shard, in three processes over gloo.

Both reduce ``weight.grad``, which main_grad replaces: without a word the ranks would drift apart.
"""

from __future__ import annotations

import pytest

from tests.gemm import data_parallel_rank
from tests.ranks import run


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    """Reports of the ranks: tests/gemm/data_parallel_rank.py."""
    return run(data_parallel_rank.WORLD, data_parallel_rank.report)


def test_ddp_is_refused_with_the_recipe(ranks):
    for rank in ranks:
        case = rank["ddp_refused"]
        for message in (case["said"], case["cast"]):
            assert message.startswith("main_grad: expected none inside DistributedDataParallel")
            assert "ddp.no_sync()" in message and "docs/gemm.md" in message
        assert case["no_grad"] == "" and case["untouched"]


def test_main_grads_are_averaged_in_the_order_of_ranks(ranks):
    """Equal bytes on all ranks for any micro-batches of each; another order has others."""
    cases = [rank["ddp_recipe"] for rank in ranks]
    found = {digest for case in cases for digest in (*case["means"], case["want"])}
    assert len(found) == 1 and not found & {case["mutant"] for case in cases}


def test_an_optimizer_over_ranks(ranks):
    cases = [rank["optimizer_steps"] for rank in ranks]
    found = {digest for case in cases for digest in case["weights"]}
    assert len(found) == 1 and cases[0]["start"] not in found


def test_ranks_with_other_main_grads_raise_together(ranks):
    first, *others = (rank["main_grads_that_differ"]["said"] for rank in ranks)
    want = "ArgumentTypeError: weights: expected parameters with a main_grad, got 1 without"
    assert first[0] == want and all("RankError: arguments: " in said[0] for said in others)
    assert all(said[1].startswith("RankError: elements: ") for said in (first, *others))


def test_ddp_that_leaves_the_parameter_alone_is_not_refused(ranks):
    cases = [rank["ddp_elsewhere"] for rank in ranks]
    assert all(case["digest"] == case["want"] for case in cases)
    assert cases[0]["digest"] != cases[1]["digest"]


def test_fsdp2_is_refused_with_the_recipe(ranks):
    for rank in ranks:
        case = rank["fsdp_refused"]
        for message, got in ((case["given"], "a tensor"), (case["lost"], "weight.main_grad")):
            assert message.startswith("main_grad: expected none under fully_shard")
            assert "leave main_grad out" in message and message.endswith(f"got {got}")


def test_fsdp2_without_main_grad_reduces_as_ever(ranks):
    for rank in ranks:
        case = rank["fsdp_without"]
        assert case["error"] <= 1e-6 * case["size"]


def test_fsdp2_runs_cached_plans_and_refuses_a_later_main_grad(ranks):
    for rank in ranks:
        case = rank["fsdp_with_plans"]
        assert case["cached"] == case["steps"] and len(set(case["steps"])) == 7
        assert case["cached"][-1].startswith("main_grad: expected none under fully_shard")
        # Two shapes, and the call that is refused; not one of six forwards.
        assert case["checked"] == 3
