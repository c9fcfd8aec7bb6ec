"""Hardware counters of launches through Nsight Compute: what every `perf profile` shares.

`ncu` runs the same command line again with `--target`, which warms a call up and opens the
profiler for one call.  Clocks are left alone.  The metric list is fixed and short; a metric that
this ncu does not know is named in the record, not asked for.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from . import record
from .work import Work

_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "gmma",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "misc",
    "no_instruction",
    "not_selected",
    "short_scoreboard",
    "sleeping",
    "tex_throttle",
    "wait",
)
METRICS = {
    "time_ns": "gpu__time_duration.sum",
    "sm_clock_hz": "sm__cycles_elapsed.avg.per_second",
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "dram_pct": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_hit_pct": "lts__t_sector_hit_rate.pct",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block",
    "grid": "launch__grid_size",
} | {f"stall_{name}": _STALL.format(name) for name in STALLS}
#: ncu's units, as a factor to ns, Hz, bytes or the plain number.
_UNITS = dict.fromkeys(("", "%", "inst", "register/thread", "hz", "cycle/second"), 1.0)
for _prefix, _factor in (("", 1.0), ("k", 1e3), ("m", 1e6), ("g", 1e9)):
    _UNITS |= dict.fromkeys((f"{_prefix}byte", f"{_prefix}byte/block", f"{_prefix}hz"), _factor)
for _prefix, _factor in (("n", 1.0), ("u", 1e3), ("m", 1e6), ("", 1e9)):
    _UNITS |= dict.fromkeys((f"{_prefix}s", f"{_prefix}second"), _factor)
    _UNITS[f"cycle/{_prefix}second"] = 1e9 / _factor


class ProfileError(RuntimeError):
    """Error: ncu could not run, or its output is not the CSV it documents."""


@dataclass(frozen=True)
class Launch:
    """One profiled kernel: its name and its metrics by ncu's names, in base units."""

    kernel: str
    values: dict[str, float]


def _number(text: str) -> float | None:
    """A CSV cell as a number: ncu writes thousands separators; "n/a" and "" are none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def parse(text: str) -> list[Launch]:
    """Parse ncu's `--csv --page raw` output: other lines, then header, units, one row per launch.

    ProfileError where there is no such table, a row is short, or a unit is unknown.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        raise ProfileError('ncu output: expected a CSV header that starts with "ID", got none')
    table = [line for line in lines[start:] if line.startswith('"')]
    header, *rows = csv.reader(io.StringIO("\n".join(table)))
    if "Kernel Name" not in header or len(rows) < 2:
        raise ProfileError("ncu output: expected a units row and a launch below the header")
    units, *values = rows
    launches = []
    for row in values:
        if len(row) != len(header) or len(units) != len(header):
            raise ProfileError(f"ncu output: expected {len(header)} columns, got {len(row)}")
        metrics = {}
        for name, unit, cell in zip(header, units, row, strict=True):
            if name not in METRICS.values():
                continue
            number = _number(cell)
            if number is None:
                continue
            if unit.lower() not in _UNITS:
                raise ProfileError(f"ncu output: unknown unit {unit!r} of {name}")
            metrics[name] = number * _UNITS[unit.lower()]
        launches.append(Launch(row[header.index("Kernel Name")], metrics))
    return launches


def summary(launches: list[Launch], work: Work, ceilings: dict[str, float]) -> dict:
    """Achieved against the floor, and the five stalls that hold warps most, of the longest launch.

    A stall's number is warps in that state per cycle in which the scheduler issues.
    """
    time = METRICS["time_ns"]
    timed = [launch for launch in launches if time in launch.values]
    if not timed:
        raise ProfileError(f"ncu output: expected {time} in a launch, got none")
    longest = max(timed, key=lambda launch: launch.values[time])
    counters = {field: longest.values.get(name) for field, name in METRICS.items()}
    stalls = {name: counters.pop(f"stall_{name}") for name in STALLS}
    ranked = sorted(((v, k) for k, v in stalls.items() if v is not None), reverse=True)
    total_us = sum(launch.values[time] for launch in timed) / 1e3
    floor = work.floor_us(ceilings)
    return {
        "kernel_name": longest.kernel,
        "launches": len(launches),
        "time_us": total_us,
        "floor_us": floor,
        "floor_fraction": floor / total_us,
        "bytes_over_least": _traffic(timed) / work.bytes,
        "counters": {k: v for k, v in counters.items() if v is not None},
        "stalls": [{"reason": name, "warps": value} for value, name in ranked[:5]],
        "ceilings": ceilings,
    }


def _traffic(launches: list[Launch]) -> float:
    names = (METRICS["dram_read_bytes"], METRICS["dram_write_bytes"])
    return sum(launch.values.get(name, 0.0) for launch in launches for name in names)


def ncu() -> str:
    """The path of ncu, or ProfileError."""
    path = shutil.which("ncu")
    if path is None:
        raise ProfileError("ncu (Nsight Compute) is not on the PATH")
    return path


def known_metrics(listing: str) -> tuple[list[str], list[str]]:
    """(metrics to ask for, metrics unknown) from `ncu --query-metrics` output.

    The listing has base names; `launch__` metrics are not in it and always exist.  A listing
    without the most common metric is none: then all are asked for, and ncu says what it lacks.
    """
    base = {line.split()[0] for line in listing.splitlines() if line.strip()}
    if METRICS["time_ns"].split(".")[0] not in base:
        return list(METRICS.values()), []
    available = [m for m in METRICS.values() if m.startswith("launch__") or m.split(".")[0] in base]
    return available, [m for m in METRICS.values() if m not in available]


def command(path: str, metrics: list[str], target: list[str], kernels: str = "") -> list[str]:
    """The ncu command line: counters of what the program brackets, as CSV on standard output.

    kernels: a regular expression for the names of those that count; empty for all.
    """
    options = [
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
        "--target-processes",
        "all",
    ]
    options += ["--kernel-name", f"regex:{kernels}"] if kernels else []
    options += ["--print-units", "base", "--csv", "--page", "raw", "--metrics", ",".join(metrics)]
    return [path, *options, *target]


def launches_of(kernels: str = "") -> tuple[list[Launch], list[str]]:
    """(launches, metrics unknown) of this program under ncu, with `--target`."""
    path = ncu()
    listing = subprocess.run(
        [path, "--query-metrics"], capture_output=True, text=True, timeout=120
    ).stdout
    metrics, unknown = known_metrics(listing)
    program = [sys.executable, "-m", "perf", *sys.argv[1:], "--target"]
    line = command(path, metrics, program, kernels)
    process = subprocess.run(line, cwd=record.ROOT, capture_output=True, text=True, timeout=300)
    if process.returncode:
        tail = (process.stdout + process.stderr).strip()[-1500:]
        raise ProfileError(f"ncu ended with {process.returncode}: {tail}")
    return parse(process.stdout), unknown


def bracketed(call: Callable[[], object]) -> None:
    """Run what ncu profiles: three calls to warm up, then one with the profiler open."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def lines(body: dict) -> Iterator[str]:
    """Lines of the terminal for one record."""
    yield f"{body['system']} {body['product']} {body['shape']}: {body['kernel_name'][:80]}"
    yield (
        f"  {body['time_us']:.1f} us, {body['floor_fraction']:.1%} of the floor "
        f"({body['floor_us']:.1f} us); memory traffic {body['bytes_over_least']:.2f}x the least"
    )
    for name, value in body["counters"].items():
        yield f"  {name:<18} {value:,.6g}"
    yield "  warps stalled per issue cycle:"
    for stall in body["stalls"]:
        yield f"  {stall['reason']:<18} {stall['warps']:.3f}"
    if body["unknown_metrics"]:
        yield f"  not known to this ncu: {', '.join(body['unknown_metrics'])}"
