"""Compare the machine code of SM90 kernels with the stored certificates, to move code unchanged.

    PYTHONPATH=. python tools/sass_digests.py [REGEX] [--every N] [--jobs N]

REGEX: search pattern for kernels' names; all by default.  ``--every N`` compiles every N-th of
each name's configurations.  A digest covers opcodes and operands without addresses, labels and
names.  Exit status: 0; 1 where a kernel differs or is new.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from pathlib import Path

STORED = Path(__file__).resolve().parents[1] / "perf" / "results" / "certificates.json"

#: Constants of the certificates that configurations no longer have: name -> new name, or None.
RENAMED: dict[str, str | None] = {
    "watchdog_ms": None,
    "box": "keys_per_load",
    "spans": "kv_ranges",
}
#: Kernels whose variant without sinks is gone.
WITH_SINKS = "sparse_attn_paged", "sparse_attn_buffer"


def _key(name: str, constexpr: dict) -> str:
    named = {RENAMED.get(old, old): value for old, value in constexpr.items()}
    named.pop(None, None)
    if name.startswith(WITH_SINKS) and not named.pop("sinks", True):
        return f"{name} without sinks"
    return f"{name} {json.dumps(named, sort_keys=True)}"


def _kernels() -> dict:
    """Every entry of the catalogue by its kernel's name and constants."""
    from cute_kernels import about

    return {_key(kernel.name, dict(kernel.constexpr)): kernel for kernel, *_ in about.catalogue()}


def digest(key: str) -> tuple[str, str]:
    """(key, digest) of one kernel, compiled here."""
    from verify import sass

    return key, sass.digest(sass.parse(sass.artefacts(_kernels()[key].build).sass))


def chosen(keys: list[str], pattern: str, every: int) -> list[str]:
    """Every ``every``-th key of each name that ``pattern`` matches."""
    names = groupby(
        sorted(k for k in keys if re.search(pattern, k.split()[0])), lambda k: k.split()[0]
    )
    return [key for _, of_name in names for key in list(of_name)[::every]]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args(argv)
    records = json.loads(STORED.read_text())
    stored = {_key(r["name"], r["constexpr"]): r["sass_sha256"] for r in records}
    keys = chosen(list(_kernels()), args.pattern, args.every)
    # Two threads in one compiler crash it, and so does a fork of one that has started.
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as workers:
        digests = dict(workers.map(digest, keys))
    changed = [
        f"{'differs' if key in stored else 'new'}: {key}"
        for key, sha in digests.items()
        if stored.get(key) != sha
    ]
    print("\n".join([*changed, f"{len(digests)} kernels compiled, {len(changed)} changed"]))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
