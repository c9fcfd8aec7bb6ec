"""Claims of README, docs/support.md, docs/index.md and docs/guarantees.md against the records."""

from __future__ import annotations

import re

import pytest

from perf import cards
from perf.core import record
from perf.core.models import MODELS
from perf.core.tables import NOT_RUN, by_card, latest
from perf.gemm import targets
from perf.gemm.page import geomean
from perf.model.llama import Size

#: First words of a header in docs/support.md -> rows of `cards.render` for its times.
TIMED = {
    "device | op | dtype": "`linear`, `matmul`: products timed",
    "device | forward and gradients": "attention: passes timed",
    "device | `linear_logp`": "`linear_logp`: passes timed",
    "device | `mhc`": "mHC: ops and sites timed",
    "device | `rms_norm`": "norms timed",
}


def text(path: str) -> str:
    return " ".join((record.ROOT / path).read_text().split())


@pytest.fixture(scope="module")
def records() -> list[dict]:
    return record.read_all()


@pytest.fixture(scope="module")
def ran(records) -> dict[str, dict[str, str]]:
    """Row of what ran where -> GPU model -> cell."""
    head, _, *rows = cards.render(records)
    names = [cell.strip() for cell in head.strip("|").split("|")][1:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {first: dict(zip(names, rest, strict=True)) for first, *rest in cells}


@pytest.mark.parametrize("header", TIMED)
def test_support_names_the_cards_that_were_timed(header, ran):
    page = (record.ROOT / "docs" / "support.md").read_text()
    (table,) = [part for part in page.split("\n\n") if part.startswith(f"| {header}")]
    states = [line.strip("|").split("|")[-1].strip() for line in table.splitlines()]
    (state,) = [state for state in states if "timed" in state]
    said = re.search(r"timed on (an H\d+(?: and an H\d+)*)", state)
    found = re.findall(r"H\d+", said[1]) if said else []
    assert found == [name for name in MODELS if ran[TIMED[header]][name] != NOT_RUN]


def test_support_has_the_versions_of_the_records(records):
    """Of torch, triton, the DSL, tvm-ffi and the driver: what ran on a card is in the table."""
    page = (record.ROOT / "docs" / "support.md").read_text().partition("## Versions")[2]
    on_cards = [r for r in records if r["gpu"] != "none"]
    for name in ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi"):
        row = next(x for x in page.splitlines() if x.startswith(f"| {name} |"))
        versions = {r["versions"][name] for r in on_cards} - {"absent"}
        where = row if name != "nvidia-cutlass-dsl" else page
        assert versions and all(version in where for version in versions), (name, versions)
    (row,) = [x for x in page.splitlines() if x.startswith("| NVIDIA driver |")]
    assert {r["driver"] for r in on_cards} == set(re.findall(r"\d+\.\d+\.\d+", row))


def test_the_records_have_the_cards_that_the_readme_names(ran):
    assert all(ran["steps of a whole model timed"][name] != NOT_RUN for name in MODELS)
    assert all(ran["norms timed"][name] != NOT_RUN for name in MODELS)
    single = [row for row in TIMED.values() if row != "norms timed"]
    assert all(ran[row]["H100"] == NOT_RUN for row in single)


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


def test_the_readmes_share_of_the_copy_is_that_of_decoding(records):
    bench = latest(records, "logp")
    shares = [
        one["of_copy"]
        for (system, _, shape), one in bench.records.items()
        if system == "ours" and "/t" in shape and "of_copy" in one
    ]
    claim = f"reads the head at {100 * min(shares):.0f} to {100 * max(shares):.0f}% of the copy"
    assert len(shares) == 10 and claim in text("README.md")


def test_most_passes_of_linear_logp_take_at_most_ligers_time(records):
    bench = latest(records, "logp")
    cases = [(name, size) for name in ("fwd", "bwd", "both") for size in ("128k", "152k")]
    ratios = [bench.ratio(case, "liger") for case in cases]
    assert sum(round(ratio, 2) >= 1 for ratio in ratios) > len(ratios) / 2


def test_the_readme_names_the_norms_that_rivals_do_faster(records):
    """Liger's and quack's forward of rms_norm, and quack's backward with a residual."""
    bench = by_card(records, "norm")

    def faster(card: str, product: str, sizes: tuple[str, ...]) -> list[float]:
        ratios = [bench[card].ratio((product, s), r) for s in sizes for r in ("liger", "quack")]
        return [1 - ratio for ratio in ratios if ratio is not None]

    narrow = [x for card in MODELS for x in faster(card, "rms_norm fwd", ("262144x128",))]
    wide = faster("H200", "rms_norm fwd", ("4096x7168", "16384x8192"))
    page = text("README.md")
    span = f"at 128 columns, by {100 * min(narrow):.0f} to {100 * max(narrow):.0f}%"
    assert span in page
    assert f"at 7168 and more, by {100 * min(wide):.0f} to {100 * max(wide):.0f}%" in page
    assert all(share < 0.005 for share in faster("H100", "rms_norm fwd", ("4096x7168",)))
    case = ("add_rms_norm bwd", "16384x8192")
    assert bench["H100"].ratio(case, "quack") < 1 < bench["H200"].ratio(case, "quack")


def test_the_readme_names_the_products_that_rivals_do_faster(records):
    bench = latest(records, "gemm")
    starved = geomean([bench.ratio(("fwd", shape), "cublas_starved") for shape in targets.SHAPES])
    assert f"was {100 * (1 - starved):.0f}% faster forward" in text("README.md")
    assert all(bench.ratio(("dw", shape), "quack_untuned") < 1 for shape in targets.SHAPES)


def rivals_of_attention() -> list[list[str]]:
    """The rows of docs/status.md, which a test compares with the records."""
    page = (record.ROOT / "docs" / "status.md").read_text().replace("\N{NO-BREAK SPACE}", " ")
    part = page.partition("### Rivals of attention\n")[2].partition("\n###")[0]
    rows = [line for line in part.splitlines() if line.startswith("| ") and " D = " in line]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_readme_says_which_backward_of_attention_is_faster():
    rows = rivals_of_attention()
    dims = [int(re.search(r"D = (\d+)", row[0])[1]) for row in rows]
    cudnn, fa4 = ([row[column].rstrip("x") for row in rows] for column in (5, 3))
    narrow = [float(x) for x, dim in zip(cudnn, dims, strict=True) if x != NOT_RUN and dim <= 128]
    assert min(narrow) >= 1 and len(narrow) > 20
    kinds = [row[0].split()[0] for row in rows]
    both = list(zip(kinds, dims, fa4, strict=True))
    documents = [float(x) for kind, _, x in both if kind == "document" and x != NOT_RUN]
    dense = [
        float(x) for kind, d, x in both if kind in ("full", "causal") and d <= 192 and x != NOT_RUN
    ]
    assert min(documents) > 1 and max(dense) < 1


def test_guarantees_do_not_deny_a_run_that_support_records():
    """Two GPUs: docs/support.md has the run; the table of guarantees must have it too."""
    support, guarantees = text("docs/support.md"), text("docs/guarantees.md")
    (cases,) = re.findall(
        r"gpu_tensor_parallel\.py` found the bytes of one rank in (\d+ of \d+)", support
    )
    (row,) = [
        x
        for x in (record.ROOT / "docs/guarantees.md").read_text().splitlines()
        if x.startswith("| `tp_invariant` | 1, 2")
    ]
    assert cases in row and "two GPUs: not run" not in guarantees
