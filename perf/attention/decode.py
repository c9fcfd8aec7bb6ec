"""Times of decode attention: python -m perf.attention.decode

One query for each of so many sequences, 32 query heads of 128 over 8 KV heads, bf16, in CUDA
graphs, in turns in one process, cold L2: `ck.paged_attention` with pages of 16 and of 256 keys in
random order, its two ways of walking keys ("chain": one CTA, "long": all SMs; the op chooses),
`ck.block_sparse_attention` over a key buffer, cuDNN's and flash's SDPA, FA4.  Before it is timed,
each of ours must have the bytes of the dense forward of each sequence alone.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_kernels as ck
from cute_kernels.sparse_attn.paged import launch
from cute_kernels.sparse_attn.tensors import PagedOptions

from ..core import record, timing
from ..core.bits import same_bytes
from ..core.rival import Absent, module

HEADS, KV_HEADS, WIDTH = 32, 8, 128
#: (sequences, keys of each).
SIZES = (
    (1, 16384),
    (1, 131072),
    (8, 32768),
    (32, 4096),
    (64, 4096),
    (128, 2048),
    (256, 1024),
)
PAGES = (16, 256)
#: Ways of walking keys, whatever the op chooses.
PLANNERS = {"chain": launch.plan_chain, "long": launch.plan_long}


class Inputs(NamedTuple):
    """Queries [B, 1, Hq, D], keys and values [B, S, Hkv, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def drawn(cls, batch: int, keys: int, seed: int) -> Inputs:
        """Random inputs on the GPU."""
        generator = torch.Generator("cuda").manual_seed(seed)
        options = {"device": "cuda", "generator": generator}
        shapes = (batch, 1, HEADS, WIDTH), *[(batch, keys, KV_HEADS, WIDTH)] * 2
        return cls(*(torch.randn(shape, **options).bfloat16() for shape in shapes))


def paged(t: Inputs, size: int) -> tuple[torch.Tensor, ...]:
    """Operands of `ck.paged_attention` for the same keys in pages in random order."""
    batch, keys = t.k.shape[:2]
    order = torch.randperm(batch * keys // size, device=t.q.device)
    caches = []
    for rows in (t.k, t.v):
        pages = rows.view(-1, size, *rows.shape[2:])
        caches.append(torch.empty_like(pages).index_copy_(0, order, pages))
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=t.q.device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=t.q.device)
    return t.q[:, 0], *caches, order.view(batch, -1).int(), lengths, starts


def planned(planner: Callable, operands: tuple[torch.Tensor, ...]) -> Callable:
    """Call of one way of walking keys, which returns [B, Hq, D]."""
    operands = *operands, *PagedOptions(WIDTH**-0.5, (None, 0))
    plan = planner(*operands)
    return lambda: plan.run(*operands)[0]


def sdpa(backend: SDPBackend, t: Inputs) -> torch.Tensor:
    """Attention of torch by one backend."""
    with sdpa_kernel(backend):
        heads_first = (x.transpose(1, 2) for x in t)
        return F.scaled_dot_product_attention(*heads_first, enable_gqa=True)


def systems(t: Inputs) -> dict[str, Callable]:
    """Calls that are timed, by name; ours return [B, Hq, D]."""
    calls: dict[str, Callable] = {}
    for size in PAGES:
        operands = paged(t, size)
        calls[f"paged {size}"] = functools.partial(ck.paged_attention, *operands)
        if launch.is_long(operands[0], *operands[1:4]):
            calls |= {f"{name} {size}": planned(f, operands) for name, f in PLANNERS.items()}
    calls["key buffer"] = lambda: ck.block_sparse_attention(*t, causal=True)[:, 0]
    calls["cudnn"] = functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION, t)
    calls["flash"] = functools.partial(sdpa, SDPBackend.FLASH_ATTENTION, t)
    try:
        fa4 = module("flash_attn.cute").flash_attn_func
    except Absent:
        return calls
    return calls | {"fa4": functools.partial(fa4, *t, causal=True)}


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


def ours(calls: dict[str, Callable]) -> list[str]:
    """Names of calls of our kernels."""
    return [name for name in calls if name.split()[0] in ("paged", "key", *PLANNERS)]


def require_bytes(calls: dict[str, Callable], t: Inputs) -> None:
    """Raise if a row is not its row in the dense forward of its sequence alone."""
    for name in ours(calls):
        out = calls[name]()
        for n in range(len(t.q)):
            alone = (x[n : n + 1] for x in t)
            if not same_bytes(out[n], ck.block_sparse_attention(*alone, causal=True)[0, 0]):
                raise AssertionError(f"{name}: sequence {n} of {len(t.q)} differs")


def measured(batch: int, keys: int) -> dict:
    """Medians of every system at one size."""
    first = Inputs.drawn(batch, keys, 0)
    calls = systems(first)
    require_bytes(calls, first)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    count = timing.set_count(2 * first.k.nbytes, l2_bytes, len(calls))
    sets = [calls, *(systems(Inputs.drawn(batch, keys, seed)) for seed in range(1, count))]
    graphs = [{name: graphed(call) for name, call in each.items()} for each in sets]
    turned = {name: lambda of_set, name=name: of_set[name]() for name in calls}
    rotated = timing.rotating(turned, graphs)
    timing.warm_up(rotated, count)
    times = timing.interleave(rotated)
    return {
        "sequences": batch,
        "keys": keys,
        "us": {name: round(stats.median, 1) for name, stats in times.items()},
        "paged_256_tbs": round(2 * first.k.nbytes / times["paged 256"].median / 1e6, 2),
    }


def main() -> None:
    """Print medians, a line for each size."""
    common = record.environment(None) | {"copy_gbs": timing.ceilings()["copy_gbs"]}
    for batch, keys in SIZES:
        print(json.dumps(measured(batch, keys) | common), flush=True)


if __name__ == "__main__":
    main()
