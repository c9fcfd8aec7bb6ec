"""The command line of norm: python -m perf bench norm."""

from __future__ import annotations

from typing import Annotated

import typer

from ..core import commands as verbs
from ..core import record
from ..core.commands import Commit, Output, chosen, need_gpu
from . import cases

_SIZES = {f"{m}x{d}": (m, d) for m, d in cases.SIZES}


@verbs.bench.command("norm")
def bench_norm(
    op: Annotated[str, typer.Option(help=f"of {','.join(cases.OPS)}")] = ",".join(cases.OPS),
    size: Annotated[str, typer.Option(help="of " + ",".join(_SIZES))] = ",".join(_SIZES),
    rivals: Annotated[str, typer.Option(help="who is measured; see perf/norm/rivals.py")] = "",
    rounds: Annotated[int, typer.Option(min=10, help="samples of each rival")] = 50,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """rms_norm and layer_norm, forward and backward alone, timed in turns with their rivals."""
    need_gpu("bench")
    from ..core.passes import Suite, bench, line
    from .rivals import RIVALS

    names = chosen("--rivals", rivals, RIVALS) or list(RIVALS)
    sizes = [_SIZES[name] for name in chosen("--size", size, _SIZES)]
    todo = cases.cases(chosen("--op", op, cases.OPS), sizes)
    suite = Suite("norm", "rms_norm", RIVALS)
    failed, path = 0, output or record.RESULTS / "norm.jsonl"
    for body in bench(suite, todo, names, output=path, rounds=rounds, commit=commit):
        typer.echo(line(body))
        ours = RIVALS[body["system"]].promised
        failed += ours and (body["status"] != "ok" or not all(body["bitwise"].values()))
    if failed:
        raise typer.Exit(1)
