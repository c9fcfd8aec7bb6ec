"""A kernel's certificate now, and the machine code that perf/results/certificates.json holds.

`make certify` followed by `python -m perf report` stores the hashes of this tree's kernels.  A
change of a kernel's machine code must come with new ones.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

STORED = Path(__file__).parents[1] / "perf" / "results" / "certificates.json"


def certify(kernel, kind: str, expect):
    """The certificate of a `compile.Kernel`."""
    from cute_kernels.certify import certificate

    constexpr = dict(kernel.constexpr)
    return certificate.certify(
        kernel.build, name=kernel.name, constexpr=constexpr, kind=kind, expect=expect
    )


def stored(kernel) -> dict | None:
    """What is stored of a kernel, if anything."""
    for item in json.loads(STORED.read_text()):
        if item["name"] == kernel.name and item["constexpr"] == dict(kernel.constexpr):
            return item
    return None


def check_stored(kernel, found) -> None:
    """Asserts that the machine code is the stored one; skips under another toolchain."""
    kept = stored(kernel)
    assert kept is not None, f"not in {STORED.name}: make certify, then python -m perf report"
    if kept["toolchain"] != found.toolchain:
        pytest.skip(f"hashes were stored with {kept['toolchain']}, this is {found.toolchain}")
    assert kept["sass_sha256"] == found.sass_sha256, (
        "the machine code changed: if that was meant, run make certify and python -m perf report"
    )
