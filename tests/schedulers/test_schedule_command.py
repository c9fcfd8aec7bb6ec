"""``python -m cute_kernels.schedulers``: its numbers are the model's, its errors one line."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import cute_kernels as ck
from cute_kernels.errors import ScheduleError
from cute_kernels.schedulers.__main__ import _MASKS, app, parse_mask
from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.model.bounds import bound
from cute_kernels.schedulers.model.machines import machine
from cute_kernels.schedulers.model.selection import select
from cute_kernels.schedulers.model.simulation import simulate
from cute_kernels.schedulers.order.kinds import spt
from cute_kernels.schedulers.order.schedule import Schedule
from cute_kernels.schedulers.report import picture
from cute_kernels.schedulers.report import rows as report
from cute_kernels.sparse_attn.config import MACHINES, auto
from cute_kernels.sparse_attn.masks import BLOCK

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--seqlen", "1024", "--heads", "4", "--slots", "10"]
CARD = MACHINES[128]
CAUSAL = BlockMask.causal(1024, 1024, block_size=BLOCK)


def run(*options: str):
    return CliRunner().invoke(app, [*options])


def table(output: str) -> dict[tuple[str, str], list[str]]:
    """(kind, heads in flight) -> the other cells of the printed table; no row is there twice."""
    rows = {}
    for line in output.split("Tried:")[0].splitlines():
        cells = re.split(r" {2,}", line.strip())
        if len(cells) == len(report.HEADER) and cells[0] in report.CHOICES:
            assert (cells[0], cells[1]) not in rows, cells
            rows[cells[0], cells[1]] = cells[2:]
    return rows


def lines_of(results) -> str:
    return " ".join(results.stdout.split())


# ---- what it prints -----------------------------------------------------------------------------


def test_the_machine_and_the_blocks_are_those_of_attention_on_the_card():
    results = run("--mask", "sliding_window:1024", "--seqlen", "8192", "--heads", "16")
    assert results.exit_code == 0 and not results.stderr
    rows = table(results.stdout)
    assert {kind for kind, _ in rows} == set(report.CHOICES)
    mask = BlockMask.sliding_window(8192, 8192, left=1024, right=0, block_size=BLOCK)
    simulation = simulate(spt(mask, heads=16, heads_in_flight=4), CARD)
    floor = bound(mask, heads=16, machine=CARD).lower_ns
    assert rows["spt", "4"] == [
        f"{simulation.makespan_ns / 1e3:,.1f}",
        f"{simulation.ratio:.3f}",
        f"{simulation.stall_share:.1%}",
        f"{simulation.makespan_ns / floor:.3f}",
        "any_residency",
    ]
    assert re.fullmatch(r"needs\(\d+\)", rows["symmetric_shift", "4"][-1])
    selection = select(mask, heads=16, machine=CARD)
    assert selection.schedule.hash == auto(mask, 16, 128, "cuda").hash
    assert f"select takes '{selection.schedule.name}'" in lines_of(results)
    for line in str(selection).splitlines():
        assert " ".join(line.split()) in lines_of(results)
    assert max(map(len, results.stdout.splitlines())) <= 80
    flight = str(selection.schedule.heads_in_flight)
    assert rows["select", flight][0] == f"{selection.predicted_ns / 1e3:,.1f}"


TEN = machine(CARD, slots=10)


@pytest.mark.parametrize(
    ("options", "mask", "walk", "told"),
    [
        ("--walk descending", CAUSAL, "descending", TEN),
        ("--block 64x128", CAUSAL.reblock((64, 128)), "ascending", TEN),
        ("--machine h200_d64", CAUSAL, "ascending", machine("h200_d64", slots=10)),
    ],
)
def test_options_reach_the_model(options, mask, walk, told):
    """A kind asked twice is one row."""
    results = run(*SMALL, *shlex.split("--kind spt --kind spt --flight 2"), *shlex.split(options))
    want = simulate(spt(mask, heads=4, heads_in_flight=2, walk=walk), told).makespan_ns
    ((row, cells),) = table(results.stdout).items()
    assert row == ("spt", "2") and cells[0] == f"{want / 1e3:,.1f}"
    if mask is CAUSAL:
        assert want != simulate(spt(CAUSAL, heads=4, heads_in_flight=2), TEN).makespan_ns
    assert "select takes" not in results.stdout


def test_pictures_are_of_what_fits_the_machine(tmp_path, monkeypatch):
    """One head of a full mask: shift is optimal and needs every column resident."""
    recorded = []
    monkeypatch.setattr(picture, "gantt", lambda path, panels, **_: recorded.extend(panels))
    options = shlex.split("--mask full --seqlen 1024 --heads 1 --slots 8 --plot")
    results = run(*options, str(tmp_path / "a.svg"))
    mask = BlockMask.full(1024, 1024, block_size=BLOCK)
    schedule = select(mask, heads=1, machine=machine(CARD, slots=8)).schedule
    assert recorded == [f"select: {schedule.name}, one head at a time"]
    rows = table(results.stdout)
    assert float(rows["shift", "1"][0]) < float(rows["select", "1"][0])
    assert re.search(r"shift, one head at a time is \d+\.\d% faster but needs\(8\)", results.stdout)
    recorded.clear()
    results = run(*SMALL, "--plot", str(tmp_path / "a.svg"), "--compare")
    timed = [cells for cells in table(results.stdout).values() if cells[0] != "-"]
    assert len(recorded) == len(timed) < len(table(results.stdout))


def test_json_is_the_table_and_the_choice():
    results = run(*SMALL, "--json")
    assert results.exit_code == 0 and not results.stderr
    data, rows = json.loads(results.stdout), table(run(*SMALL).stdout)
    assert data["machine"]["name"] == f"{CARD}*" and data["machine"]["slots"] == 10
    assert (data["mask"], data["seqlen"], data["heads"]) == ("causal", 1024, 4)
    assert data["block_size"] == list(BLOCK) and data["blocks"] == 36
    assert len(data["rows"]) == len(rows)
    for row in data["rows"]:
        cells = rows[row["kind"], str(row["heads_in_flight"])]
        needs = row["needs_residents"]
        assert cells[-1].startswith("any_residency" if needs == 1 else f"needs({needs})")
        if row["predicted_ns"] is None:
            assert cells[0] == "-" and row["why_untimed"] and row["over_bound"] is None
        else:
            assert cells[0] == f"{row['predicted_ns'] / 1e3:,.1f}"
            assert cells[1] == f"{row['predicted_ns'] / row['unordered_ns']:.3f}"
            assert cells[2] == f"{row['waiting']:.1%}" and cells[3] == f"{row['over_bound']:.3f}"
    selection = select(CAUSAL, heads=4, machine=TEN)
    assert data["bound_ns"] == selection.bound.lower_ns
    assert data["select"]["hash"] == selection.schedule.hash == data["rows"][-1]["hash"]
    assert data["select"]["predicted_ns"] == selection.predicted_ns
    trials = [(t["kind"], t["walk"], t["predicted_ns"]) for t in data["select"]["trials"]]
    assert trials == [(t.kind, t.walk, t.predicted_ns) for t in selection.trials]
    assert json.loads(run(*SMALL, "--json", "--kind", "lpt").stdout)["select"] is None


def test_the_schedule_that_is_saved_is_read_back(tmp_path):
    """What select takes, which attention takes as its own; without it the fastest of the kinds."""
    results = run(*SMALL, "--save", str(tmp_path / "taken.npz"))
    assert results.exit_code == 0, results.stderr
    again = Schedule.load(tmp_path / "taken.npz")
    selection = select(CAUSAL, heads=4, machine=TEN).schedule
    assert again.hash == selection.hash and again.name == selection.name
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = torch.randn(4, 1, 1024, 4, 64, generator=generator).bfloat16().unbind(0)

    def gradient(schedule):
        leaf = q.clone().requires_grad_()
        out = ck.block_sparse_attention(leaf, k, v, CAUSAL, schedule=schedule)
        return torch.autograd.grad(out, leaf, grad)[0].view(torch.int16)

    assert torch.equal(gradient(again), gradient(selection))
    assert not torch.equal(gradient(again), gradient("left_to_right"))
    options = shlex.split("--kind left_to_right --kind lpt --kind spt --json --mask full --save")
    results = run(*SMALL, *options, str(tmp_path / "taken.npz"))
    rows = json.loads(results.stdout)["rows"]
    fastest = min(rows, key=lambda row: row["predicted_ns"])
    assert len({row["predicted_ns"] for row in rows}) > 1
    assert Schedule.load(tmp_path / "taken.npz").hash == fastest["hash"]


# ---- masks --------------------------------------------------------------------------------------

SIZE = (64, 128)


def test_mask_texts_are_the_constructors():
    size = {"block_size": SIZE}
    causal = BlockMask.causal(2048, 2048, **size)
    ids = torch.zeros(2048, dtype=torch.int64)
    table = {
        "full": BlockMask.full(2048, 2048, **size),
        "causal": causal,
        " causal ": causal,
        "sliding_window:300": BlockMask.sliding_window(2048, 2048, left=300, right=0, **size),
        "sliding_window:300:40": BlockMask.sliding_window(2048, 2048, left=300, right=40, **size),
        "dilated_window:500:3": BlockMask.dilated_window(
            2048, 2048, left=500, right=0, dilation=3, **size
        ),
        "prefix_lm:700": BlockMask.prefix_lm(2048, 2048, prefix=700, **size),
        "document:1": BlockMask.document(ids, **size),
        "random:1": BlockMask.full(2048, 2048, **size),
        "causal & sliding_window:0": BlockMask.sliding_window(2048, 2048, left=0, right=0, **size),
    }
    for text, want in table.items():
        assert parse_mask(text, 2048, SIZE).block_hash() == want.block_hash(), text
    assert {text.strip().split(":")[0].split(" ")[0] for text in table} == set(_MASKS)


# ---- bad input ----------------------------------------------------------------------------------


#: Options, and what the one line of the error begins with.
BAD = {
    "--mask triangle": "--mask: expected one of 'full', 'causal', ",
    "--mask 'causal &'": "--mask: expected one of",
    "--mask sliding_window:-5": "--mask left: expected a whole number of at least 0, got '-5'",
    "--mask sliding_window:wide": "--mask left: expected a whole number",
    "--mask sliding_window": "--mask: expected sliding_window:LEFT[:RIGHT], got sliding_window",
    "--mask causal:3": "--mask: expected causal, got causal:3",
    "--mask dilated_window:64:0": "--mask step: expected a whole number of at least 1",
    "--mask prefix_lm:9999": "--mask prefix: expected 0 <= prefix <= 1024, got 9999",
    "--mask document:1025": "--mask count: expected a whole number of at least 1 and at most 1024",
    "--mask document:2:-1": "--mask seed: expected",
    "--mask random:nan": "--mask share: expected a number from 0 to 1",
    "--seqlen long": "--seqlen: expected a whole number of at least 1, got 'long'",
    "--seqlen 9999999999": "--seqlen: expected a length of at most",
    "--seqlen 65536 --heads 64": "--seqlen, --heads: expected at most",
    "--heads 0": "--heads: expected a whole number",
    "--kind fastest": "--kind: expected one of 'left_to_right', ",
    "--walk sideways": "--walk: expected one of 'ascending', ",
    "--flight 0": "--flight: expected a whole number",
    "--block 64": "--block: expected QxKV, such as 64x128, got '64'",
    "--block 64x": "--block: expected a whole number",
    "--slots 0": "--slots: expected a whole number",
    "--machine b300": "--machine: expected one of 'h200_d128', ",
    "--plot /no/such/folder/a.svg": "--plot: expected a file in a folder that exists",
    "--compare": "--compare: expected --plot FILE",
    "--save a.json": "--save: expected a file ending in .npz in a folder that exists, got a.json",
    "--kind shift --flight 4 --mask full --plot a.svg": "--plot: expected a schedule that fits the",
    "--kind shift --flight 4 --mask full --save a.npz": "--save: expected a schedule that fits the",
}


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line_and_exit_code_2(line):
    results = run(*SMALL, *shlex.split(line))
    assert results.exit_code == 2
    assert not results.stdout or "fits" in BAD[line]
    assert results.stderr.count("\n") == 1 and results.stderr.endswith("\n")
    assert results.stderr.startswith(f"schedule: {BAD[line]}"), results.stderr
    assert len(results.stderr) < 300 and not list(Path().iterdir())


def test_a_path_that_cannot_be_written_is_one_line_too(tmp_path, monkeypatch):
    """The file system says no after the tables are printed."""
    pytest.importorskip("matplotlib")

    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(picture, "gantt", refuse)
    monkeypatch.setattr(Schedule, "save", lambda _, path: refuse(path))
    for option, name in (("--plot", "a.svg"), ("--save", "a.npz")):
        results = run(*SMALL, option, str(tmp_path / name))
        assert results.exit_code == 2 and table(results.stdout)
        assert results.stderr.count("\n") == 1
        assert results.stderr == f"schedule: {option} {tmp_path / name}: Permission denied\n"


# ---- rows ---------------------------------------------------------------------------------------


def test_rows_that_are_not_timed_say_why(monkeypatch):
    full = np.full((8, 8), 2, np.uint8)
    row = report.evaluate(full, "shift", machine=machine(slots=7))
    assert row.simulation is None and row.over_bound is None
    assert report.cells(row)[2:] == ["-", "-", "-", "-", "needs(8): more than 7"]
    monkeypatch.setattr(report, "MAX_STEPPED", 63)
    assert "64 visits" in report.evaluate(full, "shift", machine=machine(slots=8)).why
    assert report.evaluate(full, "spt", machine=machine(slots=8)).simulation


def test_too_much_work_is_refused(monkeypatch):
    mask = BlockMask.full(512, 512, block_size=128)
    with monkeypatch.context() as patch:
        patch.setattr(report, "MAX_VISITS", 2 * 16 * 2)
        assert report.compare(mask, heads=2, kinds=("spt",))
        patch.setattr(report, "MAX_VISITS", 2 * 16 * 2 - 1)
        with pytest.raises(ScheduleError, match="block_mask: expected at most 63 visits"):
            report.compare(mask, heads=2, kinds=("spt",))
