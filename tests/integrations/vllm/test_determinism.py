"""How vLLM's own determinism tests are run: what is judged, the tokenizer, the session.

The session runs a test file of the same shape as vLLM's; vLLM's files are not in this repository.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")
from tests.integrations.vllm import determinism, processes, unchanged

UTILS = """
import pytest
BACKENDS = ["FLASH_ATTN", "TRITON_ATTN"]
skip_unsupported = pytest.mark.skipif(True, reason="Requires CUDA")
"""
FILE = """
import pytest
from utils import BACKENDS, skip_unsupported

@skip_unsupported
@pytest.mark.parametrize("backend", BACKENDS)
def test_list(backend):
    assert backend == "CPU_ATTN"

@pytest.mark.parametrize("backend", ["FLASH_ATTN"])
def test_own(backend):
    assert backend == "CPU_ATTN"

def test_fails():
    assert False, "says why"

@pytest.mark.skip(reason="of its own")
def test_skips():
    pass
"""


PLAIN, NOTHING = "test_batched", f"Failed: {determinism.NOTHING_DIFFERS} 32 prompts"


@pytest.mark.parametrize(
    ("test", "outcome", "reason", "want"),
    [
        (PLAIN, "passed", "", True),
        (PLAIN, "failed", "", False),
        (determinism.INVERSE, "failed", NOTHING, True),
        (determinism.INVERSE, "failed", "EngineDeadError", False),
        (determinism.INVERSE, "passed", "", False),
    ],
)
def test_only_batch_invariant_outcomes_are_right(test, outcome, reason, want):
    assert determinism.is_right({"test": test, "outcome": outcome, "reason": reason}) == want


def test_each_token_survives_its_text():
    tokenizer = determinism.make_tokenizer()
    assert len(tokenizer) == determinism.VOCAB
    for ids in (list(range(determinism.VOCAB)), [5, 5, 900, 2047, 0, 1, 700]):
        assert tokenizer(tokenizer.decode(ids)).input_ids == ids
    text = "Question: What is 1 + 1?\nAnswer: it's"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.nightly
def test_a_session_replaces_backends_and_lifts_skips_of_gpus_only(tmp_path):
    pytest.importorskip("vllm", reason="vllm is not installed: docs/vllm.md says how")
    folder = tmp_path / "vllm" / "v1" / "determinism"
    folder.mkdir(parents=True)
    (folder / "utils.py").write_text(UTILS)
    (folder / "test_shape.py").write_text(FILE)
    (folder / "test_cannot.py").write_text("import no_such_package")
    root, records = tmp_path / "root", tmp_path / "records.jsonl"
    root.mkdir()
    determinism.link_tests(tmp_path / "vllm", root)
    arguments = (unchanged.__file__, root, "CPU_ATTN", records, unchanged.FOLDER)
    processes.run(*arguments, code=1, CUTE_KERNELS_VLLM="1")
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert [(line["test"].split("::")[-1], line["outcome"]) for line in lines] == [
        ("test_cannot.py", "failed"),
        ("test_list[CPU_ATTN]", "passed"),
        ("test_own[FLASH_ATTN]", "passed"),
        ("test_fails", "failed"),
        ("test_skips", "skipped"),
    ]
    assert "says why" in lines[3]["reason"] and "of its own" in lines[4]["reason"]
