"""Records of probes, as the tests of their page make them."""

from __future__ import annotations

from perf.core import record


def probe(name: str, **more) -> dict:
    item = {"schema": record.SCHEMA, "kind": "probe", "probe": name, "case": "answer"}
    item |= {"commit": "fedcba9876543210", "dirty": True, "date": "2026-11-21T11:00:00+00:00"}
    return item | {"gpu": "NVIDIA H200"} | more
