"""Contracts of vLLM engines and of patched trainers: equal, or different by name.

By night, as it takes minutes: one process starts an engine for each line.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: docs/vllm.md says how")
pytest.importorskip("transformers")
from tests.integrations.vllm import cases, contracts, processes

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("contracts")
    for name in cases.CASES:
        cases.save(name, folder)
    out = folder / "out.jsonl"
    processes.run("-m", contracts.__name__, folder, out, CUTE_KERNELS_VLLM="1")
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("number", range(len(contracts.ENGINES)))
def test_an_engine_differs_by_the_name_of_its_setting(lines, number):
    assert lines[number]["differ"] == contracts.ENGINES[number].differ


@pytest.mark.parametrize("number", range(len(contracts.WRITES)))
def test_weights_past_the_publisher_take_the_statement_back(lines, number):
    name, writes = [*contracts.WRITES][number], lines[0]["writes"]
    assert writes[f"published {number + 1}"] == []
    assert writes[name] == ["weights"]
