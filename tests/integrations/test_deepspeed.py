"""DeepSpeed, ZeRO 0 to 3: two real processes against one, byte for byte (zero_rank.py)."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from cute_kernels.errors import ArgumentTypeError, MissingPackageError
from cute_kernels.integrations import deepspeed as ours
from tests.integrations import tiny
from tests.integrations.ending import after_a_kill, assert_error_not_hang
from tests.ranks import reports

SCRIPT = "tests.integrations.zero_rank"
HERE = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(
    not HERE, reason="deepspeed is not installed: pip install 'cute-kernels[deepspeed]'"
)
STAGES = {0: [False], 1: [False], 2: [False, True], 3: [False, True]}
CASES = [(stage, tied) for stage, heads in STAGES.items() for tied in heads]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What both ranks report."""
    return reports(SCRIPT, tiny.RANKS, tmp_path_factory.mktemp("zero"))


def each(ran, case) -> list[dict]:
    """What each rank trained, of a stage and a tie."""
    trained = [{(r["stage"], r["tied"]): r for r in of_rank["trained"]} for of_rank in ran]
    assert all(set(of_rank) == set(CASES) for of_rank in trained)
    return [of_rank[case] for of_rank in trained]


@needs_deepspeed
@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_have_the_bytes_of_one_process(ran, case):
    """Log-probs, the gradients of all ranks, and the weights after each step of AdamW."""
    for report in each(ran, case):
        assert report["steps"] == 3
        assert report["differing"] == []
        assert report["evaluation"] == [] and report["fused"] == []


@needs_deepspeed
@pytest.mark.parametrize("tied", [False, True])
def test_stage_3_releases_what_it_gathers(ran, tied):
    for report in each(ran, (3, tied)):
        assert report["kept"] == [] and report["published"]["kept"] == []
        found = report["direct"]
        # After the forward, and after the backward; one gather for each.
        assert found["sizes"] == [0, 0] and found["gathers"] == [1, 1]
        assert all(found["same"]) and len(found["same"]) == 8
        assert found["after"] == 0


@needs_deepspeed
@pytest.mark.parametrize("tied", [False, True])
def test_what_is_there_is_not_gathered_again(ran, tied):
    for report in each(ran, (3, tied)):
        size = tiny.VOCAB * tiny.WIDTH
        assert report["direct"]["inside"] == {"sizes": [size, size], "gathers": []}
        # The head twice and the embedding: two parameters, or one that is both.
        assert report["direct"]["twice"] == [1 if tied else 2]


@needs_deepspeed
@pytest.mark.parametrize("tied", [False, True])
def test_a_gather_in_the_forward_only_is_noticed(ran, tied):
    """The mutant: its backward reads a weight that is not there."""
    for report in each(ran, (3, tied)):
        assert report["direct"]["mutant"] not in ("survives", "")


@needs_deepspeed
@pytest.mark.parametrize("case", CASES, ids=str)
def test_publication(ran, case):
    stage, tied = case
    for rank, report in enumerate(each(ran, case)):
        found = report["published"]
        assert found["manifest"] and found["names"] and found["differing"] == []
        assert found["layout"] == [stage, tiny.RANKS, 0]
        assert found["metadata"] == {"step": 3}
        assert found["tied"] == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
        assert "version 0 does not rise above 0" in found["again"]
        assert found["again"].startswith("rank 0 did not publish") == (rank > 0)


@needs_deepspeed
@pytest.mark.parametrize("case", CASES, ids=str)
def test_wrong_ids_are_refused_on_every_rank(ran, case):
    for report in each(ran, case):
        assert report["refused"] == "input_ids: expected ids of a vocabulary of 96, got 96"


@needs_deepspeed
def test_mixed_precision_with_checkpointing_and_accumulation(ran):
    for of_rank in ran:
        cases = [report["case"] for report in of_rank["mixed"]]
        assert cases == [[z, how] for z in (1, 3) for how in ("bf16", "torch_autocast")]
        for report in of_rank["mixed"]:
            assert report["same"] and report["kept"] == []
            # Two batches make one step.
            first, second, third = report["losses"]
            assert first == second != third


@needs_deepspeed
def test_a_killed_rank_ends_the_others(tmp_path):
    assert_error_not_hang(after_a_kill(SCRIPT, tiny.RANKS, tmp_path), killed=1)


@needs_deepspeed
@pytest.mark.nightly
def test_twenty_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPS", "20")
    for found in reports(SCRIPT, tiny.RANKS, tmp_path):
        of_rank = found["trained"]
        assert [(r["stage"], r["tied"]) for r in of_rank if r["steps"] == 20] == [
            (0, False), (1, False), (2, False), (3, False), (3, True), (2, True),
        ]  # fmt: skip
        assert all(r["differing"] == [] and r["kept"] == [] for r in of_rank)


@needs_deepspeed
def test_no_engine():
    with pytest.raises(ArgumentTypeError, match=r"engine: expected .*DeepSpeedEngine, got Llama"):
        ours.zero_stage(tiny.llama())
    with pytest.raises(ArgumentTypeError, match=r"engine: expected .*DeepSpeedEngine, got Linear"):
        ours.publish_weights("nowhere", torch.nn.Linear(2, 2))


def test_without_deepspeed(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"deepspeed: pip install 'cute-kernels\[deepsp"):
        ours.zero_stage(tiny.llama())


def test_importing_loads_no_deepspeed():
    import subprocess

    code = (
        "import sys; from cute_kernels.integrations import deepspeed, fsdp, transformers; "
        "sys.exit(any(m in sys.modules for m in ('deepspeed', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
