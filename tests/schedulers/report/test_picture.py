"""The pictures: every wait is in them at its place, the same bytes every time, clear errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.errors import BackendUnavailable, ScheduleError
from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.model.machines import machine
from cute_kernels.schedulers.model.simulation import simulate
from cute_kernels.schedulers.order.kinds import build, left_to_right, permutation, shift, spt
from cute_kernels.schedulers.order.ranks import block_grid
from cute_kernels.schedulers.report import picture

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[3]


def drawn(rows: int, columns: int, seed: int) -> np.ndarray:
    """uint8 blocks, two thirds of them present."""
    return np.random.default_rng(seed).integers(0, 3, (rows, columns)).astype(np.uint8)


def causal(blocks: int) -> np.ndarray:
    mask = np.tril(np.full((blocks, blocks), 2, np.uint8))
    np.fill_diagonal(mask, 1)
    return mask


def colour(text: str) -> np.ndarray:
    return np.array([int(text[i : i + 2], 16) for i in (1, 3, 5)])


def pixels(path: Path, text: str, within: int = 6) -> np.ndarray:
    """Pixels of a PNG that have a colour: bool [height, width]."""
    from matplotlib.image import imread

    image = np.rint(imread(path)[..., :3] * 255).astype(int)
    return (np.abs(image - colour(text)) <= within).all(axis=-1)


# ---- what is drawn ------------------------------------------------------------------------------


def grey_area(path: Path, simulation, monkeypatch) -> tuple[int, int]:
    """Pixels of waits, and of all ticket time, in the one panel of a launch (legend aside)."""
    monkeypatch.setattr(picture, "_SLOTS", 0)  # flat grey, as for a large machine
    picture.gantt(path, {"one": simulation})
    waits = pixels(path, picture.WAIT)
    colours = picture.head_colours(int(simulation.order[:, 0].max()) + 1)
    busy = sum(pixels(path, each).astype(int) for each in colours)
    frame = int(waits.shape[0] * 0.78)  # below: axis labels and the legend
    return int(waits[:frame].sum()), int(busy[:frame].sum())


def test_the_grey_area_is_the_time_spent_waiting(tmp_path, monkeypatch):
    slots = machine(slots=12)
    for name, make in (("left", left_to_right), ("right", spt)):
        simulation = simulate(make(causal(12), heads=3), slots)
        grey, busy = grey_area(tmp_path / f"{name}.png", simulation, monkeypatch)
        busy_ns = int((simulation.end_ns - simulation.start_ns).sum())
        want = int(simulation.stall_ns.sum()) / busy_ns
        assert abs(grey / (grey + busy) - want) < 0.015, name
        assert want > (0.3 if name == "left" else -1)


def test_a_picture_without_waits_is_noticed(tmp_path, monkeypatch):
    """Mutant: the waits are not drawn."""
    simulation = simulate(left_to_right(causal(12), heads=3), machine(slots=12))
    monkeypatch.setattr(type(simulation), "waits", lambda _: [])
    grey, busy = grey_area(tmp_path / "none.png", simulation, monkeypatch)
    want = int(simulation.stall_ns.sum()) / int((simulation.end_ns - simulation.start_ns).sum())
    assert abs(grey / (grey + busy) - want) > 0.2


def cases():
    """Schedules of all sorts, with machines that have tiles, fixed costs and short compute."""
    table = []
    for seed in range(6):
        blocks = drawn(5 + seed % 3, 4 + seed % 4, seed)
        order = np.random.default_rng(seed).permutation(blocks.shape[1])
        table.append((left_to_right(blocks, heads=2), machine(slots=3 + seed)))
        table.append((permutation(blocks, order=order, heads=2), machine(slots=2)))
    table.append((shift(np.full((6, 6), 2, np.uint8), heads=2), machine(slots=7)))
    mask = BlockMask.causal(512, 512, block_size=128)
    table.append((spt(mask, heads=2), machine(slots=4, tile_start_ns=500, tile_end_ns=300)))
    return table


def test_every_wait_of_the_simulation_is_in_the_table_of_visits():
    waited = 0
    for schedule, slots in cases():
        simulation = simulate(schedule, slots)
        visit = picture.visit_table(schedule, simulation)
        last = np.cumsum(simulation.visits)[simulation.visits > 0] - 1
        out = []
        for (begin, end), which in (
            (visit["buffer"], slice(None)),
            (visit["turn"], last),
        ):
            kept = end[which] > begin[which]
            parts = (visit["slot"][which], begin[which], end[which])
            out += list(zip(*(part[kept].tolist() for part in parts), strict=True))
        assert sorted(out) == simulation.waits()
        waited += len(out)
    assert waited > 50


def test_slots_do_one_thing_at_a_time_and_reductions_take_their_time():
    for schedule, slots in cases():
        simulation = simulate(schedule, slots)
        visit = picture.visit_table(schedule, simulation)
        for name in ("compute", "reduce"):
            begin, end = visit[name]
            for slot in range(slots.slots):
                mine = np.flatnonzero(visit["slot"] == slot)
                mine = mine[np.argsort(begin[mine], kind="stable")]
                assert (begin[mine][1:] >= end[mine][:-1]).all()
        taken = visit["reduce"][1] - visit["reduce"][0]
        assert (taken == simulation.machine.reduce_ns).all()
        assert (visit["compute"][1] - visit["compute"][0] == simulation.compute_ns).all()


def test_rows_are_those_of_the_tickets():
    schedule = spt(causal(4), heads=2, heads_in_flight=2)
    visit = picture.visit_table(schedule, simulate(schedule, machine(slots=3)))
    want = [(head, row) for head, _, ticket in schedule.tickets() for row, _, _ in ticket]
    assert list(zip(visit["head"].tolist(), visit["row"].tolist(), strict=True)) == want


def test_handoffs_lead_from_a_landing_to_the_reduction_that_waited():
    """Brute force: a visit waited if it was ready before its turn, the landing of the rank below
    and a handoff later."""
    total = 0
    for schedule, slots in cases():
        simulation = simulate(schedule, slots)
        visit = picture.visit_table(schedule, simulation)
        tiles = len(visit["row"]) // max(1, len([e for t in schedule.tickets() for e in t[2]]))
        rank = np.repeat([e[2] for t in schedule.tickets() for e in t[2]], tiles)
        lock = list(zip(visit["head"].tolist(), visit["row"].tolist(), strict=True))
        want = []
        for v in range(len(lock)):
            for u in range(len(lock)):
                if lock[u] == lock[v] and rank[u] + 1 == rank[v]:
                    turn = int(visit["reduce"][1][u]) + simulation.machine.handoff_ns
                    if visit["turn"][0][v] < turn:
                        ends = (int(visit["slot"][u]), int(visit["slot"][v]))
                        want.append((turn - simulation.machine.handoff_ns, turn, *ends))
        assert sorted(visit["handoffs"]) == sorted(want)
        total += len(want)
    assert total > 50


@pytest.mark.nightly
@pytest.mark.parametrize("suffix", picture.SUFFIXES)
def test_the_same_bytes_every_time(tmp_path, suffix):
    schedule = left_to_right(causal(5), heads=2)
    slots = machine(slots=6)
    for draw, inputs in (
        (picture.gantt, {"a": simulate(schedule, slots), "b": simulate(spt(causal(5)), slots)}),
        (picture.steps, {"a": schedule, "b": spt(causal(5))}),
    ):
        options = {"machine": slots} if draw is picture.steps else {"bound_ns": 20000}
        paths = [tmp_path / f"{i}{suffix}" for i in range(2)]
        for path in paths:
            draw(path, inputs, columns=2, **options)
        one, other = (path.read_bytes() for path in paths)
        assert one == other and len(one) > 4000
        draw(paths[1], {**inputs, "b": inputs["a"]}, columns=2, **options)
        assert paths[1].read_bytes() != one


def test_titles_and_facts_are_text_of_the_picture(tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    simulation = simulate(left_to_right(causal(6)), machine(slots=6))
    picture.gantt(tmp_path / "a.svg", {"my title": simulation}, bound_ns=15200)
    text = (tmp_path / "a.svg").read_text()
    for message in ("my title", "30.4 µs", "2.11 × unordered", "2.00 × bound", "44% waiting"):
        assert message in text
    assert "lower bound, 15.2 µs" in text and "head 0" in text and "waiting for a turn" in text


def test_a_large_launch_is_stored_as_pixels(tmp_path):
    """A launch of 16 heads has thousands of shapes; its file stays small."""
    mask = BlockMask.causal(8192, 8192, block_size=(64, 128))
    simulation = simulate(left_to_right(mask, heads=16), "h200_d128")
    assert len(simulation.waits()) > 1500
    picture.gantt(tmp_path / "a.svg", {"a": simulation})
    assert (tmp_path / "a.svg").stat().st_size < 200_000
    assert "<image" in (tmp_path / "a.svg").read_text()


def test_launches_without_work_can_be_drawn(tmp_path):
    empty = np.zeros((3, 4), np.uint8)
    picture.gantt(tmp_path / "a.png", {"none": simulate(spt(empty))})
    picture.steps(tmp_path / "b.png", {"none": spt(empty)})
    assert pixels(tmp_path / "a.png", "#ffffff").mean() > 0.8


# ---- colours ------------------------------------------------------------------------------------

# Linear RGB -> what a reader without L, M or S cones sees (Machado et al. 2009, severity 1).
BLIND = {
    "protan": """0.152286 1.052583 -0.204868
                 0.114503 0.786281 0.099216
                 -0.003882 -0.048116 1.051998""",
    "deutan": """0.367322 0.860646 -0.227968
                 0.280085 0.672501 0.047413
                 -0.011820 0.042940 0.968881""",
    "tritan": """1.255528 -0.076749 -0.178779
                 -0.078411 0.930809 0.147602
                 0.004733 0.691367 0.303900""",
}
XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))


def lab(texts: list[str], kind: str) -> np.ndarray:
    """CIE Lab [n, 3] of colours as one kind of reader sees them."""
    srgb = np.array([colour(text) for text in texts]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    if kind != "all":
        recorded = np.array(BLIND[kind].split(), float).reshape(3, 3)
        linear = np.clip(linear @ recorded.T, 0, 1)
    xyz = linear @ np.array(XYZ).T / (0.9505, 1.0, 1.089)
    root = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    x, y, z = root.T
    return np.stack((116 * y - 16, 500 * (x - y), 200 * (y - z)), axis=1)


def least_difference(texts: list[str]) -> float:
    """The least Lab distance of two colours, over all kinds of readers."""
    out = []
    for kind in ("all", *BLIND):
        seen = lab(texts, kind)
        apart = np.linalg.norm(seen[:, None] - seen[None], axis=2)
        out.append(apart[np.triu_indices(len(texts), 1)].min())
    return min(out)


def test_colour_blind_readers_can_tell_heads_waits_and_paper_apart():
    assert least_difference([*picture.HEAD_COLOURS, picture.WAIT, "#ffffff"]) > 9
    assert least_difference(["#d62728", "#2ca02c", "#8c564b"]) < 9, "the check finds red and green"


def test_each_head_has_its_colour():
    for heads in (1, 4, 6, 7, 16, 64):
        out = picture.head_colours(heads)
        assert len(out) == len(set(out)) == heads
        assert picture.WAIT not in out


# ---- the door -----------------------------------------------------------------------------------


def test_bad_input(tmp_path):
    ok = simulate(spt(causal(3)), machine(slots=2))
    big = spt(causal(30))
    table = [
        (lambda: picture.gantt(tmp_path / "a.svg", {}), "panels: expected at least one"),
        (lambda: picture.gantt(tmp_path / "a.bmp", {"a": ok}), "path: expected a file ending in"),
        (lambda: picture.gantt(tmp_path / "svg", {"a": ok}), "path: expected a file ending in"),
        (lambda: picture.gantt(tmp_path / "no" / "a.svg", {"a": ok}), "a folder that exists"),
        (lambda: picture.steps(tmp_path / "a.svg", {"a": big}), "a: expected at most 400 visits"),
        (lambda: picture.steps(tmp_path / "a.svg", {}), "panels: expected at least one"),
        (
            lambda: picture.steps(
                tmp_path / "a.svg",
                {"a": shift(np.full((4, 4), 2, np.uint8))},
                machine=machine(slots=3),
            ),
            "machine.slots: expected at least 4",
        ),
    ]
    (tmp_path / "b.svg").mkdir()
    table.append((lambda: picture.gantt(tmp_path / "b.svg", {"a": ok}), "path: expected a file"))
    for call, message in table:
        with pytest.raises(ScheduleError, match=message):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["b.svg"]


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    simulation = simulate(spt(causal(3)), machine(slots=2))
    with pytest.raises(BackendUnavailable, match=r"cute-kernels\[schedule\]"):
        picture.gantt(tmp_path / "a.svg", {"a": simulation})


def test_matplotlib_is_imported_at_the_first_picture_and_pyplot_never(tmp_path):
    code = (
        "import sys, numpy as np; from cute_kernels.schedulers.report import picture\n"
        "from cute_kernels.schedulers.model import simulation\n"
        "from cute_kernels.schedulers.order import kinds\n"
        "told = simulation.simulate(kinds.spt(np.full((2, 2), 2, np.uint8)))\n"
        "print('matplotlib' in sys.modules)\n"
        "picture.gantt(sys.argv[1], {'a': told})\n"
        "print('matplotlib' in sys.modules, 'matplotlib.pyplot' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.svg")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.split() == ["False", "True", "False"], run.stderr


def test_write_orders_of_each_row_are_drawn_too(tmp_path):
    """Ranks that do not follow the launch: the event loop's schedules."""
    grid = block_grid(np.full((4, 4), 2, np.uint8), None)
    rows = np.stack([np.roll(np.arange(4), step) for step in range(4)])[None]
    schedule = build(grid, np.arange(4)[None], rows, "by_rank")
    picture.steps(tmp_path / "a.svg", {"a": schedule}, machine=machine(slots=4))
    assert (tmp_path / "a.svg").stat().st_size > 4000
