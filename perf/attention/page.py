"""Targets and bits of attention on the status page: pure functions of the records."""

from __future__ import annotations

from ..core.speed import Speed
from ..core.tables import (
    MET,
    MISSED,
    NOT_RUN,
    Bench,
    geomean,
    kept,
    latest,
)
from . import paged_page, soak_page, targets
from .targets import Target

TITLE = "Attention"
BENCHES = ("attention", "paged_attention")
SPEED = (
    Speed("attention, forward", "attention", ("fwd",), "fa4", "FlashAttention-4"),
    Speed(
        "attention, ordered backward", "attention", ("bwd",), "fa4", "FlashAttention-4, unordered"
    ),
    Speed("attention, ordered backward", "attention", ("bwd",), "cudnn", "cuDNN, unordered"),
)
Size = tuple[str, int, int, int, int]  # mask, length, head size, query heads, KV heads


def label(size: Size) -> str:
    """The shape of a record of this size."""
    mask, s, dim, heads, kv_heads = size
    return f"{mask}/s{s}/d{dim}/h{heads}/kv{kv_heads}"


_MEASURE = "`python -m perf bench attention`"
_MET = (MET, "none")
_MISSED = (MISSED, "docs/notes/attention_sm90.md")


CASES = [(which, label(size)) for size in targets.cases() for which in ("fwd", "bwd")]


def _text(size: Size) -> str:
    mask, s, dim, heads, _ = size
    length = f"{s:,}" if s % 1024 else f"{s // 1024}k"
    case_text = _kept_together(f"{mask} {length}", f"D = {dim}", f"{heads} heads")
    return f"{case_text} {_kept_together(_group(size))}"


def _group(size: Size) -> str:
    *_, heads, kv_heads = size
    return "MHA" if heads == kv_heads else f"GQA {heads // kv_heads}:1"


def _kept_together(*parts: str) -> str:
    """The parts with commas, where alone a narrow column may break the line."""
    return ", ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)


def _over(value: float | None) -> str:
    return NOT_RUN if value is None else f"{value:.3f}x"


def slowdown(bench: Bench, which: str, size: Size, system: str, rival: str) -> float | None:
    """A system's time over a rival's, of one call."""
    ratio = bench.ratio((which, label(size)), rival, system)
    return None if not ratio else 1 / ratio


def _target_row(bench: Bench, target: Target) -> list[str]:
    cases = [
        size
        for size in (*targets.cases(), *targets.HELD_OUT)
        if target.covers(*size[:2]) and targets.rival_wanted(target.rival, size[0], size[2:])
    ]
    slowdowns = {
        size: slowdown(bench, target.which, size, target.system, target.rival) for size in cases
    }
    measured = {size: value for size, value in slowdowns.items() if value is not None}
    if target.mean:
        return _mean_verdict(target, list(measured.values()), len(cases))
    return _verdict(target.text, measured, len(cases), target.at_most, _over)


def _mean_verdict(target: Target, slowdowns: list[float], total: int) -> list[str]:
    """A row: the geometric mean of the cases measured; some of them decide nothing."""
    if not slowdowns:
        return [target.text, NOT_RUN, NOT_RUN, _MEASURE]
    mean = geomean(slowdowns)
    measured = f"{_over(mean)} (geometric mean; {len(slowdowns)} of {total} cases)"
    if len(slowdowns) < total:
        return [target.text, measured, NOT_RUN, _MEASURE]
    return [target.text, measured, *(_MET if mean <= target.at_most else _MISSED)]


def _verdict(
    text: str, slowdowns: dict[Size, float], total: int, limit: float, as_text
) -> list[str]:
    """A row: the worst of the cases measured; held only if all were, missed if one is beyond."""
    if not slowdowns:
        return [text, NOT_RUN, NOT_RUN, _MEASURE]
    worst = max(slowdowns, key=slowdowns.get)
    measured = f"{as_text(slowdowns[worst])} ({_text(worst)}; {len(slowdowns)} of {total} cases)"
    if slowdowns[worst] > limit:
        return [text, measured, *_MISSED]
    return [text, measured, *(_MET if len(slowdowns) == total else (NOT_RUN, _MEASURE))]


def _other_rows(bench: Bench) -> list[list[str]]:
    """The rate of the full mask at D = 128, what lists cost, and what the tables of packs do."""
    sizes = targets.cases()
    full = [size for size in sizes if size[0] == "full" and size[2] == 128]
    records = {size: bench.get(("bwd", label(size))) or {} for size in sizes}
    rates = {s: -records[s]["tflops"] for s in full if "tflops" in records[s]}
    lists = {s: r["order_share"] for s, r in records.items() if "order_share" in r}
    packs = {size: bench.get(("bwd", label(size)), "ours_pack") or {} for size in targets.PACKS}
    tables = {s: r["table_share"] for s, r in packs.items() if "table_share" in r}
    least, most = targets.RATE, targets.LISTS
    rate_text = f"bwd, full, D = 128: ours >= {least:.0f} TFLOP/s"
    lists_text = f"the tensors of an order, built on the device: <= {most:.0%} of one backward"
    tables_text = f"the table and the tickets of a pack, likewise: <= {most:.0%} of one backward"
    return [
        _verdict(rate_text, rates, len(full), -least, lambda value: f"{-value:.0f} TFLOP/s"),
        _verdict(lists_text, lists, len(sizes), most, lambda value: f"{value:.1%}"),
        _verdict(tables_text, tables, len(packs), most, lambda value: f"{value:.1%}"),
    ]


def masked_target_rows(records: list[dict]) -> list[list[str]]:
    """(target, measured, verdict, next step) of every target of attention under masks."""
    bench = latest(records, "attention")
    return [_target_row(bench, target) for target in targets.TARGETS] + _other_rows(bench)


def target_rows(records: list[dict]) -> list[list[str]]:
    """(target, measured, verdict, next step) of every target, paged caches included."""
    return masked_target_rows(records) + paged_page.target_rows(records)


def bits_kept(records: list[dict]) -> list[list[str]]:
    """The promises about bits: of the latest record of each case, and of the soak."""
    return [
        ["bits", kept(latest(records, "attention"), CASES)],
        ["bits beside other work", soak_page.verdict(records)],
        ["compute-sanitizer", soak_page.sanitized(records)],
        *paged_page.bits_kept(records),
    ]
