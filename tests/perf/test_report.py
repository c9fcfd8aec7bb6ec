"""The status pages: a pure function of records and certificates."""

from __future__ import annotations

import json
import re

from perf import report, verdict
from perf.core import record
from tests.perf.gemm.records import bench, forward
from tests.perf.pages import facts, made, row
from tests.perf.probes.records import probe


def test_the_pages_do_not_depend_on_the_order_of_the_records():
    records = [*forward(0.97), probe("zeros", verdict="yes", outputs=10**7, differ=0)]
    certificates = [{"name": "gemm_sm90", "ok": True}, {"name": "gemm_sm90", "ok": True}]
    pages = report.pages(records, certificates)
    assert pages == report.pages(records[::-1], certificates[::-1])


def test_certificates_fill_compiled_and_certified():
    certificates = [
        {"name": "gemm_sm90", "ok": True, "registers": 168},
        {"name": "gemm_sm90", "ok": False, "registers": 200},
        {"name": "gemm_column_sum_sm90", "ok": True, "registers": 255},
    ]
    page = report.pages([], certificates)["status/kernels.md"]
    assert row(page, "`gemm_sm90`")[1:] == ["2 configurations", "1 of 2, <= 200 registers"]
    assert row(page, "`sparse_attn_fwd_sm90`")[1:] == ["not run", "not run"]
    assert verdict.certified(certificates) == "2 of 3 hold"
    assert "2 of 3 hold" in report.pages([], certificates)["status.md"]


def test_profiles_have_a_table_of_their_own():
    item = probe("-", kind="profile", kernel="gemm", system="ours", product="fwd", shape="a/b")
    item |= {"floor_fraction": 0.8, "bytes_over_least": 1.25}
    item["stalls"] = [{"reason": "long_scoreboard", "warps": 1.5}]
    assert "## Profiles" not in made("gemm") + made("norm", item)
    out = facts(made("gemm", item), "## Profiles", "fwd", "a b")
    assert (out["of floor"], out["traffic"]) == ("80%", "1.25x")
    assert (out["system"], out["top stalls"]) == ("ours", "long scoreboard 1.50")


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
    assert report.draw([], tmp_path) == []
    assert not any("plots/" in page for page in report.pages([], []).values())
    records = [*forward(0.97), bench("fwd", "qkv", 512, 50.0, {"cublas": 49.0})]
    drawn = report.draw(records, tmp_path)
    assert [path.name for path in drawn] == [
        "gemm_ratio_h200.svg",
        "gemm_ratio_h200.png",
        "gemm_sweep_h200.svg",
        "gemm_sweep_h200.png",
    ]
    page = made("gemm", *records)
    assert all(f"plots/{path.name}" in page for path in drawn if path.suffix == ".svg")
    first = drawn[0].read_bytes()
    assert b"<svg" in first and drawn[1].read_bytes().startswith(b"\x89PNG")
    report.draw(records, tmp_path)
    assert drawn[0].read_bytes() == first


def test_the_status_pages_are_up_to_date():
    """The pages, and no others in their folder, and no plots of records that are gone."""
    pages = report.pages(record.read_all(), report.load_certificates())
    docs = report.STATUS.parent
    written = [report.STATUS, *sorted((docs / "status").iterdir())]
    assert sorted(pages) == sorted(path.relative_to(docs).as_posix() for path in written)
    for name, text in pages.items():
        assert (docs / name).read_text() == text, f"{name}: run `python -m perf report`"


def test_every_plot_of_the_pages_is_drawn(tmp_path):
    records = record.read_all()
    drawn = {path.name for path in report.draw(records, tmp_path) if path.suffix == ".svg"}
    pages = report.pages(records, [])
    shown = [name for text in pages.values() for name in re.findall(r"\.\./plots/([\w.]+)", text)]
    assert sorted(shown) == sorted(drawn) and drawn
    assert drawn <= {path.name for path in (report.STATUS.parent / "plots").iterdir()}
