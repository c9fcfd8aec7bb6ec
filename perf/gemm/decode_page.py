"""Few rows on the status page of products: a pure function of the records of `bench decode`."""

from __future__ import annotations

import math

from ..core.tables import Bench, field_of, kept, latest, mean_row, ratio_to
from ..core.tables import Case as Key
from . import decode

SYSTEMS = ("chain", "tree", "skinny", "fast", "cublas")
FEW = [(name, m) for name in decode.SHAPES for m in decode.ROWS]
CASES = [(name, m) for name, m in (*FEW, *decode.MIDDLE, decode.SHORT_WAVE, *decode.DENSE)]
#: Bytes from which a weight counts as large.
LARGE = 100e6
_STEPS = ("`python -m perf bench decode`", "docs/notes/gemm_sm90.md")


def _key(case: tuple[str, int]) -> Key:
    return "fwd", f"{case[0]}/m{case[1]}"


def _either(bench: Bench, case: Key) -> float | None:
    """The better order over cuBLAS."""
    ratios = [bench.ratio(case, "cublas", order) for order in ("chain", "tree")]
    return None if None in ratios else max(ratios)


_LOW, _HIGH = [c for c in FEW if c[1] <= 16], [c for c in FEW if c[1] > 16]
_PAIR = [c for c in FEW if c[0] in ("o_proj", "mlp_down")]
_HEAVY = [c for c in FEW if 2 * math.prod(decode.SHAPES[c[0]]) >= LARGE]
#: (what, cases, their value, the least geometric mean, the least of any) of each target of speed.
TARGETS = (
    ("`chain`, rows <= 16, over cuBLAS", _LOW, ratio_to("cublas", "chain"), 1.0, 0.8),
    ("`chain`, rows > 16, over cuBLAS", _HIGH, ratio_to("cublas", "chain"), 1 / 1.05, 0.8),
    (
        "`chain`, weights >= 100 MB, of the copy's bandwidth",
        _HEAVY, field_of("of_copy", "chain"), 0.8, 0.8,
    ),
    (
        "`skinny_linear` over `chain`, o_proj, mlp_down",
        _PAIR, ratio_to("chain", "skinny"), 1.0, 0.0,
    ),
    ("`skinny_linear`, rows <= 16, over cuBLAS", _LOW, ratio_to("cublas", "skinny"), 1 / 0.95, 0.0),
    (
        "`skinny_linear`, ordered over in arrival order",
        FEW, ratio_to("fast", "skinny"), 1 / 1.05, 1 / 1.05,
    ),
    ("`tree`, 4096 rows, over cuBLAS", decode.DENSE, ratio_to("cublas", "tree"), 0.9, 0.9),
    # Where a dense kernel's last wave is short.
    (
        "160 to 512 rows and 2048 x 7168 x 2112, the better order over cuBLAS",
        (*decode.MIDDLE, decode.SHORT_WAVE), _either, 0.95, 0.95,
    ),
)  # fmt: skip


def target_rows(records: list[dict]) -> list[list[str]]:
    """(target, measured, verdict, next step) of every target of speed."""
    rows, bench = [], latest(records, "decode")
    for text, cases, value, mean, lowest in TARGETS:
        values = [value(bench, _key(case)) for case in cases]
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
