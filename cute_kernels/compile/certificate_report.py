"""What a certificate is asked and what it says: expectations, records, JSON and a table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from ..errors import ArgumentTypeError, expected

REPORT = "certificates.json"


@dataclass(frozen=True)
class Finding:
    """One rule that does not hold, or could not be shown to hold."""

    rule: str
    where: str
    text: str


@dataclass(frozen=True)
class Expect:
    """What a kernel was meant to compile to.

    Attributes:
        mma: the matrix instructions meant, by shape (``"64x256x16"``) or from the opcode on
            (``"HGMMA.64x256x16.F32.BF16"``), several for several; each must occur and no other
            may.  None: there must be none.
        max_registers: registers per thread.
        max_shared: static and dynamic shared memory in bytes; None: any.
        pdl: the kernel is launched with programmatic dependent launch, so R3 applies.
        max_step: the largest constant that a coordinate is multiplied by in 32 bits, see R4.
    """

    mma: str | tuple[str, ...] | None
    max_registers: int
    max_shared: int | None = None
    pdl: bool = False
    max_step: int = 512


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
    """What was read from one compiled configuration of a kernel; `ok` when no rule is broken.

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


def table(certs: Iterable[Certificate]) -> Table:
    """One row per certificate; the rules that are broken, and how often.

    Of a kernel's configuration the rows show what is not the same in all of them.
    """
    certs = [_checked(certificate) for certificate in certs]
    values: dict[tuple[str, str], set] = {}
    for certificate in certs:
        for key, value in certificate.constexpr:
            values.setdefault((certificate.name, key), set()).add(value)
    out = Table(title="Certificates")
    for column in ("kernel", "configuration", "class"):
        out.add_column(column, no_wrap=column != "class")
    for column in ("regs", "warpgroups", "shared", "MMA", "atomics"):
        out.add_column(column, justify="right")
    out.add_column("SASS")
    out.add_column("verdict")
    for certificate in certs:
        shown = [(k, v) for k, v in certificate.constexpr if len(values[certificate.name, k]) > 1]
        out.add_row(*_row(certificate, shown), style="" if certificate.ok else "red")
    return out


def _row(certificate: Certificate, shown: list[tuple[str, Any]]) -> list[str]:
    counts = dict(certificate.opcodes)
    mma = sum(n for opcode, n in counts.items() if opcode.endswith("MMA"))
    memory = ("RED", "ATOM", "UBLKRED", "UTMARED")
    atomics = sum(n for opcode, n in counts.items() if opcode.startswith(memory))
    dynamic = certificate.shared_dynamic
    return [
        certificate.name,
        " ".join(str(value) for _, value in shown),
        certificate.kind,
        str(certificate.registers),
        "+".join(map(str, certificate.register_pool.held)) if certificate.register_pool else "",
        "?" if dynamic is None else str(dynamic + certificate.shared_static),
        str(mma),
        str(atomics),
        certificate.sass_sha256[:8],
        "ok" if certificate.ok else _broken(certificate.findings),
    ]


def _broken(findings: tuple[Finding, ...]) -> str:
    counts = Counter(finding.rule for finding in findings)
    return ", ".join(f"{rule} x{count}" for rule, count in sorted(counts.items()))


def _checked(certificate: Any) -> Certificate:
    if not isinstance(certificate, Certificate):
        raise ArgumentTypeError(expected("certs", "Certificate items", type(certificate).__name__))
    return certificate
