"""The command line of linear attention: python -m perf bench linear_attn."""

from __future__ import annotations

from typing import Annotated

import typer

from ..core import commands as verbs
from ..core.commands import Commit, Output, bench_suite, chosen, need_gpu
from . import cases


@verbs.bench.command("linear_attn")
def bench_linear_attn(
    lists: Annotated[
        str, typer.Option("--cases", help=f"of {','.join(cases.LISTS)}; in this order")
    ] = ",".join(cases.LISTS),
    shape: Annotated[str, typer.Option(help="as records have it: 1x8192 16/32")] = "",
    rivals: Annotated[str, typer.Option(help="who is measured; see perf/linear_attn")] = "",
    rounds: Annotated[int, typer.Option(min=10, help="samples of each rival")] = 20,
    seconds: Annotated[float, typer.Option(help="begin no case after so many")] = 130.0,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Time conv, gated norm and gated delta rule, forward and backward alone, beside FLA's."""
    names = chosen("--cases", lists, cases.LISTS)
    todo = [case for name in names for case in cases.LISTS[name]]
    shapes = chosen("--shape", shape, {case.label for case in todo})
    todo = [case for case in todo if not shapes or case.label in shapes]
    need_gpu("bench")
    from .rivals import SUITE, tuned_together

    options = {"output": output, "rounds": rounds, "seconds": seconds, "commit": commit}
    with tuned_together():
        bench_suite(SUITE, todo, rivals, **options)
