"""Records that count on the status page, and cells of its tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .models import model

NOT_RUN = "not run"
#: Verdicts on a target that has records.
MET, MISSED = "met", "missed"

Case = tuple[str, str]  # product, shape label


@dataclass(frozen=True)
class Bench:
    """The latest record of each (system, product, shape label) on one GPU model.

    ratios: By system, product, shape and rival, of the latest record that timed both.
    """

    records: dict[tuple[str, str, str], dict]
    ratios: dict[tuple[str, str, str, str], float] = field(default_factory=dict)

    @property
    def card(self) -> str:
        """The GPU model; empty without a record."""
        return next((model(item["gpu"]) for item in self.records.values()), "")

    def get(self, case: Case, system: str = "ours") -> dict | None:
        return self.records.get((system, *case))

    def ratio(self, case: Case, rival: str, system: str = "ours") -> float | None:
        """The rival's time over the system's, of the latest call that timed both."""
        ratio = (self.get(case, system) or {}).get("ratio", {}).get(rival)
        return self.ratios.get((system, *case, rival)) if ratio is None else ratio


def latest(records: list[dict], kernel: str) -> Bench:
    """The records of one kernel on one GPU model; ValueError if they are of several.

    Of several records of a case the one with the latest date counts, then the last line.  One that
    took no time replaces a timed one only if it failed.
    """
    newest: dict[tuple[str, str, str], dict] = {}
    ratios: dict[tuple[str, str, str, str], float] = {}
    bench = [r for r in records if r["kind"] == "bench" and r["kernel"] == kernel]
    if len(cards := sorted({model(r["gpu"]) for r in bench})) > 1:
        raise ValueError(f"records: expected one GPU model, got {', '.join(cards)}")
    for item in sorted(bench, key=lambda r: r["date"]):
        key = (item["system"], item["product"], item["shape"])
        if (
            "median_us" in item
            or item["status"] == "failed"
            or "median_us" not in newest.get(key, {})
        ):
            newest[key] = item
            if item["status"] == "failed":
                ratios = {k: ratio for k, ratio in ratios.items() if k[:3] != key}
            ratios |= {(*key, rival): ratio for rival, ratio in item.get("ratio", {}).items()}
    return Bench(newest, ratios)


def by_card(records: list[dict], kernel: str) -> dict[str, Bench]:
    """The latest records of one kernel on each GPU model that has one, by the model's name."""
    bench = [r for r in records if (r["kind"], r.get("kernel")) == ("bench", kernel)]
    timed = [r for r in bench if "median_us" in r or "host_us" in r]
    names = sorted({model(r["gpu"]) for r in timed})
    return {name: latest([r for r in bench if model(r["gpu"]) == name], kernel) for name in names}


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def target_row(text: str, measured: str | None, met: bool, steps: tuple[str, str]) -> list[str]:
    """Row of a target: text, measured, verdict, next step; measured: None where it is not run.

    steps: Next steps of a target that is not run, and of one that is missed.
    """
    measure, after_a_miss = steps
    if measured is None:
        return [text, NOT_RUN, NOT_RUN, measure]
    return [text, measured, MET, "none"] if met else [text, measured, MISSED, after_a_miss]


def mean_row(
    text: str,
    values: list[float | None],
    at_least: float,
    each: float | None,
    steps: tuple[str, str],
) -> list[str]:
    """`target_row` of a geometric mean over all cases, and of a bound on each."""
    measured = [value for value in values if value is not None]
    if len(measured) < len(values):
        count = f" ({len(measured)} of {len(values)} cases)" if measured else ""
        return [text, NOT_RUN + count, NOT_RUN, steps[0]]
    mean, lowest = geomean(measured), min(measured)
    met = mean >= at_least and lowest >= (each or 0.0)
    return target_row(text, f"{mean:.3f}x (lowest {lowest:.3f}x)", met, steps)


#: What is measured of a case: None where there is no record of it.
Value = Callable[[Bench, Case], float | None]


def ratio_to(rival: str, system: str = "ours") -> Value:
    """The rival's time over the system's."""
    return lambda bench, case: bench.ratio(case, rival, system)


def field_of(name: str, system: str = "ours") -> Value:
    """A field of the system's record."""
    return lambda bench, case: (bench.get(case, system) or {}).get(name)


@dataclass(frozen=True)
class Target:
    """A bound that each measured case has to reach.

    share: Whether values are fractions of a copy, not ratios to a rival.
    """

    text: str
    cases: Sequence[Case]
    at_least: float
    value: Value
    share: bool = False

    def row(self, bench: Bench, steps: tuple[str, str]) -> list[str]:
        """`target_row` of it."""
        values = [self.value(bench, case) for case in self.cases]
        values = [value for value in values if value is not None]
        if not values:
            return target_row(self.text, None, False, steps)
        form = "{:.0%}" if self.share else "{:.2f}x"
        measured = f"{form.format(min(values))} to {form.format(max(values))}, {len(values)} sizes"
        return target_row(self.text, measured, min(values) >= self.at_least, steps)


Rows = Callable[[list[dict]], list[list[str]]]


def page_of(
    kernel: str, cases: list[Case], targets: Sequence[Target], steps: tuple[str, str]
) -> tuple[Rows, Rows]:
    """`bits_kept` and `target_rows` of a page of one kernel."""

    def bits_kept(records: list[dict]) -> list[list[str]]:
        """Bits over all cases."""
        return [["bits", kept(latest(records, kernel), cases)]]

    def target_rows(records: list[dict]) -> list[list[str]]:
        """(target, measured, verdict, next step) of every target."""
        bench = latest(records, kernel)
        return [target.row(bench, steps) for target in targets]

    return bits_kept, target_rows


def commit_of(item: dict) -> str:
    """The commit of a record; a `+` where the tree had changes.

    A card's tree has no .git: who gives it a commit writes `-dirty` behind that of a changed one.
    """
    mark = "+" if item.get("dirty") or item["commit"].endswith("-dirty") else ""
    return item["commit"][:10] + mark


def where(item: dict | None) -> str:
    """GPU, commit and date of a record that holds."""
    if item is None or item["status"] == "absent":
        return NOT_RUN
    verdict = "" if item["status"] == "ok" else f"{item['status']} "
    return f"{verdict}{item['gpu']}, {commit_of(item)}, {item['date'][:10]}"


def times(value: float | None, missing: str = NOT_RUN) -> str:
    """A ratio; ``missing`` where there is none."""
    return missing if value is None else f"{value:.2f}x"


def geomean(values: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(math.log(v) for v in values) / len(values))


def bits(item: dict | None) -> str:
    """The bitwise verdicts of a record: "same", or the names of those that do not hold."""
    if item is None or "bitwise" not in item:
        return NOT_RUN
    broken = sorted(name for name, held in item["bitwise"].items() if not held)
    return f"differ: {', '.join(broken)}" if broken else "same"


def kept(bench: Bench, cases: list[tuple[str, str]]) -> str:
    """Cell: the number of cases whose bitwise promises all held; those that broke one."""
    records = {case: bench.get(case) for case in cases}
    checked = {case: item["bitwise"] for case, item in records.items() if "bitwise" in (item or {})}
    broken = [" ".join(case) for case, held in checked.items() if not all(held.values())]
    if not checked:
        return NOT_RUN
    text = f"kept in {len(checked) - len(broken)} of {len(cases)} cases"
    return f"{text}; broken in {', '.join(broken)}" if broken else text


def certified(certificates: list[dict], kernel: str) -> tuple[str, str]:
    """("compiled", "certified") cells of a kernel: as the catalogue names it."""
    entries = [c for c in certificates if c["name"] == kernel]
    if not entries:
        return NOT_RUN, NOT_RUN
    good = [c for c in entries if c["ok"]]
    registers = [c["registers"] for c in entries if "registers" in c]
    limit = f", <= {max(registers)} registers" if registers else ""
    return f"{len(entries)} configurations", f"{len(good)} of {len(entries)}{limit}"
