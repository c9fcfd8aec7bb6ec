"""The status page, its plots and the README's table: pure functions of records and certificates."""

from __future__ import annotations

import json
import re

import pytest

from perf import report, show
from perf.core import record
from perf.core.models import MODELS, model
from perf.core.systems import modules
from perf.core.tables import latest
from perf.gemm import targets
from tests.perf.attention.records import every
from tests.perf.gemm.records import bench, forward
from tests.perf.pages import row
from tests.perf.probes.records import probe

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
FORWARD = targets.TARGETS[0].text
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


def test_the_page_does_not_depend_on_the_order_of_the_records():
    some = [*forward(0.97), probe("zeros", verdict="yes", outputs=10**7, differ=0)]
    certificates = [{"name": "gemm_sm90", "ok": True}, {"name": "gemm_sm90", "ok": True}]
    assert report.status(some, certificates) == report.status(some[::-1], certificates[::-1])


def test_without_records_everything_says_not_run():
    text = report.status([], [])
    for page in modules("page"):
        part = section(text, page.TITLE)
        cells = [row(part, text)[1:] for text, *_ in page.target_rows([])]
        assert cells == [["not run"] * len(MODELS)] * len(cells), page.TITLE
        assert "- Records: H100 not run; H200 not run." in part
        assert row(text, f"[{page.TITLE}](#{report._anchor(page.TITLE)})")[1:] == ["not run"] * 2
    assert "plots/" not in text and report.by_speed([]) == {}


def test_a_system_has_targets_next_steps_bits_and_where_they_ran():
    text = report.status([*forward(0.99, qkv=0.89), *every(1.01)], [])
    part = section(text, "`linear` and `matmul`")
    assert row(part, FORWARD)[1:] == ["not run", "0.969x (lowest 0.890x): missed"]
    assert "- Next, of what is missed: `python -m perf profile gemm --shape qkv --prod" in part
    assert "- Bits: H100 not run; H200 kept in 5 of 30 cases." in part
    assert "- Records: H100 not run; H200 `0123456789` of 2026-11-21." in part
    counted = row(text, "[`linear` and `matmul`](#linear-and-matmul)")[1:]
    assert counted == ["not run", "1 missed, 13 not run"]
    assert "- Bits: H100 not run; H200 kept in 56 of 112 cases." in section(text, "Attention")


def test_broken_bits_are_named():
    some = every(1.01)
    some[0]["bitwise"]["repeat"] = False
    broken = f"kept in 55 of 112 cases; broken in {some[0]['product']} {some[0]['shape']}"
    assert broken in section(report.status(some, []), "Attention")


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


def test_a_newer_record_changes_the_page_and_an_older_one_does_not(records):
    """Of one case of each system and card, as `python -m perf bench` would append it."""
    groups = {}
    for page in modules("page"):
        kernels = {row.kernel for row in page.SPEED}
        for item in records:
            if item["kind"] == "bench" and item["kernel"] in kernels and "median_us" in item:
                groups.setdefault((item["kernel"], item["gpu"]), item)
    others = [elsewhere(item, gpu) for (_, gpu), item in groups.items()]
    older = [other | {"date": "2026-01-01"} for other in others]
    base = report.status(records, [])
    changed = report.status([*records, *others], [])
    assert "`ffffffffff` of 2027-01-01" in changed and "`ffffffffff`" not in base
    assert len(groups) > 10
    assert report.status([*records, *older], []) == base


def test_certificates_are_counted():
    certificates = [
        {"name": "gemm_sm90", "ok": True, "registers": 168},
        {"name": "gemm_sm90", "ok": False, "registers": 200},
        {"name": "gemm_column_sum_sm90", "ok": True, "registers": 255},
    ]
    assert "2 of 3 hold" in report.status([], certificates)
    _, rows = show.shown("kernels", [], certificates)
    assert rows[0] == ["gemm_sm90", "2 configurations", "1 of 2, <= 200 registers"]


def test_a_fresh_certificate_report_is_adopted(tmp_path):
    built, adopted = tmp_path / "built.json", tmp_path / "kept" / "certificates.json"
    assert not report.adopt_certificates(adopted, (built,))
    full = [{"name": n, "ok": True, "registers": 9, "opcodes": {"HGMMA": 4}} for n in ("b", "a")]
    built.write_text(json.dumps(full))
    assert report.adopt_certificates(adopted, (tmp_path / "other.json", built))
    assert report.load_certificates(adopted) == [
        {"name": name, "ok": True, "registers": 9} for name in ("a", "b")
    ]
    assert report.load_certificates(tmp_path / "none.json") == []


def test_a_report_of_one_system_leaves_the_others(tmp_path):
    built, kept = tmp_path / "built.json", tmp_path / "certificates.json"

    def adopted(*names: str) -> list[str]:
        built.write_text(json.dumps([{"name": name, "ok": True} for name in names]))
        assert report.adopt_certificates(kept, (built,))
        return [item["name"] for item in report.load_certificates(kept)]

    adopted("gemm_sm90", "norm_fwd", "norm_gone")
    assert adopted("norm_bwd", "norm_fwd") == ["gemm_sm90", "norm_bwd", "norm_fwd"]


def test_plots_are_drawn_from_what_was_timed(tmp_path):
    page = tmp_path / "docs" / "status.md"
    assert report.write([], [], page) == [page]
    some = [*forward(0.97), bench("fwd", "qkv", 512, 50.0, {"cublas": 49.0})]
    _, drawn = report.write(some, [], page)
    assert drawn.name == "speed_h200.svg" and f"plots/{drawn.name}" in page.read_text()
    first = drawn.read_bytes()
    report.write(some, [], page)
    assert b"<svg" in first and drawn.read_bytes() == first


def test_the_status_page_is_up_to_date(records):
    text = report.status(records, report.load_certificates())
    assert report.STATUS.read_text() == text, "run `python -m perf report`"
    shown = re.findall(r"\(plots/(\w+\.svg)\)", text)
    assert shown and all((report.STATUS.parent / "plots" / name).is_file() for name in shown)


def test_show_has_the_newest_record_of_each_case(records):
    old = bench("dx", "qkv", 512, 100.0, {"cublas": 70.0})
    new = bench("dx", "qkv", 512, 100.0, {"cublas": 98.0}, dirty=True)
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
