"""FSDP2: two real processes against one, byte for byte (fsdp_rank.py)."""

from __future__ import annotations

import pytest

from cute_kernels.errors import ArgumentTypeError
from cute_kernels.integrations import fsdp as ours
from tests.integrations import tiny
from tests.integrations.ending import after_a_kill, assert_error_not_hang
from tests.ranks import reports

SCRIPT = "tests.integrations.fsdp_rank"
CASES = [["model", False], ["layers", False], ["layers and head", False], ["layers", True]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What both ranks report, case by case."""
    return reports(SCRIPT, tiny.RANKS, tmp_path_factory.mktemp("fsdp"))


def each(ran, number: int) -> list[dict]:
    found = [of_rank[number] for of_rank in ran]
    assert [report["case"] for report in found] == [CASES[number]] * tiny.RANKS
    return found


numbered = pytest.mark.parametrize("number", range(len(CASES)), ids=[str(c) for c in CASES])


@numbered
def test_steps_have_the_bytes_of_one_process(ran, number):
    """Log-probs, the gradients of all ranks, and the weights after each step of AdamW."""
    for report in each(ran, number):
        assert report["steps"] == 3
        assert report["differing"] == [] and report["evaluation"] is True
        assert report["fused"] == []


@numbered
def test_nothing_whole_is_kept(ran, number):
    """Between a forward and its backward, after a step, an evaluation and a publication."""
    for report in each(ran, number):
        assert report["kept"] == [] and report["published"]["kept"] == []


@numbered
def test_parts_are_refused_by_name(ran, number):
    for report in each(ran, number):
        assert report["refused"].startswith("ArgumentTypeError: weight: expected a whole parameter")


@numbered
def test_a_gather_in_the_forward_only_is_noticed(ran, number):
    """The mutant: its backward would read memory that is freed."""
    for report in each(ran, number):
        assert report["mutant"].startswith("GatherError: a parameter of the head was resharded")


@numbered
def test_publication(ran, number):
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if CASES[number][1] else {}
    for found in (report["published"] for report in each(ran, number)):
        assert found["manifest"] and found["differing"] == []
        assert found["layout"] == [3, tiny.RANKS, 0] and found["tied"] == tied


@pytest.mark.nightly
def test_a_killed_rank_ends_the_others(tmp_path):
    assert_error_not_hang(after_a_kill(SCRIPT, tiny.RANKS, tmp_path), killed=1)


@pytest.mark.nightly
def test_twenty_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPS", "20")
    for of_rank in reports(SCRIPT, tiny.RANKS, tmp_path):
        assert [r["steps"] for r in of_rank] == [20] * len(CASES)
        assert all(r["differing"] == [] and r["kept"] == [] for r in of_rank)


def test_a_model_that_is_not_sharded(tmp_path):
    with pytest.raises(ArgumentTypeError, match="model: expected a module that fully_shard"):
        ours.publish_weights(tmp_path, tiny.llama())
