"""`python -m perf bench decode`: products of few rows, in both orders, side by side with cuBLAS.

Records are of the kernel "decode": one for each of SYSTEMS at each case.  `skinny` and `fast` are
`ck.skinny_linear`, ordered and in arrival order; `chain` and `tree` are `ck.linear`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core import record, timing, watch
from ..core.bits import repeats
from ..core.rival import Call
from ..core.work import measured, ratios
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


def calls(case: Case) -> dict[str, Call]:
    """Calls that are measured at a case, by system."""
    import cute_kernels as ck

    linear, skinny = ck.linear, ck.skinny_linear
    out: dict[str, Call] = {
        "chain": lambda t: linear(t["x"], t["w"]),
        "tree": lambda t: linear(t["x"], t["w"], order="tree"),
        "cublas": lambda t: torch.mm(t["x"], t["w"].mT),
    }
    if case.m <= max(ROWS):
        out["skinny"] = lambda t: skinny(t["x"], t["w"], deterministic=True)
        out["fast"] = lambda t: skinny(t["x"], t["w"], deterministic=False)
    return out


def verdict(name: str, call: Call, t: Inputs) -> dict:
    """Right, and for what is ordered: the same bytes again, and of rows alone."""
    try:
        outcome = check.check(call, "fwd", t, promised=name != "cublas")
        bits = {}
        if name not in ("cublas", "fast"):
            bits = {"repeat": repeats(lambda: (call(t),)), "rows": check.rows_alone(call, "fwd", t)}
    except Exception as error:
        # A kernel that fails on the card is a result to record, with its reason.
        return {"status": "failed", "why": watch.words(error)}
    body = {"check": outcome.items(), "bitwise": bits, "status": "ok" if outcome.ok else "failed"}
    return body if outcome.ok else body | {"why": "the result is wrong"}


def run_case(
    case: Case, *, rounds: int, device: str, ceilings: dict[str, float], clock=None
) -> dict[str, dict]:
    """One record body per system, all from one interleaved run."""
    first = case.inputs(0, device)
    todo = calls(case)
    bodies = {
        name: case.items() | {"system": name} | verdict(name, call, first)
        for name, call in todo.items()
    }
    timed = {name: todo[name] for name, body in bodies.items() if body["status"] == "ok"}
    draw = functools.partial(case.inputs, device=device)
    options = {"rounds": rounds, "device": device, "clock": clock}
    with torch.inference_mode():
        times, cold_l2 = timing.in_turns(timed, first, draw, **options)
    medians = {name: stats.median for name, stats in times.items()}
    for name, stats in times.items():
        bodies[name] |= measured(stats, case.work, ceilings) | {"ratio": ratios(medians, name)}
        gbs = case.weight_bytes / stats.median / 1e3
        bodies[name] |= {"weight_gbs": gbs, "of_copy": gbs / ceilings["copy_gbs"]}
        bodies[name]["cold_l2"] = cold_l2
    return bodies


def bench(
    todo: list[Case],
    *,
    output: Path,
    rounds: int = timing.MIN_ROUNDS,
    commit: str | None = None,
    device: str = "cuda",
) -> Iterator[dict]:
    """Measures every case on the device; yields each record as it is written."""
    import cute_kernels as ck

    common = record.environment(commit) | {"kind": "bench", "kernel": "decode"}
    ceilings = timing.ceilings()
    for case in todo:
        bodies = run_case(case, rounds=rounds, device=device, ceilings=ceilings)
        clocks = record.clocks()
        for name, body in bodies.items():
            body |= common | {"clocks": clocks}
            if name != "cublas":
                op = "linear" if name in ("chain", "tree") else "skinny_linear"
                body["contract_id"] = ck.contract_id(op, device)
            record.append(output, body)
            yield body


def lines(bodies: list[dict]) -> str:
    """One line for the terminal: the times of one case."""
    cells = []
    for body in bodies:
        if body["status"] != "ok":
            cells.append(f"{body['system']} {body['status']}: {body['why'][:60]}")
            continue
        broken = "" if all(body["bitwise"].values()) else " BITS DIFFER"
        against = body["ratio"].get("cublas")
        ratio = f" ({against:.2f})" if against else ""
        cells.append(f"{body['system']} {body['median_us']:.1f}{ratio}{broken}")
    return f"{bodies[0]['shape']:<20} " + "  ".join(cells)
