"""The command line of attention: `perf bench|profile|soak|sanitize attention`, `perf refit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..core import commands as verbs
from ..core import record
from ..core.commands import (
    Commit,
    Output,
    Target,
    chosen,
    need_gpu,
    numbers,
    printed,
    profiled,
    sanitized,
    say,
    soaked,
    stop,
)
from . import targets


@verbs.bench.command("attention")
def bench_attention(
    mask: Annotated[
        str, typer.Option(help="of full,causal,window,document,prefix,random; pack")
    ] = "",
    s: Annotated[str, typer.Option(help="lengths; default: each mask's own")] = "",
    d: Annotated[str, typer.Option(help="head sizes, of 64,128; 192, 256")] = "",
    heads: Annotated[str, typer.Option(help="query heads, 16,32")] = "",
    group: Annotated[str, typer.Option(help="query heads of a KV head, 1,4")] = "",
    passes: Annotated[str, typer.Option("--pass", help="of fwd,bwd")] = "",
    systems: Annotated[str, typer.Option(help="who is measured; see perf/attention")] = "",
    quick: Annotated[bool, typer.Option(help="backward of D = 128, 16 heads; two minutes")] = False,
    held_out: Annotated[bool, typer.Option(help="sizes that nothing was tuned on")] = False,
    rounds: Annotated[int, typer.Option(min=50, help="samples of each system")] = 50,
    budget: Annotated[float, typer.Option(help="seconds after which no case is begun")] = 380.0,
    output: Output = None,
    check_only: Annotated[bool, typer.Option(help="short cases against float64, no time")] = False,
    commit: Commit = None,
) -> None:
    """Block-sparse attention: ordered, unordered, FA4, FlexAttention on the same masks.

    `--mask pack` is packed sequences, against FA4's varlen kernels; no other choice includes it.
    `--held-out` is ten cases of other lengths, head sizes and groups, and no others.
    `--d 192` is q and k of 192 with v of 128, `--d 256` all of 256: where they are asked for.
    """
    need_gpu("bench")
    from . import bench, suite
    from .cases import PASSES
    from .rivals import RIVALS

    masks = chosen("--mask", mask, [*targets.MASKS, targets.PACK])
    names = chosen("--systems", systems, RIVALS)
    which = chosen("--pass", passes, PASSES)
    sizes = {"s": s, "d": d, "heads": heads, "group": group}
    size_options = {name: numbers(f"--{name}", text) for name, text in sizes.items()}
    todo = suite.chosen(masks, quick=quick, held_out=held_out, **size_options)
    if not todo:
        raise typer.BadParameter("no case of the suite has these sizes")
    default = list(suite.QUICK_RIVALS if quick else RIVALS)
    which = which or (["bwd"] if quick else list(PASSES))
    run = suite.options(names or default, which, by_default=not names, check_only=check_only)
    run.rounds, run.budget_s = rounds, budget
    path = output or record.RESULTS / "attention.jsonl"
    yielded = bench.measure(todo, run, output=path, commit=commit)
    bodies = printed("bench", yielded, bench.line)
    if any(b["system"].startswith("ours") and b["status"] != "ok" for b in bodies):
        raise typer.Exit(1)


@verbs.profile.command("attention")
def profile_attention(
    mask: Annotated[str, typer.Option(help="of full,causal,window,...")] = "full,causal,document",
    d: Annotated[str, typer.Option(help="head sizes, of 64,128; 192, 256")] = "64,128",
    passes: Annotated[str, typer.Option("--pass", help="of fwd,bwd")] = "fwd,bwd",
    output: Output = None,
    commit: Commit = None,
    target: Target = False,
) -> None:
    """Counters of the forward kernel and of the ordered backward's, 8k, 16 heads."""
    need_gpu("profile")
    from ..core import ncu
    from . import profile
    from .cases import PASSES

    todo = profile.cases(chosen("--mask", mask, targets.MASKS), numbers("--d", d))
    which = chosen("--pass", passes, PASSES)
    if target:
        profile.target(todo, which)
        return
    with profiled():
        bodies = profile.attention(todo, which, commit)
    for body in bodies:
        record.append(output or record.RESULTS / "profile.jsonl", body)
        say("\n".join(ncu.lines(body)))


@verbs.soak.command("attention")
def soak_attention(
    only: Annotated[str, typer.Option(help="parts of case names: causal/,d128,unordered")] = "",
    repeats: Annotated[int | None, typer.Option(min=1, help="in place of each case's own")] = None,
    budget: Annotated[float, typer.Option(help="seconds after which no case is begun")] = 280.0,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Forward and backward again and again under every disturbance: not one byte may differ."""
    need_gpu("soak")
    from ..core import soak
    from .soak_cases import suite

    todo = suite(only)
    if not todo:
        raise typer.BadParameter(f"--only: no case's name has {only!r}")
    options, path = soak.on_the_card(repeats, budget), output or record.RESULTS / "soak.jsonl"
    soaked(soak.measure("attention", todo, options, output=path, commit=commit))


@verbs.sanitize.command("attention")
def sanitize_attention(
    tools: Annotated[str, typer.Option(help="of memcheck,synccheck")] = "memcheck,synccheck",
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Run compute-sanitizer over forward and backward of small cases, and over a planted error."""
    need_gpu("sanitize")
    from ..core import sanitize

    tool_names = chosen("--tools", tools, sanitize.TOOLS)
    bodies = sanitize.measure("attention", "target", tool_names, commit)
    sanitized(bodies, output or record.RESULTS / "sanitize.jsonl")


@verbs.sanitize.command("target", hidden=True)
def sanitize_target(
    plant: Annotated[bool, typer.Option(help="a write beyond an allocation")] = False,
) -> None:
    """Run the calls that compute-sanitizer checks."""
    need_gpu("sanitize")
    from ..core import sanitize
    from .sanitized import run

    sanitize.target(run, plant)


@verbs.app.command()
def refit(
    results: Annotated[list[Path], typer.Argument(help="files of attention records")],
) -> None:
    """Fits the schedule model's constants to measured backwards.  Prints; changes no file."""
    from . import refit as fitting

    try:
        records = [item for path in results for item in record.read(path)]
    except record.RecordError as error:
        raise stop("refit", error) from None
    for text in fitting.lines(records):
        say(text)
