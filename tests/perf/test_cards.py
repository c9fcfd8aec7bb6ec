"""GPU models side by side: no table mixes two, and no two rows contradict each other."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from perf import report
from perf.core import record
from perf.core.models import MODELS, model, split
from perf.core.systems import modules, name_of
from perf.core.tables import latest

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
#: Pages of systems, those that a card has timed, and those that one besides an H100 has.
PAGES = [name_of(page) for page in modules("page")]
TIMED = {
    (r["kernel"], model(r["gpu"]))
    for r in record.read_all()
    if r["kind"] == "bench" and "median_us" in r
}
SYSTEMS = [name for name in PAGES if name in {kernel for kernel, _ in TIMED}]
BESIDES = [name for name in SYSTEMS if {c for k, c in TIMED if k == name} - {"H100"}]
UNTIMED = {f"status/{name}.md" for name in PAGES if name not in SYSTEMS}
LATER = "2027-01-01T00:00:00+00:00"
#: Columns that say what a row is of; "ran on" says where, and the others what was found.
NAMES = {
    *("call", "case", "cases of contract id", "configurations", "heads", "kernel", "label", "op"),
    *("mask, length, heads", "pass", "product", "question", "record of", "rival", "rows", "shape"),
    *("rival's time over ours", "rows x D", "step, batch x tokens", "system", "target", "tool"),
    *("tokens x C", "verdict on", "weight"),
}
#: Columns that have numbers which are not results.
SKIPPED = {"next step", "ran on", "schedule"}
DIGITS = re.compile(r"\d")


@pytest.fixture(scope="module")
def records() -> list[dict]:
    return record.read_all()


def elsewhere(item: dict) -> dict:
    """A record of the same case on an H100, newer and with other numbers."""
    changed = {
        name: 1.37 * value for name, value in item.items() if isinstance(value, float) and value
    }
    if "ratio" in item:
        changed["ratio"] = {name: 0.613 * value for name, value in item["ratio"].items()}
    return item | changed | {"gpu": H100, "date": LATER, "commit": "f" * 40}


def parts(page: str) -> dict[tuple[str, str], str]:
    """(heading, GPU model in bold) -> what stands there."""
    out, heading, card = defaultdict(list), "", ""
    for line in page.splitlines():
        if line.startswith("#"):
            heading, card = line.lstrip("# "), ""
        elif bold := re.fullmatch(r"\*\*(.+)\*\*", line):
            card = bold[1]
        else:
            out[heading, card].append(line)
    return {key: "\n".join(lines).strip() for key, lines in out.items()}


# ---- two cards ----------------------------------------------------------------------------------


def test_records_of_two_cards_are_refused_together(records):
    one = next(r for r in records if r["kind"] == "bench" and r["kernel"] == "gemm")
    with pytest.raises(ValueError, match="expected one GPU model, got H100, H200"):
        latest([one | {"gpu": H200}, one | {"gpu": H100}], "gemm")


@pytest.fixture(scope="module")
def three(records) -> list[dict[str, str]]:
    """The pages of an H200, of that and a newer H100 with every case, and of this alone."""
    h200 = [r for r in records if model(r["gpu"]) != "H100"]
    copies = [elsewhere(r) for r in h200 if r["kind"] in ("bench", "profile", "soak", "sanitize")]
    return [report.pages(records, []) for records in (h200, h200 + copies, copies)]


@pytest.mark.parametrize("system", BESIDES)
def test_a_newer_record_of_one_card_leaves_the_other_alone(system, three):
    """Every case on both cards: one's parts are those of its records alone, byte for byte."""
    one, both, other = (parts(pages[f"status/{system}.md"]) for pages in three)
    mine = {key: text for key, text in one.items() if key[1] == "H200"}
    theirs = {key: text for key, text in other.items() if key[1] == "H100"}
    assert mine and {heading for heading, _ in mine} == {heading for heading, _ in theirs}
    assert {key: text for key, text in both.items() if key[1]}.items() == (mine | theirs).items()
    differ = [key[0] for key in mine if mine[key] != theirs[key[0], "H100"]]
    assert set(differ) > {"Targets"}


def test_each_card_of_one_case_has_its_newest_record(records):
    """Two cards, two records each, of one case: the newer of each is shown with its own name."""
    one = next(
        r
        for r in records
        if r.get("kernel") == "logp" and (r["system"], r["product"]) == ("ours", "fwd")
    )
    made = [
        one | {"gpu": gpu, "date": f"2026-12-0{day}T00:00:00+00:00", "median_us": us}
        for gpu, day, us in ((H100, 1, 1e3), (H100, 3, 2e3), (H200, 2, 3e3), (H200, 4, 4e3))
    ]
    found = parts(report.pages(made[::-1], [])["status/logp.md"])
    for card, gpu, ms, gone in (("H100", H100, "2.00", "1.00"), ("H200", H200, "4.00", "3.00")):
        rows = facts_of(f"**{card}**\n\n" + found["Passes", card])
        shown = [value for key, value in rows if key[0] == card and key[2] == "ms"]
        assert ms in shown and gone not in shown and gpu in found["Passes", card]


# ---- contradictions -----------------------------------------------------------------------------


def tables(page: str) -> Iterator[tuple[str, list[list[str]]]]:
    """(GPU model in bold above it, rows of a table with what every row has) of a page."""
    card, shared, rows = "", {}, []
    for line in [*page.splitlines(), ""]:
        if line.startswith("|"):
            rows += [[cell.strip() for cell in line.strip("|").split(" | ")]]
            continue
        if rows:
            head, _, *body = rows
            yield card, [[*head, *shared], *([*row, *shared.values()] for row in body)]
            rows, shared = [], {}
        if message := re.fullmatch(r"Every row: (.*)\.", line):
            shared = dict(text.split(": ", 1) for text in message[1].split("; "))
        elif bold := re.fullmatch(r"\*\*(.+)\*\*", line):
            card = bold[1]
        elif line.startswith("#"):
            card = ""


def facts_of(page: str) -> list[tuple[tuple, str]]:
    """((GPU model, what the row is of, column), cell) of every number that ran on a GPU."""
    out = []
    title = page.splitlines()[0].lstrip("# ").removesuffix(": status") if page else ""
    for card, (head, *body) in tables(re.sub(r"\]\([^)]*\)|\[", "", page)):
        for row in body:
            cells = dict(zip(head, row, strict=True))
            if "verdict on" in cells:
                cells.setdefault("system", title)
            of = tuple(sorted((k, v) for k, v in cells.items() if k in NAMES))
            ran = model(cells.get("ran on", "").split(",")[0].removeprefix("failed "))
            for column, cell in cells.items():
                if column in NAMES | SKIPPED or not DIGITS.search(cell):
                    continue
                if not (ran or card or column in MODELS):
                    continue  # a model's time, or a target
                out.append(((ran or card, of, column), cell))
    return out


def contradictions(pages: list[str]) -> dict[tuple, set[str]]:
    """Contradictions: what two rows say differently of one case on one GPU model."""
    out = defaultdict(set)
    for page in pages:
        for key, value in facts_of(page):
            if key[1]:
                out[key].add(value)
    return {key: values for key, values in out.items() if len(values) > 1}


def documents() -> list[Path]:
    """The README and the pages that quote records; notes are a diary, of several runs each."""
    docs = record.ROOT / "docs"
    quoting = [docs / name for name in ("costs.md", "index.md", "schedulers.md", "splitk.md")]
    pages = [docs / name for name in report.pages([], [])]
    return [record.ROOT / "README.md", *quoting, *pages]


def test_no_row_contradicts_another():
    pages = [path.read_text() for path in documents()]
    assert contradictions(pages) == {}
    counted = [key for page in pages for key, _ in facts_of(page)]
    # Those that stand on two pages, which could differ, and all others.
    assert len(counted) > 3000 and len(counted) - len(set(counted)) > 500


def test_every_table_of_the_status_pages_says_what_its_rows_are_of():
    for name, page in report.pages(record.read_all(), report.load_certificates()).items():
        for card, (head, *_) in tables(page):
            assert NAMES & set(head), (name, head)
            everywhere = name in {"status.md", "status/digests.md", "status/kernels.md", *UNTIMED}
            assert everywhere or card or head[0] == "verdict on", (name, head)


@pytest.mark.parametrize(
    ("row", "clash"),
    [
        ("| fwd | qkv | 784 | 98% |", True),
        ("| fwd | qkv | 783 | 98% |", False),
        ("| dx | qkv | 784 | 98% |", False),
    ],
)
def test_a_planted_contradiction_is_found(row, clash):
    head = "Every row: ran on: NVIDIA H200, 45e2796, 2026-11-20.\n\n"
    head += "| product | shape | TFLOP/s | of floor |\n| --- | --- | --- | --- |\n"
    page = f"{head}| fwd | qkv | 783 | 98% |\n"
    assert bool(contradictions([page, f"\n{head}{row}\n"])) == clash
    assert bool(contradictions([f"{page}{row}\n"])) == clash
    other = head.replace("H200", "H100 80GB HBM3")
    assert not contradictions([page, f"\n{other}{row}\n"])
    bold = head.split("\n\n")[1]
    assert bool(contradictions([page, f"**H200**\n\n{bold}{row}\n"])) == clash


def test_the_hosts_times_are_the_same_on_both_pages_that_have_them(records):
    """Products quote what a call costs the host from the records of a whole model."""
    compared = 0
    for model_records in split(records).values():
        pages = report.pages(model_records, [])
        calls = {
            dict(key[1])["call"]: value
            for key, value in facts_of(pages["status/model.md"])
            if key[2] == "ours, us"
        }
        for key, value in facts_of(pages["status/gemm.md"]):
            target = dict(key[1]).get("target", "")
            if key[2] == "measured" and target.startswith("host time"):
                call = "linear, grad" if "grad" in target else "linear"
                assert value.startswith(f"{calls[call]} us; torch")
                compared += 1
    assert compared == 4


# ---- the newest record --------------------------------------------------------------------------


def test_a_newer_record_changes_the_pages_and_an_older_one_does_not(records):
    """Of one case of each system and card, as `python -m perf bench` would append it."""
    counts = [count for page in modules("page") for count in page.COUNTS]
    groups = {}
    for item in records:
        if item["kind"] == "bench" and any(count.of(item) is not None for count in counts):
            groups.setdefault((item["kernel"], item["gpu"]), item)
    assert {"decode", *SYSTEMS} - {"gemm"} <= {kernel for kernel, _ in groups}
    others = [elsewhere(item) | {"gpu": gpu} for (_, gpu), item in groups.items()]
    base = report.pages(records, [])
    older = [other | {"date": "2026-01-01"} for other in others]
    assert report.pages([*records, *older], []) == base
    changed = report.pages([*records, *others], [])
    for kernel, gpu in groups:
        name = f"status/{'gemm' if kernel == 'decode' else kernel}.md"
        before, after = (parts(pages[name]) for pages in (base, changed))
        keys = [key for key in after if key[1] == model(gpu)]
        keys = [key for key in keys if ("few rows" in key[0].lower()) == (kernel == "decode")]
        assert any(before[key] != after[key] for key in keys), (kernel, gpu)
