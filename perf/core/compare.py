"""`python -m perf compare A B`: is the second run slower than the first, beyond their own noise?

The rule.  A case is (kernel, system, product, shape, dtype, GPU).  The noise of one run of a case
is half its spread, (p90 - p10) / 2, the typical distance of a sample from the median.  B is slower
where its median exceeds A's by more than the two noises together, and faster where it falls below
by more.  A bitwise verdict or a correctness check that held in A and does not hold in B is a
regression whatever the time.  Of several records of a case in one file the last counts.
"""

from __future__ import annotations

from dataclasses import dataclass

Key = tuple[str, ...]
_KEY = ("kernel", "system", "product", "shape", "dtype", "gpu")


class Unusable(ValueError):
    """Two files that have no case in common, or a record that lacks a field."""


@dataclass(frozen=True)
class Row:
    """One case in both files: medians in microseconds, noise as a share of A's median."""

    key: Key
    before: float | None
    after: float | None
    change: float | None
    noise: float | None
    verdict: str

    @property
    def regressed(self) -> bool:
        return self.verdict.startswith("regression")


def latest(records: list[dict]) -> dict[Key, dict]:
    """The last bench record of each case that was measured or failed."""
    bench = [r for r in records if r["kind"] == "bench" and r.get("status") != "absent"]
    for name in (*_KEY, "status"):
        if any(name not in r for r in bench):
            raise Unusable(f"a bench record has no field {name!r}")
    return {tuple(str(r[name]) for name in _KEY): r for r in bench}


def _noise(record: dict) -> float:
    return (record["p90_us"] - record["p10_us"]) / 2


def _lost(old_record: dict, new_record: dict) -> str | None:
    """A promise that A kept and B does not."""
    if old_record["status"] == "ok" and new_record["status"] != "ok":
        return f"failed ({new_record['why'].splitlines()[0][:80]})"
    old, new = old_record.get("bitwise", {}), new_record.get("bitwise", {})
    lost = [name for name, held in old.items() if held and not new.get(name)]
    return f"lost bitwise {', '.join(lost)}" if lost else None


def _row(key: Key, old_record: dict, new_record: dict) -> Row:
    if lost := _lost(old_record, new_record):
        return Row(
            key,
            old_record.get("median_us"),
            new_record.get("median_us"),
            None,
            None,
            "regression: " + lost,
        )
    if "median_us" not in old_record or "median_us" not in new_record:
        return Row(
            key, old_record.get("median_us"), new_record.get("median_us"), None, None, "not timed"
        )
    old, new = old_record["median_us"], new_record["median_us"]
    noise = _noise(old_record) + _noise(new_record)
    verdict = "same"
    if new - old > noise:
        verdict = "regression: slower"
    elif old - new > noise:
        verdict = "faster"
    return Row(key, old, new, new / old - 1, noise / old, verdict)


def compare(a: list[dict], b: list[dict]) -> tuple[list[Row], list[Key], list[Key]]:
    """(rows of the cases in both, cases only in a, cases only in b), in a's order."""
    before, after = latest(a), latest(b)
    common = [key for key in before if key in after]
    if not common:
        raise Unusable("the two files have no measured case in common (same shape and same GPU)")
    rows = [_row(key, before[key], after[key]) for key in common]
    return rows, [k for k in before if k not in after], [k for k in after if k not in before]
