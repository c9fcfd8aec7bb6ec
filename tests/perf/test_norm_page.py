"""The norms of the status page: each card from its own records, targets on each."""

from __future__ import annotations

import pytest

from perf.core.tables import commit_of
from perf.norm import page
from tests.perf.pages import made

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


def targets(records: list[dict]) -> dict[tuple[str, str], list[str]]:
    """(target, card) -> (measured, verdict, next step)."""
    part = made("norm", *records).split("## Targets")[1]
    out, card = {}, ""
    for line in part.splitlines():
        card = line.strip("*") if line.startswith("**") else card
        row = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(row) == 4 and "at least" in row[0]:
            out[row[0], card] = row[1:]
    return out


def test_each_card_has_its_own_table_and_targets():
    records = [
        measured(H100, "8192x4096", 48.0, 0.91, {"copy": 0.99, "liger": 0.99}),
        measured(H100, "32768x2048", 92.0, 0.95, {"copy": 1.0, "liger": 1.02}),
        measured(H200, "8192x4096", 36.0, 0.88, {"copy": 0.90, "liger": 1.04}),
    ]
    text = made("norm", *records)
    assert text.count("| rms_norm fwd | 8192x4096 |") == 2
    assert "48.0 us, 91%" in text and "36.0 us, 88%" in text
    out = targets(records)
    equal = "rms_norm fwd: at least 90% of a copy of as many bytes"
    assert out[equal, H100][:2] == ["99% to 100%, 2 sizes", "met"]
    assert out[equal, H200][:2] == ["90% to 90%, 1 sizes", "met"]
    large = "rms_norm fwd: at least 90% of the bandwidth of a large copy"
    assert (out[large, H100][1], out[large, H200][1]) == ("met", "missed")
    liger = "rms_norm fwd: at least 1.00x liger"
    assert (out[liger, H100][1], out[liger, H200][1]) == ("missed", "met")
    assert out["layer_norm bwd: at least 1.00x liger", H200][1] == "not run"


def test_a_later_record_of_one_card_leaves_the_other_alone():
    early = measured(H100, "8192x4096", 48.0, 0.91, {"copy": 0.99})
    late = measured(H200, "8192x4096", 36.0, 0.80, {"copy": 0.8}, date="2026-11-27T00:00:00+00:00")
    equal = "rms_norm fwd: at least 90% of a copy of as many bytes"
    assert targets([early])[equal, H100] == targets([early, late])[equal, H100]


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
