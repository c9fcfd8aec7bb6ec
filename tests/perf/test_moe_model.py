"""A whole mixture on a CPU: its records, the command line, and its part of the status page."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from typer.testing import CliRunner

from perf.core import record
from perf.moe import qwen3
from perf.moe.commands import verbs


@pytest.mark.nightly
def test_the_command_on_a_cpu(tmp_path):
    """Rows and a step of a tiny model: a record of every product and system, no byte differs."""
    path = tmp_path / "records.jsonl"
    arguments = ["bench", "qwen3-moe", "--tiny", "--device", "cpu", "--rounds", "1"]
    run = CliRunner().invoke(verbs.app, [*arguments, "-o", str(path)])
    assert run.exit_code == 0, run.output
    bodies = record.read(path)
    products = {(body["product"], body["system"]) for body in bodies}
    every = (qwen3.ROWS, *qwen3.TIMED)
    assert products == {(p, system) for p in every for system in qwen3.SYSTEMS}
    for body in bodies:
        assert body["status"] == "ok" and body["gpu"] == "none"
        if body["product"] != qwen3.ROWS:
            assert body["median_us"] > 0 and len(body["ratio"]) == 1
        elif body["system"] == "ours":
            assert set(body["differing_bytes"].values()) == {0} and body["bitwise"]["rows"]


def test_other_bytes_are_counted(monkeypatch):
    """A model whose rows follow the batch is not ok; rows that are not finite are no verdict."""
    size = dataclasses.replace(qwen3.TINY, layers=1)
    model = qwen3.built(size, "cpu", "torch")

    class Following(torch.nn.Module):
        config = model.config

        def forward(self, input_ids, **inputs):
            out = model(input_ids=input_ids, **inputs)
            out.logits[:, -1, 0] += float(len(input_ids) > 1) + self.added
            return out

    wrong = Following()
    monkeypatch.setattr(qwen3, "built", lambda *_: wrong)
    wrong.added = 0.0
    body = qwen3.compared(size, "cpu", "ours")
    assert body["differing_bytes"]["in a batch"] > 0 and not body["bitwise"]["rows"]
    assert body["differing_bytes"]["again"] == 0
    wrong.added = float("nan")
    assert qwen3.compared(size, "cpu", "ours")["status"] == "failed"
