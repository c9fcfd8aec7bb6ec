"""Inputs in pages, times of calls over them in turns, and the records of these."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from cute_kernels.sparse_attn import launch, lowering

from ..core import record, timing
from ..core.work import spreads
from .paged_page import KERNEL, RIVALS

Calls = dict[str, Callable]
HEADS, KV_HEADS, WIDTH = 32, 8, 128


class Inputs(NamedTuple):
    """Queries [tokens, Hq, D], keys and values [keys of all sequences, Hkv, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def drawn(cls, sequences: Sequence[tuple[int, int]], seed: int, device="cuda") -> Inputs:
        """Random inputs of sequences of (queries, keys)."""
        generator = torch.Generator(device).manual_seed(seed)
        queries, keys = (sum(column) for column in zip(*sequences, strict=True))
        shapes = (queries, HEADS, WIDTH), *[(keys, KV_HEADS, WIDTH)] * 2
        options = {"device": device, "generator": generator}
        return cls(*(torch.randn(shape, **options).bfloat16() for shape in shapes))


class Paged(NamedTuple):
    """Operands of `ck.paged_attention`."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seqlens_k: torch.Tensor
    cu_seqlens_q: torch.Tensor

    @classmethod
    def of(cls, t: Inputs, sequences: Sequence[tuple[int, int]], size: int) -> Paged:
        """Put the keys in pages of ``size``, a divisor of each number of keys, in random order."""
        device = t.q.device
        order = torch.randperm(len(t.k) // size, device=device)
        caches = []
        for rows in (t.k, t.v):
            pages = rows.view(-1, size, *rows.shape[1:])
            caches.append(torch.empty_like(pages).index_copy_(0, order, pages))
        used = [keys // size for _, keys in sequences]
        table = torch.zeros((len(used), max(used)), dtype=torch.int32, device=device)
        for row, places in zip(table, order.int().split(used), strict=True):
            row[: len(places)] = places
        queries, keys = (torch.tensor(c, device=device) for c in zip(*sequences, strict=True))
        starts = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int()
        return cls(t.q, *caches, table, keys.int(), starts)


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
    about = {"kind": "bench", "kernel": KERNEL, "product": case[0], "shape": case[1]}
    about |= {"status": "ok", "dtype": "bf16"}
    for name, fields in spreads({name: own.samples for name, own in times.items()}).items():
        body = about | {"system": name} | fields
        body["of_copy"] = nbytes / fields["median_us"] / 1e3 / common["copy_gbs"]
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
    medians = {body["system"]: round(body["median_us"], 2) for body in made}
    print(json.dumps({"shape": made[0]["shape"], "us": medians}), flush=True)
