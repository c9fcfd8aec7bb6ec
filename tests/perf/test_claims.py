"""Numbers of README and docs/support.md against the records."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from perf.core import record
from perf.core.models import MODELS, split
from perf.core.tables import MISSED, by_card
from perf.mhc import page as mhc_page
from perf.model.llama import Size

#: First words of a header in docs/support.md -> the kernel of the records of its times.
TIMED = {
    "device | op | dtype": "gemm",
    "device | forward and gradients": "attention",
    "device | `linear_logp`": "logp",
    "device | `mhc`": "mhc",
    "device | `rms_norm`": "norm",
}


@pytest.fixture(scope="module")
def records() -> list[dict]:
    return record.read_all()


@pytest.mark.parametrize("header", TIMED)
def test_support_names_the_cards_that_were_timed(header, records):
    page = (record.ROOT / "docs" / "support.md").read_text()
    (table,) = [part for part in page.split("\n\n") if part.startswith(f"| {header}")]
    states = [line.strip("|").split("|")[-1].strip() for line in table.splitlines()]
    (state,) = [state for state in states if "timed" in state]
    message = re.search(r"timed on (an H\d+(?: and an H\d+)*)", state)
    matches = re.findall(r"H\d+", message[1]) if message else []
    assert matches == [name for name in MODELS if name in by_card(records, TIMED[header])]


def test_support_has_the_versions_of_the_records(records):
    """Of torch, triton, the DSL, tvm-ffi and the driver: what ran on a card is in the table."""
    page = (record.ROOT / "docs" / "support.md").read_text().partition("## Versions")[2]
    on_cards = [r for r in records if r["gpu"] != "none"]
    for name in ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi"):
        row = next(x for x in page.splitlines() if x.startswith(f"| {name} |"))
        versions = {r["versions"][name] for r in on_cards} - {"absent"}
        where = row if name != "nvidia-cutlass-dsl" else page
        assert versions and all(version in where for version in versions), (name, versions)
    (row,) = [x for x in page.splitlines() if x.startswith("| NVIDIA driver |")]
    assert {r["driver"] for r in on_cards} == set(re.findall(r"\d+\.\d+\.\d+", row))


def gap(what: str) -> str:
    """The number of a row of the README's known gaps."""
    rows = (record.ROOT / "README.md").read_text().partition("## Known gaps")[2].splitlines()
    (row,) = [row for row in rows if row.startswith(f"| {what}")]
    return row.split("|")[2].strip()


def ratios(records, kernel: str, product: str, rival: str, ours: str = "ours") -> list[float]:
    """Ratios of every case on every GPU model that has records of it."""
    out = []
    for bench in by_card(records, kernel).values():
        shapes = {s for _, p, s in bench.records if p == product}
        out += [bench.ratio((product, shape), rival, ours) for shape in shapes]
    return [ratio for ratio in out if ratio is not None]


def test_the_gaps_have_the_numbers_of_the_records(records):
    backward = min(ratios(records, "attention", "bwd", "fa4"))
    assert gap("attention's ordered backward").startswith(f"down to {backward:.2f} of")
    both = ratios(records, "logp", "both", "quack")
    assert gap("`linear_logp`").startswith(f"{min(both):.2f} to {max(both):.2f}:")
    products = [r for p in ("fwd", "dx", "dw") for r in ratios(records, "moe", p, "dense")]
    dense = f"{min(products):.2f} to {max(products):.2f} of a dense"
    assert gap("MoE products, training").startswith(dense)
    decode = ratios(records, "paged_attention", "decode", "cudnn", "page 256")
    assert gap("decode attention").startswith(f"{min(decode):.2f} of cuDNN's speed")
    verdicts = [
        [row[2] for row in mhc_page.target_rows(model_records)]
        for model_records in split(records).values()
    ]
    words = max(map(Counter, verdicts), key=lambda words: words[MISSED])
    assert gap("hyper-connections") == f"{words[MISSED]} of {sum(words.values())} targets missed"
    for card in MODELS:
        host = by_card(records, "model")[card]
        case = ("host rms_norm, grad", "64x2048")
        ours, torchs = (host.get(case, name)["host_us"] for name in ("ours", "torch"))
        assert abs(ours / torchs - float(gap("a norm's call").split()[0])) < 0.15


def test_the_audit_found_nothing_on_either_card(records):
    for card in MODELS:
        audits = [
            r
            for r in records
            if (r.get("kernel"), r.get("product")) == ("model", "audit") and card in r["gpu"]
        ]
        usual = [r for r in audits if r["model"] == Size().label]
        newest = max(usual, key=lambda r: r["date"])
        assert newest["ours"]["differing"] == 0 < newest["torch"]["differing"]


def test_half_of_the_passes_of_linear_logp_take_at_most_ligers_time(records):
    cases = [(name, size) for name in ("fwd", "bwd", "both") for size in ("128k", "152k")]
    for bench in by_card(records, "logp").values():
        ratios = [ratio for case in cases if (ratio := bench.ratio(case, "liger"))]
        assert ratios
        assert sum(round(ratio, 2) >= 1 for ratio in ratios) >= len(ratios) / 2
