"""``python -m cute_kernels contract``: this process's contract, to a file or against one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..model.contract import Contract
from ..model.contract import contract as make_contract
from ..runtime.process_contract import report
from .common import BROKEN, folded, one_line, say, writing


@one_line
def contract(
    compare: Annotated[Path | None, typer.Option(help="File of the other side.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the best there is.")] = None,
) -> None:
    """Print, write or compare what the bits of this process depend on."""
    ours = make_contract(device)
    if out is not None:
        with writing(out):
            ours.save(out)
        say(f"contract {ours.id} in {out}")
    if compare is not None:
        differing = ours.differences(Contract.load(compare))
        if differing:
            typer.echo(folded(f"{compare}: {report(differing)}"), err=True)
            raise typer.Exit(BROKEN)
        say(f"{compare}: the contract of this process, {ours.id}")
    if out is None and compare is None:
        typer.echo(json.dumps(ours.to_dict(), indent=1, sort_keys=True))
