"""The command line of mixtures of experts: python -m perf bench moe | qwen3-moe."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ..core import commands as verbs
from ..core import record
from ..core.commands import Commit, Output, bench_suite, chosen, judged, need_gpu
from . import cases, qwen3

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
    from .rivals import DEFAULT, SUITE

    todo = cases.cases(
        chosen("--shape", shape, cases.SHAPES),
        [_TOKENS[name] for name in chosen("--tokens", tokens, _TOKENS)],
        chosen("--product", product, cases.PRODUCTS + cases.MOVES),
        chosen("--load", load, cases.LOADS),
    )
    options = {"output": output, "rounds": rounds, "seconds": budget, "commit": commit}
    bench_suite(SUITE, todo, rivals or DEFAULT, **options)


@verbs.bench.command("qwen3-moe")
def bench_qwen3(
    parts: Annotated[str, typer.Option(help=f"of {','.join(qwen3.PARTS)}")] = ",".join(qwen3.PARTS),
    experts: Annotated[int, typer.Option(min=8, help="of a layer: 64 or 128")] = 64,
    tiny: Annotated[bool, typer.Option("--tiny", help="a model for a CPU")] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu, whose times say nothing")] = "cuda",
    rounds: Annotated[int, typer.Option(min=1, help="steps of each system")] = 15,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """A Qwen3-MoE of 8 layers, patched: bytes of its rows, and a training step beside torch's.

    On a CPU records are written where --output says, and nowhere else.
    """
    (device,) = chosen("--device", device, ("cuda", "cpu"))
    if device == "cuda":
        need_gpu("bench")
        output = output or record.RESULTS / "moe.jsonl"
    size = qwen3.TINY if tiny else replace(qwen3.Size(), experts=experts)
    options = {"output": output, "rounds": rounds, "device": device, "commit": commit}
    some = chosen("--parts", parts, qwen3.PARTS)
    judged("bench", qwen3.measure(size, some, **options), qwen3.line, lambda body: True)
