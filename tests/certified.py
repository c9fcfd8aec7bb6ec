"""A kernel's certificate now, and the machine code that perf/results/certificates.json holds.

`make certificates` stores the hashes of this tree's kernels, each with the digest of what it was
made from.  A change of a kernel's machine code must come with new ones.

A kernel whose digest is the stored one was proved already, by whoever stored it: every commit
compiles a sample of those, and all others.  The nightly run compiles everything.

    python -m tests.certified norm norm.triton ...

runs the simulated tests of a system's SM90 kernels, or those of its Triton kernels, and, if they
pass, stores the digest of the launchers: until then every commit runs them all.  Without names it
does so for every system that changed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tests import import_graph, kernel_store

ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT / "perf" / "results" / "certificates.json"
TESTS = ROOT / "tests"
#: ``norm`` (SM90 kernels) or ``norm.triton`` -> digest of its launchers when its tests last passed.
LAUNCHERS = TESTS / "launchers.json"


def certify(kernel, kind: str, expect):
    """The certificate of a `compile.Kernel`."""
    from verify import certificate

    constexpr = dict(kernel.constexpr)
    return certificate.certify(
        kernel.build, name=kernel.name, constexpr=constexpr, kind=kind, expect=expect
    )


@functools.cache
def compiled(kernel):
    """Artefacts of compiling a `compile.Kernel`, stored: for tests of what is expected."""
    from verify import sass

    made_from = "artefacts", kernel.identity, sources_of(kernel.name)
    return kernel_store.pickled(made_from, lambda: sass.artefacts(kernel.build))


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
    from verify.command import certificate_sources

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
    """Whether a system's kernels and launchers, and the simulator, are as they were tested.

    system: ``norm`` for its SM90 kernels, ``norm.triton`` for its Triton kernels.
    """
    from ptxsim.tests import proved as simulator

    known = launched(LAUNCHERS).get(system) == launchers_digest(system) and simulator.holds()
    if _is_triton(system):
        return known
    names = {item["name"] for item in records() if item["name"].startswith(f"{system}_")}
    return known and bool(names) and all(map(proved, names))


def _is_triton(system: str) -> bool:
    return system.endswith(".triton")


def launched(store: Path) -> dict[str, str]:
    """Stored digests of launchers by system; empty where there is no file."""
    return json.loads(store.read_text()) if store.is_file() else {}


def launchers(system: str) -> set[str]:
    """Modules that a system's launchers are made of: Triton's with their kernels, SM90's beyond
    what certificates depend on."""
    every, own = import_graph.modules(), system.split(".")[0]
    if _is_triton(system):
        left = {name for name in every if name.startswith(f"{system}.")}
        out, shared = set(), _SHARED
    else:
        left = {name for name in every if name.startswith(f"{own}.") and name.endswith(".launch")}
        out, shared = {"runtime.operands"}, ()
    while left:
        name = left.pop()
        inside = name.startswith((f"{own}.", *shared)) or (shared and ".triton." in name)
        if inside and name not in out and not _is_elsewhere(name, system):
            out.add(name)
            left |= import_graph.imports(name)
    return out


#: What Triton kernels and launchers of several systems import.
_SHARED = ("runtime.operands", "runtime.products", "runtime.triton_", "schedulers.")


def _is_elsewhere(name: str, system: str) -> bool:
    """Whether a module belongs to another backend of the system, or to an SM90 certificate."""
    parts = name.split(".")[1:]
    if _is_triton(system):
        return parts[0] == "cpu"
    kernel = parts[0] in ("config", "device", "masks")
    return kernel or parts[0] in ("cpu", "triton") or parts[-1].startswith("kernel_")


def tested_files(system: str) -> dict[str, Path]:
    """Name -> file of a system's `launchers` and, for Triton, of what runs them in tests."""
    paths = import_graph.modules()
    out = {name: paths[name] for name in launchers(system)}
    if _is_triton(system):
        out |= {f"tests/{path.name}": path for path in TESTS.glob("triton_*.py")}
    return out


def tested_versions(system: str) -> dict[str, str]:
    """Versions of the packages that compile and interpret a system's Triton kernels."""
    packages = ("numpy", "triton") if _is_triton(system) else ()
    return {name: _version(name) for name in packages}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def launchers_digest(system: str) -> str:
    """SHA-256 over a system's `tested_versions`, and the names and code of its `tested_files`."""
    total = hashlib.sha256()
    for package, version in sorted(tested_versions(system).items()):
        total.update(f"{package}\0{version}\0".encode())
    kernel_store.add_code(total, tested_files(system))
    return total.hexdigest()


def changed_systems(store: Path = LAUNCHERS) -> list[str]:
    """Systems whose launchers are not those that were stored."""
    from cute_kernels.systems import SYSTEMS

    names = [system.package for system in SYSTEMS if system.launcher]
    names += [f"{system.package}.triton" for system in SYSTEMS]
    known = launched(store)
    return [name for name in names if known.get(name) != launchers_digest(name)]


def tests_of(system: str) -> list[str]:
    """Pytest's arguments that select the tests of a system's SM90 or Triton kernels."""
    folder = TESTS / system.split(".")[0]
    if not _is_triton(system):
        return [str(folder), "-m", "sim and not nightly and not gpu"]
    return [*map(str, sorted(folder.glob("test_triton*.py"))), "-m", "not nightly and not gpu"]


def record(system: str, run: Callable[[Sequence[str]], int], store: Path = LAUNCHERS) -> int:
    """Run a system's simulated tests, store its launchers' digest if they pass; pytest's status.

    The old digest goes first: without one all of the tests run, and a failure leaves none.
    """
    digest = launchers_digest(system)
    kept = launched(store)
    kept.pop(system, None)
    _write(kept, store)
    status = run([*tests_of(system), "-q"])
    if status == 0:
        _write(kept | {system: digest}, store)
    return status


def _write(kept: dict[str, str], store: Path) -> None:
    store.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")


def _pytest(arguments: Sequence[str]) -> int:
    """Run pytest in a new interpreter, with a worker for each core."""
    workers = min(16, len(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", "pytest", f"-n{workers}", "--dist", "worksteal", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def marks(system: str, often: str | None = None) -> list[pytest.MarkDecorator]:
    """Marks of simulated tests of a system; ``often``: see `left_to_the_night`."""
    from ptxsim import skips

    names = {} if often is None else {"often": often}
    return [skips.requires_sim, pytest.mark.sim, pytest.mark.simulates(system, **names)]


def left_to_the_night(items: Iterable, known: Callable[[str], bool] | None = None) -> list:
    """The tests marked ``simulates(system, ...)`` but the first parameter of each function.

    If each system is proved: neither its kernels nor what runs them has changed since all ran.  A
    module may name in one string those of its functions that run ``often``: a test of each kind.
    Of those marked ``mutants``, which test the tests, always.
    """
    known = functools.cache(known or proved_system)
    often, left = set(), []
    for item in items:
        mark = item.get_closest_marker("simulates")
        proof = mark is not None and all(map(known, mark.args))
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


if __name__ == "__main__":
    sys.exit(max((record(name, _pytest) for name in sys.argv[1:] or changed_systems()), default=0))
