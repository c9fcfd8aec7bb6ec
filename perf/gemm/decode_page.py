"""Few rows on the status page of products: a pure function of the records of `bench decode`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from ..core import figure, section
from ..core.counts import Count
from ..core.section import Section, benched
from ..core.tables import MET, MISSED, NOT_RUN, Bench, folded, geomean, kept, latest, times, where
from . import decode

SYSTEMS = ("chain", "tree", "skinny", "fast", "cublas")
FEW = [(name, m) for name in decode.SHAPES for m in decode.ROWS]
CASES = [(name, m) for name, m in (*FEW, *decode.MIDDLE, decode.SHORT_WAVE, *decode.DENSE)]
#: Bytes from which a weight counts as large.
LARGE = 100e6
_MEASURE = "`python -m perf bench decode`"


def _key(case: tuple[str, int]) -> tuple[str, str]:
    return "fwd", f"{case[0]}/m{case[1]}"


def _of(item: dict) -> object:
    """The case of a record of the chain's time."""
    ours = item["kind"] == "bench" and item["kernel"] == "decode" and item["system"] == "chain"
    keys = {_key(case) for case in CASES}
    key = (item.get("product"), item.get("shape"))
    return key if ours and "median_us" in item and key in keys else None


COUNTS = (Count("`linear`, `skinny_linear`: products of few rows timed", _of, len(CASES)),)


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
    bench, rows = latest(records, "decode"), []
    for text, values, mean, lowest in targets(bench):
        least = f"{text}: >= {mean:.2f}x" + (f", each >= {lowest:.2f}x" if lowest else "")
        ratios = [value for value in values if value is not None]
        if len(ratios) < len(values):
            rows.append([least, NOT_RUN, NOT_RUN, _MEASURE])
            continue
        average = geomean(ratios)
        met = average >= mean and min(ratios) >= lowest
        step = "none" if met else "docs/notes/gemm_sm90.md"
        measured = f"{average:.3f}x (lowest {min(ratios):.3f}x)"
        rows.append([least, measured, MET if met else MISSED, step])
    return rows


def _us(bench: Bench, case: tuple[str, int], system: str) -> str:
    item = bench.get(_key(case), system) or {}
    return f"{item['median_us']:.1f}" if "median_us" in item else NOT_RUN


def _time_row(bench: Bench, case: tuple[str, int]) -> list[str]:
    chain = bench.get(_key(case), "chain")
    cells = [*map(str, case), *(_us(bench, case, name) for name in ("chain", "tree", "cublas"))]
    share = (chain or {}).get("of_copy")
    cells.append(NOT_RUN if share is None else f"{share:.0%}")
    ratios = (bench.ratio(_key(case), "cublas", system) for system in ("chain", "tree"))
    return [*cells, *map(times, ratios), where(chain)]


def both_orders(bench: Bench) -> list[str]:
    """The table of every case: `linear` in both orders, and cuBLAS."""
    head = ["weight", "rows", "`chain`", "`tree`", "cuBLAS", "of copy"]
    head += ["cuBLAS / `chain`", "cuBLAS / `tree`", "ran on"]
    return folded(head, [_time_row(bench, case) for case in CASES], ("ran on",))


def both_variants(bench: Bench) -> list[str]:
    """The table of `skinny_linear`: in order, and in arrival order."""
    head = ["weight", "rows", "ordered", "in arrival order", "arrival / ordered", "ran on"]
    rows = [
        [
            *map(str, case),
            *(_us(bench, case, name) for name in ("skinny", "fast")),
            times(bench.ratio(_key(case), "fast", "skinny")),
            where(bench.get(_key(case), "skinny")),
        ]
        for case in FEW
    ]
    return folded(head, rows, ("ran on",))


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


def _times(records: list[dict]) -> list[str]:
    bench = latest(records, "decode")
    plot = figure.image("Of the copy's bandwidth", "decode", bench)
    return [*([plot, ""] if points(bench) else []), *both_orders(bench)]


SECTIONS = (
    Section(
        "Few rows",
        """
        bf16, cold L2, microseconds, in turns. `fast` adds leaves as they arrive. Bits are those
        of 20 repeats and of each row alone.
        """,
        _times,
        benched("decode"),
    ),
    Section(
        "`skinny_linear`, ordered and not",
        "",
        lambda records: both_variants(latest(records, "decode")),
        benched("decode"),
    ),
    section.targets(
        target_rows,
        benched("decode"),
        "Geometric means; a ratio is the other's time over ours.",
        heading="Targets of few rows",
    ),
)


def points(bench: Bench) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Timed points: weight -> system -> (rows, share of the copy's bandwidth)."""
    out: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for name, m in FEW:
        for system in ("chain", "skinny", "cublas"):
            item = bench.get(_key((name, m)), system) or {}
            if "of_copy" in item:
                out.setdefault(name, {}).setdefault(system, []).append((m, item["of_copy"]))
    return out


def plots(records: list[dict], folder: Path) -> list[Path]:
    """Share of the copy's bandwidth over rows: ours full, cuBLAS dashed."""
    bench = latest(records, "decode")
    lines_by_weight = points(bench)
    if not lines_by_weight:
        return []
    chart, axes = figure.figure()
    for index, (name, lines) in enumerate(lines_by_weight.items()):
        for system, style in (("chain", "-"), ("cublas", ":")):
            xs, ys = zip(*lines.get(system, [(1, math.nan)]), strict=True)
            label = name if system == "chain" else None
            axes.plot(xs, ys, style, marker=".", color=f"C{index}", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(decode.ROWS, [str(m) for m in decode.ROWS])
    axes.set_xlabel("rows (full: chain, dotted: cuBLAS)")
    axes.set_ylabel("weight bytes per second over the copy's")
    axes.set_ylim(0, 1)
    axes.set_title(figure.title(bench, "few rows"))
    chart.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure.save(chart, folder, figure.file_name("decode", bench))
