"""Mixtures cut over 1, 2 and 4 ranks: the bytes of one, in training and in generation."""

from __future__ import annotations

import functools

import pytest

from tests.model.parallel import cases, mixture_rank

EVERY_COMMIT = ["bytes_of_one", "kept", "packed_states", "survivors", "refused"]
NIGHTLY = ["others", "fully_sharded", "packed_degrees"]
BY_TRANSFORMERS, EIGHT = "transformers_loaded", "eight_ranks"


reports = functools.partial(cases.reports, "mixture_rank")


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return reports(EVERY_COMMIT)


def test_no_part_is_left_out():
    assert sorted([*EVERY_COMMIT, *NIGHTLY, BY_TRANSFORMERS, EIGHT]) == sorted(mixture_rank.PARTS)


def test_every_degree_has_the_bytes_of_one(ranks):
    """Logits, generation, gradients of both heads' losses, three steps of training."""
    for rank in ranks:
        found = rank["bytes_of_one"]
        assert len(found) == 2 and not any(found.values()), found


def test_states_are_whole_and_unpatch_gathers(ranks):
    for rank in ranks:
        found = dict(rank["kept"])
        assert found.pop("report") == [mixture_rank.CUT] and found.pop("router") is False
        assert [found.pop(name) for name in ("whole", "read", "unpatched")] == [[], [], []]
        assert found and all(value is True for value in found.values()), found


def test_checkpoints_and_whole_states_of_a_packed_weight(ranks):
    """Saved and loaded by one process, 2, 4 and 2 x 2 ranks; whole dicts; other DTensors."""
    for rank in ranks:
        found = rank["packed_states"]
        assert len(found) == 3 * (3 + 1) + 2 * 5 + 3
        assert not any(found.values()), found


def test_mutants_are_killed(ranks):
    assert all(rank["survivors"] == [] for rank in ranks)


def test_every_rank_refuses(ranks):
    for rank in ranks:
        assert rank["refused"] == dict.fromkeys(mixture_rank.REFUSED, "right")


@pytest.mark.nightly
def test_other_families_and_degrees():
    """Qwen2-MoE with a shared expert, OLMoE, one rank; FSDP2 over the other dimension."""
    for rank in reports(NIGHTLY):
        assert len(rank["others"]) == 10 and not any(rank["others"].values()), rank["others"]
        assert rank["fully_sharded"] == []
        found = rank["packed_degrees"]
        assert len(found) == 4 * (4 + 1) + 5 and not any(found.values()), found


@pytest.mark.nightly
def test_eight_ranks():
    for rank in reports([EIGHT], 8):
        assert rank[EIGHT] == {"mixtral": [], "qwen3_moe": []}


@pytest.mark.nightly
def test_a_model_that_transformers_cut():
    """Its parts are taken as they are, and its forwards replaced."""
    pytest.importorskip("accelerate", reason="transformers' tensor parallelism needs accelerate")
    for rank in reports([BY_TRANSFORMERS]):
        assert rank[BY_TRANSFORMERS] == {"taken": True, "saved": [], "differing": []}
