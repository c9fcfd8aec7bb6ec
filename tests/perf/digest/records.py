"""Records of digests, as the tests of their page make them."""

from __future__ import annotations

from perf.core import record
from perf.digest.cases import CASES

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


NAME = CASES[0].name


def digested(case: str = NAME, gpu: str = H200, digest: str = "d", **more) -> dict:
    item = {"schema": record.SCHEMA, "kind": "digest", "case": case, "gpu": gpu, "status": "ok"}
    item |= {"commit": "0123456789abcdef", "dirty": False, "date": "2026-11-22T10:00:00+00:00"}
    op = "linear" if case.startswith("linear") else "block_sparse_attention"
    item |= {"contract_id": f"{op}/cute_sm90/sm_90a/{'ab' * 8}", "inputs": "i"}
    return item | {"digest": digest * 64} | more
