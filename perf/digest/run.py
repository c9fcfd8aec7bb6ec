"""Digests of the cases on one device, and whether they are those of the records.

A digest is the SHA-256 of a tensor's bytes, in C order, little-endian.  A case has one for each
input and result, and one for all of its results together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import cute_kernels as ck
from cute_kernels import arch

from ..core import record
from .cases import Case, Tensors

EQUAL, DIFFERS, NO_RECORD = "equal", "differs", "no record"


@dataclass(frozen=True)
class Verdict:
    """Verdict of the records on a digest taken here: one of the three words, and a line."""

    word: str
    text: str


def digest(t: Tensor) -> str:
    """SHA-256 of the raw bytes."""
    raw = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy()).hexdigest()


def combined(digests: dict[str, str]) -> str:
    """SHA-256 of the lines "<name> <digest>", names in alphabetical order."""
    lines = "".join(f"{name} {value}\n" for name, value in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def digests(tensors: Tensors) -> dict[str, str]:
    """The digest of each tensor."""
    return {name: digest(t) for name, t in tensors.items()}


def body(case: Case, device: str) -> dict:
    """The fields of a record that this case fills."""
    inputs = case.inputs()
    results = digests(case.results({name: t.to(device) for name, t in inputs.items()}))
    return {
        "kind": "digest",
        "case": case.name,
        "op": case.op,
        "status": "ok",
        "arch": arch.describe(device).arch,
        "contract_id": ck.contract_id(case.op, device, case.dtype),
        "library": ck.__version__,
        "inputs": combined(digests(inputs)),
        "results": results,
        "digest": combined(results),
    }


def measure(todo: list[Case], device: str, commit: str | None) -> Iterator[dict]:
    """A record of each case, taken on `device`: "cuda" or "cpu"."""
    environment = record.environment(commit)
    gpu = torch.cuda.get_device_name(device) if device != "cpu" else "none"
    for case in todo:
        yield environment | {"gpu": gpu} | body(case, device)


def comparable(one: dict, other: dict) -> bool:
    """Whether two records must have equal digests: one case, one contract id, equal inputs."""
    return all(one[name] == other[name] for name in ("case", "contract_id", "inputs"))


def against(here: dict, records: list[dict]) -> Verdict:
    """Compare a digest taken here with the records."""
    recorded = [r for r in records if r["kind"] == "digest" and r["case"] == here["case"]]
    matches = [r for r in recorded if comparable(here, r)]
    if not matches:
        same_id = [r for r in recorded if r["contract_id"] == here["contract_id"]]
        match = "with these inputs" if same_id else f"of contract id {here['contract_id']}"
        return Verdict(NO_RECORD, f"no record {match}")
    for match in matches:
        if match["digest"] != here["digest"]:
            names = here["results"].keys() | match["results"].keys()
            bad = [n for n in sorted(names) if here["results"].get(n) != match["results"].get(n)]
            return Verdict(DIFFERS, f"differs in {', '.join(bad)} from {_where(match)}")
    return Verdict(EQUAL, f"equal to {'; '.join(sorted({_where(r) for r in matches}))}")


def _where(item: dict) -> str:
    name = item["arch"] if item["gpu"] == "none" else item["gpu"]
    return f"{name}, {item['commit'][:10]}, {item['date'][:10]}"


def line(here: dict, verdict: Verdict | None = None) -> str:
    """One line for a terminal."""
    head = f"{here['case']:<58} {here['digest'][:16]}"
    return f"{head}  {verdict.text}" if verdict else head


def summary(verdicts: list[Verdict]) -> tuple[str, int]:
    """A last line and an exit code: 1 if a digest differs, 2 if none could be compared."""
    counts = {word: [v.word for v in verdicts].count(word) for word in (EQUAL, DIFFERS, NO_RECORD)}
    text = ", ".join(f"{count} {word}" for word, count in counts.items())
    if counts[DIFFERS]:
        return text, 1
    return (text, 0) if counts[EQUAL] else (f"{text}: nothing to compare", 2)
