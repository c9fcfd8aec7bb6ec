"""Output of Nsight Compute, for tests of what reads it."""

from __future__ import annotations

import csv
import io
import subprocess

from perf.core import ncu, record, timing

CEILINGS = {"mm_tflops": 800.0, "copy_gbs": 4300.0}
STALLS = {"gmma": 1.5, "long_scoreboard": 0.25, "barrier": 0.5, "wait": 0.125, "membar": 0.0625}


def row(cells: list[str]) -> str:
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="").writerow(cells)
    return out.getvalue()


def output(launches: list[dict[str, str]], units: dict[str, str]) -> str:
    """Standard output of ncu --csv --page raw: its own lines, the program's, then the table."""
    names = list(units)
    fixed = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"]
    fixed += ["Block Size", "Grid Size", "Device", "CC"]
    lines = [
        "==PROF== Connected to process 4242 (/usr/bin/python3.12)",
        "warming up",
        '==PROF== Profiling "kernel_cutlass_gemm": 0%....50%....100% - 9 passes',
        "==PROF== Disconnected from process 4242",
        row([*fixed, *names]),
        row([""] * len(fixed) + [units[name] for name in names]),
    ]
    for index, launch in enumerate(launches):
        head = [str(index), "4242", "python3.12", "127.0.0.1", launch["kernel"], "1", "7"]
        head += ["(384, 1, 1)", "(132, 1, 1)", "0", "9.0"]
        lines.append(row([*head, *(launch.get(name, "n/a") for name in names)]))
    return "\n".join(lines) + "\n"


UNITS = {
    ncu.METRICS["time_ns"]: "us",
    ncu.METRICS["sm_clock_hz"]: "Ghz",
    ncu.METRICS["tensor_pct"]: "%",
    ncu.METRICS["dram_read_bytes"]: "Mbyte",
    ncu.METRICS["dram_write_bytes"]: "byte",
    ncu.METRICS["registers"]: "register/thread",
    "sm__something_else.sum": "furlong",
} | {ncu.METRICS[f"stall_{name}"]: "inst" for name in (*STALLS, "drain")}


MAIN = {
    "kernel": "kernel_cutlass_gemm_o_(tile 128, 256)",
    ncu.METRICS["time_ns"]: "1,234.5",
    ncu.METRICS["sm_clock_hz"]: "1.75",
    ncu.METRICS["tensor_pct"]: "88.25",
    ncu.METRICS["dram_read_bytes"]: "134.5",
    ncu.METRICS["dram_write_bytes"]: "100,663,296",
    ncu.METRICS["registers"]: "168",
    "sm__something_else.sum": "3",
} | {ncu.METRICS[f"stall_{name}"]: str(value) for name, value in STALLS.items()}


def stand_in(monkeypatch, words: str, launches: list[dict], listing="none\n", code=0) -> list[str]:
    """Replace ncu and the card for the command line ``words``; the calls of ncu, once made."""
    requested: list[str] = []

    def answer(command, **_):
        requested.append(" ".join(command))
        text = listing if "--query-metrics" in command else output(launches, UNITS)
        return subprocess.CompletedProcess(command, code, text, "==ERROR== NVGPUCTRPERM")

    monkeypatch.setattr(ncu, "ncu", lambda: "ncu")
    monkeypatch.setattr(ncu.subprocess, "run", answer)
    monkeypatch.setattr(ncu.sys, "argv", words.split())
    monkeypatch.setattr(timing, "ceilings", lambda: CEILINGS)
    monkeypatch.setattr(record, "environment", lambda commit: {"commit": commit})
    return requested
