"""The command line: audit, demo, info, aot, certify, contract.

python -m cute_kernels info
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from . import __version__, about
from .cli.audit import audit
from .cli.certify import certify
from .cli.common import one_line, say
from .cli.contract import contract
from .cli.info import info
from .errors import ArgumentValueError, one_of
from .runtime.optional import require

# Without rich's markup a flag has no `<bool>` in the help, and an error of usage no frame.
app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
console = Console()

Arch = Annotated[str, typer.Option(help=f"What to compile for: {', '.join(about.ARCHES)}.")]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"cute-kernels {__version__}")
        raise typer.Exit


Version = typer.Option(
    "--version", is_eager=True, callback=_print_version, help="Print the version."
)


@app.callback()
def _root(version: Annotated[bool, Version] = False) -> None:
    """GPU kernels whose bits you can rely on."""


app.command(short_help="What runs here, and what is not as tested.")(info)


@app.command(short_help="Train a small model; compare rollout and training bits.")
@one_line
def demo(
    out: Annotated[Path, typer.Option("--out", "-o")] = Path("demo_output"),
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the best there is.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Training time; 50 on a CPU, 5 on a GPU.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps, instead of a time.")] = None,
    seed: Annotated[int, typer.Option()] = 0,
    order: Annotated[str, typer.Option(help="Of every linear layer: chain or tree.")] = "chain",
) -> None:
    """Train a small transformer on real text; compare rollout and training bits."""
    from .demo.run import main as run

    raise typer.Exit(run(out, device, seconds, seed, steps, order=order))


@app.command(short_help="Compile the catalogue for another machine to load.")
@one_line
def aot(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    arch: Arch = about.ARCHES[0],
    only: Annotated[str, typer.Option(help="Names that contain this text.")] = "",
) -> None:
    """Compile the whole catalogue on this machine, GPU or not, for another to load."""
    from .compile import aot as ahead

    if arch not in about.ARCHES:
        raise ArgumentValueError(one_of("--arch", about.ARCHES, arch))
    chosen = [kernel for kernel, _, _ in about.matching(only)]
    require("cu13", "cutlass", "tvm_ffi")
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"compiling for {arch}", total=len(chosen))
        records = ahead.export(chosen, arch, out, progress=lambda *_: bar.advance(task))
    say(f"{len(records)} kernels in {out}; load them with CUTE_KERNELS_AOT_DIR={out}")


app.command(short_help="Name the modules whose bits follow the batch.")(audit)
app.command(short_help="Prove the rules of docs/certificate.md on compiled kernels.")(certify)
app.command(short_help="What bits depend on here: print, write, compare.")(contract)


def main() -> None:
    """The entry point of the `cute-kernels` script."""
    app()


if __name__ == "__main__":
    main()
