"""Counts of the records: which cases a GPU model has run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Count:
    """A count: its text, the case of a record (None: of another count), the number of cases."""

    text: str
    of: Callable[[dict], object]
    total: int


def timed(text: str, kernel: str, wanted: set[tuple[str, str]]) -> Count:
    """The (product, shape) cases of one kernel that ours has a time of."""

    def of(item: dict) -> object:
        key = (item.get("product"), item.get("shape"))
        ours = item["kind"] == "bench" and item["kernel"] == kernel and item["system"] == "ours"
        return key if ours and "median_us" in item and key in wanted else None

    return Count(text, of, len(wanted))


def recorded(text: str, field: str, wanted: set[str], counts: Callable[[dict], bool]) -> Count:
    """The values of a field, of records for which `counts` holds."""

    def of(item: dict) -> object:
        return item[field] if counts(item) and item[field] in wanted else None

    return Count(text, of, len(wanted))
