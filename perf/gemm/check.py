"""Is a product right, and which bitwise promises does it keep?  Before any timing.

The reference is float64 on the device, from the same bf16 inputs.  The bounds are those of the
error model (docs: n = ceil(K / 16) steps, S = sum |a_k b_k| + |c|): an fp32 chain is off by at most
T = 5.25 n 2^-23 S, and one rounding to bf16 adds half an ulp.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass

import torch

from ..core.bits import repeats, same_bytes
from ..core.rival import Call
from .cases import Inputs

GROUP_K = 16
ROWS = 64
_STEP_LOSS = 5.25 * 2.0**-23
_SLACK = 1.0 + 2.0**-7  # of T, for the rounding of a value that is itself off by T
_REL_ERROR = 1e-2  # bf16 operands or results: between 1e-3 and 1e-2
_CHUNK_BYTES = 1 << 30


@dataclass(frozen=True)
class Check:
    """Result of the comparison with float64.

    ok: no NaN and a relative error below 1e-2; for a rival that promises the bound, also no output
    beyond it.  poisoned: the output lay in memory that held NaN before the call (False: the rival
    took other memory, so unwritten elements may show old values).  misround: share of outputs that
    are not the correctly rounded float64.
    """

    ok: bool
    rel_error: float
    beyond_bound: int
    misround: float
    nan: int
    poisoned: bool

    def items(self) -> dict:
        return asdict(self)


def operands(product: str, t: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(a [M', K'], b [N', K'], c) with result = c + a b^T, as views."""
    if product == "fwd":
        return t["x"], t["w"], None
    if product == "dx":
        return t["dy"], t["w"].mT, None
    return t["dy"].mT, t["x"].mT, t["main_grad"]


def fresh(t: Inputs) -> Inputs:
    """Copy the inputs, with a main_grad of their own, since dW writes it."""
    return {k: v.clone() if k == "main_grad" else v for k, v in t.items()}


def poisoned_call(call: Call, t: Inputs, shape, dtype) -> tuple[torch.Tensor, bool]:
    """Calls after filling a freed block of the output's size with NaN; whether the output took it.

    The caching allocator hands a freed block to the next request of its size.
    """
    trap = torch.full(shape, math.nan, dtype=dtype, device=next(iter(t.values())).device)
    address = trap.data_ptr()
    del trap
    out = call(t)
    return out, out.data_ptr() == address


def check(call: Call, product: str, t: Inputs, *, promised: bool) -> Check:
    """Compares one call with float64."""
    a, b, c = operands(product, t)
    shape = (a.shape[0], b.shape[0])
    if c is None:
        out, poisoned = poisoned_call(call, t, shape, a.dtype)
    else:
        out, poisoned = call(fresh(t)), True  # the result is the input, written in full
    error = norm = 0.0
    beyond = wrong = nan = 0
    wide_b = b.to(torch.float64)
    rows = max(1, _CHUNK_BYTES // (8 * max(b.shape)))
    for low in range(0, shape[0], rows):
        block = slice(low, low + rows)
        wide_a = a[block].to(torch.float64)
        exact, scale = wide_a @ wide_b.mT, wide_a.abs() @ wide_b.abs().mT
        if c is not None:
            exact, scale = exact + c[block], scale + c[block].abs()
        got = out[block]
        delta = (got.to(torch.float64) - exact).abs()
        error += delta.square().sum().item()
        norm += exact.square().sum().item()
        beyond += int((~(delta <= bound(exact, scale, a.shape[1], out.dtype))).sum())
        wrong += int((got != exact.to(out.dtype)).sum())
        nan += int(got.isnan().sum())
    relative = math.sqrt(error / norm) if norm else math.sqrt(error)
    ok = nan == 0 and relative < _REL_ERROR and not (promised and beyond)
    return Check(ok, relative, beyond, wrong / (shape[0] * shape[1]), nan, poisoned)


def bound(exact: torch.Tensor, scale: torch.Tensor, k: int, dtype: torch.dtype) -> torch.Tensor:
    """The largest error an ordered fp32 chain over k may have, stored as `dtype`."""
    chain = _STEP_LOSS * math.ceil(k / GROUP_K) * scale
    if dtype == torch.float32:
        return chain
    half_ulp = torch.exp2(torch.frexp(exact).exponent.clamp(min=-125) - 9.0)
    return half_ulp.to(torch.float64) + chain * _SLACK


def rows_alone(call: Call, product: str, t: Inputs) -> bool:
    """Whether row i alone has the bytes of row i in the batch (fwd and dx).

    Another order shows in few bf16 outputs (about 3e-5 of them for reversed partial sums of
    K = 4096), so ROWS rows are compared: with N = 12288 the chance to miss it is below 1e-10.
    """
    name = "x" if product == "fwd" else "dy"
    m = t[name].shape[0]
    together = call(t).clone()
    step = max(1, m // ROWS)
    picked = sorted({*range(0, m, step), m - 1})
    return all(
        same_bytes(call({**t, name: t[name][i : i + 1]}), together[i : i + 1]) for i in picked
    )


def splits(call: Call, t: Inputs) -> bool:
    """Whether dW over consecutive micro-batches has the bytes of one shot (cuts at k16)."""
    m = t["x"].shape[0]
    one_shot = call(fresh(t)).clone()
    cuts = sorted({0, m // 5 // GROUP_K * GROUP_K, m // 2 // GROUP_K * GROUP_K, m})
    inputs = fresh(t)
    for low, high in itertools.pairwise(cuts):
        call({**inputs, "x": t["x"][low:high], "dy": t["dy"][low:high]})
    return same_bytes(inputs["main_grad"], one_shot)


def bitwise(call: Call, product: str, t: Inputs) -> dict[str, bool]:
    """The verdicts of a product: "repeat", and "rows" (fwd, dx) or "splits" (dw)."""
    verdict = {"repeat": repeats(lambda: (call(fresh(t)),))}
    if product == "dw":
        return verdict | {"splits": splits(call, t)}
    return verdict | {"rows": rows_alone(call, product, t)}
