"""Records of products, as the tests of their page make them."""

from __future__ import annotations

from perf.core import record
from perf.gemm import targets


def bench(product: str, shape: str, m: int, us: float, rivals: dict[str, float], **more) -> dict:
    item = {
        "schema": record.SCHEMA,
        "kind": "bench",
        "kernel": "gemm",
        "system": "ours",
        "product": product,
        "shape": targets.label(shape, m),
        "dtype": "bf16",
        "status": "ok",
        "commit": "0123456789abcdef",
        "dirty": False,
        "date": "2026-11-21T10:00:00+00:00",
        "gpu": "NVIDIA H200",
        "median_us": us,
        "tflops": 700.0,
        "floor_fraction": 0.9,
        "bitwise": {"repeat": True, "splits" if product == "dw" else "rows": True},
        "ratio": {name: other / us for name, other in rivals.items()},
    }
    return item | more


def forward(ratio: float, **more) -> list[dict]:
    """The five shapes, ours at `ratio` of cuBLAS's throughput; `more` maps a shape to another."""
    rows = []
    for shape, (m, _, _) in targets.SHAPES.items():
        share = more.get(shape, ratio)
        rows.append(bench("fwd", shape, m, 100.0, {"cublas": 100.0 * share}))
    return rows
