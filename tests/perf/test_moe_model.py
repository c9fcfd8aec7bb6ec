"""A whole mixture on a CPU: its records, the command line, and its part of the status page."""

from __future__ import annotations

import dataclasses

import torch

from perf.moe import qwen3


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
