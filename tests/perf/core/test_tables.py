"""Cells, tables and the names of GPU models."""

from __future__ import annotations

import pytest

from perf.core import models, tables


def test_what_every_row_says_is_said_once():
    head, rows = ["a", "b", "c"], [["1", "x", "same"], ["2", "x", "same"]]
    assert tables.folded(head, rows, ("b", "c"))[0] == "Every row: b: x; c: same."
    assert tables.folded(head, rows, ("b", "c"))[2:] == tables.table(["a"], [["1"], ["2"]])
    rows[1][2] = "other"
    assert tables.folded(head, rows, ("b", "c"))[2:] == tables.table(
        ["a", "c"], [["1", "same"], ["2", "other"]]
    )
    assert tables.folded(head, rows, ("c",)) == tables.table(head, rows)
    assert tables.folded(head, [], ("b",)) == tables.table(head, [])


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA GH200 480GB", "NVIDIA GH200 480GB"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
    ],
)
def test_a_model_is_told_by_its_word(gpu, name):
    assert models.model(gpu) == name
    assert models.models([{"gpu": gpu}, {"gpu": "none"}])[:2] == ["H100", "H200"]
