"""The status page of attention: a pure function of the records."""

from __future__ import annotations

from pathlib import Path

from ..core import figure, section
from ..core.counts import recorded, timed
from ..core.section import Section, benched
from ..core.speed import Speed
from ..core.tables import (
    MET,
    MISSED,
    NOT_RUN,
    Bench,
    bits,
    by_card,
    folded,
    geomean,
    kept,
    latest,
    table,
    times,
    where,
)
from . import paged_page, soak_cases, soak_page, targets
from .targets import Target

TITLE = "Attention"
KERNELS = (
    "sparse_attn_fwd_sm90",
    "sparse_attn_bwd_pre_sm90",
    "sparse_attn_bwd_sm90",
    "sparse_attn_bwd_post_sm90",
)
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


def _soaked(item: dict) -> bool:
    return item["kind"] == "soak" and item["status"] == "ok"


CASES = [(which, label(size)) for size in targets.cases() for which in ("fwd", "bwd")]
_SOAKED = {case.label for case in soak_cases.suite()}
COUNTS = (
    timed("attention: passes timed", "attention", set(CASES)),
    recorded("attention: configurations soaked", "shape", _SOAKED, _soaked),
)
_TIMES = [
    "mask, length, heads",
    "forward",
    "ordered backward",
    "ordered / unordered",
    "predicted",
    "lists / backward",
    "bits",
    "ran on",
]
_RIVALS = [
    "mask, length, heads",
    "FA4 forward",
    "FA4 / our unordered",
    "FA4 backward",
    "FA4 in order",
    "cuDNN",
    "Flex",
    "next step",
]
_PACKS = [
    "heads",
    "forward",
    "ordered backward",
    "FA4 varlen / ours",
    "one mask / ours",
    "each alone / ours",
    "bits",
    "ran on",
]


def _text(size: Size) -> str:
    mask, s, dim, heads, _ = size
    length = f"{s:,}" if s % 1024 else f"{s // 1024}k"
    case_text = _kept_together(f"{mask} {length}", f"D = {dim}", f"{heads} heads")
    return f"{case_text} {_kept_together(_group(size))}"


def _group(size: Size) -> str:
    *_, heads, kv_heads = size
    return "MHA" if heads == kv_heads else f"GQA {heads // kv_heads}:1"


def _heads(size: Size) -> str:
    """Label of a pack, whose table has no room for more."""
    _, _, dim, heads, _ = size
    return _kept_together(f"D = {dim}", f"{heads} heads", _group(size))


def _kept_together(*parts: str) -> str:
    """The parts with commas, where alone a narrow column may break the line."""
    return ", ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)


def _over(value: float | None) -> str:
    return NOT_RUN if value is None else f"{value:.3f}x"


def slowdown(bench: Bench, which: str, size: Size, system: str, rival: str) -> float | None:
    """A system's time over a rival's, of one call."""
    ratio = bench.ratio((which, label(size)), rival, system)
    return None if not ratio else 1 / ratio


def _rate(item: dict | None) -> str:
    if item is None or "tflops" not in item:
        return NOT_RUN
    # The rate may break: two columns have it.
    return _kept_together(f"{item['median_us']:,.0f} us") + f", {item['tflops']:.0f} TFLOP/s"


def _time_row(bench: Bench, size: Size) -> list[str]:
    forward, backward = (bench.get((which, label(size))) for which in ("fwd", "bwd"))
    predicted, lists = ((backward or {}).get(name) for name in ("predicted", "order_share"))
    return [
        _text(size),
        _rate(forward),
        _rate(backward),
        _over(slowdown(bench, "bwd", size, "ours", "ours_unordered")),
        _over(predicted and predicted["ratio"]),
        NOT_RUN if lists is None else f"{lists:.1%}",
        bits(backward),
        where(backward or forward),
    ]


def _rival_row(bench: Bench, size: Size) -> list[str]:
    return [
        _text(size),
        _over(bench.ratio(("fwd", label(size)), "fa4")),
        _over(bench.ratio(("bwd", label(size)), "fa4", "ours_unordered")),
        _over(bench.ratio(("bwd", label(size)), "fa4")),
        _over(bench.ratio(("bwd", label(size)), "fa4_ordered")),
        _over(bench.ratio(("bwd", label(size)), "cudnn")),
        _over(bench.ratio(("bwd", label(size)), "flex")),
        _next(bench, size),
    ]


def _next(bench: Bench, size: Size) -> str:
    """Next step of a case, from its records alone."""
    mask, s, dim, heads, kv_heads = size
    for which in ("fwd", "bwd"):
        for system in ("ours", "ours_unordered"):
            item = bench.get((which, label(size)), system)
            if item is not None and item["status"] == "failed":
                return f"fix {system} {which}: " + item["why"].splitlines()[0][:80]
            if item is not None and not all(item.get("bitwise", {}).values()):
                return f"fix the bits of {which}"
    backward = bench.get(("bwd", label(size)))
    if backward is None or "median_us" not in backward:
        options = f"--mask {mask} --s {s} --d {dim} --heads {heads} --group {heads // kv_heads}"
        options = "--held-out" if size in targets.HELD_OUT else options
        return f"`python -m perf bench attention {options}`"
    missed = dict.fromkeys(
        targets.RIVAL_TEXT[t.rival]
        for t in targets.TARGETS
        if not t.mean
        and t.covers(mask, s)
        and (slowdown(bench, t.which, size, t.system, t.rival) or 0.0) > t.at_most
    )
    return f"tune against {', '.join(missed)}" if missed else "none"


def _pack_row(bench: Bench, size: Size) -> list[str]:
    forward, backward = (bench.get((which, label(size)), "ours_pack") for which in ("fwd", "bwd"))
    rivals = (_of_pack(bench, size, name) for name in ("fa4_varlen", "ours", "ours_runs"))
    return [
        _heads(size),
        _rate(forward),
        _rate(backward),
        *rivals,
        _bits_of_pack(forward, backward),
        where(backward or forward),
    ]


def _bits_of_pack(*passes: dict | None) -> str:
    """The verdicts of both passes; that each sequence has its own bytes is not taken as said."""
    measured = [item for item in passes if item is not None and "bitwise" in item]
    promises = {f"{k} {item['pass']}": v for item in measured for k, v in item["bitwise"].items()}
    compared = all("alone" in item["bitwise"] for item in measured)
    verdicts = bits({"bitwise": promises} if measured else None)
    return verdicts if compared else f"{verdicts}; alone: {NOT_RUN}"


def _of_pack(bench: Bench, size: Size, rival: str) -> str:
    """A rival's time over that of one launch for the pack: forward, backward."""
    ratios = [bench.ratio((which, label(size)), rival, "ours_pack") for which in ("fwd", "bwd")]
    return NOT_RUN if ratios == [None, None] else _kept_together(*map(times, ratios))


def _pack_lines(records: list[dict]) -> list[str]:
    """The table of packed sequences, and what a new pack costs."""
    bench = latest(records, "attention")
    rows = [_pack_row(bench, size) for size in targets.PACKS]
    costs = []
    for size in targets.PACKS:
        item = bench.get(("bwd", label(size)), "ours_pack") or {}
        if "new_pack_host_us" in item:
            cost = f"{item['new_pack_host_us']:,.0f} us"
            if "table_us" in item:
                cost += f", the device {item['table_us']:.1f} us"
            costs.append(f"{cost} ({_heads(size)}; {item['sequences']} sequences)")
    return [
        *folded(_PACKS, rows, ("bits", "ran on")),
        "",
        "What a pack of new lengths costs: the host (median of 20) to launch what places its",
        f"sequences, for both passes, and the device in a backward: {'; '.join(costs) or NOT_RUN}.",
    ]


def _is_pack(item: dict) -> bool:
    return benched("attention")(item) and item.get("mask") == targets.PACK


def _shown(bench: Bench) -> list[Size]:
    """The quick suite's cases, and all others that have a record, wide heads among them."""
    measured = {key[2] for key in bench.records}
    quick = set(targets.cases(quick=True))
    sizes = (*targets.cases(), *targets.HELD_OUT, *targets.WIDE)
    return [c for c in sizes if c in quick or label(c) in measured]


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
    """The same of every target on the page."""
    return masked_target_rows(records) + paged_page.target_rows(records)


def _prediction_rows(bench: Bench) -> list[list[str]]:
    rows = []
    for size in (*targets.cases(), *targets.HELD_OUT, *targets.WIDE):
        item = bench.get(("bwd", label(size)))
        if item is None or "predicted" not in item:
            continue
        predicted, ordered = item["predicted"], item["ordered_us"]
        unordered = item.get("unordered_us")
        rows.append(
            [
                _text(size),
                f"{item['schedule']['name']} `{item['schedule']['hash'][:12]}`",
                f"{predicted['makespan_us']:,.0f}, {predicted['unordered_us']:,.0f}",
                f"{ordered:,.0f}, " + (f"{unordered:,.0f}" if unordered else NOT_RUN),
            ]
        )
    return rows


def order_points(bench: Bench) -> dict[str, tuple[float, float, float]]:
    """Mask and length -> ordered over unordered time: measured, predicted, target.  Quick cases."""
    out = {}
    for size in targets.cases(quick=True):
        item = bench.get(("bwd", label(size)))
        measured = slowdown(bench, "bwd", size, "ours", "ours_unordered")
        if measured is None or "predicted" not in item:
            continue
        limit = next(t.at_most for t in targets.TARGETS if t.covers(*size[:2]))
        out[f"{size[0]} {size[1] // 1024}k"] = measured, item["predicted"]["ratio"], limit
    return out


def plots(records: list[dict], folder: Path) -> list[Path]:
    """Plots of what the order costs."""
    from . import plots as drawn

    return drawn.write(records, folder)


def bits_kept(records: list[dict]) -> list[list[str]]:
    """The promises about bits: of the latest record of each case, and of the soak."""
    return [
        ["bits", kept(latest(records, "attention"), CASES)],
        ["bits beside other work", soak_page.verdict(records)],
        *paged_page.bits_kept(records),
    ]


def _cases(records: list[dict]) -> list[str]:
    bench = latest(records, "attention")
    plot = figure.image("What the order costs", "attention_order", bench)
    return [
        *([plot, ""] if order_points(bench) else []),
        *folded(_TIMES, [_time_row(bench, size) for size in _shown(bench)], ("bits", "ran on")),
    ]


def _rivals(records: list[dict]) -> list[str]:
    bench = latest(records, "attention")
    return table(_RIVALS, [_rival_row(bench, size) for size in _shown(bench)])


def _predictions(records: list[dict]) -> list[str]:
    rows = _prediction_rows(latest(records, "attention"))
    head = ["case", "schedule", "predicted us", "measured us"]
    return table(head, rows) if rows else []


def _is_absent(item: dict) -> bool:
    return item["kind"] == "bench" and (item["kernel"], item["status"]) == ("attention", "absent")


def _cannot(records: list[dict]) -> list[str]:
    """Reasons that rivals cannot run, with the masks."""
    absent: dict[tuple[str, str], set[str]] = {}
    for item in latest(records, "attention").records.values():
        if item["status"] == "absent":
            cases = absent.setdefault((item["system"], item["why"]), set())
            cases.add(f"{item['mask']} {item['pass']}")
    return [
        f"- {name} ({', '.join(sorted(c))}): {why}" for (name, why), c in sorted(absent.items())
    ]


SECTIONS = (
    Section(
        "Cases",
        f"""
        bf16, 32k tokens a batch. Of {len(targets.cases())} cases, those without a record are left
        out but for the first seven. Rates count the scores that a mask allows. Predicted: the
        simulator's ordered over unordered time, for the schedule that ran. Lists: building those
        of an order. Bits: 20 repeats of the backward.
        """,
        _cases,
        benched("attention"),
    ),
    Section("Rivals", "", _rivals, benched("attention")),
    Section(
        "Packed sequences",
        """
        `python -m perf bench attention --mask pack`: causal sequences of 100 to 4,000 tokens,
        1,000 on average, 32k tokens a pack. Ours is one launch a pass for all, which reads them
        where they lie, behind a small one that says where. Ratios: forward, backward; of the
        card's time, without the host's part of a call. One mask: blocks are counted from each
        row's start, so that a sequence's bits follow its place. Each alone: a launch for each
        sequence. Bits: 20 repeats, and those of each sequence alone.
        """,
        _pack_lines,
        _is_pack,
    ),
    section.targets(
        masked_target_rows,
        benched("attention"),
        """
        The worst case counts, or the mean where it says so. What was tried and what is next:
        [notes](../notes/attention_sm90.md).
        """,
    ),
    *paged_page.SECTIONS,
    *soak_page.SECTIONS,
    Section(
        "Schedules: predicted and measured",
        "Ordered, then unordered.",
        _predictions,
        benched("attention"),
    ),
    Section("What a rival cannot do", "", _cannot, _is_absent),
    section.profiles("attention"),
)


def schedule_times(records: list[dict]) -> list[str]:
    """Lines of docs/schedulers.md: 16 query heads, a table for each GPU model.

    A cell has the ordered backward predicted and measured, then both over the unordered one.
    """
    lines = []
    for bench in by_card(records, "attention").values():
        rows: dict[str, dict[str, str]] = {}
        for size in targets.cases():
            mask, s, dim, heads, kv_heads = size
            item = bench.get(("bwd", label(size))) or {}
            if heads == 16 and "predicted" in item:
                row = rows.setdefault(f"{mask} {s // 1024}k", {})
                row[f"{kv_heads} KV heads, D = {dim}"] = _schedule_cell(bench, size, item)
        head = list(dict.fromkeys(column for row in rows.values() for column in row))
        cells = [
            [name, *(row.get(column, NOT_RUN) for column in head)] for name, row in rows.items()
        ]
        lines += [f"**{bench.card}**", "", *table(["mask", *head], cells), ""] if rows else []
    return lines[:-1] or [NOT_RUN]


def _schedule_cell(bench: Bench, size: Size, item: dict) -> str:
    predicted = item["predicted"]
    measured = slowdown(bench, "bwd", size, "ours", "ours_unordered")
    ratio = NOT_RUN if measured is None else f"{measured:.2f}"
    times_us = f"{predicted['makespan_us']:,.0f}, {item['ordered_us']:,.0f}"
    return f"{times_us}; {predicted['ratio']:.2f}, {ratio}"
