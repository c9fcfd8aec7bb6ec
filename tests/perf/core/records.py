"""Records of a bench, as the tests of what reads them make them."""

from __future__ import annotations


def bench(us: float, spread: float = 2.0, **more) -> dict:
    fields = {
        "kind": "bench",
        "kernel": "gemm",
        "system": "ours",
        "product": "fwd",
        "shape": "qkv",
        "dtype": "bf16",
        "gpu": "NVIDIA H200",
        "status": "ok",
        "median_us": us,
        "p10_us": us - spread / 2,
        "p90_us": us + spread / 2,
        "bitwise": {"repeat": True, "rows": True},
    }
    return fields | more
