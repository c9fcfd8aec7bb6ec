"""The status page, its plots and the README's table: pure functions of records and certificates."""

from __future__ import annotations

import json
import re

import pytest

from perf import headline, report, show
from perf.core import record
from perf.core.models import MODELS, model
from perf.core.systems import modules
from perf.core.tables import latest
from tests.perf.records import H100, H200, every_attention, forward, gemm

LATER = {"date": "2027-01-01T00:00:00+00:00", "commit": "f" * 40}


@pytest.fixture(scope="module")
def records() -> list[dict]:
    return record.read_all()


def section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def elsewhere(item: dict, gpu: str = H100) -> dict:
    """A newer record of the same case on another card, with other numbers."""
    changed = {k: 1.37 * v for k, v in item.items() if isinstance(v, float) and v}
    if "ratio" in item:
        changed["ratio"] = {name: 0.613 * value for name, value in item["ratio"].items()}
    return item | changed | LATER | {"gpu": gpu}


def row(text: str, *start: str) -> list[str]:
    """The cells of the one row of a Markdown text that begins with these cells."""
    head = "| " + " | ".join(start) + " |"
    (line,) = [line for line in text.splitlines() if line.startswith(head)]
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_without_records_everything_says_not_run():
    text = report.status([], [])
    for page in modules("page"):
        part = section(text, page.TITLE)
        cells = [row(part, text)[1:] for text, *_ in page.target_rows([])]
        assert cells == [["not run"] * len(MODELS)] * len(cells), page.TITLE
        assert "- Records: H100 not run; H200 not run." in part
        assert row(text, f"[{page.TITLE}](#{report._anchor(page.TITLE)})")[1:] == ["not run"] * 2
    assert "plots/" not in text and report.by_speed({}) == {}


def test_a_system_has_targets_bits_and_where_they_ran_in_any_order_of_records():
    some = [*forward(0.99, qkv=0.89), *every_attention(1.01)]
    text = report.status(some, [])
    assert report.status(some[::-1], []) == text
    part = section(text, "`linear` and `matmul`")
    assert "0.969x (lowest 0.890x): missed" in part
    assert "- Bits: H100 not run; H200 kept in 5 of 30 cases." in part
    assert "- Records: H100 not run; H200 `0123456789` of 2026-11-21." in part
    counted = row(text, "[`linear` and `matmul`](#linear-and-matmul)")[1:]
    assert counted == ["not run", "1 missed, 13 not run"]


def test_records_of_two_cards_are_refused_together(records):
    one = next(r for r in records if r["kind"] == "bench" and r["kernel"] == "gemm")
    with pytest.raises(ValueError, match="expected one GPU model, got H100, H200"):
        latest([one | {"gpu": H200}, one | {"gpu": H100}], "gemm")


def test_a_newer_record_of_one_card_leaves_the_other_alone(records):
    """The column of a card is that of its records alone."""
    own = [r for r in records if model(r["gpu"]) == "H200"]
    both = report.status([*own, *map(elsewhere, own)], [])
    alone = report.status(own, [])
    lines = [line for line in alone.splitlines() if line.startswith("| ") and " | " in line]
    compared = 0
    for line in lines:
        first, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
        if len(cells) == len(MODELS) and cells[0] in ("not run", "-") and f"| {first} |" in both:
            same = [x for x in both.splitlines() if x.startswith(f"| {first} |")]
            compared += any(x.strip("| ").endswith(cells[1]) for x in same)
            assert any(x.strip("| ").endswith(cells[1]) for x in same), line
    assert compared > 50 and both != alone


def test_certificates_are_counted():
    names = {"gemm_sm90": 168, "gemm_column_sum_sm90": 255}
    certificates = [{"name": name, "ok": True, "registers": n} for name, n in names.items()]
    certificates.append({"name": "gemm_sm90", "ok": False, "registers": 200})
    assert "2 of 3 hold" in report.status([], certificates)
    _, rows = show.shown("kernels", [], certificates)
    assert rows[0] == ["gemm_sm90", "2 configurations", "1 of 2, <= 200 registers"]


def test_a_fresh_certificate_report_is_adopted_and_leaves_other_systems(tmp_path):
    built, kept = tmp_path / "built.json", tmp_path / "kept" / "certificates.json"
    assert not report.adopt_certificates(kept, (built,)) and report.load_certificates(kept) == []

    def adopted(*names: str) -> list[dict]:
        built.write_text(json.dumps([{"name": n, "ok": True, "opcodes": {}} for n in names]))
        assert report.adopt_certificates(kept, (tmp_path / "other.json", built))
        return report.load_certificates(kept)

    assert adopted("norm_fwd", "gemm_sm90", "norm_gone")[0] == {"name": "gemm_sm90", "ok": True}
    names = [item["name"] for item in adopted("norm_bwd", "norm_fwd")]
    assert names == ["gemm_sm90", "norm_bwd", "norm_fwd"]


def test_plots_are_drawn_from_what_was_timed(tmp_path):
    page = tmp_path / "docs" / "status.md"
    assert report.write([], [], page, {}) == [page]
    some = [*forward(0.97), gemm("fwd", "qkv", 512, 50.0, {"cublas": 49.0})]
    _, drawn = report.write(some, [], page, {"H200": some})
    assert drawn.name == "speed_h200.svg" and f"plots/{drawn.name}" in page.read_text()
    first = drawn.read_bytes()
    report.write(some, [], page, {"H200": some})
    assert b"<svg" in first and drawn.read_bytes() == first


def test_the_status_page_is_up_to_date(records):
    text = report.status(records, report.load_certificates(), headline.runs())
    assert report.STATUS.read_text() == text, "run `python -m perf report`"
    shown = re.findall(r"\(plots/(\w+\.svg)\)", text)
    assert shown and all((report.STATUS.parent / "plots" / name).is_file() for name in shown)


def test_show_has_the_newest_record_of_each_case(records):
    old = gemm("dx", "qkv", 512, 100.0, {"cublas": 70.0})
    new = gemm("dx", "qkv", 512, 100.0, {"cublas": 98.0}, dirty=True)
    new |= {"date": "2026-11-22T10:00:00+00:00"}
    _, rows = show.cases([new, old], "gemm")
    (cells,) = rows
    assert cells[:3] == ["dx", "qkv/m512", "ours"]
    assert cells[3:6] == ["100.0", "700 TFLOP/s, 90% of the floor", "cublas 0.98x"]
    assert cells[6:] == ["same", "NVIDIA H200, 0123456789+, 2026-11-22"]
    for kernel in show.kernels_of(records):
        head, rows = show.shown(kernel, records, [])
        assert rows and {len(cells) for cells in rows} == {len(head)}
        own = show.shown(kernel, records, [], gpu="H200")[1]
        assert all("H200" in cells[-1] or "not run" in cells[-1] for cells in own)
