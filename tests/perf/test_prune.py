"""The newest record of each case stays, and with it the status pages."""

from __future__ import annotations

import random

import pytest

from perf import prune, report
from perf.core import record
from tests.perf.records import bench


def item(**fields) -> dict:
    return bench("gemm", "fwd", "qkv", 1.0) | {"date": "2026-11-20T10:00:00+00:00"} | fields


LATER = "2026-11-21T10:00:00+00:00"


@pytest.mark.parametrize(
    ("records", "kept"),
    [
        ([item(), item(date=LATER)], [1]),
        ([item(date=LATER), item()], [0]),
        ([item(median_us=2.0), item()], [1]),
        ([item(), item(date=LATER, gpu="NVIDIA H100")], [0, 1]),
        ([item(), item(date=LATER, shape="out")], [0, 1]),
        ([item(), item(date=LATER, system="cuBLAS")], [0, 1]),
        ([item(kind="digest"), item(kind="digest", date=LATER)], [0, 1]),
    ],
)
def test_the_newest_of_each_case_stays(records, kept):
    assert prune.newest(records) == [records[i] for i in kept]


def test_records_are_dropped_of_their_file(tmp_path):
    for one in (item(), item(date=LATER), item(date=LATER, shape="out")):
        record.append(tmp_path / "gemm.jsonl", one)
    assert prune.prune(tmp_path) == {"gemm.jsonl": [item()]}
    assert record.read(tmp_path / "gemm.jsonl") == [item(date=LATER), item(date=LATER, shape="out")]


def test_a_time_stays_under_a_later_record_without_one():
    records = [item(), item(date=LATER, status="absent")]
    del records[1]["median_us"]
    assert prune.newest(records) == records
    records.append(item(date="2026-11-22T10:00:00+00:00", status="failed"))
    assert prune.newest(records) == records[2:]


def test_the_pages_are_those_of_all_records():
    """Older records with other times, at random places, change nothing."""
    newest = record.read_all()
    draw, aged = random.Random(1), []
    for one in newest:
        if one["kind"] in prune.REPLACED and "median_us" in one and draw.random() < 0.2:
            aged.append(one | {"date": "2026-01-01T00:00:00+00:00", "median_us": 7.0})
        aged.append(one)
    certificates = report.load_certificates()
    assert len(aged) > len(newest) > 2000
    assert report.status(aged, certificates) == report.status(newest, certificates)
