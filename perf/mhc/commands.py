"""The command line of mHC: python -m perf bench mhc."""

from __future__ import annotations

from typing import Annotated

import typer

from ..core import commands as verbs
from ..core import record
from ..core.commands import Commit, Output, chosen, need_gpu
from . import cases

_TOKENS = {str(m): m for m in cases.TOKENS}
_CHANNELS = {str(c): c for c in cases.CHANNELS}


@verbs.bench.command("mhc")
def bench_mhc(
    op: Annotated[str, typer.Option(help=f"of {','.join(cases.OPS)}")] = ",".join(cases.OPS),
    tokens: Annotated[str, typer.Option(help="of " + ",".join(_TOKENS))] = ",".join(_TOKENS),
    channels: Annotated[str, typer.Option(help="of " + ",".join(_CHANNELS))] = ",".join(_CHANNELS),
    rivals: Annotated[str, typer.Option(help="who is measured; see perf/mhc/rivals.py")] = "",
    rounds: Annotated[int, typer.Option(min=10, help="samples of each rival")] = 50,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Hyper-connections, op by op and a whole site: timed in turns with TransformerEngine."""
    need_gpu("bench")
    from ..core.passes import line
    from . import bench
    from .rivals import RIVALS

    names = chosen("--rivals", rivals, RIVALS) or list(RIVALS)
    m = [_TOKENS[name] for name in chosen("--tokens", tokens, _TOKENS)]
    c = [_CHANNELS[name] for name in chosen("--channels", channels, _CHANNELS)]
    todo = cases.cases(chosen("--op", op, cases.OPS), m, c)
    failed, path = 0, output or record.RESULTS / "mhc.jsonl"
    for body in bench.mhc(todo, names, output=path, rounds=rounds, commit=commit):
        typer.echo(line(body))
        ours = RIVALS[body["system"]].promised
        failed += ours and (body["status"] != "ok" or not all(body["bitwise"].values()))
    if failed:
        raise typer.Exit(1)
