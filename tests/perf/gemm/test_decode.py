"""Few rows: verdicts that can fail."""

from __future__ import annotations

import pytest

from perf.core import passes
from perf.gemm import decode
from perf.gemm.decode import Case


def by_rows(t):
    """Inside the bound, but not the same for a row that is not alone."""
    y = t["x"].float() @ t["w"].float().mT
    return (y if len(y) == 1 else y * (1 + 2.0**-12)).bfloat16()


@pytest.mark.parametrize(
    ("call", "status", "bits"),
    [
        (by_rows, "ok", {"repeat": True, "rows": False}),
        (lambda t: 2 * (t["x"] @ t["w"].mT), "failed", {"repeat": True, "rows": True}),
        (lambda t: t["no such tile"], "failed", None),
    ],
)
def test_what_is_wrong_is_told(call, status, bits):
    case = Case("fwd", "o_proj", 5, 4096, 96)
    rival, t = decode.RIVALS["chain"], case.inputs(0, "cpu")
    out = passes._verdict(decode.SUITE, rival, call, case, t)
    assert out["status"] == status and out.get("bitwise") == bits
