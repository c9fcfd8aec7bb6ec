"""Times of calls over paged caches in turns, and the records of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from cute_kernels.sparse_attn import launch, lowering

from ..core import record, timing
from .paged_page import KERNEL, RIVALS

Calls = dict[str, Callable]


def graphed(call: Callable) -> Callable:
    """A CUDA graph of the call."""
    call()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def in_turns(first: Calls, drawn: Callable[[int], Calls], nbytes: int) -> dict[str, timing.Timing]:
    """Times of every call in a graph, behind a cold L2.

    Args:
        first: The calls of the first input set.
        drawn: Seed -> those of another set; 1 is the first seed.
        nbytes: What a call reads.
    """
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    count = timing.set_count(nbytes, l2_bytes, len(first))
    sets = [first, *(drawn(seed) for seed in range(1, count))]
    graphs = [{name: graphed(call) for name, call in calls.items()} for calls in sets]
    turned = {name: lambda of_set, name=name: of_set[name]() for name in first}
    rotated = timing.rotating(turned, graphs)
    timing.warm_up(rotated, count)
    return timing.interleave(rotated)


def bodies(
    case: tuple[str, str], times: dict[str, timing.Timing], nbytes: int, common: dict
) -> Iterator[dict]:
    """A record of each system; those of ours have been compared with the dense forward."""
    for name, own in times.items():
        body = {
            "kind": "bench",
            "kernel": KERNEL,
            "product": case[0],
            "shape": case[1],
            "system": name,
            "status": "ok",
            "dtype": "bf16",
            "median_us": round(own.median, 2),
            "p10_us": round(own.p10, 2),
            "p90_us": round(own.p90, 2),
            "ratio": {
                other: round(theirs.median / own.median, 4)
                for other, theirs in times.items()
                if other != name
            },
            "of_copy": round(nbytes / own.median / 1e3 / common["copy_gbs"], 4),
        }
        if name not in RIVALS:
            body["bitwise"] = {"dense forward": True}
        yield body | common


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal forward of [B, S, H, D] by one kernel, whose CTAs walk all keys of their rows."""
    mask = lowering.lower(lowering.whole(None, True, q.shape[1], k.shape[1], str(q.device)))
    operands = q, k, v, mask, q.shape[-1] ** -0.5, 0.0
    return launch.plan_one_kernel(*operands).run(*operands)[0]


def options(description: str) -> argparse.Namespace:
    """Arguments of a script: a file of records, and the commit that they name."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, default=record.RESULTS / "paged.jsonl")
    parser.add_argument("--commit")
    return parser.parse_args()


def common(commit: str | None) -> dict:
    """Fields of all records of a process: the environment, and a copy's bandwidth."""
    return record.environment(commit) | {"copy_gbs": round(timing.ceilings()["copy_gbs"], 1)}


def keep(path: Path, made: list[dict]) -> None:
    """Append records, and print their medians in one line."""
    for body in made:
        record.append(path, body)
    medians = {body["system"]: body["median_us"] for body in made}
    print(json.dumps({"shape": made[0]["shape"], "us": medians}), flush=True)
