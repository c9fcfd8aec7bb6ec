"""The command line of the probes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..core import commands as verbs
from ..core import record
from ..core.commands import Commit, Output, chosen, need_gpu, say


@verbs.app.command()
def probe(
    names: Annotated[list[str], typer.Argument(help="names of probes (perf/probes), or all")],
    output: Output = None,
    golden: Annotated[Path | None, typer.Option(help="folder of the golden vectors")] = None,
    commit: Commit = None,
) -> None:
    """Asks the card what its tensor cores do (docs: questions for the hardware)."""
    need_gpu("probe")
    from . import runner

    probe_names = list(runner.PROBES) if names == ["all"] else names
    chosen("names", ",".join(probe_names), runner.PROBES)
    bad = 0
    path = output or record.RESULTS / "probes.jsonl"
    for body in runner.run(probe_names, output=path, golden=golden or runner.GOLDEN, commit=commit):
        say(runner.line(body))
        smoke = body["probe"] == "smoke" and body["case"] == "answer"
        bad += body.get("verdict") == "failed" or (smoke and body["verdict"] != "yes")
    if bad:
        raise typer.Exit(1)
