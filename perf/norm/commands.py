"""The command line of norm: python -m perf bench|profile norm."""

from __future__ import annotations

from typing import Annotated

import typer

from ..core import commands as verbs
from ..core import record
from ..core.commands import Commit, Output, chosen, counted, need_gpu, say
from . import cases

_SIZES = {f"{m}x{d}": (m, d) for m, d in cases.SIZES}
_Op = Annotated[str, typer.Option(help=f"of {','.join(cases.OPS)}")]
_Size = Annotated[str, typer.Option(help="of " + ",".join(_SIZES))]
_Rivals = Annotated[str, typer.Option(help="who is measured; see perf/norm/rivals.py")]


def _cases(op: str, size: str) -> list[cases.Case]:
    sizes = [_SIZES[name] for name in chosen("--size", size, _SIZES)]
    return cases.cases(chosen("--op", op, cases.OPS), sizes)


def _suite():
    from ..core.passes import Suite
    from .rivals import RIVALS

    return Suite("norm", "rms_norm", RIVALS)


@verbs.bench.command("norm")
def bench_norm(
    op: _Op = ",".join(cases.OPS),
    size: _Size = ",".join(_SIZES),
    rivals: _Rivals = "",
    rounds: Annotated[int, typer.Option(min=10, help="samples of each rival")] = 50,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Time rms_norm and layer_norm, forward and backward alone, in turns with their rivals."""
    need_gpu("bench")
    from ..core.passes import bench, line

    suite, failed = _suite(), 0
    names = chosen("--rivals", rivals, suite.rivals) or list(suite.rivals)
    path = output or record.RESULTS / "norm.jsonl"
    options = {"output": path, "rounds": rounds, "commit": commit}
    for body in bench(suite, _cases(op, size), names, **options):
        say(line(body))
        ours = suite.rivals[body["system"]].promised
        failed += ours and (body["status"] != "ok" or not all(body["bitwise"].values()))
    if failed:
        raise typer.Exit(1)


@verbs.profile.command("norm")
def profile_norm(
    op: _Op = "rms_norm",
    size: _Size = "8192x4096,32768x2048",
    system: Annotated[str, typer.Option(help="whose kernels")] = "ours",
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Counters of every launch of a norm, forward and backward."""
    need_gpu("profile")
    from ..core.counters import profile

    suite = _suite()
    chosen("--system", system, suite.rivals)
    target = ["norm-target", "--op", op, "--size", size, "--system", system]
    counted(lambda: profile(suite, _cases(op, size), system, target, commit), output)


@verbs.profile.command("norm-target", hidden=True)
def profile_norm_target(op: _Op, size: _Size, system: Annotated[str, typer.Option()]) -> None:
    """Run the calls that ncu profiles."""
    need_gpu("profile")
    from ..core.counters import target

    target(_suite(), _cases(op, size), system)
