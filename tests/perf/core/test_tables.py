"""The names of GPU models."""

from __future__ import annotations

import pytest

from perf.core import models


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
