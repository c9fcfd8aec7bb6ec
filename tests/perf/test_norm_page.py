"""Targets of norms on the status page, of one card's records."""

from __future__ import annotations

import pytest

from perf.core.tables import commit_of
from perf.norm import page
from tests.perf.pages import targets

H100, H200 = "H100", "H200"
NAMES = {H100: "NVIDIA H100 80GB HBM3", H200: "NVIDIA H200"}


def measured(gpu: str, size: str, median_us: float, share: float, ratio: dict, **more) -> dict:
    """A record of rms_norm's forward."""
    record = {
        "kind": "bench",
        "kernel": "norm",
        "product": "rms_norm fwd",
        "shape": size,
        "system": "ours",
        "status": "ok",
        "gpu": NAMES[gpu],
        "commit": "c" * 40,
        "dirty": False,
        "date": "2026-11-26T20:00:00+00:00",
        "median_us": median_us,
        "floor_fraction": share,
        "ratio": ratio,
        "bitwise": {"repeat": True},
    }
    return record | more


def test_each_card_has_its_own_targets():
    h100 = [
        measured(H100, "8192x4096", 48.0, 0.91, {"copy": 0.99, "liger": 0.99}),
        measured(H100, "32768x2048", 92.0, 0.95, {"copy": 1.0, "liger": 1.02}),
    ]
    h200 = [measured(H200, "8192x4096", 36.0, 0.88, {"copy": 0.90, "liger": 1.04})]
    first, second = targets(page, *h100), targets(page, *h200)
    equal = "rms_norm fwd: at least 90% of a copy of as many bytes"
    assert first[equal][:2] == ["99% to 100%, 2 sizes", "met"]
    assert second[equal][:2] == ["90% to 90%, 1 sizes", "met"]
    large = "rms_norm fwd: at least 90% of the bandwidth of a large copy"
    assert (first[large][1], second[large][1]) == ("met", "missed")
    liger = "rms_norm fwd: at least 1.00x liger"
    assert (first[liger][1], second[liger][1]) == ("missed", "met")
    assert second["layer_norm bwd: at least 1.00x liger"][1] == "not run"


def test_without_a_record_every_target_is_not_run():
    verdicts = [row[2] for row in page.target_rows([])]
    assert verdicts == ["not run"] * len(page.TARGETS)


@pytest.mark.parametrize(
    "commit, dirty, shown",
    [
        ("e77c02327c-dirty", None, "e77c02327c+"),
        ("e77c02327c", None, "e77c02327c"),
        ("e77c02327c" + "0" * 30, True, "e77c02327c+"),
    ],
)
def test_a_commit_of_a_changed_tree_is_marked(commit, dirty, shown):
    assert commit_of({"commit": commit, "dirty": dirty}) == shown
