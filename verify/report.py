"""Expectations and results of certificates: records, JSON and tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cute_kernels.errors import ArgumentTypeError, expected

REPORT = "certificates.json"


@dataclass(frozen=True)
class Finding:
    """One rule that does not hold, or could not be shown to hold."""

    rule: str
    where: str
    text: str


@dataclass(frozen=True)
class RegisterPool:
    """Registers that the warpgroups of a CTA share through setmaxnreg.

    Attributes:
        threads: of a CTA.
        start: registers per thread that each starts with, in eights.
        held: registers per thread, for each warpgroup the most it holds after its first setmaxnreg.
    """

    threads: int
    start: int
    held: tuple[int, ...]

    @property
    def size(self) -> int:
        """Registers of the CTA."""
        return self.threads * self.start

    @property
    def asked(self) -> int:
        """Registers that the warpgroups hold together."""
        return sum(n * min(128, self.threads - 128 * g) for g, n in enumerate(self.held))


@dataclass(frozen=True)
class Certificate:
    """Certificate of one compiled configuration of a kernel; `ok` when no rule is broken.

    Attributes:
        name: the kernel, by the name its caller gives it.
        constexpr: the configuration, (argument, value) in the order given.
        arch: the PTX target, ``"sm_90a"``.
        toolchain: the DSL's version and the compiler that wrote the PTX.
        kind: the class, ``"A"`` or ``"B"``.
        opcodes: SASS opcodes without modifiers and how many of each, over all kernels in the cubin.
        registers: registers per thread, the largest of the kernels.
        shared_static: static shared memory in bytes, without what the system reserves.
        shared_dynamic: dynamic shared memory of the launch in bytes; None if it is not a constant.
        stack: local memory per thread in bytes.
        spills: SASS instructions that read or write local memory.
        sass_sha256: digest of opcodes and operands without addresses, labels and names.
        findings: empty for a kernel that holds every rule of its class.
        register_pool: what its warpgroups do with setmaxnreg, of several kernels the one with the
            least to spare; None if they do not use it.
        sources: what it was made from, see `sources.digest`; None: not said.
    """

    name: str
    constexpr: tuple[tuple[str, Any], ...]
    arch: str
    toolchain: str
    kind: Literal["A", "B"]
    opcodes: tuple[tuple[str, int], ...]
    registers: int
    shared_static: int
    shared_dynamic: int | None
    stack: int
    spills: int
    sass_sha256: str
    findings: tuple[Finding, ...]
    register_pool: RegisterPool | None = None
    sources: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every rule holds."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """The record in JSON's types; constexpr values that JSON lacks become their ``str``."""
        record = asdict(self) | {"ok": self.ok}
        record["constexpr"] = {key: _plain(value) for key, value in self.constexpr}
        record["opcodes"] = dict(self.opcodes)
        record["findings"] = [asdict(finding) for finding in self.findings]
        return record

    def to_json(self) -> str:
        """One line of JSON with sorted keys: equal certificates give equal text."""
        return json.dumps(self.to_dict(), sort_keys=True)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)


def write_report(certs: Iterable[Certificate], out_dir: str | Path) -> Path:
    """Writes ``certificates.json``, a list of records, into `out_dir` and returns its path.

    Raises:
        ArgumentTypeError: an item is not a Certificate.
    """
    records = [_checked(certificate).to_dict() for certificate in certs]
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / REPORT
    path.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
    return path


def tables(certs: Iterable[Certificate]) -> list[Table]:
    """One table for each kernel, one row per certificate; 80 columns are enough for those here.

    Of a configuration the rows show what is not the same in all of the kernel's.
    """
    kernels: dict[tuple[str, str], list[Certificate]] = {}
    for certificate in map(_checked, certs):
        kernels.setdefault((certificate.name, certificate.kind), []).append(certificate)
    found = []
    for (name, kind), group in kernels.items():
        look = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
        table = Table(title=f"{name}, class {kind}", title_justify="left", **look)
        table.add_column("configuration", overflow="fold")
        for column in ("regs", "warpgroups", "shared", "MMA", "atomics"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("verdict", overflow="fold")
        for certificate in group:
            style = "" if certificate.ok else "red"
            table.add_row(*_row(certificate, _configuration(certificate, group)), style=style)
        found.append(table)
    return found


def broken_rules(certs: Iterable[Certificate]) -> list[str]:
    """List one line for each broken rule: where first, and how often."""
    lines = []
    for certificate in certs:
        for rule, count in _counts(certificate):
            first = next(f for f in certificate.findings if f.rule == rule)
            which = ", ".join(f"{name}={value}" for name, value in certificate.constexpr)
            times = f" ({count} times, all in {REPORT})" if count > 1 else ""
            lines.append(f"{certificate.name}({which}): {rule}: {first.where}: {first.text}{times}")
    return lines


def _configuration(certificate: Certificate, group: list[Certificate]) -> str:
    first, shown = dict(group[0].constexpr), []
    for name, value in certificate.constexpr:
        if all(dict(one.constexpr).get(name) == first.get(name) for one in group):
            continue
        if isinstance(value, bool):
            value = name if value else f"no {name}"
        shown.append(str(value))
    return " ".join(shown)


def _row(certificate: Certificate, configuration: str) -> list[str]:
    counts = dict(certificate.opcodes)
    mma = sum(n for opcode, n in counts.items() if opcode.endswith("MMA"))
    memory = ("RED", "ATOM", "UBLKRED", "UTMARED")
    atomics = sum(n for opcode, n in counts.items() if opcode.startswith(memory))
    dynamic = certificate.shared_dynamic
    return [
        configuration,
        str(certificate.registers),
        "+".join(map(str, certificate.register_pool.held)) if certificate.register_pool else "",
        "?" if dynamic is None else str(dynamic + certificate.shared_static),
        str(mma),
        str(atomics),
        ", ".join(f"{rule} x{count}" for rule, count in _counts(certificate)) or "ok",
    ]


def _counts(certificate: Certificate) -> list[tuple[str, int]]:
    return sorted(Counter(finding.rule for finding in certificate.findings).items())


def _checked(certificate: Any) -> Certificate:
    if not isinstance(certificate, Certificate):
        raise ArgumentTypeError(expected("certs", "Certificate items", type(certificate).__name__))
    return certificate
