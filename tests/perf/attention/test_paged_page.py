"""Attention over paged caches on the status page: verdicts, the fastest rival, two cards."""

from __future__ import annotations

import itertools

import pytest

from perf.attention import paged_page as page
from perf.core.tables import MET, MISSED, NOT_RUN

RIVALS = dict.fromkeys(page.RIVALS, 100.0)


def records(case: tuple[str, str], us: dict[str, float], gpu: str = "NVIDIA H100") -> list[dict]:
    """Records of every system at one case."""
    return [
        {
            "kind": "bench", "kernel": page.KERNEL, "product": case[0], "shape": case[1],
            "system": name, "status": "ok", "median_us": own, "of_copy": 90.0 / own,
            "ratio": {other: theirs / own for other, theirs in us.items() if other != name},
            "bitwise": {"dense forward": True}, "gpu": gpu, "commit": "0123456",
            "date": "2026-11-28",
        }
        for name, own in us.items()
    ]  # fmt: skip


def verdicts(made: list[dict]) -> dict[str, str]:
    return {row[0]: row[2] for row in page.target_rows(made)}


def every_size(us: dict[str, float], gpu: str = "NVIDIA H100") -> list[dict]:
    cases = [*map(page.key, page.SIZES), page.mixed_key()]
    return list(itertools.chain(*(records(case, us, gpu) for case in cases)))


def test_nothing_measured():
    assert set(verdicts([]).values()) == {NOT_RUN}


def test_as_fast_as_everyone():
    assert set(verdicts(every_size({"page 16": 100.0, "page 256": 100.0} | RIVALS)).values()) == {
        MET
    }


@pytest.mark.parametrize("rival", page.RIVALS)
def test_the_fastest_rival_counts(rival):
    us = {"page 16": 100.0, "page 256": 100.0} | RIVALS | {rival: 85.0}
    missed = {text for text, verdict in verdicts(every_size(us)).items() if verdict == MISSED}
    assert missed >= {
        "1x16384: >= 0.91x of the best rival",
        "8 to 256 sequences: >= 1.00x of the best rival",
    }
    assert ("mixed batch: >= 0.95x of FA4's varlen" in missed) == (rival == "fa4")


def test_small_pages_and_bandwidth():
    us = {"page 16": 127.0, "page 256": 120.0} | dict.fromkeys(page.RIVALS, 120.0)
    missed = [text for text, verdict in verdicts(every_size(us)).items() if verdict == MISSED]
    assert missed == [
        "8 to 256 sequences: >= 80% of a copy's bandwidth",
        "pages of 16: >= 0.95x of pages of 256",
    ]


def test_each_card_has_its_limit():
    us = {"page 16": 200.0, "page 256": 200.0} | dict.fromkeys(page.RIVALS, 200.0)
    assert verdicts(every_size(us))["1x131072: at most 210 us"] == MET
    on_h200 = verdicts(every_size(us, "NVIDIA H200"))
    assert on_h200["1x131072: at most 160 us"] == on_h200["32x4096: at most 148.5 us"] == MISSED


def test_bits():
    made = every_size({"page 256": 100.0} | RIVALS)
    assert page.bits_kept(made) == [["bits over pages", "kept in 8 of 8 cases"]]
    made[0]["bitwise"] = {"dense forward": False}
    assert "broken in decode 1x16384" in page.bits_kept(made)[0][1]
