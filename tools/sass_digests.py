"""Digest the machine code of every SM90 kernel in the catalogue, to move code without changing it.

    python tools/sass_digests.py FILE [--jobs N]                  writes {kernel: digest}
    python tools/sass_digests.py FILE --before FILE [--jobs N]    and compares

A digest covers opcodes and operands without addresses, labels and names.  Exit status: 0; 1 where
a kernel differs, is new or is gone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


def _named() -> dict:
    """Every entry of the catalogue by its kernel's name and constants."""
    from cute_kernels import about

    return {
        f"{kernel.name} {json.dumps(dict(kernel.constexpr), sort_keys=True)}": kernel
        for kernel, _, _ in about.catalogue()
    }


def digest(name: str) -> tuple[str, str]:
    """(name, digest) of one kernel, compiled here."""
    from verify import sass

    made = sass.artefacts(_named()[name].build)
    return name, sass.digest(sass.parse(made.sass))


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """A line for each kernel whose code is not what it was."""
    changed = [f"differs: {name}" for name in before if after.get(name, "") != before[name]]
    return changed + [f"new: {name}" for name in after if name not in before]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args(argv)
    # Two threads in one compiler crash it, and so does a fork of one that has started.
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as workers:
        found = dict(workers.map(digest, _named()))
    args.file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    if args.before is None:
        print(f"{len(found)} kernels")
        return 0
    changed = differences(json.loads(args.before.read_text()), found)
    print("\n".join([*changed, f"{len(found)} kernels, {len(changed)} changed"]))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
