"""The command line of norm: python -m perf bench|profile norm."""

from __future__ import annotations

from typing import Annotated

import typer

from ..core import commands as verbs
from ..core.commands import Commit, Output, Target, bench_suite, chosen, counted, need_gpu
from . import cases

_SIZES = {f"{m}x{d}": (m, d) for m, d in cases.SIZES}
_Op = Annotated[str, typer.Option(help=f"of {','.join(cases.OPS)}")]
_Size = Annotated[str, typer.Option(help="of " + ",".join(_SIZES))]
_Rivals = Annotated[str, typer.Option(help="who is measured; see perf/norm/rivals.py")]


def _cases(op: str, size: str) -> list[cases.Case]:
    sizes = [_SIZES[name] for name in chosen("--size", size, _SIZES)]
    return cases.cases(chosen("--op", op, cases.OPS), sizes)


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
    from .rivals import SUITE

    options = {"output": output, "rounds": rounds, "commit": commit}
    bench_suite(SUITE, _cases(op, size), rivals, **options)


@verbs.profile.command("norm")
def profile_norm(
    op: _Op = "rms_norm",
    size: _Size = "8192x4096,32768x2048",
    system: Annotated[str, typer.Option(help="whose kernels")] = "ours",
    output: Output = None,
    commit: Commit = None,
    target: Target = False,
) -> None:
    """Counters of every launch of a norm, forward and backward."""
    need_gpu("profile")
    from .rivals import SUITE

    chosen("--system", system, SUITE.rivals)
    counted(SUITE, _cases(op, size), system, target, output, commit)
