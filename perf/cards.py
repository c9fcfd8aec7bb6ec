"""What each GPU model has a record of: the table that the home, support and status pages share."""

from __future__ import annotations

from collections.abc import Callable

from .attention import page, soak_cases
from .core.models import model, models
from .core.tables import NOT_RUN, commit_of, table
from .digest.cases import CASES
from .gemm import targets


def _timed(kernel: str, wanted: set[tuple[str, str]]) -> Callable[[dict], object]:
    """What a record has timed of one kernel's cases, or None."""

    def of(item: dict) -> object:
        key = (item.get("product"), item.get("shape"))
        ours = item["kind"] == "bench" and item["kernel"] == kernel and item["system"] == "ours"
        return key if ours and "median_us" in item and key in wanted else None

    return of


def _probed(item: dict) -> object:
    asked = item["kind"] == "probe" and item["case"] == "answer" and item["verdict"] != "failed"
    return item["probe"] if asked and item["probe"] in _QUESTIONS else None


def _soaked(item: dict) -> object:
    kept = item["kind"] == "soak" and item["status"] == "ok"
    return item["shape"] if kept and item["shape"] in _SOAKED else None


def _digested(item: dict) -> object:
    return item["case"] if item["kind"] == "digest" and item["case"] in _DIGESTED else None


_PRODUCTS = {(product, targets.label(name, m)) for product, name, m in targets.gemm_cases()}
_PASSES = {(way, page.label(s)) for s in targets.attention_cases() for way in ("fwd", "bwd")}
_QUESTIONS = {question.probe for question in targets.QUESTIONS}
_SOAKED = {case.label for case in soak_cases.suite()}
_DIGESTED = {case.name for case in CASES}
#: What was run, the case of a record of it (None: another record), and how many cases there are.
_RUNS = (
    ("`linear`, `matmul`: products timed", _timed("gemm", _PRODUCTS), len(_PRODUCTS)),
    ("attention: passes timed", _timed("attention", _PASSES), len(_PASSES)),
    ("attention: configurations soaked", _soaked, len(_SOAKED)),
    ("questions about the card answered", _probed, len(_QUESTIONS)),
    ("digests of fixed inputs recorded", _digested, len(_DIGESTED)),
)


def _cell(of: Callable[[dict], object], total: int, records: list[dict]) -> str:
    """How many cases have a record, and commit and date of the last."""
    own = [r for r in records if of(r) is not None]
    if not own:
        return NOT_RUN
    last = max(own, key=lambda r: r["date"])
    return f"{len(set(map(of, own)))} of {total}; {commit_of(last)}, {last['date'][:10]}"


def render(records: list[dict]) -> list[str]:
    """Lines of a Markdown table: what ran on which GPU model."""
    names = models(records)
    by_model = {name: [r for r in records if model(r["gpu"]) == name] for name in names}
    rows = [
        [text, *(_cell(of, total, by_model[name]) for name in names)] for text, of, total in _RUNS
    ]
    return table(["record of", *names], rows)
