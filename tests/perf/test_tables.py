"""Cells and tables of the pages that are made from records, and how wide those pages are."""

from __future__ import annotations

import re

import pytest

from perf import cards, report, verdict
from perf.attention import targets
from perf.attention.page import label as case_label
from perf.core import record
from perf.core.models import MODELS
from perf.digest.cases import CASES
from tests.perf.attention.records import bench as attention
from tests.perf.attention.records import every
from tests.perf.digest.records import digested
from tests.perf.gemm.records import bench, forward
from tests.perf.pages import index, row
from tests.perf.probes.records import probe

#: Of a laptop's 1366 pixels a table gets 742.  A column takes its longest word and 20 more; letters
#: of prose (a header's are bold) and of code are this wide at most.  Measured in a browser.
PAGE, COLUMN, PROSE, CODE = 742, 20, 8.5, 6.8


PAGES = [p for p in (record.ROOT / "docs").rglob("*.md") if "_build" not in p.parts]


def found_tables(text: str) -> list[list[list[str]]]:
    """The tables of a page, as rows of cells, the header first."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.M)
    return [
        [[cell.strip() for cell in line.strip("|\n").split("|")] for line in lines]
        for block in blocks
        for lines in [[x for x in block.splitlines() if not re.match(r"^[| -]+$", x)]]
    ]


def least_width(rows: list[list[str]]) -> float:
    """The pixels that a table needs at least: a line breaks at spaces and after hyphens."""
    return sum(COLUMN + max(map(width_of, column)) for column in zip(*rows, strict=True))


def width_of(cell: str) -> float:
    """The widest part of a cell that has no break."""
    text = re.sub(r"\]\([^)]*\)|\[", "", cell)
    code = [
        CODE * len(part) + 12 for span in re.findall(r"`([^`]*)`", text) for part in span.split()
    ]
    prose = [PROSE * len(part) for part in re.split(r"[ -]", re.sub(r"`[^`]*`", "", text))]
    return max(code + prose)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_fit_a_laptop(page):
    # A generated part is as wide as the code that it lists.
    text = re.sub(r"<!-- generated.*?<!-- end -->", "", page.read_text(), flags=re.S)
    for rows in found_tables(text):
        assert len(rows[0]) <= 8, rows[0]
        assert least_width(rows) <= PAGE, (least_width(rows), rows[0])


def test_the_digests_of_both_models_fit_a_laptop():
    out = [
        digested(case.name, gpu) for case in CASES for gpu in ("NVIDIA H100 PCIe", "NVIDIA H200")
    ]
    for rows in found_tables("\n".join(report.pages(out, []).values())):
        assert len(rows[0]) <= 8 and least_width(rows) <= PAGE, rows[0]


def test_packs_fit_a_laptop_whatever_each_card_said():
    """With columns that all rows share and, of two cards and one broken promise, without."""
    for gpus in (("NVIDIA H200",) * 3, ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H200")):
        out = []
        for size, gpu in zip(targets.PACKS, gpus, strict=True):
            rivals = dict.fromkeys(targets.PACK_RIVALS, 1234.5)
            held = {"repeat": True, "alone": gpu == "NVIDIA H200"}
            more = {"gpu": gpu, "bitwise": held, "rivals": rivals, "us": 12_345.0}
            out += [attention(size, w, system="ours_pack", **more) for w in ("fwd", "bwd")]
        page = report.pages(out, [])["status/attention.md"]
        part = page.split("## Packed sequences")[1].split("\n## ")[0]
        tables = found_tables(part)
        assert len(tables) == len(set(gpus))
        for rows in tables:
            assert len(rows) == 4 and len(rows[0]) <= 8 and least_width(rows) <= PAGE, rows


def test_a_table_that_is_too_wide_is_seen():
    wide = "| op | backend | run_to_run | batch_invariant | split_invariant | schedule_invariant |"
    wide = f"{wide} tp_invariant |\n|{' --- |' * 7}\n| block_sparse_attention | `cute_sm90` |"
    (rows,) = found_tables(wide + " yes |" * 5 + "\n")
    assert len(rows) == 2 and least_width(rows) > PAGE


def test_the_index_is_one_table_of_systems_and_cards():
    page = report.pages(record.read_all(), report.load_certificates())["status.md"]
    (rows,) = found_tables(page)
    assert rows[0][:4] == ["system", "verdict on", *MODELS] and len(page.splitlines()) < 50
    linked = set(re.findall(r"\]\((status/[\w.]+)", page))
    assert linked == set(report.pages([], [])) - {"status.md"}


def test_the_verdict_counts_targets_and_bits():
    def said(system: str, verdict_on: str) -> str:
        (out,) = [
            line.split(" | ")
            for line in index(*records).splitlines()
            if f"](status/{system}.md) | {verdict_on} |" in line
        ]
        assert out[2].removeprefix("[").startswith("not run")
        return re.sub(r"\[|\]\(.*\)", "", out[3]).strip("| ")

    records: list[dict] = []
    for system in ("gemm", "attention"):
        assert said(system, "bits") == said(system, "targets") == "not run"
    records = [*forward(0.96), *every(1.01)]
    assert said("gemm", "targets") == "1 met, 13 not run"
    assert said("gemm", "bits") == "kept in 5 of 30 cases"
    assert said("attention", "bits") == "kept in 56 of 112 cases"
    size = targets.cases()[-1]
    item = next(r for r in records if r["shape"] == case_label(size))
    item["bitwise"]["repeat"] = False
    broken = f"kept in 55 of 112 cases; broken in bwd {case_label(size)}"
    assert said("attention", "bits") == broken


def test_each_model_has_a_column_from_its_own_records():
    head = "`linear`, `matmul`: products timed"
    assert set(row("\n".join(cards.render([])), head)[1:]) == {"not run"}
    h100 = bench("dx", "qkv", 512, 9.0, {}, gpu="NVIDIA H100 80GB HBM3", commit="b" * 40)
    other = bench("dw", "qkv", 512, 9.0, {}, gpu="AMD Instinct MI300X")
    checked = {k: v for k, v in other.items() if k != "median_us"} | {"gpu": "NVIDIA H100 PCIe"}
    lines = cards.render([*forward(0.9), h100, other, checked])
    assert lines[0] == "| record of | H100 | H200 | AMD Instinct MI300X |"
    assert row("\n".join(lines), head)[1:] == [
        "1 of 30; bbbbbbbbbb, 2026-11-21",
        "5 of 30; 0123456789, 2026-11-21",
        "1 of 30; 0123456789, 2026-11-21",
    ]


def test_questions_and_passes_are_counted_where_they_ran():
    text = "\n".join(cards.render([probe("width", verdict="yes"), *every(1.0), *every(1.0)]))
    assert row(text, "questions about the card answered")[2].startswith("1 of 4; ")
    assert row(text, "attention: passes timed")[2].startswith("56 of 112; ")
    failed = probe("width", verdict="failed", why="-")
    assert row("\n".join(cards.render([failed])), "questions about the card answered")[2] == (
        "not run"
    )


def test_the_verdict_of_no_record_is_not_run():
    (rows,) = found_tables("\n".join(verdict.index([])))
    cells = [re.sub(r"\[|\]\(.*\)", "", cell) for row in rows[1:] for cell in row[2:]]
    assert set(cells) == {"not run"} and len(cells) > 2 * 6
