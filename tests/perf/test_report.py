"""The status page: a pure function of records and certificates."""

from __future__ import annotations

import json
import re

import pytest

from perf import report
from perf.core import record
from perf.gemm import targets
from perf.probes.questions import QUESTIONS

PROFILE = "`python -m perf profile gemm --shape"


def bench(product: str, shape: str, m: int, us: float, rivals: dict[str, float], **more) -> dict:
    item = {
        "schema": record.SCHEMA,
        "kind": "bench",
        "kernel": "gemm",
        "system": "ours",
        "product": product,
        "shape": targets.label(shape, m),
        "dtype": "bf16",
        "status": "ok",
        "commit": "0123456789abcdef",
        "dirty": False,
        "date": "2026-11-21T10:00:00+00:00",
        "gpu": "NVIDIA H200",
        "median_us": us,
        "tflops": 700.0,
        "floor_fraction": 0.9,
        "bitwise": {"repeat": True, "splits" if product == "dw" else "rows": True},
        "ratio": {name: other / us for name, other in rivals.items()},
    }
    return item | more


def forward(ratio: float, **more) -> list[dict]:
    """The five shapes, ours at `ratio` of cuBLAS's throughput; `more` maps a shape to another."""
    rows = []
    for shape, (m, _, _) in targets.SHAPES.items():
        share = more.get(shape, ratio)
        rows.append(bench("fwd", shape, m, 100.0, {"cublas": 100.0 * share}))
    return rows


def row(page: str, *start: str) -> list[str]:
    """The cells of the one row that begins with these cells."""
    head = "| " + " | ".join(start) + " |"
    found = [line for line in page.splitlines() if line.startswith(head)]
    assert len(found) == 1, (start, found)
    return [cell.strip() for cell in found[0].strip("|").split("|")]


def facts(page: str, heading: str, *start: str) -> dict[str, str]:
    """Column -> cell of the one row below a heading that begins so, and what every row has."""
    part = re.split(r"\n#+ ", page.split(f"{heading}\n", 1)[1])[0]
    (shared,) = re.findall(r"^Every row: (.*)\.$", part, re.M) or [""]
    said = dict(text.split(": ", 1) for text in shared.split("; ") if text)
    head = next(line for line in part.splitlines() if line.startswith("| "))
    names = [cell.strip() for cell in head.strip("|").split("|")]
    return dict(zip(names, row(part, *start), strict=True)) | said


def rates(page: str, product: str, shape: str) -> dict[str, str]:
    return facts(page, "## linear and matmul", product, shape)


def probe(name: str, **more) -> dict:
    item = {"schema": record.SCHEMA, "kind": "probe", "probe": name, "case": "answer"}
    item |= {"commit": "fedcba9876543210", "dirty": True, "date": "2026-11-21T11:00:00+00:00"}
    return item | {"gpu": "NVIDIA H200"} | more


def test_without_records_every_row_says_not_run():
    page = report.render([], [])
    assert len(targets.cases()) == 30
    for product, name, m in targets.cases():
        case = (product, targets.label(name, m))
        found = rates(page, *case)
        assert found.pop("next step").startswith("`python -m perf bench gemm")
        assert (found.pop("product"), found.pop("shape")) == case
        assert len(found) == 4 and set(found.values()) == {"not run"}
        ratios = list(facts(page, "### Rivals", *case).values())[2:]
        assert ratios == ["not run"] * len(targets.RIVAL_TEXT)
    for target in targets.TARGETS:
        assert row(page, target.text)[1:3] == ["not run", "not run"]
        assert row(page, target.text)[3].startswith("`python -m perf bench gemm`")
    for question in QUESTIONS:
        assert row(page, f"{question.number}. {question.text}")[1] == "not run"


def test_the_page_does_not_depend_on_the_order_of_the_records():
    records = [*forward(0.97), probe("zeros", verdict="yes", outputs=10**7, differ=0)]
    certificates = [{"name": "gemm_sm90", "ok": True}, {"name": "gemm_sm90", "ok": True}]
    page = report.render(records, certificates)
    assert page == report.render(records[::-1], certificates[::-1])


def test_a_record_fills_its_row_and_the_latest_counts():
    old = bench("dx", "qkv", 512, 100.0, {"cublas": 70.0})
    new = bench("dx", "qkv", 512, 100.0, {"cublas": 98.0}, dirty=True)
    new["date"] = "2026-11-22T10:00:00+00:00"
    page = report.render([new, old], [])
    found, ratios = rates(page, "dx", "qkv/m512"), facts(page, "### Rivals", "dx", "qkv/m512")
    assert found["ran on"] == "NVIDIA H200, 0123456789+, 2026-11-22"
    assert (found["TFLOP/s"], found["of floor"]) == ("700", "90%")
    assert (ratios["cuBLAS"], ratios["quack"]) == ("0.98x", "not run")
    assert (found["bits"], found["next step"]) == ("same", "none")
    old_only = rates(report.render([old], []), "dx", "qkv/m512")
    assert old_only["next step"] == "`python -m perf profile gemm --shape qkv --product dx`"


def test_a_check_does_not_hide_a_time_but_a_failure_does():
    timed = bench("fwd", "qkv", 4096, 100.0, {"cublas": 98.0})
    later = {"date": "2026-11-23T10:00:00+00:00"}
    checked = {
        k: v for k, v in (timed | later).items() if k not in ("median_us", "ratio", "tflops")
    }
    page = report.render([timed, checked], [])
    assert facts(page, "### Rivals", "fwd", "qkv")["cuBLAS"] == "0.98x"
    failed = checked | {"status": "failed", "why": "the result is wrong"}
    found = rates(report.render([timed, failed], []), "fwd", "qkv")
    assert found["ran on"].startswith("failed NVIDIA H200")
    assert found["next step"] == "fix: the result is wrong"


def test_differing_bits_are_the_next_step():
    item = bench("fwd", "qkv", 4096, 100.0, {"cublas": 120.0})
    item["bitwise"]["rows"] = False
    page = report.render([item], [])
    found = rates(page, "fwd", "qkv")
    assert (found["bits"], found["next step"]) == ("differ: rows", "fix the bits")
    said = row(page, "[bits of `linear` and `matmul`](#linear-and-matmul)")[1]
    assert said == "kept in 0 of 30 cases; broken in fwd qkv"


@pytest.mark.parametrize(
    ("records", "measured", "verdict", "step"),
    [
        (forward(0.96), "0.960x (lowest 0.960x)", "held", "none"),
        (forward(0.94, lm_head=0.93), "0.938x (lowest 0.930x)", "missed", f"{PROFILE} lm_head"),
        (forward(0.99, qkv=0.89), "0.969x (lowest 0.890x)", "missed", f"{PROFILE} qkv"),
        (forward(0.96)[:3], "not run (3 of 5 shapes)", "not run", "`python -m perf bench gemm`"),
    ],
)
def test_a_target_needs_all_five_shapes_the_mean_and_each(records, measured, verdict, step):
    cells = row(report.render(records, []), targets.TARGETS[0].text)
    assert cells[1:3] == [measured, verdict]
    assert cells[3].startswith(step)


def test_a_miss_at_the_floor_is_the_rivals():
    """Ours within a tenth of the floor, the rival at half of it: 2.3x is out of reach."""
    target = targets.TARGETS[1]
    records = []
    for shape, (m, _, _) in targets.SHAPES.items():
        records.append(bench("fwd", shape, m, 100.0, {target.rival: 184.0}))
        rate = {"system": target.rival, "tflops": 443.0 if shape == "qkv" else 424.0}
        records.append(bench("fwd", shape, m, 184.0, {}, **rate))
    cells = row(report.render(records, []), target.text)
    assert cells[2] == "missed"
    assert cells[3] == (
        "none: ours is at 90% of the floor or above, the rival runs at 424 to 443 TFLOP/s"
    )
    for item in records:
        item["floor_fraction"] = 0.89
    assert row(report.render(records, []), target.text)[3].startswith(PROFILE)


def test_host_targets_read_the_worst_cost():
    slow = bench("fwd", "qkv", 4096, 1.0, {}, host_us={"grad": 14.0, "inference": 9.0})
    page = report.render([slow], [])
    grad, inference = (f"host time of one forward call, {mode}" for mode in ("grad", "inference"))
    assert row(page, f"{grad}: <= 15 us")[1:] == ["14.0 us", "held", "none"]
    assert row(page, f"{inference}: <= 8 us")[1:] == ["9.0 us", "missed", targets.HOST_NEXT]
    torchs = bench("fwd", "qkv", 4096, 1.0, {}, system="cublas", host_us={"inference": 11.6})
    cells = row(report.render([slow, torchs], []), f"{inference}: <= 8 us")
    assert cells[1] == "9.0 us (`torch.mm`: 11.6 us)"


def test_certificates_fill_compiled_and_certified():
    certificates = [
        {"name": "gemm_sm90", "ok": True, "registers": 168},
        {"name": "gemm_sm90", "ok": False, "registers": 200},
        {"name": "gemm_column_sum_sm90", "ok": True, "registers": 255},
    ]
    page = report.render([], certificates)
    assert row(page, "`gemm_sm90`")[1:] == ["2 configurations", "1 of 2, <= 200 registers"]
    assert row(page, "`sparse_attn_fwd_sm90`")[1:] == ["not run", "not run"]
    assert row(page, "[certificates](certificate.md) of the compiled kernels")[1] == "2 of 3 hold"


def test_an_answer_needs_enough_outputs_and_tells_extremes_apart():
    few = probe("width", verdict="yes", outputs=1000, differ=0)
    question = QUESTIONS[0]
    text = f"{question.number}. {question.text}"
    assert "too few outputs" in row(report.render([few], []), text)[1]
    extreme = {"verdict": "no"}
    full = probe("width", verdict="yes", outputs=2 * 10**7, differ=0, extreme=extreme)
    found = facts(report.render([few, full], []), "## Questions for the hardware", text)
    assert found["answer"] == (
        "yes (0 of 20,000,000 outputs differ); subnormal and overflowing operands: no"
    )
    assert found["ran on"] == "NVIDIA H200, fedcba9876+, 2026-11-21"
    step = "the rule for those operands, then `python -m perf probe width`"
    assert found["next step"] == step
    known = probe("width", verdict="yes", outputs=2 * 10**7, differ=0, extreme={"verdict": "yes"})
    assert row(report.render([known], []), text)[-1] == "none"
    failed = probe("width", verdict="failed", why="RuntimeError: boom")
    assert row(report.render([failed], []), text)[1] == "failed: RuntimeError: boom"


def test_promotion_costs_are_listed_by_period():
    item = probe("promotion", verdict="yes", outputs=10**7, differ=0, costs={"16": 0.02, "4": 0.25})
    question = QUESTIONS[3]
    cells = row(report.render([item], []), f"{question.number}. {question.text}")
    assert cells[1].endswith("leaf of 4 groups +25.0%, leaf of 16 groups +2.0%")


def test_absent_rivals_are_listed():
    item = bench("fwd", "qkv", 4096, 1.0, {}, system="quack", status="absent", why="no quack")
    assert "- quack: no quack" in report.render([item], [])


def test_profiles_have_a_table_of_their_own():
    item = probe("-", kind="profile", system="ours", product="fwd", shape="qkv")
    item |= {"floor_fraction": 0.8, "bytes_over_least": 1.25}
    item["stalls"] = [{"reason": "gmma", "warps": 1.5}]
    assert "## Profiles" not in report.render([], [])
    found = facts(report.render([item], []), "## Profiles", "fwd", "qkv")
    assert (found["of floor"], found["traffic"]) == ("80%", "1.25x")
    assert (found["system"], found["top stalls"]) == ("ours", "gmma 1.50")


def test_a_fresh_certificate_report_is_adopted(tmp_path):
    built, kept = tmp_path / "built.json", tmp_path / "kept" / "certificates.json"
    assert not report.adopt_certificates(kept, (built,))
    full = [{"name": n, "ok": True, "registers": 9, "opcodes": {"HGMMA": 4}} for n in ("b", "a")]
    built.write_text(json.dumps(full))
    assert report.adopt_certificates(kept, (tmp_path / "other.json", built))
    assert report.load_certificates(kept) == [
        {"name": name, "ok": True, "registers": 9} for name in ("a", "b")
    ]
    assert report.load_certificates(tmp_path / "none.json") == []


def test_plots_are_drawn_from_what_was_timed(tmp_path):
    assert report.draw([], tmp_path) == []
    assert "plots/" not in report.render([], [])
    records = [*forward(0.97), bench("fwd", "qkv", 512, 50.0, {"cublas": 49.0})]
    drawn = report.draw(records, tmp_path)
    assert [path.name for path in drawn] == [
        "gemm_ratio.svg",
        "gemm_ratio.png",
        "gemm_sweep.svg",
        "gemm_sweep.png",
    ]
    page = report.render(records, [])
    assert all(f"plots/{path.name}" in page for path in drawn if path.suffix == ".svg")
    first = drawn[0].read_bytes()
    assert b"<svg" in first and drawn[1].read_bytes().startswith(b"\x89PNG")
    report.draw(records, tmp_path)
    assert drawn[0].read_bytes() == first


@pytest.mark.skipif(not report.STATUS.is_file(), reason="docs/status.md is not written yet")
def test_the_status_page_is_up_to_date():
    page = report.render(record.read_all(), report.load_certificates())
    assert report.STATUS.read_text() == page, "run `python -m perf report`"
