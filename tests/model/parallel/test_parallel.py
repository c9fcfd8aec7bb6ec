"""Whole models cut over 1, 2 and 4 ranks: the bytes of one, in training and in generation."""

from __future__ import annotations

import functools

import pytest

from tests.model.parallel import cases, parallel_rank

EVERY_COMMIT = [
    "families_of_every_commit",
    "tied",
    "whole_vocabulary",
    "states",
    "refused",
    "survivors",
    "fully_sharded",
    "loaded",
]
NIGHTLY = ["other_families", "other_degrees", "other_families_sharded", "settings", "compiled"]
PROGRAMS, LOADED, BY_TRANSFORMERS, EIGHT = (
    "programs",
    "others_loaded",
    "transformers_loaded",
    "eight_ranks",
)


reports = functools.partial(cases.reports, "parallel_rank")


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return reports(EVERY_COMMIT)


def test_no_part_is_left_out():
    assert sorted([*EVERY_COMMIT, *NIGHTLY, PROGRAMS, LOADED, BY_TRANSFORMERS, EIGHT]) == sorted(
        parallel_rank.PARTS
    )


def test_every_degree_has_the_bytes_of_one(ranks):
    """Logits, generation, gradients of both heads' losses, three steps of training."""
    for rank in ranks:
        found = rank["families_of_every_commit"]
        assert len(found) == 4 and not any(found.values()), found


def test_embedding_and_head_share_a_part(ranks):
    assert all(rank["tied"] == {"shared": True, "differing": []} for rank in ranks)


def test_a_vocabulary_that_is_not_cut_is_whole_and_reported(ranks):
    want = {"left": ["vocabulary"], "cut": False, "differing": []}
    assert all(rank["whole_vocabulary"] == want for rank in ranks)


def test_state_dicts_are_whole_and_unpatch_gathers(ranks):
    for rank in ranks:
        found = dict(rank["states"])
        assert found.pop("loaded") == [] and found.pop("unpatched") == []
        assert found.pop("copies") == [True, True, True]
        assert found and all(value is True for value in found.values()), found


@pytest.mark.nightly
def test_programs_of_torch_around_a_cut_model():
    """foreach, fused and plain optimizers with the bytes of one rank; torch's clipping."""
    for rank in reports([PROGRAMS]):
        assert rank[PROGRAMS] == {"1": [], "2": [], "raised": []}


def test_every_rank_refuses(ranks):
    for rank in ranks:
        assert rank["refused"] == dict.fromkeys(parallel_rank.REFUSED, "right")


def test_mutants_are_killed(ranks):
    assert all(rank["survivors"] == [] for rank in ranks)


def test_fully_shard_over_the_other_dimension(ranks):
    """Training, a checkpoint of 2 x 2 ranks that 2 and 1 load, and what is refused by name."""
    for rank in ranks:
        found = rank["fully_sharded"]
        assert found["training"] == found["cut"] == found["whole"] == [], found
        assert found["unpatch"].startswith("PatchError: ") and "fully_shard" in found["unpatch"]
        assert found["patch"].startswith("ArgumentTypeError: ") and "q_proj" in found["patch"]
        assert found["main_grad"].startswith("ArgumentValueError: main_grad")


def test_a_checkpoint_is_read_part_by_part(ranks):
    """Of Gemma 3, from several files: its parts alone have memory, and all results are right."""
    want = {"files": True, "ends": True, "memory": True, "differing": []}
    assert all(rank["loaded"] == want for rank in ranks)


@pytest.mark.nightly
def test_checkpoints_of_other_families():
    assert all(rank[LOADED] == {} for rank in reports([LOADED]))


@pytest.mark.nightly
def test_other_families_degrees_and_settings():
    """All families; one rank; main_grad; static caches; log-probs; checkpointing."""
    for rank in reports(NIGHTLY):
        for part, found in rank.items():
            assert found and not any(found.values()), (part, found)


@pytest.mark.nightly
def test_eight_ranks():
    for rank in reports([EIGHT], 8):
        assert rank[EIGHT] == {"llama": [], "qwen3": []}


@pytest.mark.nightly
def test_models_that_transformers_cut():
    """Its parts are taken as they are, its forwards replaced, and it saves whole tensors."""
    pytest.importorskip("accelerate", reason="transformers' tensor parallelism needs accelerate")
    for rank in reports([BY_TRANSFORMERS]):
        for family, found in rank[BY_TRANSFORMERS].items():
            assert found == {"taken": True, "saved": [], "differing": []}, family
