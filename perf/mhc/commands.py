"""The command line of mHC: python -m perf bench mhc."""

from __future__ import annotations

import itertools
from typing import Annotated

import typer

from ..core import commands as verbs
from ..core.commands import Commit, Output, Target, bench_suite, chosen, counted, need_gpu
from . import cases

_TOKENS = {str(m): m for m in (*cases.FEW_TOKENS, *cases.TOKENS)}
_CHANNELS = {str(c): c for c in cases.CHANNELS}
_Op = Annotated[str, typer.Option(help=f"of {','.join(cases.ALL_OPS)}; all of the list by default")]
_Tokens = Annotated[str, typer.Option(help="of " + ",".join(_TOKENS))]
_Channels = Annotated[str, typer.Option(help="of " + ",".join(_CHANNELS))]
_Layout = Annotated[str, typer.Option(help=f"one of {','.join(cases.LAYOUTS)}")]
#: How long the bench of a list may take by default: at most a call of a lent machine.
_SECONDS = 540.0


def _cases(op: str, tokens: str, channels: str, layout: str) -> list[cases.Case]:
    m = [_TOKENS[name] for name in chosen("--tokens", tokens, _TOKENS)]
    c = [_CHANNELS[name] for name in chosen("--channels", channels, _CHANNELS)]
    (only_layout,) = chosen("--layout", layout, cases.LAYOUTS)
    ops = chosen("--op", op, cases.ALL_OPS) or cases.OPS
    return cases.cases(ops, itertools.product(m, c), only_layout)


def _listed(lists: str, op: str, shape: str) -> list[cases.Case]:
    """Cases of the named lists that have one of the ops and one of the shapes."""
    names = chosen("--list", lists, cases.LISTS)
    todo = list(dict.fromkeys(case for name in names for case in cases.LISTS[name]()))
    ops = chosen("--op", op, cases.ALL_OPS) or cases.ALL_OPS
    shapes = chosen("--shape", shape, {case.label for case in todo})
    return [case for case in todo if case.op in ops and (not shapes or case.label in shapes)]


@verbs.bench.command("mhc")
def bench_mhc(
    lists: Annotated[
        str, typer.Option("--list", help=f"of {','.join(cases.LISTS)}; cases in their order")
    ] = "sizes",
    op: _Op = "",
    shape: Annotated[str, typer.Option(help="as records have it: 8192x4096,8192x4096 nc")] = "",
    rivals: Annotated[str, typer.Option(help="who is measured; see perf/mhc/rivals.py")] = "",
    rounds: Annotated[int, typer.Option(min=10, help="samples of each rival")] = 50,
    seconds: Annotated[float, typer.Option(help="begin no case after so many")] = _SECONDS,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Hyper-connections, op by op and a whole site: timed in turns with TransformerEngine."""
    todo = _listed(lists, op, shape)
    need_gpu("bench")
    import torch

    from .rivals import SUITE

    # TransformerEngine's gradient of phi is a product of cuBLAS, in TF32 as in its own library.
    torch.backends.cuda.matmul.allow_tf32 = True
    options = {"output": output, "rounds": rounds, "seconds": seconds, "commit": commit}
    bench_suite(SUITE, todo, rivals, **options)


@verbs.profile.command("mhc")
def profile_mhc(
    op: _Op = "",
    tokens: _Tokens = "8192",
    channels: _Channels = "7168",
    layout: _Layout = "cn",
    output: Output = None,
    commit: Commit = None,
    target: Target = False,
) -> None:
    """Counters of every launch of our ops, forward and backward."""
    need_gpu("profile")
    from .rivals import SUITE

    counted(SUITE, _cases(op, tokens, channels, layout), "ours", target, output, commit)
