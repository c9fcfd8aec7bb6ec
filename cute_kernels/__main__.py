"""The command line: audit, demo, info, aot, certify, schedule.

python -m cute_kernels info
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from . import __version__, about
from .audit_command import audit
from .certify_command import certify
from .commands import one_line, require
from .errors import ArgumentValueError, one_of
from .schedule_command import schedule

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__.split(":")[0] + ".")
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


@app.command()
@one_line
def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Versions, devices, the backend of each op on each device and why others were refused."""
    facts = about.info()
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    console.print(_pairs(f"cute_kernels {__version__}", facts["versions"]))
    where = facts["extension"]
    remembered = "in C" if where is None else f"in Python: {where}"
    settings = facts["settings"] | {"cache folder": facts["cache_dir"], "known calls": remembered}
    console.print(_pairs("Settings (CUTE_KERNELS_...)", settings))
    for name, device in facts["devices"].items():
        console.print(_pairs(f"Device {name}", device))
    for op, devices in facts["ops"].items():
        for device, support in devices.items():
            console.print(_backends(op, device, support))


@app.command()
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


@app.command()
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
    console.print(f"{len(records)} kernels in {out}; load them with CUTE_KERNELS_AOT_DIR={out}")


app.command()(one_line(audit))
app.command()(one_line(certify))
app.command()(one_line(schedule))


def _pairs(title: str, rows: dict) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(str(name), str(value) if value != "" else "-")
    return table


def _backends(op: str, device: str, support: dict) -> Table:
    reasons = support["backends"]
    rows = {"runs on": next((name for name, why in reasons.items() if why is None), "nothing")}
    rows |= {f"not {name}": why for name, why in reasons.items() if why}
    rows |= {"guarantees": ", ".join(support["guarantees"]), "contract id": support["contract_id"]}
    return _pairs(f"{op} on {device} (bf16)", rows)


def main() -> None:
    """The entry point of the `cute-kernels` script."""
    app()


if __name__ == "__main__":
    main()
