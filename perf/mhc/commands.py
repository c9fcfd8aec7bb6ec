"""The command line of mHC: python -m perf bench mhc."""

from __future__ import annotations

from typing import Annotated

import typer

from ..core import commands as verbs
from ..core import record
from ..core.commands import Commit, Output, chosen, counted, need_gpu, say
from . import cases

_TOKENS = {str(m): m for m in cases.TOKENS}
_CHANNELS = {str(c): c for c in cases.CHANNELS}
_Op = Annotated[str, typer.Option(help=f"of {','.join(cases.OPS)}")]
_Tokens = Annotated[str, typer.Option(help="of " + ",".join(_TOKENS))]
_Channels = Annotated[str, typer.Option(help="of " + ",".join(_CHANNELS))]
_Layout = Annotated[str, typer.Option(help=f"one of {','.join(cases.LAYOUTS)}")]


def _cases(op: str, tokens: str, channels: str, layout: str) -> list[cases.Case]:
    m = [_TOKENS[name] for name in chosen("--tokens", tokens, _TOKENS)]
    c = [_CHANNELS[name] for name in chosen("--channels", channels, _CHANNELS)]
    (only_layout,) = chosen("--layout", layout, cases.LAYOUTS)
    return cases.cases(chosen("--op", op, cases.OPS), m, c, only_layout)


@verbs.bench.command("mhc")
def bench_mhc(
    op: _Op = ",".join(cases.OPS),
    tokens: _Tokens = ",".join(_TOKENS),
    channels: _Channels = ",".join(_CHANNELS),
    layout: _Layout = "cn",
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

    # Nobody else has the layout nc.
    everybody = list(RIVALS) if layout == "cn" else ["ours"]
    names = chosen("--rivals", rivals, everybody) or everybody
    todo = _cases(op, tokens, channels, layout)
    failed, path = 0, output or record.RESULTS / "mhc.jsonl"
    for body in bench.mhc(todo, names, output=path, rounds=rounds, commit=commit):
        say(line(body))
        ours = RIVALS[body["system"]].promised
        failed += ours and (body["status"] != "ok" or not all(body["bitwise"].values()))
    if failed:
        raise typer.Exit(1)


@verbs.profile.command("mhc")
def profile_mhc(
    op: _Op = ",".join(cases.OPS),
    tokens: _Tokens = "8192",
    channels: _Channels = "7168",
    layout: _Layout = "cn",
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Counters of every launch of our ops, forward and backward."""
    need_gpu("profile")
    from ..core.counters import profile
    from .bench import SUITE

    todo = _cases(op, tokens, channels, layout)
    names = {"--op": op, "--tokens": tokens, "--channels": channels, "--layout": layout}
    target = ["mhc-target", *(word for pair in names.items() for word in pair)]
    counted(lambda: profile(SUITE, todo, "ours", target, commit), output)


@verbs.profile.command("mhc-target", hidden=True)
def profile_mhc_target(op: _Op, tokens: _Tokens, channels: _Channels, layout: _Layout) -> None:
    """Run the calls that ncu profiles."""
    need_gpu("profile")
    from ..core.counters import target
    from .bench import SUITE

    target(SUITE, _cases(op, tokens, channels, layout), "ours")
