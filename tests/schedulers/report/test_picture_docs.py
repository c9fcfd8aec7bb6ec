"""docs/schedulers.md is true: its pictures are drawn, its rows and numbers are the code's."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.schedulers.__main__ import _MASKS, parse_mask
from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.model import machines as machine
from cute_kernels.schedulers.model import selection as choice
from cute_kernels.schedulers.model.simulation import simulate
from cute_kernels.schedulers.order.kinds import KINDS, WALKS, left_to_right, permutation, spt
from cute_kernels.schedulers.order.safety import check
from cute_kernels.schedulers.report import picture
from cute_kernels.schedulers.report import rows as report

pytest.importorskip("matplotlib")
DOCS = Path(__file__).resolve().parents[3] / "docs"
TEXT = (DOCS / "schedulers.md").read_text()
PROSE = " ".join(TEXT.split())


@pytest.fixture(scope="module")
def conf() -> dict:
    """The program that writes the generated parts of the documentation."""
    return runpy.run_path(str(DOCS.parent / "tools" / "generate_docs.py"))


def shown(conf: dict, name: str) -> dict[str, report.Row]:
    """The rows of one picture, by title."""
    text, *panels = conf["PICTURES"][name]
    mask = parse_mask(text, 8192, (64, 128))
    rows = [
        report.evaluate(mask, kind, heads=16, heads_in_flight=flight, walk=walk)
        for kind, flight, walk in panels
    ]
    return {row.title: row for row in rows}


def test_every_picture_of_the_page_is_drawn(conf, tmp_path):
    names = re.findall(r"!\[[^\]]+\]\(plots/([\w.]+)\)", TEXT)
    assert len(names) == TEXT.count("![") >= 4
    conf["draw_pictures"](tmp_path)
    drawn = {path.name: path for path in tmp_path.iterdir()}
    assert set(drawn) == set(names)
    for path in drawn.values():
        assert 20_000 < path.stat().st_size < 400_000
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_pictures_show_what_the_page_says(conf):
    rows = shown(conf, "causal")
    left, spread, right, chosen = rows.values()
    assert left.simulation.ratio > 2 and left.simulation.stall_share > 0.4
    assert 0 < spread.simulation.stall_share < left.simulation.stall_share / 4
    assert right.simulation.ratio == 1 and right.simulation.stall_share == 0
    assert right.over_bound > 1.1, "the tail"
    assert re.fullmatch(
        r"spt, last \d+ left_to_right \(ascending, descending\)", chosen.schedule.name
    )
    assert chosen.over_bound < 1.01 and chosen.safety.any_residency
    window = shown(conf, "window")
    two, one = (row.simulation for row in window.values())
    assert two.ratio > 4 and one.ratio == 1
    drawn, out = shown(conf, "random").values()
    assert drawn.simulation.ratio > 1.8 and out.simulation.ratio < 1.12


def test_the_small_picture_shows_what_the_page_says():
    """Column n's first turn comes after column n - 1's second visit, or without a wait."""
    mask = BlockMask.causal(384, 384, block_size=64)
    tile = machine.Machine("six slots", 6, 2200, 2200, 1200, 2000, tile=(64, 64))
    for schedule, waits in ((left_to_right(mask), True), (spt(mask), False)):
        visit = picture.visit_table(schedule, simulate(schedule, tile))
        column = np.repeat(schedule.order[:, 1], [len(ticket) for *_, ticket in schedule.tickets()])
        for n in range(1, 6):
            mine, other = (np.flatnonzero(column == each) for each in (n, n - 1))
            turn = int(visit["reduce"][0][mine[0]])
            second = int(visit["reduce"][1][other[1]]) + tile.handoff_ns
            assert (turn == second) if waits else (turn == visit["compute"][1][mine[0]])


def test_the_constants_in_the_prose_are_the_machines():
    usual = machine.machine()
    assert f"(add {usual.reduce_ns / 1e3} µs and hand over {usual.handoff_ns / 1e3} µs)" in PROSE
    assert f"longer than one tile's compute ({usual.full_ns / 1e3} µs)" in PROSE
    assert f"a fixed limit of {usual.max_heads_in_flight}, not a cost" in PROSE
    assert usual.full_ns == usual.partial_ns and "Partial and full tiles cost the same" in PROSE


def test_the_page_names_every_machine():
    section = TEXT.split("\n## The machine\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| \w", section, re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(machine.TABLE)
    assert "`cute_kernels/schedulers/model/machines.py`" in section
    for constants in machine.TABLE.values():
        assert all(source for _, source in constants.values())


def test_the_steps_of_select_are_its_thresholds():
    for constant, message in (
        (choice.NEAR, "2. If that is not within {}"),
        (choice.CLOSE, "3. If that is not within {}"),
    ):
        assert message.format(f"{round((constant - 1) * 100, 3):g}%") in PROSE


def test_the_kinds_table_is_the_code():
    written = re.sub(r"<!-- generated.*?<!-- end -->", "", TEXT, flags=re.S)
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([\w `]+) \|$", written, re.M)
    assert [name for name, _ in rows] == [*list(KINDS)[:4], "permutation", *list(KINDS)[4:]]
    full = np.full((6, 6), 2, np.uint8)
    for name, safety in rows:
        if name == "permutation":
            schedule = permutation(full, order=range(6), write_order=range(5, -1, -1))
        else:
            schedule = KINDS[name](full)
        assert check(schedule).any_residency == (safety == "any residency")
    for walk in WALKS:
        assert f"`{walk}`" in PROSE
    for mask in _MASKS:
        assert f"`{mask}" in PROSE
