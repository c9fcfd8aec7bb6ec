"""Numbers in prose: docs/numerics.md and the GEMM note say what the records say."""

from __future__ import annotations

import json
import re

import pytest

from perf.core import record
from perf.core.models import model
from perf.probes.questions import MIN_OUTPUTS, QUESTIONS

#: The pages quote the newest run on this GPU model; of profiles and variants, that of products.
CARD = "H200"
TILES = ("64x128", "128x128", "128x192")  # of the promotion probe


def page(path: str) -> str:
    return (record.ROOT / path).read_text()


def records(name: str) -> list[dict]:
    """The records of the newest run."""
    lines = (record.RESULTS / f"{name}.jsonl").read_text().splitlines()
    own = [r for r in map(json.loads, lines) if model(r["gpu"]) == CARD]
    own = [r for r in own if name == "probes" or r["kernel"] == "gemm"]
    newest = max(own, key=lambda r: r["date"])["commit"]
    return [r for r in own if r["commit"] == newest]


def row(text: str, start: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    assert len(lines) == 1, (start, lines)
    return lines[0]


def answer(probe: str) -> dict:
    out = [r for r in records("probes") if r["probe"] == probe and r["case"] == "answer"]
    assert len(out) == 1
    return out[0]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.probe)
def test_numerics_counts_what_the_probes_counted(question):
    out = answer(question.probe)
    assert out["outputs"] >= MIN_OUTPUTS
    cells = row(page("docs/numerics.md"), f"{question.number}. ")
    assert f"{out['differ']:,} of {out['outputs']:,}" in cells
    extreme = out.get("extreme")
    if extreme and question.number != 2:
        assert f"operands: {extreme['differ']:,} of {extreme['outputs']:,}" in cells
    if question.number == 2:
        assert out["differ"] == out["zero_sign"] and extreme["differ"] == 0


def test_numerics_has_the_cost_of_every_leaf():
    cases = {r["case"]: r for r in records("probes") if r["probe"] == "promotion"}
    text = page("docs/numerics.md")
    for period in (4, 8, 16, 32, 64):
        costs = [cases[f"{t}, leaf of {period} groups"]["cost"] for t in TILES]
        start = f"{period} groups | {16 * period} |"
        assert row(text, start).endswith(" | ".join(f"{cost:+.1%}" for cost in costs) + " |")
    rates = [cases[f"{t}, leaf of 0 groups"]["tflops"] for t in TILES]
    assert row(text, "none | all").endswith(" | ".join(f"{r:.0f} TFLOP/s" for r in rates) + " |")


def test_the_note_has_the_measured_variants():
    kept = {(r["system"], r["shape"]): r for r in records("tune")}
    text = page("docs/notes/gemm_sm90.md")
    shapes = ("qkv", "mlp_down")
    base = [kept["ours[]", shape]["median_us"] for shape in shapes]
    assert row(text, "shipped").endswith("| " + " | ".join(f"{us:.1f} us" for us in base) + " |")
    assert all(r["bits_of_shipped"] for r in kept.values() if r["system"] != "cublas")
    for system in sorted({name for name, _ in kept} - {"ours[]"}):
        more = [kept[system, s]["median_us"] / us - 1 for s, us in zip(shapes, base, strict=True)]
        name = "cuBLAS" if system == "cublas" else f"`{system[5:-1]}`"
        assert row(text, f"{name} |").endswith(" | ".join(f"{x:+.1%}" for x in more) + " |")


def test_numerics_has_the_shares_that_the_checks_found():
    """Of our forward: the newest check of each shape, none with an output beyond its bound."""
    checks = {r["shape"]: r for r in record.read(record.RESULTS / "bench.jsonl") if ours_forward(r)}
    assert all(item["check"]["beyond_bound"] == 0 for item in checks.values())
    share = {item["k"]: item["check"]["misround"] for item in checks.values()}
    (part,) = [x for x in page("docs/numerics.md").split("\n\n") if "checks.jsonl" in x]
    numbers = dict(re.findall(r"([\d.]+%)[^%]*?K = (\d+)", part))
    assert numbers == {f"{share[k]:.2%}": str(k) for k in (4096, 14336)}


def ours_forward(item: dict) -> bool:
    key = item["kind"], item["kernel"], item["system"], item["product"], model(item["gpu"])
    return key == ("bench", "gemm", "ours", "fwd", CARD) and "check" in item
