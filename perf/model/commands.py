"""The command line of a whole model: python -m perf bench model."""

from __future__ import annotations

from typing import Annotated

import typer

from ..core import commands as verbs
from ..core import record
from ..core.commands import Commit, Output, chosen, judged, need_gpu
from . import llama, shapes

PARTS = ("host", "audit", *shapes.TIMED)


@verbs.bench.command("model")
def bench_model(
    systems: Annotated[str, typer.Option(help=f"of {','.join(llama.SYSTEMS)}")] = ",".join(
        llama.SYSTEMS
    ),
    parts: Annotated[str, typer.Option(help=f"of {','.join(PARTS)}")] = ",".join(PARTS),
    layers: Annotated[int, typer.Option(min=1, help="of the model")] = 16,
    rounds: Annotated[int, typer.Option(min=4, help="samples of each system")] = 20,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """A Llama of hidden 2048 beside torch: audit, training, decoding, the host's part of a call."""
    need_gpu("bench")
    from . import bench

    path = output or record.RESULTS / "model.jsonl"
    options = {"output": path, "rounds": rounds, "commit": commit}
    names, part_names = chosen("--systems", systems, llama.SYSTEMS), chosen("--parts", parts, PARTS)
    found = bench.model(llama.Size(layers=layers), names, parts=part_names, **options)
    judged("bench", found, bench.line, lambda body: body["system"].startswith("ours"))
