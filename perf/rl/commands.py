"""The command line of an RL step: python -m perf bench rl."""

from __future__ import annotations

import dataclasses
import importlib.util
import signal
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ..core import commands as verbs
from ..core import record
from ..core.commands import Commit, Output, chosen, need_gpu, say, stop
from . import bench
from .size import CARD, TINY

_DEFAULT = "native,ours"


@verbs.bench.command("rl")
def bench_rl(
    systems: Annotated[str, typer.Option(help=f"of {','.join(bench.SYSTEMS)}")] = _DEFAULT,
    device: Annotated[str, typer.Option(help="cuda, or cpu with small sizes")] = "cuda",
    size: Annotated[str, typer.Option(help=f"of {','.join(CARD)}")] = "0.5b",
    layers: Annotated[int | None, typer.Option(min=1, help="of the model")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="that are timed")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="of a step")] = None,
    new: Annotated[int | None, typer.Option(min=1, help="tokens of a completion")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="of the engine, tensor-parallel")] = 1,
    limit: Annotated[float, typer.Option(help="seconds of a stage at most")] = 130.0,
    budget: Annotated[float, typer.Option(help="seconds of all of them")] = 560.0,
    work: Annotated[Path | None, typer.Option(help="folder of models and logs")] = None,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Generate, log-probs, update: stock vLLM and torch beside the plug-in and a patched model."""
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"--device: expected cuda or cpu, got {device!r}")
    if size not in CARD:
        raise typer.BadParameter(f"--size: expected {', '.join(CARD)}; got {size!r}")
    names = chosen("--systems", systems, bench.SYSTEMS)
    if device == "cuda":
        need_gpu("bench")
    elif output is None:
        raise stop("bench rl", "-o: expected a file: times of a CPU are no records of this project")
    if work is not None and work.exists() and any(work.iterdir()):
        raise stop("bench rl", f"--work: expected an empty folder, got {work}")
    if importlib.util.find_spec("vllm") is None:
        raise stop("bench rl", "vllm is not installed: docs/vllm.md says how")
    asked = {"layers": layers, "steps": steps, "prompts": prompts, "new": new, "ranks": gpus}
    chosen_size = dataclasses.replace(
        TINY if device == "cpu" else CARD[size], **{k: v for k, v in asked.items() if v is not None}
    )
    signal.signal(signal.SIGTERM, bench.interrupted)
    path = output or record.RESULTS / "rl.jsonl"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(work or scratch).resolve()
        failed = 0
        options = {"limit_s": limit, "budget_s": budget, "device": device, "commit": commit}
        for body in bench.rl(chosen_size, names, output=path, work=folder, **options):
            if isinstance(body, str):
                say(body)
                if " ok " not in body and " not run " not in body:
                    say(bench.tail(folder))
                continue
            say(bench.line(body))
            mine = body["system"] == "ours"
            has_bits = all(body.get("bitwise", {}).values())
            failed += body["status"] != "ok" or (mine and not has_bits)
            failed += mine and body.get("contract", "equal") != "equal"
    if failed:
        raise typer.Exit(1)
