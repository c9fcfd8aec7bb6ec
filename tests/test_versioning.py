"""docs/versioning.md holds: no plan changes unnoticed, and the changelog names what is public."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path

import pytest

import cute_kernels as ck
from cute_kernels import about, arch, contracts
from cute_kernels.gemm import config
from cute_kernels.integrations import grouped_tensor_parallel, tensor_parallel

from . import snapshot

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r"^## (\d+\.\d+\.\d+)(?: \((.+)\))?$", re.M)
#: The machines of the plans; a CPU's has one thread.
DEVICES = {
    arch.CUTE_SM90: (arch.Device("cuda:0", "cuda", "sm_90a", 132),),
    arch.TRITON: (
        arch.Device("cuda:0", "cuda", "sm_80", 108),
        arch.Device("cuda:0", "hip", "gfx942", 304),
    ),
    arch.CPU: (arch.Device("cpu", "cpu", "AVX512", 1),),
}


def plans() -> str:
    """A line for each contract, backend and machine: a hash of all constants of its plan."""
    assert (
        about.info and tensor_parallel and grouped_tensor_parallel
    )  # importing them registers every contract
    lines = []
    for op in contracts.ops():
        contract = contracts._CONTRACTS[op]
        for backend in sorted(contract.kept):
            for device in DEVICES[backend]:
                text = json.dumps(contract.facts(backend, device), sort_keys=True)
                digest = hashlib.sha256(text.encode()).hexdigest()[:16]
                lines.append(f"{op} {backend} {device.arch} {digest}")
    return "\n".join(lines)


def test_plans_are_the_stored_ones():
    """One that changes belongs under "Bits" in CHANGELOG.md; SNAPSHOTS=write stores it then."""
    snapshot.check("contract_plans.txt", plans())


def test_a_changed_constant_is_seen(monkeypatch):
    before = plans().splitlines()
    monkeypatch.setattr(config, "CPU", dataclasses.replace(config.CPU, columns=128))
    changed = {a.split()[0] for a, b in zip(before, plans().splitlines(), strict=True) if a != b}
    parallel = {
        f"{cut}_parallel_{kind}linear" for cut in ("column", "row") for kind in ("", "grouped_")
    }
    assert changed == {"linear", "matmul", "skinny_linear", "grouped_linear"} | parallel


def sections(text: str) -> dict[str, str]:
    """Version -> what is said of it."""
    parts = VERSION.split(text)
    return {parts[i]: parts[i + 2] for i in range(1, len(parts), 3)}


def test_the_changelog_has_this_version_and_all_public_names():
    out = sections((ROOT / "CHANGELOG.md").read_text())
    assert next(iter(out)) == ck.__version__
    assert all(re.search(r"^### Bits$", message, re.M) for message in out.values())
    named = set(re.findall(r"`(?:ck\.)?(\w+)[^`]*`", "\n".join(out.values())))
    assert set(ck.__all__) <= named, set(ck.__all__) - named


def test_issue_forms_are_well_formed_and_a_bug_report_asks_for_what_names_the_bits():
    yaml = pytest.importorskip("yaml")
    for path in sorted((ROOT / ".github").rglob("*.yml")):
        form = yaml.safe_load(path.read_text())
        if path.stem == "config":
            assert form["blank_issues_enabled"] is False
            continue
        assert form["name"] and form["description"]
        fields = {part["id"]: part for part in form["body"] if part["type"] != "markdown"}
        for part in fields.values():
            assert part["attributes"]["label"] and "required" in part.get("validations", {})
        if path.stem == "bug_report":
            commands = {"info": "python -m cute_kernels info", "ids": "ck.contract_id("}
            for name, command in commands.items():
                assert command in fields[name]["attributes"]["description"]
                assert fields[name]["validations"]["required"] is True
