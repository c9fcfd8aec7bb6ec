"""Is a grouped product or a move right, and which promises does it keep?  Before any timing.

Products are compared with float64 in some rows (fwd, dx) or some experts (dw), and ours there with
the bytes of ``ck.linear``.  Moves are compared with torch's indexing.
"""

from __future__ import annotations

import math

import torch

from ..core.bits import repeats, same_bytes
from ..core.rival import Call, Rival
from .cases import PRODUCTS, Case, Inputs

REPEATS = 5
ROWS = 64
#: Experts whose dW is compared, and its rows.
EXPERTS, DW_ROWS = 4, 256
#: bf16 operands or results: between 1e-3 and 1e-2.
_REL_ERROR = 1e-2


def verdict(rival: Rival, call: Call, case: Case, t: Inputs) -> dict:
    """Relative error, and bits of ours; a copy, or a dense product, has no result to check."""
    bits, body = {}, {}
    out = call(t)
    if rival.name not in ("copy", "dense"):
        parts = _parts(case, out, t)
        error = sum(float((got.double() - want).square().sum()) for got, want, _ in parts)
        norm = sum(float(want.square().sum()) for _, want, _ in parts)
        relative = math.sqrt(error / norm)
        body["check"] = {"rel_error": relative}
        if not relative < _REL_ERROR:  # NaN as well
            return body | {"status": "failed", "why": f"the result is wrong: {relative:.1e}"}
        if rival.promised:
            bits["linear" if case.product in PRODUCTS else "indexing"] = all(
                same_bytes(got, of_linear()) for got, _, of_linear in parts if of_linear
            )
    del out
    if rival.promised:
        bits["repeat"] = repeats(lambda: (call(t),), REPEATS)
    return body | {"bitwise": bits}


def _parts(case: Case, out: torch.Tensor, t: Inputs) -> list[tuple]:
    """(part of the result, in float64, function that gives its bytes or None) of some parts."""
    if case.product == "permute":
        source = t["indices"].flatten().argsort(stable=True) // case.sizes[1]
        want = t["x"][source]
        return [(out, want.double(), lambda: want)]
    if case.product == "permute+combine":
        weights = t["weights"][:ROWS].double().sum(1, keepdim=True)
        return [(out[:ROWS], t["x"][:ROWS].double() * weights, None)]
    if case.product == "combine":
        order = t["indices"].flatten().argsort(stable=True)
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order), device=order.device)
        rows = t["rows"][position].view(case.tokens, case.sizes[1], -1)[:ROWS]
        return [(out[:ROWS], (rows.double() * t["weights"][:ROWS, :, None].double()).sum(1), None)]
    return _dw_parts(out, t) if case.product == "dw" else _row_parts(case, out, t)


def _row_parts(case: Case, out: torch.Tensor, t: Inputs) -> list[tuple]:
    import cute_kernels as ck

    of_linear = ck.linear  # loads the system, which registers its ops
    forward = case.product == "fwd"
    rows = t["x" if forward else "dy"]
    ends = t["offsets"][1:].tolist()
    parts = []
    for row in sorted({*range(0, len(rows), max(1, len(rows) // ROWS)), len(rows) - 1}):
        expert = next(e for e, end in enumerate(ends) if row < end)
        one, weight = rows[row : row + 1], t["w"][expert]
        if forward:
            want, bits = one.double() @ weight.mT.double(), lambda x=one, w=weight: of_linear(x, w)
        else:
            want = one.double() @ weight.double()
            bits = lambda x=one, w=weight: torch.ops.cute_kernels.linear_dx(x, w, "chain")  # noqa: E731
        parts.append((out[row : row + 1], want, bits))
    return parts


def _dw_parts(out: torch.Tensor, t: Inputs) -> list[tuple]:
    import cute_kernels as ck

    assert ck.linear  # loads the system, which registers its ops
    counts = t["offsets"].diff()
    parts = []
    for expert in counts.argsort(descending=True)[:: max(1, len(counts) // EXPERTS)].tolist():
        rows = slice(*t["offsets"][expert : expert + 2].tolist())
        dy, x = t["dy"][rows], t["x"][rows]
        want = dy[:, :DW_ROWS].double().mT @ x.double()
        got = out[expert, :DW_ROWS]

        def bits(dy=dy, x=x) -> torch.Tensor:
            return torch.ops.cute_kernels.linear_dw(dy, x, "chain")[:DW_ROWS]

        parts.append((got, want, bits))
    return parts
