"""Numbers in prose say what the records say: README, support, numerics and the note on GEMM."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from perf.core import record
from perf.core.models import MODELS, model, split
from perf.core.tables import MISSED, by_card
from perf.mhc import page as mhc_page
from perf.model.llama import Size
from perf.probes.questions import MIN_OUTPUTS, QUESTIONS

#: First words of a header in docs/support.md -> the kernel of the records of its times.
TIMED = {
    "device | op | dtype": "gemm",
    "device | forward and gradients": "attention",
    "device | `linear_logp`": "logp",
    "device | `mhc`": "mhc",
    "device | `rms_norm`": "norm",
}


def page(path: str) -> str:
    return (record.ROOT / path).read_text()


@pytest.fixture(scope="module")
def records() -> list[dict]:
    return record.read_all()


@pytest.mark.parametrize("header", TIMED)
def test_support_names_the_cards_that_were_timed(header, records):
    (table,) = [
        part for part in page("docs/support.md").split("\n\n") if part.startswith(f"| {header}")
    ]
    states = [line.strip("|").split("|")[-1].strip() for line in table.splitlines()]
    (state,) = [state for state in states if "timed" in state]
    message = re.search(r"timed on (an H\d+(?: and an H\d+)*)", state)
    matches = re.findall(r"H\d+", message[1]) if message else []
    assert matches == [name for name in MODELS if name in by_card(records, TIMED[header])]


def test_support_has_the_versions_of_the_records(records):
    """Of torch, triton, the DSL, tvm-ffi and the driver: what ran on a card is in the table."""
    table = page("docs/support.md").partition("## Versions")[2]
    on_cards = [r for r in records if r["gpu"] != "none"]
    for name in ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi"):
        row = next(x for x in table.splitlines() if x.startswith(f"| {name} |"))
        versions = {r["versions"][name] for r in on_cards} - {"absent"}
        where = row if name != "nvidia-cutlass-dsl" else table
        assert versions and all(version in where for version in versions), (name, versions)
    (row,) = [x for x in table.splitlines() if x.startswith("| NVIDIA driver |")]
    assert {r["driver"] for r in on_cards} == set(re.findall(r"\d+\.\d+\.\d+", row))


def gap(what: str) -> str:
    """The number of a row of the README's known gaps."""
    rows = page("README.md").partition("## Known gaps")[2].splitlines()
    (row,) = [row for row in rows if row.startswith(f"| {what}")]
    return row.split("|")[2].strip()


def ratios(records, kernel: str, product: str, rival: str, ours: str = "ours") -> list[float]:
    """Ratios of every case on every GPU model that has records of it."""
    out = []
    for bench in by_card(records, kernel).values():
        shapes = {s for _, p, s in bench.records if p == product}
        out += [bench.ratio((product, shape), rival, ours) for shape in shapes]
    return [ratio for ratio in out if ratio is not None]


def test_the_gaps_have_the_numbers_of_the_records(records):
    backward = min(ratios(records, "attention", "bwd", "fa4"))
    assert gap("attention's ordered backward").startswith(f"down to {backward:.2f} of")
    both = ratios(records, "logp", "both", "quack")
    assert gap("`linear_logp`").startswith(f"{min(both):.2f} to {max(both):.2f}:")
    products = [r for p in ("fwd", "dx", "dw") for r in ratios(records, "moe", p, "dense")]
    dense = f"{min(products):.2f} to {max(products):.2f} of a dense"
    assert gap("MoE products, training").startswith(dense)
    decode = ratios(records, "paged_attention", "decode", "cudnn", "page 256")
    assert gap("decode attention").startswith(f"{min(decode):.2f} of cuDNN's speed")
    verdicts = [
        [row[2] for row in mhc_page.target_rows(model_records)]
        for model_records in split(records).values()
    ]
    words = max(map(Counter, verdicts), key=lambda words: words[MISSED])
    assert gap("hyper-connections") == f"{words[MISSED]} of {sum(words.values())} targets missed"
    for card in MODELS:
        host = by_card(records, "model")[card]
        case = ("host rms_norm, grad", "64x2048")
        ours, torchs = (host.get(case, name)["host_us"] for name in ("ours", "torch"))
        assert abs(ours / torchs - float(gap("a norm's call").split()[0])) < 0.15


def test_the_audit_found_nothing_on_either_card(records):
    for card in MODELS:
        audits = [
            r
            for r in records
            if (r.get("kernel"), r.get("product")) == ("model", "audit") and card in r["gpu"]
        ]
        usual = [r for r in audits if r["model"] == Size().label]
        newest = max(usual, key=lambda r: r["date"])
        assert newest["ours"]["differing"] == 0 < newest["torch"]["differing"]


def test_half_of_the_passes_of_linear_logp_take_at_most_ligers_time(records):
    cases = [(name, size) for name in ("fwd", "bwd", "both") for size in ("128k", "152k")]
    for bench in by_card(records, "logp").values():
        ratios = [ratio for case in cases if (ratio := bench.ratio(case, "liger"))]
        assert ratios
        assert sum(round(ratio, 2) >= 1 for ratio in ratios) >= len(ratios) / 2


# ---- numerics and the note on GEMM ---------------------------------------------------------------

#: The pages quote the newest run on this GPU model; of profiles and variants, that of products.
CARD = "H200"
TILES = ("64x128", "128x128", "128x192")  # of the promotion probe


def records_of_card(name: str) -> list[dict]:
    """Records of all runs on `CARD`."""
    lines = (record.RESULTS / f"{name}.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if model(r["gpu"]) == CARD]


def newest(name: str) -> list[dict]:
    """Records of products of the newest run on `CARD`."""
    own = [r for r in records_of_card(name) if r["kernel"] == "gemm"]
    commit = max(own, key=lambda r: r["date"])["commit"]
    return [r for r in own if r["commit"] == commit]


def row(text: str, start: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    assert len(lines) == 1, (start, lines)
    return lines[0]


def answer(probe: str) -> dict:
    out = [r for r in records_of_card("probes") if (r["probe"], r["case"]) == (probe, "answer")]
    return max(out, key=lambda r: r["date"])


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
    ascending = sorted(records_of_card("probes"), key=lambda r: r["date"])
    cases = {r["case"]: r for r in ascending if r["probe"] == "promotion"}
    text = page("docs/numerics.md")
    for period in (4, 8, 16, 32, 64):
        costs = [cases[f"{t}, leaf of {period} groups"]["cost"] for t in TILES]
        start = f"{period} groups | {16 * period} |"
        assert row(text, start).endswith(" | ".join(f"{cost:+.1%}" for cost in costs) + " |")
    rates = [cases[f"{t}, leaf of 0 groups"]["tflops"] for t in TILES]
    assert row(text, "none | all").endswith(" | ".join(f"{r:.0f} TFLOP/s" for r in rates) + " |")


def test_the_note_has_the_measured_variants():
    kept = {(r["system"], r["shape"]): r for r in newest("tune")}
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
