"""The status page of mixtures of experts: a pure function of the records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..core import section
from ..core.counts import timed
from ..core.section import Section, benched
from ..core.speed import Speed
from ..core.tables import NOT_RUN, Bench, bits, folded, kept, latest, times, where
from . import cases, qwen3

TITLE = "Mixtures of experts"
KERNELS = ("moe_grouped_sm90", "moe_grouped_few_sm90", "moe_grouped_dw_sm90")
_ALL = cases.cases(
    list(cases.SHAPES),
    [*cases.DECODE, *cases.TRAIN],
    [*cases.PRODUCTS, *cases.MOVES],
    list(cases.LOADS),
)
CASES = [(case.product, case.label) for case in _ALL]
SPEED = tuple(
    Speed(
        f"MoE products, {what}",
        "moe",
        cases.PRODUCTS,
        "torch",
        "torch, `grouped_mm`",
        {case.label for case in _ALL if case.tokens in tokens},
    )
    for what, tokens in (("decode", cases.DECODE), ("training", cases.TRAIN))
)
COUNTS = (timed("MoE: products and moves timed", "moe", set(CASES)),)
_MEASURE = "`python -m perf bench moe`"
_STEP = "docs/moe.md"
_RIVALS = ("torch", "deepgemm", "dense", "copy")


@dataclass(frozen=True)
class Target:
    """A share of the copy's bandwidth over the weights that are read, or a rival's time over ours.

    cases: The ones that it is of.  rival: None: the copy's bandwidth.
    """

    text: str
    cases: tuple[tuple[str, str], ...]
    at_least: float
    rival: str | None = None

    def values(self, bench: Bench) -> list[float]:
        """Values of the sizes that were measured."""
        if self.rival:
            ratios = [bench.ratio(case, self.rival) for case in self.cases]
        else:
            ratios = [(bench.get(case) or {}).get("of_copy") for case in self.cases]
        return [value for value in ratios if value is not None]


def _of(product: str, tokens: tuple[int, ...]) -> tuple[tuple[str, str], ...]:
    some = (case for case in _ALL if case.product == product and case.tokens in tokens)
    return tuple((case.product, case.label) for case in some)


TARGETS = (
    *(
        Target(
            f"decode of {t} tokens: weights at 75% or more of the copy's bandwidth",
            _of("fwd", (t,)),
            0.75,
        )
        for t in cases.DECODE
    ),
    *(
        Target(f"{product}: at least {least:.2f}x one dense product of as many operations",
               _of(product, cases.TRAIN), least, "dense")
        for product, least in (("fwd", 0.84), ("dx", 0.84), ("dw", 0.90))
    ),
    *(
        Target(f"{product}: at least {least:.2f}x a copy of as many bytes",
               _of(product, cases.TRAIN), least, "copy")
        for product, least in zip(cases.MOVES, (0.85, 0.85, 0.80), strict=True)
    ),
)  # fmt: skip


def bits_kept(records: list[dict]) -> list[list[str]]:
    """Bits over all cases."""
    return [["bits", kept(latest(records, "moe"), CASES)]]


def target_rows(records: list[dict]) -> list[list[str]]:
    """(target, measured, verdict, next step) of every target."""
    bench = latest(records, "moe")
    return [
        section.target_row(
            t.text, t.values(bench), t.at_least, t.rival is None, (_MEASURE, _STEP)
        )
        for t in TARGETS
    ]  # fmt: skip


def _rows(bench: Bench) -> list[list[str]]:
    rows = []
    for key in CASES:
        item = bench.get(key)
        if item is None or "median_us" not in item:
            continue
        speed = f"{item['tflops']:.0f} TFLOP/s"
        if item["of_copy"] and ("weight_gbs" in item or item["product"] in cases.MOVES):
            speed = f"{item['of_copy']:.0%} of the copy"
        torchs, *others = (times(bench.ratio(key, name), "-") for name in _RIVALS)
        deepgemm, dense, copied = others
        label = item["shape"].replace("/", " ")
        cells = [item["product"], label, f"{item['median_us']:.1f}", speed]
        # A product of few tokens, or a move, has a copy beside it; others a dense product.
        bound = copied if dense == "-" else dense
        rows.append([*cells, torchs, deepgemm, bound, bits(item), where(item)])
    return rows


def _table(records: list[dict]) -> list[str]:
    head = ["product", "shape", "us", "speed", "torch", "deepgemm", "bound", "bits", "ran on"]
    rows = _rows(latest(records, "moe"))
    return folded(head, rows, ("bits", "ran on")) if rows else [NOT_RUN]


def _is_of_the_model(item: dict) -> bool:
    return benched("moe")(item) and item["product"].startswith("model ")


def _model(records: list[dict]) -> list[str]:
    """A row for each product of the whole model and system."""
    bench = latest([r for r in records if _is_of_the_model(r)], "moe")
    rows = []
    for (system, product, shape), item in sorted(bench.records.items(), key=_by_part):
        if "differing_bytes" in item:
            counts = item["differing_bytes"].items()
            told = f"{sum(n for _, n in counts)} bytes differ in {len(counts)} surroundings"
            rows.append([product, shape, system, told, "-", where(item)])
        elif "median_us" in item:
            rival = times(bench.ratio((product, shape), "torch", system), "-")
            time = f"{item['median_us'] / 1e3:.2f} ms"
            rows.append([product, shape, system, time, rival, where(item)])
    head = ["product", "shape", "system", "measured", "torch", "ran on"]
    return (
        folded(head, rows, ("ran on",))
        if rows
        else [f"`python -m perf bench qwen3-moe`: {NOT_RUN}."]
    )


def _by_part(entry: tuple) -> tuple:
    (system, product, shape), _ = entry
    return shape, (qwen3.ROWS, *qwen3.TIMED).index(product), system


SECTIONS = (
    Section(
        "Products and moves",
        """
        bf16; tokens (t) of a step, experts with equal loads or Zipf's; cold L2, in turns. Of
        the copy: the weights of experts that have rows, or the rows moved, at the bandwidth of
        a large copy in that run. Rivals: their time over ours; torch: grouped_mm, or sort and
        indexing; deepgemm: its grouped products of padded rows; bound: one dense product of as
        many operations, and for few tokens and moves a copy of as many bytes. Bits: those of
        `ck.linear`, and the same ones again.
        """,
        _table,
        benched("moe"),
    ),
    Section(
        "A whole model",
        """
        A Qwen3-MoE of 8 layers, random bf16 weights, by `ck.patch(strict=True)` beside
        transformers with torch's ops and `grouped_mm`, eager. Rows: bytes of logits that differ
        from those of one dense forward, for a sequence again, in a batch, padded on the left, in
        chunks, decoded with a cache, alone and in a batch. Step: each phase until the device is
        idle; torch: its time over the system's.
        """,
        _model,
        _is_of_the_model,
    ),
    section.targets(target_rows, benched("moe")),
)


def plots(records: list[dict], folder: Path) -> list[Path]:
    """None so far."""
    return []
