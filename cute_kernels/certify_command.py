"""``python -m cute_kernels certify``: the certificates of the catalogue, several at a time."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from .about import catalogue

console = Console()
#: A process holds the compiler and a kernel's code: half a GiB each.
_MOST_JOBS = 8


def certify(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the report.")] = Path(
        "certify"
    ),
    only: Annotated[str, typer.Option(help="Names that contain this text.")] = "",
    jobs: Annotated[int, typer.Option(help="Processes; 0: one for each core.")] = 0,
) -> None:
    """Compile the catalogue, disassemble it, prove the rules of docs/certificate.md."""
    from .compile import certificate_report as report

    named = [i for i, entry in enumerate(catalogue()) if only in entry[0].name]
    chosen = [i for i in named if catalogue()[i][1] is not None]
    jobs = jobs or min(_MOST_JOBS, len(os.sched_getaffinity(0)))
    # Two threads in one compiler crash it, and so does a fork of one that has started.
    fresh = multiprocessing.get_context("spawn")
    with Progress(console=console) as bar, ProcessPoolExecutor(jobs, fresh) as workers:
        task = bar.add_task("certifying", total=len(chosen))
        found = []
        for one in workers.map(prove, chosen):
            found.append(one)
            bar.advance(task)
    report.write_report(found, out)
    console.print(report.table(found))
    if unordered := len(named) - len(chosen):
        console.print(f"{unordered} kernels add in arrival order: no certificate is claimed")
    raise typer.Exit(0 if all(one.ok for one in found) else 1)


def prove(index: int):
    """The certificate of one entry of the catalogue."""
    from .compile import certificate

    kernel, kind, expect = catalogue()[index]
    return certificate.certify(
        kernel.build,
        name=kernel.name,
        constexpr=dict(kernel.constexpr),
        kind=kind,
        expect=expect,
    )
