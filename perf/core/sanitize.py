"""Small cases under compute-sanitizer, and a planted error: what every `perf sanitize` shares.

The tool runs this program again with a hidden command of the system.  Each tensor there is an
allocation of its own, since in a shared block a write beyond a tensor hits memory that exists.  The
planted error must be found: else nothing found says nothing.
"""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from . import record

TOOLS = ("memcheck", "synccheck")
LIMIT_S = 150.0
PLANTED = "memcheck, planted"
_HOMES = ("CUDA_HOME", "CUDA_PATH")
_PLACES = ("bin", "compute-sanitizer")
_TAIL = 3000  # characters of the output that are kept
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?")


def find() -> str | None:
    """The path of compute-sanitizer: on the PATH, or under CUDA_HOME; None where it is absent."""
    if on_path := shutil.which("compute-sanitizer"):
        return on_path
    homes = [Path(os.environ[name]) for name in _HOMES if os.environ.get(name)]
    for home in [*homes, Path("/usr/local/cuda")]:
        for subfolder in _PLACES:
            if (path := home / subfolder / "compute-sanitizer").is_file():
                return str(path)
    return None


def command(path: str, tool: str, target: str, plant: bool) -> list[str]:
    """The command line of one run of `perf sanitize TARGET`."""
    program = [sys.executable, "-m", "perf", "sanitize", target, *(["--plant"] if plant else [])]
    return [path, "--tool", tool, "--print-limit", "10", "--error-exitcode", "99", *program]


def errors(text: str) -> int | None:
    """The errors that the tool counted; None where it came to no summary."""
    counts = _SUMMARY.findall(text)
    return sum(map(int, counts)) if counts else None


def verdict(case: str, code: int, text: str) -> dict:
    """The fields of a record: of a planted error `ok` means that it was found."""
    count, plant = errors(text), case == PLANTED
    body = {"errors": count, "exit_code": code}
    if count is None:
        why = f"no summary, exit code {code}"
    elif plant:
        outcome = {"status": "ok"} if count else {"status": "failed", "why": "planted, not found"}
        return body | outcome
    elif count:
        why = f"{count} errors"
    elif code or "sanitize target: ok" not in text:
        why = f"no errors, but the program ended with {code}"
    else:
        return body | {"status": "ok"}
    return body | {"status": "failed", "why": why, "tail": _end(text)}


def _end(text: str) -> str:
    """First lines of the tool, or, where it printed none, the last of the program."""
    tool_lines = [line for line in text.splitlines() if line.startswith("=====")]
    return "\n".join(tool_lines)[:_TAIL] if len(tool_lines) > 2 else text.strip()[-_TAIL:]


def measure(
    kernel: str, target: str, tools: list[str], commit: str | None = None
) -> Iterator[dict]:
    """The records: one for each tool, and one for the error that memcheck must find."""
    common = record.environment(commit) | {"kind": "sanitize", "kernel": kernel}
    path = find()
    for case in [*tools, *([PLANTED] if "memcheck" in tools else [])]:
        tool, start = case.split(",")[0], time.monotonic()
        body = common | {"case": case, "tool": tool}
        if path is None:
            yield body | {"status": "absent", "why": "compute-sanitizer is not on this machine"}
            continue
        code, text = _run(command(path, tool, target, case == PLANTED))
        seconds = round(time.monotonic() - start, 1)
        yield body | verdict(case, code, text) | {"seconds": seconds}


def _run(arguments: list[str]) -> tuple[int, str]:
    variables = dict(os.environ) | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        process = subprocess.run(
            arguments,
            cwd=record.ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired as late:
        return -1, f"{(late.stdout or b'').decode(errors='replace')}\nno end after {LIMIT_S:.0f} s"
    return process.returncode, process.stdout.decode(errors="replace")


def line(body: dict) -> str:
    """One line for the terminal, and the tool's words where it found something."""
    text = f"compute-sanitizer {body['case']:<20} {body['status']}"
    if body.get("errors") is not None:
        text += f", {body['errors']} errors, {body['seconds']:.0f} s"
    if "why" in body:
        text += f": {body['why']}"
    return text + (f"\n{body['tail']}" if "tail" in body else "")


def target(cases: Callable[[str], None], plant: bool) -> None:
    """Run what the tool checks: a system's small cases, or one write beyond an allocation.

    It ends itself before the tool is ended, which would leave it on the card.
    """
    faulthandler.dump_traceback_later(LIMIT_S - 20, exit=True)
    if plant:
        buffer = torch.empty(1 << 12, dtype=torch.uint8, device="cuda")
        size = 4 * buffer.numel()
        beyond = torch._C._construct_storage_from_data_pointer(
            buffer.data_ptr(), buffer.device, size
        )
        torch.empty(0, dtype=torch.uint8, device="cuda").set_(beyond).fill_(1)
        torch.cuda.synchronize()
        return
    cases("cuda")
    torch.cuda.synchronize()
    print("sanitize target: ok", flush=True)
