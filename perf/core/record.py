"""One measurement is one JSON object on one line: reading, writing, and where it was taken."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch

from cute_kernels.cli.common import writing

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "perf" / "results"
SCHEMA = 1
KINDS = ("bench", "digest", "probe", "profile", "sanitize", "soak", "tune")
#: What can change a number or a bit without a change of our source.
DISTRIBUTIONS = (
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "quack-kernels",
    "flash-attn-4",
    "fla-core",
)
_SOURCES = ("cute_kernels", "schedulers", "perf")


class RecordError(ValueError):
    """A results file that cannot be used: missing, empty, or with a line that is no record."""


def append(path: Path | str, record: dict) -> None:
    """Writes one record as the last line of `path`; the folder is made if there is none."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path), path.open("a") as out:
        out.write(json.dumps(record, sort_keys=True) + "\n")


def read(path: Path | str) -> list[dict]:
    """The records of one file, in order; RecordError names the file and the line that is wrong."""
    path = Path(path)
    if not path.is_file():
        raise RecordError(f"{path}: no such file")
    records = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise RecordError(f"{path}:{number}: not JSON ({error.msg})") from None
        if not isinstance(record, dict) or record.get("kind") not in KINDS:
            raise RecordError(f"{path}:{number}: expected an object whose kind is one of {KINDS}")
        if record.get("schema") != SCHEMA:
            got = record.get("schema")
            raise RecordError(f"{path}:{number}: expected schema {SCHEMA}, got {got}")
        records.append(record)
    if not records:
        raise RecordError(f"{path}: holds no record")
    return records


def read_all(folder: Path | str = RESULTS) -> list[dict]:
    """The records of every results file, files in name order; none where there is no file."""
    return [r for path in sorted(Path(folder).glob("*.jsonl")) for r in read(path)]


def _output(*command: str) -> str:
    """A command's output, stripped; the empty string where it cannot run."""
    try:
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""


@functools.cache
def source_digest() -> str:
    """A hash of the library's Python files: it ties a record to its source where git is absent."""
    digest = hashlib.sha256()
    files = [p for name in _SOURCES for p in (ROOT / name).rglob("*.py")]
    for path in sorted(files):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _git(commit: str | None) -> dict:
    """The commit and whether the tree differs from it; `commit` is for a copy without .git."""
    if commit:
        return {"commit": commit, "dirty": None}
    head = _output("git", "rev-parse", "HEAD")
    if not head:
        return {"commit": "unknown", "dirty": None}
    return {"commit": head, "dirty": bool(_output("git", "status", "--porcelain"))}


def versions() -> dict[str, str]:
    """The version of each package that matters, "absent" for one that is not installed."""
    out = {}
    for name in DISTRIBUTIONS:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "absent"
    out["cuda"] = torch.version.cuda or "absent"
    return out


def clocks() -> dict[str, str]:
    """Clocks that the card reports now; read, never set.  Empty where there is no nvidia-smi."""
    fields = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
    values = _output("nvidia-smi", "--id=0", f"--query-gpu={fields}", "--format=csv,noheader")
    return dict(zip(fields.split(","), (v.strip() for v in values.split(",")), strict=False))


def _portable(argument: str) -> str:
    """An argument of the command line; of an absolute path, which is one machine's, its name."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def environment(commit: str | None = None) -> dict:
    """The fields that every record carries: source, machine, versions, date, command line."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    driver = _output("nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "schema": SCHEMA,
        **_git(commit),
        "source": source_digest(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m perf", *map(_portable, sys.argv[1:])]),
        "gpu": gpu,
        "driver": driver or "unknown",
        "versions": versions(),
    }
