"""The command of `verify`: the certificates of the catalogue, several at a time.

A module of its own: processes that are spawned import it by its name.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from cute_kernels.about import catalogue, matching
from cute_kernels.cli.common import BROKEN, folded, one_line, writing
from cute_kernels.errors import ArgumentValueError, CertificateError, expected
from cute_kernels.runtime.optional import require

from . import certificate, report, sass, sources

console = Console()
#: A process holds the compiler and a kernel's code: half a GiB each.
_MOST_JOBS = 8


@one_line
def certify(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the report.")] = Path(
        "certify"
    ),
    only: Annotated[str, typer.Option(help="Names that contain this text.")] = "",
    jobs: Annotated[int, typer.Option(help="Processes; 0: one for each core.")] = 0,
) -> None:
    """Compile the catalogue, disassemble it, prove the rules of docs/certificate.md."""
    if jobs < 0:
        raise ArgumentValueError(expected("--jobs", "a number of processes, or 0", jobs))
    entries = matching(only)
    chosen = [kernel.identity for kernel, kind, _ in entries if kind is not None]
    require("cu13", "cutlass")
    sass.nvdisasm()
    out.mkdir(parents=True, exist_ok=True)  # before minutes of work, not after
    # Taken before the workers import anything: an edit during minutes of work leaves a digest that
    # is no longer the tree's, never one that claims what was not compiled.
    names = {kernel.name for kernel, _, _ in entries}
    made_from = {name: certificate_sources(name) for name in names}
    certificates = _prove_all(chosen, jobs or min(_MOST_JOBS, len(os.sched_getaffinity(0))))
    certificates = [replace(one, sources=made_from[one.name]) for one in certificates]
    with writing(out / report.REPORT):
        report.write_report(certificates, out)
    for table in report.tables(certificates):
        console.print(table)
    for line in report.broken_rules(certificates):
        console.print(folded(line), style="red", markup=False, soft_wrap=True)
    if unordered := len(entries) - len(chosen):
        console.print(f"{unordered} kernels add in arrival order: no certificate is claimed")
    raise typer.Exit(0 if all(one.ok for one in certificates) else BROKEN)


def certificate_sources(name: str) -> str:
    """Digest of what the certificates of the kernels called ``name`` depend on."""
    return sources.digest(
        name, entries=[entry for entry in _entries() if entry.kernel.name == name]
    )


@functools.cache
def _entries() -> tuple[tuple, ...]:
    """`catalogue`, once a process: thousands of kernels, asked for by every name and proof."""
    return tuple(catalogue())


def _prove_all(identities: list[str], jobs: int) -> list:
    # Two threads in one compiler crash it, and so does a fork of one that has started.
    fresh = multiprocessing.get_context("spawn")
    bars = Progress(console=console, disable=not console.is_terminal)
    try:
        with bars as bar, ProcessPoolExecutor(jobs, fresh) as workers:
            task = bar.add_task("certifying", total=len(identities))
            certificates = []
            for proved in workers.map(prove, identities):
                certificates.append(proved)
                bar.advance(task)
    except BrokenProcessPool:
        raise CertificateError(
            "a process that compiles was killed: try with fewer --jobs, each takes half a GiB"
        ) from None
    return certificates


def prove(identity: str):
    """The certificate of one entry of the catalogue, by its kernel's ``identity``."""
    kernel, kind, expect = next(e for e in _entries() if e[0].identity == identity)
    return certificate.certify(
        kernel.build,
        name=kernel.name,
        constexpr=dict(kernel.constexpr),
        kind=kind,
        expect=expect,
    )
