"""Few rows on the status page of products: a pure function of the records of `bench decode`."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..core.tables import Bench, kept, latest, mean_row
from . import decode

SYSTEMS = ("chain", "tree", "skinny", "fast", "cublas")
FEW = [(name, m) for name in decode.SHAPES for m in decode.ROWS]
CASES = [(name, m) for name, m in (*FEW, *decode.MIDDLE, decode.SHORT_WAVE, *decode.DENSE)]
#: Bytes from which a weight counts as large.
LARGE = 100e6
_STEPS = ("`python -m perf bench decode`", "docs/notes/gemm_sm90.md")


def _key(case: tuple[str, int]) -> tuple[str, str]:
    return "fwd", f"{case[0]}/m{case[1]}"


def _ratios(
    bench: Bench, cases: Iterable[tuple[str, int]], system: str, rival: str
) -> list[float | None]:
    return [bench.ratio(_key(case), rival, system) for case in cases]


def _shares(bench: Bench) -> list[float | None]:
    """Shares of the copy's bandwidth, at the large weights."""
    large = [c for c in FEW if 2 * math.prod(decode.SHAPES[c[0]]) >= LARGE]
    return [(bench.get(_key(case), "chain") or {}).get("of_copy") for case in large]


def _either(bench: Bench) -> list[float | None]:
    """The better order over cuBLAS, where a dense kernel's last wave is short."""
    cases = (*decode.MIDDLE, decode.SHORT_WAVE)
    pairs = zip(
        *(_ratios(bench, cases, order, "cublas") for order in ("chain", "tree")), strict=True
    )
    return [None if None in pair else max(pair) for pair in pairs]


def targets(bench: Bench) -> list[tuple[str, list[float | None], float, float]]:
    """(what, values, the least geometric mean, the least of any) of each target of speed."""
    low, high = [c for c in FEW if c[1] <= 16], [c for c in FEW if c[1] > 16]
    pair = [c for c in FEW if c[0] in ("o_proj", "mlp_down")]
    return [
        ("`chain`, rows <= 16, over cuBLAS", _ratios(bench, low, "chain", "cublas"), 1.0, 0.8),
        ("`chain`, rows > 16, over cuBLAS", _ratios(bench, high, "chain", "cublas"), 1 / 1.05, 0.8),
        ("`chain`, weights >= 100 MB, of the copy's bandwidth", _shares(bench), 0.8, 0.8),
        (
            "`skinny_linear` over `chain`, o_proj, mlp_down",
            _ratios(bench, pair, "skinny", "chain"),
            1.0,
            0.0,
        ),
        (
            "`skinny_linear`, rows <= 16, over cuBLAS",
            _ratios(bench, low, "skinny", "cublas"),
            1 / 0.95,
            0.0,
        ),
        (
            "`skinny_linear`, ordered over in arrival order",
            _ratios(bench, FEW, "skinny", "fast"),
            1 / 1.05,
            1 / 1.05,
        ),
        (
            "`tree`, 4096 rows, over cuBLAS",
            _ratios(bench, decode.DENSE, "tree", "cublas"),
            0.9,
            0.9,
        ),
        (
            "160 to 512 rows and 2048 x 7168 x 2112, the better order over cuBLAS",
            _either(bench),
            0.95,
            0.95,
        ),
    ]


def target_rows(records: list[dict]) -> list[list[str]]:
    """(target, measured, verdict, next step) of every target of speed."""
    rows = []
    for text, values, mean, lowest in targets(latest(records, "decode")):
        least = f"{text}: >= {mean:.2f}x" + (f", each >= {lowest:.2f}x" if lowest else "")
        rows.append(mean_row(least, values, mean, lowest, _STEPS))
    return rows


def bits_kept(records: list[dict]) -> list[list[str]]:
    """Bits of the ordered systems over all cases."""
    by_case = latest(records, "decode").records
    rows = []
    for name, system, cases in (
        ("chain", "chain", CASES),
        ("tree", "tree", CASES),
        ("skinny_linear", "skinny", FEW),
    ):
        # `kept` asks for what is "ours".
        bench = Bench({("ours", *key[1:]): r for key, r in by_case.items() if key[0] == system})
        keys = [_key(case) for case in cases]
        rows.append([f"bits of `{name}` at few rows", kept(bench, keys)])
    return rows
