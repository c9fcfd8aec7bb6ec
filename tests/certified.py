"""A kernel's certificate now, and the machine code that perf/results/certificates.json holds.

`make certificates` stores the hashes of this tree's kernels, each with the digest of what it was
made from.  A change of a kernel's machine code must come with new ones.

A kernel whose digest is the stored one was proved already, by whoever stored it: every commit
compiles a sample of those, and all others.  The nightly run compiles everything.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

STORED = Path(__file__).parents[1] / "perf" / "results" / "certificates.json"


def certify(kernel, kind: str, expect):
    """The certificate of a `compile.Kernel`."""
    from verify import certificate

    constexpr = dict(kernel.constexpr)
    return certificate.certify(
        kernel.build, name=kernel.name, constexpr=constexpr, kind=kind, expect=expect
    )


@functools.cache
def compiled(kernel):
    """Artefacts of compiling a `compile.Kernel`, once a process: for tests of what is expected."""
    from verify import sass

    return sass.artefacts(kernel.build)


def read(kernel, kind: str, expect):
    """`certify` of the kernel as it was first compiled: not for a patched one."""
    from verify import certificate

    constexpr = dict(kernel.constexpr)
    return certificate.certificate(
        compiled(kernel), name=kernel.name, constexpr=constexpr, kind=kind, expect=expect
    )


def records(store: Path | None = None) -> tuple[dict, ...]:
    """Every stored record, not to be changed; none where there is no file."""
    store = store or STORED
    return _parsed(store.read_bytes()) if store.is_file() else ()


@functools.lru_cache(2)
def _parsed(text: bytes) -> tuple[dict, ...]:
    """Once for each content: megabytes, asked for by every kernel's name and every certificate."""
    return tuple(json.loads(text))


def stored(kernel) -> dict | None:
    """Stored certificate of a kernel, or None."""
    for item in records():
        if item["name"] == kernel.name and item["constexpr"] == dict(kernel.constexpr):
            return item
    return None


def proved(name: str, store: Path | None = None) -> bool:
    """Whether the certificates of all kernels of this name were made from what is there now.

    No record, a record that does not say what it was made from, or that broke a rule: they were
    not.
    """
    out = [(item["ok"], item.get("sources")) for item in records(store) if item["name"] == name]
    return set(out) == {(True, sources_of(name))}


@functools.cache
def sources_of(name: str) -> str:
    """`certificate_sources`, once a process."""
    from cute_kernels.cli.certify import certificate_sources

    return certificate_sources(name)


def cases(entries: Iterable, sample, store: Path | None = None) -> Iterator:
    """The entries of a catalogue as parameters of a test; ``sample(entry)``: one for every commit.

    Of a kernel that is `proved` the rest is for the nightly run.
    """
    known: dict[str, bool] = {}
    for entry in entries:
        kernel = entry.kernel
        if kernel.name not in known:
            known[kernel.name] = proved(kernel.name, store)
        often = sample(entry) or not known[kernel.name]
        label = "-".join(str(value) for _, value in kernel.constexpr)
        marks = () if often else pytest.mark.nightly
        yield pytest.param(*entry, id=f"{kernel.name}-{label}", marks=marks)


def proved_system(system: str) -> bool:
    """Whether all kernels of a system are `proved`, by the simulator that was tested."""
    from tests.ptxsim import proved as simulator

    names = {item["name"] for item in records() if item["name"].startswith(f"{system}_")}
    return bool(names) and all(map(proved, names)) and simulator.holds()


def left_to_the_night(items: Iterable, known: Callable[[str], bool] | None = None) -> list:
    """The tests marked ``simulates(system)`` but the first parameter of each function.

    If the system is proved: neither its kernels nor what runs them has changed since all ran.  A
    module may name in one string those of its functions that run ``often``: a test of each kind.
    Of those marked ``mutants``, which test the tests, always.
    """
    known = functools.cache(known or proved_system)
    often, left = set(), []
    for item in items:
        mark = item.get_closest_marker("simulates")
        proof = mark is not None and known(*mark.args)
        if item.get_closest_marker("nightly"):
            continue
        if not (item.get_closest_marker("mutants") or proof):
            continue
        function = item.nodeid.split("[")[0]
        chosen = mark.kwargs.get("often") if proof else None
        named = chosen is None or function.split("::")[-1] in chosen.split()
        if function in often or not named:
            left.append(item)
        often.add(function)
    return left


def first_of(entries: Iterable, key) -> set:
    """The kernels that come first with their ``key``: a sample with one of each."""
    out = {}
    for entry in entries:
        out.setdefault(key(entry), entry.kernel)
    return set(out.values())


def check_stored(kernel, found) -> None:
    """Asserts that the machine code is the stored one; skips under another toolchain."""
    kept = stored(kernel)
    assert kept is not None, f"not in {STORED.name}: make certificates"
    if kept["toolchain"] != found.toolchain:
        pytest.skip(f"hashes were stored with {kept['toolchain']}, this is {found.toolchain}")
    assert kept["sass_sha256"] == found.sass_sha256, (
        "the machine code changed: if that was meant, run make certificates"
    )
