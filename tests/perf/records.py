"""Records, as the tests of what reads them make them."""

from __future__ import annotations

from perf.attention import targets as attention_targets
from perf.attention.cases import Case
from perf.core.record import SCHEMA
from perf.gemm import targets as gemm_targets

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
#: The first case of attention, (mask, length, head size, heads, KV heads).
FIRST = attention_targets.cases(quick=True)[0]


def record(kind: str = "bench", **fields) -> dict:
    head = {"schema": SCHEMA, "kind": kind, "system": "ours", "status": "ok", "gpu": H200}
    head |= {"commit": "0123456789abcdef", "dirty": False, "date": "2026-11-21T10:00:00+00:00"}
    return head | fields


def bench(kernel: str, product: str, shape: str, us: float, rivals=None, **more) -> dict:
    """A timed case; ``rivals``: their times by name."""
    times = {"median_us": us, "p10_us": us - 1, "p90_us": us + 1}
    ratio = {name: other / us for name, other in (rivals or {}).items()}
    out = record(kernel=kernel, product=product, shape=shape, dtype="bf16", ratio=ratio, **times)
    return out | {"bitwise": {"repeat": True}} | more


def gemm(product: str, shape: str, m: int, us: float, rivals: dict[str, float], **more) -> dict:
    facts = {"tflops": 700.0, "floor_fraction": 0.9} | more
    return bench("gemm", product, gemm_targets.label(shape, m), us, rivals, **facts)


def forward(ratio: float, **shapes: float) -> list[dict]:
    """The five shapes, ours at ``ratio`` of cuBLAS's throughput, or at that of a shape."""
    return [
        gemm("fwd", shape, m, 100.0, {"cublas": 100.0 * shapes.get(shape, ratio)})
        for shape, (m, _, _) in gemm_targets.SHAPES.items()
    ]


def attention(size=FIRST, which: str = "bwd", us: float = 1000.0, rivals=None, **more) -> dict:
    case = Case(*size).items(which)
    return (
        case | bench("attention", case["product"], case["shape"], us, rivals, tflops=612.0) | more
    )


def every_attention(ratio: float, rival: str = "ours_unordered", **more) -> list[dict]:
    """All cases of the suite, and the held-out ones, at ``ratio`` of a rival's time."""
    sizes = (*attention_targets.cases(), *attention_targets.HELD_OUT)
    return [attention(size, rivals={rival: 1000.0 / ratio}, **more) for size in sizes]
