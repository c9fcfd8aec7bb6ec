"""`python -m perf prune`: keep the newest record of each case, and summarise the older ones.

Git has the records that go.  The status pages are the same before and after: they take the newest
records too.  Digests, probes and checks stay whole: they are evidence, not times.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from cute_kernels.cli.common import writing

from .core import record
from .core.tables import table

#: Kinds of which an older record is replaced by a newer one of the same case.
REPLACED = ("bench", "profile", "soak", "tune")
#: Fields that say what was measured; the others say when, with what and how it went.
CASE = (
    *("kind", "gpu", "kernel", "system", "product", "shape", "dtype", "pass", "mask", "layout"),
    *("model", "batch", "heads", "kv_heads", "s", "d", "softcap", "m", "n", "k", "rows", "width"),
    *("tokens", "vocab", "channels", "tile"),
)
SUMMARY = "older.md"


def is_timed(item: dict) -> bool:
    """Whether a record replaces a timed one: it has a time, or it failed."""
    return "median_us" in item or item.get("status") == "failed"


def newest(records: Iterable[dict]) -> list[dict]:
    """The newest record of each case, and its newest timed one, in their order."""
    records = list(records)
    indices = {}
    for i in sorted(range(len(records)), key=lambda i: records[i]["date"]):
        item = records[i]
        if item["kind"] in REPLACED:
            case = json.dumps([item.get(name) for name in CASE])
            indices[case, False] = i
            if is_timed(item):
                indices[case, True] = i
        else:
            indices[i] = i
    return [records[i] for i in sorted(set(indices.values()))]


def summary(dropped: dict[str, list[dict]]) -> str:
    """Markdown table of the records that were dropped, by file, kind, kernel and GPU."""
    groups = defaultdict(list)
    for name, records in dropped.items():
        for item in records:
            groups[name, item["kind"], item["kernel"], item["gpu"]].append(item)
    rows = []
    for (name, kind, kernel, gpu), records in sorted(groups.items()):
        dates = sorted(item["date"][:10] for item in records)
        commits = len({item["commit"] for item in records})
        row = [name, kind, kernel, gpu, len(records), commits, dates[0], dates[-1]]
        rows.append([str(cell) for cell in row])
    header = ["file", "kind", "kernel", "GPU", "records", "commits", "first", "last"]
    lines = ["# Older records", "", "Dropped by `python -m perf prune`; git has them.", ""]
    return "\n".join([*lines, *table(header, rows), ""])


def prune(results: Path = record.RESULTS) -> dict[str, list[dict]]:
    """Drop the older records of a folder, and return them by the name of their file."""
    dropped = {}
    for path in sorted(results.glob("*.jsonl")):
        records = record.read(path)
        newest_records = newest(records)
        if len(newest_records) < len(records):
            ids = set(map(id, newest_records))
            dropped[path.name] = [item for item in records if id(item) not in ids]
            lines = [json.dumps(item, sort_keys=True) + "\n" for item in newest_records]
            with writing(path):
                path.write_text("".join(lines))
    return dropped
