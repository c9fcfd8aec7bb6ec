"""Times of decode attention: python -m perf.attention.decode

One query for each of so many sequences, 32 query heads of 128 over 8 KV heads, bf16, in CUDA
graphs, in turns in one process, L2 flushed: `ck.paged_attention` with pages of 16 and of 256 keys
in random order, `ck.block_sparse_attention` over a key buffer, cuDNN's and flash's SDPA, FA4.
Before it is timed, each of ours must have the bytes of the dense forward of each sequence alone.
"""

from __future__ import annotations

import functools
import json
import random
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_kernels as ck
from tests.contract import same_bytes

from ..core import record

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
ROUNDS, FLUSH_BYTES = 25, 96 << 20


def microseconds(call: Callable[[], object]) -> float:
    """Time of one call by events."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(stop)


def paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int) -> tuple:
    """Operands of `ck.paged_attention` for the same keys in pages in random order."""
    batch, keys = k.shape[:2]
    order = torch.randperm(batch * keys // size, device=q.device)
    caches = [
        torch.empty(len(order), size, *t.shape[2:], dtype=t.dtype, device=q.device) for t in (k, v)
    ]
    for cache, t in zip(caches, (k, v), strict=True):
        cache[order] = t.view(-1, size, *t.shape[2:])
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=q.device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    return q[:, 0], *caches, order.view(batch, -1).int(), lengths, starts


def sdpa(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's attention by one backend."""
    with sdpa_kernel(backend):
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, enable_gqa=True)


def systems(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable]:
    """What is timed, by name; ours return [B, Hq, D]."""
    calls = {}
    for size in PAGES:
        operands = paged(q, k, v, size)
        calls[f"paged {size}"] = functools.partial(ck.paged_attention, *operands)
    calls["key buffer"] = lambda: ck.block_sparse_attention(q, k, v, causal=True)[:, 0]
    calls["cudnn"] = functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION, q, k, v)
    calls["flash"] = functools.partial(sdpa, SDPBackend.FLASH_ATTENTION, q, k, v)
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return calls
    calls["fa4"] = functools.partial(flash_attn_func, q, k, v, causal=True)
    return calls


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


def require_bytes(name: str, call: Callable, q, k, v) -> None:
    """Raise if a row is not its row in the dense forward of its sequence alone."""
    out = call()
    for n in range(len(q)):
        alone = (t[n : n + 1] for t in (q, k, v))
        if not same_bytes(out[n], ck.block_sparse_attention(*alone, causal=True)[0, 0]):
            raise AssertionError(f"{name}: sequence {n} of {len(q)} differs")


def copy_rate() -> float:
    """Bytes that a copy of 1 GiB reads and writes, in TB/s."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = [microseconds(lambda: target.copy_(source)) for _ in range(10)]
    return 2 * (1 << 30) / statistics.median(times) / 1e6


def main() -> None:
    """Print medians, a line for each size."""
    common = record.environment(None) | {"copy_tbs": round(copy_rate(), 3)}
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for batch, keys in SIZES:
        generator = torch.Generator("cuda").manual_seed(0)
        q, k, v = (
            torch.randn(batch, length, heads, WIDTH, device="cuda", generator=generator).bfloat16()
            for length, heads in ((1, HEADS), (keys, KV_HEADS), (keys, KV_HEADS))
        )
        calls = systems(q, k, v)
        for name in [f"paged {size}" for size in PAGES] + ["key buffer"]:
            require_bytes(name, calls[name], q, k, v)
        graphs = {name: graphed(call) for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(ROUNDS):
            for name in random.sample(list(graphs), len(graphs)):
                flush.zero_()
                times[name].append(microseconds(graphs[name]))
        medians = {name: round(statistics.median(t), 1) for name, t in times.items()}
        rate = 2 * k.nbytes / medians["paged 256"] / 1e6
        body = {"sequences": batch, "keys": keys, "us": medians, "paged_256_tbs": round(rate, 2)}
        print(json.dumps(body | common), flush=True)


if __name__ == "__main__":
    main()
