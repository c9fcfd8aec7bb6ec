"""`python -m perf report`: docs/status.md, its plots, the README's tables, from the records alone.

Each is a pure function of the records and the certificates, both of which are in the repository
(perf/results/), so a test can tell whether they are up to date.  What no record supports says "not
run"; the cases one by one are what `python -m perf show` prints.
"""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from cute_kernels.cli.common import writing

from . import headline
from .core import figure, record
from .core.models import split
from .core.speed import Speed
from .core.systems import SYSTEMS, modules
from .core.tables import MET, MISSED, NOT_RUN, commit_of, latest, table
from .digest import page as digests

STATUS = record.ROOT / "docs" / "status.md"
README = record.ROOT / "README.md"
CERTIFICATES = record.RESULTS / "certificates.json"
#: What `python -m verify` writes; either name.
BUILT = tuple(record.ROOT / "certify" / name for name in ("certificates.json", "report.json"))
#: The README's part that is made here.
_SPEED = re.compile(r"(<!-- generated: speed -->\n).*?(<!-- end -->)", re.S)
_FIELDS = ("name", "constexpr", "ok", "registers", "sass_sha256", "sources", "toolchain")
_LEGEND = """
Written by `python -m perf report` from the records in `perf/results/`. A target is met or missed
by the newest records of that GPU; "not run": there is no record. A ratio is the rival's time over
ours: above 1 ours is faster. A `+` after a commit: the tree had changes. `python -m perf show
attention` prints the cases of a system one by one, with times, rivals, bits and where they ran.
"""


def load_certificates(path: Path = CERTIFICATES) -> list[dict]:
    """The committed copy of the certificates; none where there is no file."""
    return json.loads(path.read_text()) if path.is_file() else []


def adopt_certificates(kept: Path = CERTIFICATES, built: tuple[Path, ...] = BUILT) -> bool:
    """Copies what is kept of a fresh certificate report (_FIELDS) into the repository.

    Of systems that the report has no kernel of, what the repository has stays.
    """
    fresh = [path for path in built if path.is_file()]
    if not fresh:
        return False
    certificates = json.loads(fresh[0].read_text())
    facts = [{k: item[k] for k in _FIELDS if k in item} for item in certificates]
    anew = {_system_of(item["name"]) for item in certificates}
    facts += [c for c in load_certificates(kept) if _system_of(c["name"]) not in anew]
    kept.parent.mkdir(parents=True, exist_ok=True)
    facts.sort(key=lambda item: json.dumps([item["name"], item.get("constexpr")]))
    with writing(kept):
        lines = ",\n".join(json.dumps(item, sort_keys=True) for item in facts)
        kept.write_text(f"[\n{lines}\n]\n")
    return True


def _system_of(kernel: str) -> str:
    """The system of a kernel's name, or the name."""
    names = (system.package for system in SYSTEMS)
    return next((name for name in names if kernel.startswith(f"{name}_")), kernel)


# ---- the status page ----------------------------------------------------------------------------


def status(
    records: list[dict], certificates: list[dict], runs: Mapping[str, list[dict]] | None = None
) -> str:
    """The status page; runs: `headline.runs`, for its plots."""
    cards, index, sections = split(records), [], []
    for page in modules("page"):
        rows = {card: page.target_rows(of_card) for card, of_card in cards.items()}
        index.append([f"[{page.TITLE}](#{_anchor(page.TITLE)})", *map(_count, rows.values())])
        sections += [f"## {page.TITLE}", "", *_system(page, cards, rows), ""]
    lines = ["# Status", "", *_wrapped(_LEGEND), "", *table(["system", *cards], index), ""]
    lines += [figure.image(card) for card in by_speed(runs or {})] + ["", *sections]
    lines += ["## Machine code and digests", ""]
    lines.append(f"- [Certificates](certificate.md) of compiled kernels: {certified(certificates)}")
    lines.append("  (`python -m perf show kernels`).")
    lines.append(f"- [Same bits on H100 and H200](guarantees.md): {agreed(records)}")
    lines.append("  (`python -m perf show digests`).")
    return "\n".join(lines) + "\n"


def _anchor(title: str) -> str:
    """What a heading is linked by."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _count(rows: list[list[str]]) -> str:
    """How many targets are met, missed, not run; "not run" where no target has a record."""
    counts = Counter(verdict for _, _, verdict, _ in rows)
    if not counts[MET] + counts[MISSED]:
        return NOT_RUN
    return ", ".join(f"{counts[word]} {word}" for word in (MET, MISSED, NOT_RUN) if counts[word])


def _system(
    page: ModuleType, cards: dict[str, list[dict]], rows: dict[str, list[list[str]]]
) -> list[str]:
    """Lines of a system: its targets on each card, next steps, bits, and where its records ran."""
    by_target = [{text: rest for text, *rest in of_card} for of_card in rows.values()]
    targets = dict.fromkeys(text for of_card in by_target for text in of_card)
    body = [[text, *(_cell(of_card.get(text)) for of_card in by_target)] for text in targets]
    lines = [*table(["target", *cards], body), ""]
    every_row = itertools.chain(*rows.values())
    if steps := dict.fromkeys(step for *_, verdict, step in every_row if verdict == MISSED):
        lines += [f"- Next, of what is missed: {'; '.join(map(_step, steps))}."]
    for name, verdicts in _bits(page, cards).items():
        cells = "; ".join(f"{card} {verdict}" for card, verdict in verdicts.items())
        lines.append(f"- {name[0].upper()}{name[1:]}: {cells}.")
    return [*lines, f"- Records: {_records_of(page, cards)}."]


def _cell(row: list[str] | None) -> str:
    """What a card measured of a target, and the verdict."""
    if row is None:
        return "-"
    measured, verdict, _ = row
    return measured if verdict == NOT_RUN else f"{measured}: {verdict}"


def _step(text: str) -> str:
    """A next step; of a note, a link to it."""
    return re.sub(r"^docs/(notes/)?(\w+\.md)$", r"[\2](\1\2)", text)


def _bits(page: ModuleType, cards: dict[str, list[dict]]) -> dict[str, dict[str, str]]:
    """Promise about bits -> card -> verdict."""
    promises: dict[str, dict[str, str]] = {}
    for card, records in cards.items():
        for name, verdict in page.bits_kept(records):
            promises.setdefault(name, {})[card] = verdict
    return promises


def _records_of(page: ModuleType, cards: dict[str, list[dict]]) -> str:
    """The oldest and the newest commit of the records that count, card by card."""
    parts = []
    for card, records in cards.items():
        newest = [r for kernel in page.BENCHES for r in latest(records, kernel).records.values()]
        ends = sorted((r for r in newest if r["status"] == "ok"), key=lambda r: r["date"])
        names = dict.fromkeys(f"`{commit_of(r)}` of {r['date'][:10]}" for r in ends[:1] + ends[-1:])
        parts.append(f"{card} {' to '.join(names) or NOT_RUN}")
    return "; ".join(parts)


def certified(certificates: list[dict]) -> str:
    """How many certificates hold."""
    if not certificates:
        return NOT_RUN
    return f"{sum(c['ok'] for c in certificates)} of {len(certificates)} hold"


def agreed(records: list[dict]) -> str:
    """The number of cases in which the GPU models have the same digest."""
    words = Counter(digests.verdicts(records))
    equal, bad = words[digests.EQUAL], words[digests.DIFFERS]
    if not equal + bad:
        return NOT_RUN
    shared = f"equal digests in {equal} of {equal + bad} cases"
    return f"{shared}, {bad} differ" if bad else shared


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), width=100, break_on_hyphens=False)


# ---- speed: the README's tables and the plots ----------------------------------------------------


def _speed() -> list[Speed]:
    return [row for page in modules("page") for row in page.SPEED]


def by_speed(runs: Mapping[str, list[dict]]) -> dict[str, list[tuple[str, list[float]]]]:
    """GPU model -> (row of the README's table, ratios of its cases), of those with records."""
    out = {}
    for card, run in runs.items():
        found = [
            (f"{row.label}: {row.name}", row.ratios(latest(run, row.kernel))) for row in _speed()
        ]
        out[card] = [(label, ratios) for label, ratios in found if ratios]
    return out


def speed_tables(runs: Mapping[str, list[dict]]) -> list[str]:
    """Lines of the README's tables: one for the run of each GPU model, and where it was taken."""
    lines = []
    for card, run in runs.items():
        cells = [[row.label, row.name, row.cell(latest(run, row.kernel))] for row in _speed()]
        head = ["rival's time over ours", "rival", card]
        lines += [f"{headline.origin(run)}:", "", *table(head, cells), ""]
    return lines[:-1]


def readme(text: str, runs: Mapping[str, list[dict]]) -> str:
    """The README with these tables."""
    tables = "\n".join(speed_tables(runs))
    return _SPEED.sub(lambda part: f"{part[1]}{tables}\n{part[2]}", text)


# ---- files --------------------------------------------------------------------------------------


def write(
    records: list[dict],
    certificates: list[dict],
    path: Path = STATUS,
    runs: Mapping[str, list[dict]] | None = None,
) -> list[Path]:
    """Write the status page and its plots; of the repository's own, the README's tables too."""
    runs = headline.runs() if runs is None else runs
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        path.write_text(status(records, certificates, runs), encoding="utf-8")
    plots = [
        drawn
        for card, rows in by_speed(runs).items()
        for drawn in figure.speed(rows, card, path.parent / "plots")
    ]
    if path == STATUS:
        README.write_text(readme(README.read_text(encoding="utf-8"), runs), encoding="utf-8")
    return [path, *plots]
