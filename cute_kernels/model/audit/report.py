"""Report of an audit: culprits in the order in which they ran, as text, cells and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

from ..observe.rows import DIGEST_BITS

#: Columns of the table, and those that are numbers.
HEADER = ("module", "class", "transform", "bytes", "of", "first", "want", "got")
NUMBERS = ("bytes", "of")

#: Version of the JSON: raised when a key is renamed or taken away.
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One culprit under one transform, or one parameter whose gradient differs.

    Attributes:
        module: Its name in the model; "" is the model itself.
        kind: Its class.
        call: Which of its calls in one forward pass, from 0.
        ops: What it ran outside its children, in order of first use.
        transform, case: The surroundings; the first case of the transform that showed it.
        tensor: The output's path, "" where there is one; of a gradient the parameter's name.
        rows, of_rows: Tokens at which it is the culprit, of those compared, over all cases.
        bytes, of_bytes: Bytes that differ there, of all compared.
        first: (sequence, position, column), or the index of a parameter; None if the difference
            did not come again when the run was repeated to look at it.
        want, got: The bits there: of the reference, and under the transform.
    """

    module: str
    kind: str
    call: int = 0
    ops: tuple[str, ...] = ()
    transform: str
    case: str
    tensor: str
    rows: int = 0
    of_rows: int = 0
    bytes: int
    of_bytes: int
    first: tuple[int, ...] | None
    want: str
    got: str

    @property
    def name(self) -> str:
        """Name of the module or parameter, and the call if it is not the first."""
        if not self.of_rows:
            return self.tensor
        module_name = self.module or "(the model)"
        return module_name + (f" (call {self.call + 1})" if self.call else "")


@dataclass(frozen=True)
class Victim:
    """A module whose rows differ because rows that it took did."""

    module: str
    kind: str
    call: int
    transform: str
    rows: int


@dataclass(frozen=True)
class Report:
    """The result of ``ck.audit``.

    Attributes:
        findings: Culprits in the order in which modules ran, then gradients in backward order.
        victims: Modules that only passed a difference on.
        ran: Transform -> its cases.
        skipped: Transform -> why it was not run.
        unfollowed: Modules that ran and had no output with a row for each token, or none that could
            be compared; what they do is laid to the module around them.
        rows: Output rows compared, over all modules and cases; differing: how many of them differ.
        gradients: Gradients compared.
        facts: The versions, the device and the dtypes of the run.
        information: Differences that patched modules do not promise away: gradients of theirs in
            ``.grad``, summed by autograd over micro-batches, and main_grads that several of them
            add into or that hold broadcast positions.
        unrecognised: Transforms that did not run because the model's cache is not a
            ``past_key_values``: a verdict on decoding is missing.
    """

    findings: tuple[Finding, ...]
    victims: tuple[Victim, ...]
    ran: Mapping[str, tuple[str, ...]]
    skipped: Mapping[str, str]
    unfollowed: tuple[str, ...]
    rows: int
    differing: int
    gradients: int
    facts: Mapping[str, str]
    information: tuple[Finding, ...] = ()
    unrecognised: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing differs, and batches and the model's cache were tested."""
        return self.verdict == "ok"

    @property
    def untested(self) -> dict[str, str]:
        """Transforms without which a verdict is "incomplete" -> why they did not run."""
        missing = dict.fromkeys(self.unrecognised, "cache not recognised")
        return missing | {name: why for name, why in self.skipped.items() if name == "batch"}

    @property
    def verdict(self) -> str:
        """ "differs", "incomplete" (`untested` has transforms), or "ok"."""
        if self.findings or self.differing:
            return "differs"
        return "incomplete" if self.untested else "ok"

    @property
    def first(self) -> Finding | None:
        """Culprit that ran first, or the first gradient where all outputs are equal."""
        return self.findings[0] if self.findings else None

    def headline(self) -> str:
        """Return one line: the first culprit, or that there is none."""
        culprit = self.first
        if culprit is None and self.verdict != "differs":
            none = f"0 differing rows of {self.rows:,}, 0 differing of {self.gradients:,} gradients"
            if self.information:
                none += f" that are promised ({len(self.information)} others: below)"
            missing = ", ".join(f"{name} not run ({why})" for name, why in self.untested.items())
            return f"incomplete: {missing}; {none}" if missing else none
        if culprit is None:
            return f"{self.differing:,} rows of {self.rows:,} differ, and no module began it"
        ops = f"; ops: {', '.join(culprit.ops)}" if culprit.ops else ""
        return (
            f"first: {culprit.name} ({culprit.kind}{ops}) under {culprit.transform}, {culprit.case}"
        )

    def lines(self) -> list[str]:
        """Return the lines below the table."""
        lines = []
        if self.victims:
            modules = len({victim.module for victim in self.victims})
            lines.append(f"{modules} other modules passed a difference on")
        for finding in self.information:
            count = f"{finding.bytes:,} of {finding.of_bytes:,} bytes differ"
            lines.append(f"information: {finding.name}: {count}")
        lines += [f"not run: {name}: {reason}" for name, reason in self.skipped.items()]
        if self.unfollowed:
            lines.append(f"without rows to compare: {', '.join(self.unfollowed)}")
        return lines

    def as_json(self, victims: bool = False) -> dict[str, object]:
        """Return plain values by the keys of docs/audit.md; ``victims``: list them too."""
        # Dataclasses as dicts, tuples as lists.
        values = json.loads(json.dumps(dataclasses.asdict(self)))
        if not victims:
            del values["victims"]
        head = {
            "version": VERSION,
            "ok": self.ok,
            "verdict": self.verdict,
            "digest_bits": DIGEST_BITS,
            "first": values["findings"][0] if self.findings else None,
            "victim_count": len(self.victims),
        }
        return head | values

    def __str__(self) -> str:
        table = [HEADER, *(cells(finding) for finding in self.findings)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table[: len(table) if self.findings else 0]
        ]
        return "\n".join([self.headline(), *lines, *self.lines()])


def cells(finding: Finding) -> tuple[str, ...]:
    """Return the cells of a finding's row in the table."""
    place = "not seen again" if finding.first is None else ", ".join(map(str, finding.first))
    counts = f"{finding.bytes:,}", f"{finding.of_bytes:,}"
    head = finding.name, finding.kind, finding.transform
    return *head, *counts, place, finding.want, finding.got
