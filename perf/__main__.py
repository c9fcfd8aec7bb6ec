"""The command line: python -m perf bench | digest | soak | tune | profile | probe | report | ..."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cute_kernels.cli.common import writing

from .core import record, tables
from .core.commands import Commit, app, need_gpu, say, stop
from .core.systems import modules
from .digest import commands as digests
from .probes import commands as probes

app.info.help = __doc__
#: Their import adds their commands.
ADDED = (*modules("commands"), probes, digests)


@app.command()
def report(
    results: Annotated[Path, typer.Option(help="folder of the records")] = record.RESULTS,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="the index")] = None,
) -> None:
    """Writes docs/status.md, its plots and the README's table from the records."""
    from . import report as page

    if not results.is_dir():
        raise stop("report", f"--results: expected a folder that exists, got {results}")
    try:
        records = record.read_all(results)
    except record.RecordError as error:
        raise stop("report", error) from None
    certificates = results / page.CERTIFICATES.name
    page.adopt_certificates(certificates)
    path = output or page.STATUS
    _, *plots = page.write(records, page.load_certificates(certificates), path)
    say(f"{path}: {len(records)} records; plots: {len(plots) or 'none, nothing was timed'}")


@app.command()
def show(
    what: Annotated[str, typer.Argument(help="gemm, attention, ...; kernels, digests, probes")],
    gpu: Annotated[str, typer.Option(help="H100 or H200; default: all")] = "",
    results: Annotated[Path, typer.Option(help="folder of the records")] = record.RESULTS,
) -> None:
    """Prints the newest record of each case: time, rate, rivals, bits, where it ran."""
    from . import report as page
    from . import show as showing

    try:
        records = record.read_all(results)
    except record.RecordError as error:
        raise stop("show", error) from None
    certificates = page.load_certificates(results / page.CERTIFICATES.name)
    known = [*showing.kernels_of(records), *showing.others([])]
    if what not in known:
        raise stop("show", f"expected one of {', '.join(known)}; got {what!r}")
    head, rows = showing.shown(what, records, certificates, gpu)
    say("\n".join(tables.table(head, rows)))


@app.command()
def prune(
    results: Annotated[Path, typer.Option(help="folder of the records")] = record.RESULTS,
) -> None:
    """Keeps the newest record of each case, and adds a table of the older ones to older.md."""
    from . import prune as pruning

    if not results.is_dir():
        raise stop("prune", f"--results: expected a folder that exists, got {results}")
    try:
        dropped = pruning.prune(results)
    except record.RecordError as error:
        raise stop("prune", error) from None
    if dropped:
        path = results / pruning.SUMMARY
        with writing(path):
            path.write_text(pruning.summary(dropped))
    say(f"{sum(map(len, dropped.values()))} older records dropped of {len(dropped)} files")


@app.command()
def compare(a: Path, b: Path) -> None:
    """Exit code 1 if B is slower than A beyond their noise or lost a promise, 2 if unusable."""
    from .core.compare import Unusable
    from .core.compare import compare as compared

    try:
        rows, only_in_a, only_in_b = compared(record.read(a), record.read(b))
    except (record.RecordError, Unusable) as error:
        raise stop("compare", error) from None
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("system", "product", "shape\nGPU"):
        table.add_column(heading, overflow="fold")
    for heading in ("A us\nB us", "change\nnoise"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for row in rows:
        _, system, product, shape, _, gpu = row.key
        times = [f"{t:.1f}" if t else "-" for t in (row.before, row.after)]
        shares = ["-" if x is None else f"{x:+.1%}" for x in (row.change, row.noise)]
        pairs = ("\n".join(pair) for pair in ((shape, gpu), times, shares))
        table.add_row(system, product, *pairs, row.verdict)
    Console(highlight=False).print(table, markup=False)
    for name, keys in (("only in A", only_in_a), ("only in B", only_in_b)):
        for key in keys:
            say(f"{name}: {' '.join(key)}")
    if any(row.regressed for row in rows):
        raise typer.Exit(1)


@app.command()
def headline(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="file of the run")] = None,
    budget: Annotated[float, typer.Option(help="seconds that the whole run may take")] = 480.0,
    commit: Commit = None,
) -> None:
    """Every row of the README's table of speed, with its rivals, in one run of this commit.

    Replaces the run of this GPU model in perf/results/headline.jsonl; `report` makes the tables.
    """
    need_gpu("headline")
    import torch

    from . import headline as table
    from .core import stage as stages
    from .core.models import model

    path = (output or table.FILE).resolve()
    logs = record.ROOT / "build" / "headline"
    table.begin(path, model(torch.cuda.get_device_name()))
    outcomes = stages.run(table.stages(path, commit), logs, budget)
    say("\n".join(stages.tail(logs, outcomes)))
    for outcome in outcomes:
        head = f"{outcome.stage:<12} {outcome.status:<18} {outcome.seconds:7.1f} s"
        say(f"{head}  {outcome.last}")
    if any(outcome.status != "ok" for outcome in outcomes):
        raise typer.Exit(1)


if __name__ == "__main__":
    app(prog_name="python -m perf")
