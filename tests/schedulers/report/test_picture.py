"""The pictures: every wait is in them, the tables behind them have its place; clear errors."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from cute_kernels.errors import BackendUnavailable, ScheduleError
from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.model.machines import machine
from cute_kernels.schedulers.model.simulation import simulate
from cute_kernels.schedulers.order.kinds import left_to_right, permutation, shift, spt
from cute_kernels.schedulers.report import picture, rows

pytest.importorskip("matplotlib")
CAUSAL = np.tril(np.full((12, 12), 2, np.uint8))
FULL = np.full((4, 4), 2, np.uint8)


@pytest.mark.parametrize("drawn", [True, False])
def test_waits_are_drawn_in_their_colour(tmp_path, monkeypatch, drawn):
    """And none is where nothing waits: the legend has the colour then, once."""
    simulation = simulate(left_to_right(CAUSAL, heads=3), machine(slots=12))
    assert len(simulation.waits()) > 10
    if not drawn:
        monkeypatch.setattr(type(simulation), "waits", lambda _: [])
    picture.gantt(tmp_path / "a.svg", {"one": simulation}, bound_ns=15200)
    text = (tmp_path / "a.svg").read_text()
    assert all(colour.lower() in text for colour in picture.head_colours(3))
    assert (text.count(picture.WAIT) > 1) is drawn


def cases():
    """Schedules of all sorts, with machines that have tiles, fixed costs and short compute."""
    table = []
    for seed in range(6):
        random = np.random.default_rng(seed)
        blocks = random.integers(0, 3, (5 + seed % 3, 4 + seed % 4)).astype(np.uint8)
        table.append((left_to_right(blocks, heads=2), machine(slots=3 + seed)))
        order = random.permutation(blocks.shape[1])
        table.append((permutation(blocks, order=order, heads=2), machine(slots=2)))
    table.append((shift(np.full((6, 6), 2, np.uint8), heads=2), machine(slots=7)))
    mask = BlockMask.causal(512, 512, block_size=128)
    table.append((spt(mask, heads=2), machine(slots=4, tile_start_ns=500, tile_end_ns=300)))
    return table


def test_waits_and_handoffs_are_those_of_the_simulation():
    """A visit waited if it was ready before its turn: the landing of the rank below, and a handoff
    later."""
    waited = handed = 0
    for schedule, slots in cases():
        simulation = simulate(schedule, slots)
        visit = picture.visit_table(schedule, simulation)
        last = np.cumsum(simulation.visits)[simulation.visits > 0] - 1
        out = []
        for (begin, end), which in ((visit["buffer"], slice(None)), (visit["turn"], last)):
            kept = end[which] > begin[which]
            parts = (visit["slot"][which], begin[which], end[which])
            out += list(zip(*(part[kept].tolist() for part in parts), strict=True))
        assert sorted(out) == simulation.waits()
        waited += len(out)

        entries = [entry for ticket in schedule.tickets() for entry in ticket[2]]
        rank = np.repeat([e[2] for e in entries], len(visit["row"]) // max(1, len(entries)))
        lock = list(zip(visit["head"].tolist(), visit["row"].tolist(), strict=True))
        want, handoff = [], simulation.machine.handoff_ns
        for v in range(len(lock)):
            for u in range(len(lock)):
                landed = int(visit["reduce"][1][u])
                follows = lock[u] == lock[v] and rank[u] + 1 == rank[v]
                if follows and visit["turn"][0][v] < landed + handoff:
                    ends = (int(visit["slot"][u]), int(visit["slot"][v]))
                    want.append((landed, landed + handoff, *ends))
        assert sorted(visit["handoffs"]) == sorted(want)
        handed += len(want)
    assert min(waited, handed) > 50


def test_small_and_empty_launches_are_drawn(tmp_path):
    empty = np.zeros((3, 4), np.uint8)
    picture.gantt(tmp_path / "a.svg", {"none": simulate(spt(empty))})
    picture.steps(tmp_path / "b.svg", {"some": shift(FULL), "none": spt(empty)}, columns=2)
    assert 4000 < (tmp_path / "a.svg").stat().st_size < (tmp_path / "b.svg").stat().st_size


BAD = {
    "no panel": ("gantt", "a.svg", {}, "panels: expected at least one"),
    "suffix": ("gantt", "a.bmp", {"a": spt(FULL)}, "path: expected a file ending in"),
    "no folder": ("gantt", "no/a.svg", {"a": spt(FULL)}, "a folder that exists"),
    "a folder": ("gantt", "b.svg", {"a": spt(FULL)}, "path: expected a file"),
    "too large": ("steps", "a.svg", {"a": spt(np.tile(FULL, (8, 8)))}, "a: expected at most 400"),
    "slots": ("steps", "a.svg", {"a": shift(FULL)}, "machine.slots: expected at least 4"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(tmp_path, name):
    draw, path, panels, message = BAD[name]
    (tmp_path / "b.svg").mkdir()
    options = {"machine": machine(slots=3)} if draw == "steps" else {}
    if draw == "gantt":
        panels = {title: simulate(schedule) for title, schedule in panels.items()}
    with pytest.raises(ScheduleError, match=message):
        getattr(picture, draw)(tmp_path / path, panels, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["b.svg"]


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendUnavailable, match=r"cute-kernels\[schedule\]"):
        picture.gantt(tmp_path / "a.svg", {"a": simulate(spt(FULL))})


@pytest.mark.parametrize(("kind", "walk"), [("fastest", "ascending"), ("spt", "sideways")])
def test_a_row_of_an_unknown_order_is_refused(kind, walk):
    with pytest.raises(
        ScheduleError, match="kind: expected" if kind != "spt" else "walk: expected"
    ):
        rows.evaluate(FULL, kind, heads=2, walk=walk)
