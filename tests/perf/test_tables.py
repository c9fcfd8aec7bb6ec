"""How wide tables of the documentation are."""

from __future__ import annotations

import re

import pytest

from perf.core import record

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


def test_a_table_that_is_too_wide_is_seen():
    wide = "| op | backend | run_to_run | batch_invariant | split_invariant | schedule_invariant |"
    wide = f"{wide} tp_invariant |\n|{' --- |' * 7}\n| block_sparse_attention | `cute_sm90` |"
    (rows,) = found_tables(wide + " yes |" * 5 + "\n")
    assert len(rows) == 2 and least_width(rows) > PAGE
