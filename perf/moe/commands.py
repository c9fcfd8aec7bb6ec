"""The command line of mixtures of experts: python -m perf bench moe."""

from __future__ import annotations

from typing import Annotated

import typer

from ..core import commands as verbs
from ..core import record
from ..core.commands import Commit, Output, chosen, need_gpu, printed
from . import cases

_TOKENS = {str(t): t for t in cases.DECODE + cases.TRAIN}


@verbs.bench.command("moe")
def bench_moe(
    shape: Annotated[str, typer.Option(help="models; default: all")] = ",".join(cases.SHAPES),
    tokens: Annotated[str, typer.Option(help="of " + ",".join(_TOKENS))] = ",".join(_TOKENS),
    product: Annotated[
        str, typer.Option(help="of fwd,dx,dw,permute,combine,permute+combine")
    ] = ",".join(cases.PRODUCTS + cases.MOVES),
    load: Annotated[str, typer.Option(help="of balanced,zipf")] = ",".join(cases.LOADS),
    rivals: Annotated[str, typer.Option(help="who is measured; see perf/moe/rivals.py")] = "",
    rounds: Annotated[int, typer.Option(min=10, help="samples of each rival")] = 50,
    budget: Annotated[float, typer.Option(help="seconds after which no case is begun")] = 500.0,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Grouped products and moves of rows, checked, then timed in turns with torch and copies.

    Decoding (up to 128 tokens) first, forward alone; then training; then permute and combine.
    """
    need_gpu("bench")
    from . import bench
    from .rivals import DEFAULT, RIVALS

    names = chosen("--rivals", rivals, RIVALS) or list(DEFAULT)
    todo = cases.cases(
        chosen("--shape", shape, cases.SHAPES),
        [_TOKENS[name] for name in chosen("--tokens", tokens, _TOKENS)],
        chosen("--product", product, cases.PRODUCTS + cases.MOVES),
        chosen("--load", load, cases.LOADS),
    )
    path = output or record.RESULTS / "moe.jsonl"
    options = {"output": path, "rounds": rounds, "budget_s": budget, "commit": commit}
    bodies = printed("bench", bench.moe(todo, names, **options), bench.line)
    ours = [body for body in bodies if RIVALS[body["system"]].promised]
    if any(b["status"] == "failed" or not all(b.get("bitwise", {}).values()) for b in ours):
        raise typer.Exit(1)
