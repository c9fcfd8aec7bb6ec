"""The ``aot`` command: the catalogue, compiled for another machine to load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from .. import about
from ..compile import aot as ahead
from ..errors import ArgumentValueError, one_of
from ..runtime.optional import require
from .common import one_line, say

console = Console()

Arch = Annotated[str, typer.Option(help=f"What to compile for: {', '.join(about.ARCHES)}.")]


@one_line
def aot(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    arch: Arch = about.ARCHES[0],
    only: Annotated[str, typer.Option(help="Names that contain this text.")] = "",
) -> None:
    """Compile the whole catalogue on this machine, GPU or not, for another to load."""
    if arch not in about.ARCHES:
        raise ArgumentValueError(one_of("--arch", about.ARCHES, arch))
    chosen = [kernel for kernel, _, _ in about.matching(only)]
    require("cu13", "cutlass", "tvm_ffi")
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"compiling for {arch}", total=len(chosen))
        records = ahead.export(chosen, arch, out, progress=lambda *_: bar.advance(task))
    say(f"{len(records)} kernels in {out}; load them with CUTE_KERNELS_AOT_DIR={out}")
