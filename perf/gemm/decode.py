"""`python -m perf bench decode`: products of few rows, in both orders, side by side with cuBLAS.

Records are of the kernel "decode": one for each of SYSTEMS at each case.  `skinny` and `fast` are
`ck.skinny_linear`, ordered and in arrival order; `chain` and `tree` are `ck.linear`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.bits import repeats
from ..core.passes import Suite
from ..core.rival import Absent, Call, Rival, Start, by_name
from . import cases as products
from . import check
from .cases import Inputs

ROWS = (1, 2, 4, 8, 13, 16, 32, 64, 103, 128)
#: (K, N) of y[M, N] = x[M, K] @ W[N, K]^T.
SHAPES = {
    "qkv": (4096, 12288),
    "o_proj": (4096, 4096),
    "mlp_up": (4096, 14336),
    "mlp_down": (14336, 4096),
    "lm_head": (4096, 32000),
    "lm_head_128k": (4096, 128256),
    "lm_head_152k": (4096, 151936),
}
#: Besides: rows where a dense kernel's last wave is short, and those of training.
MIDDLE = tuple((name, m) for name in ("qkv", "o_proj", "mlp_down") for m in (160, 256, 384, 512))
SHORT_WAVE = ("down_2112", 2048)
DENSE = tuple((name, 4096) for name in ("qkv", "o_proj", "mlp_up", "mlp_down", "lm_head"))
_ALL = SHAPES | {SHORT_WAVE[0]: (7168, 2112)}


@dataclass(frozen=True)
class Case(products.Case):
    """Some rows times one weight."""

    @property
    def label(self) -> str:
        return f"{self.shape}/m{self.m}"

    @property
    def weight_bytes(self) -> int:
        return 2 * self.n * self.k


def cases(groups: list[str]) -> list[Case]:
    """The cases of "few", "middle" and "dense"."""
    sizes_of_group = {
        "few": [(name, m) for name in SHAPES for m in ROWS],
        "middle": [*MIDDLE, SHORT_WAVE],
        "dense": list(DENSE),
    }
    return [
        Case("fwd", name, m, *_ALL[name]) for group in groups for name, m in sizes_of_group[group]
    ]


def _linear(order: str) -> Start:
    def start(case: Case) -> Call:
        import cute_kernels as ck

        linear = ck.linear
        return lambda t: linear(t["x"], t["w"], order=order)

    return start


def _skinny(deterministic: bool) -> Start:
    def start(case: Case) -> Call:
        import cute_kernels as ck

        if case.m > max(ROWS):
            raise Absent(f"it is measured up to {max(ROWS)} rows")
        skinny = ck.skinny_linear
        return lambda t: skinny(t["x"], t["w"], deterministic=deterministic)

    return start


def verdict(rival: Rival, call: Call, case: Case, t: Inputs) -> dict:
    """Right, and for what is ordered: the same bytes again, and of rows alone."""
    outcome, bits = check.check(call, "fwd", t, promised=rival.promised), {}
    if rival.ordered:
        bits = {"repeat": repeats(lambda: (call(t),)), "rows": check.rows_alone(call, "fwd", t)}
    body = {"check": outcome.items(), "bitwise": bits}
    return body if outcome.ok else body | {"status": "failed", "why": "the result is wrong"}


def facts(case: Case, median_us: float, ceilings: dict[str, float]) -> dict:
    """Bandwidth over the weight, and its share of a copy's."""
    gbs = case.weight_bytes / median_us / 1e3
    return {"weight_gbs": gbs, "of_copy": gbs / ceilings["copy_gbs"]}


_SKINNY = {"promised": True, "op": "skinny_linear"}
RIVALS = by_name(
    Rival("chain", {"fwd": _linear("chain")}, promised=True, ordered=True),
    Rival("tree", {"fwd": _linear("tree")}, promised=True, ordered=True),
    Rival("cublas", {"fwd": lambda case: lambda t: torch.mm(t["x"], t["w"].mT)}),
    Rival("skinny", {"fwd": _skinny(True)}, ordered=True, **_SKINNY),
    Rival("fast", {"fwd": _skinny(False)}, **_SKINNY),
)
SUITE = Suite("decode", "linear", RIVALS, verdict, facts, compares=False)
