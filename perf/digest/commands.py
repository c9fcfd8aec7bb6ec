"""The command line of the digests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..core import commands as verbs
from ..core import record
from ..core.commands import Commit, chosen, need_gpu, say, stop


@verbs.app.command()
def digest(
    check: Annotated[bool, typer.Option(help="compare with the records of equal ids")] = False,
    only: Annotated[str, typer.Option(help="parts of case names: linear/,fp16")] = "",
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    results: Annotated[Path, typer.Option(help="folder of the records")] = record.RESULTS,
    output: Annotated[Path | None, typer.Option("-o", "--out", help="append here")] = None,
    commit: Commit = None,
) -> None:
    """SHA-256 of what fixed inputs give: equal contract ids must mean equal digests.

    Appends to perf/results/digests.jsonl; with --check, or on a CPU, to --out only.  --check ends
    with 1 if a digest differs from a record of its contract id, with 2 if none has such a record.
    """
    chosen("--device", device, ("cuda", "cpu"))
    if device == "cuda":
        need_gpu("digest")
    from cute_kernels.errors import BackendUnavailable

    from . import run
    from .cases import chosen as cases_of

    if not (todo := cases_of(only)):
        raise typer.BadParameter(f"--only: no case's name has {only!r}")
    keep_record = not check and device == "cuda"
    path = output or (record.RESULTS / "digests.jsonl" if keep_record else None)
    verdicts = []
    try:
        records = record.read_all(results) if check else []
        for body in run.measure(todo, device, commit):
            verdicts.append(run.against(body, records))
            say(run.line(body, verdicts[-1] if check else None))
            if path:
                record.append(path, body)
    except (record.RecordError, BackendUnavailable) as error:
        raise stop("digest", error) from None
    if check:
        text, code = run.summary(verdicts)
        say(text)
        raise typer.Exit(code)
