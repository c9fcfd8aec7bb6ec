"""The attention part of the status page: a pure function of the records and the certificates."""

from __future__ import annotations

from .. import targets
from ..tables import NOT_RUN, Bench, bits, certified, latest, table, where
from ..targets import AttentionTarget
from . import soak_page

KERNELS = (
    "sparse_attn_fwd_sm90",
    "sparse_attn_bwd_pre_sm90",
    "sparse_attn_bwd_sm90",
    "sparse_attn_bwd_post_sm90",
)
Size = tuple[str, int, int, int, int]  # mask, length, head size, query heads, KV heads
_HEAD = [
    "mask, length, heads",
    "forward",
    "FA4 forward / ours",
    "ordered backward",
    "ordered / unordered",
    "predicted",
    "FA4 backward / our unordered",
    "FA4 deterministic / our ordered",
    "FlexAttention / our ordered",
    "lists / backward",
    "bits of the backward",
    "ran on",
    "next step",
]


def label(size: Size) -> str:
    """The shape of a record of this size."""
    mask, s, dim, heads, kv_heads = size
    return f"{mask}/s{s}/d{dim}/h{heads}/kv{kv_heads}"


def _text(size: Size) -> str:
    mask, s, dim, heads, kv_heads = size
    group = "MHA" if heads == kv_heads else f"GQA {heads // kv_heads}:1"
    return f"{mask} {s // 1024}k, D = {dim}, {heads} heads {group}"


def _over(value: float | None) -> str:
    return NOT_RUN if value is None else f"{value:.3f}x"


def slowdown(bench: Bench, which: str, size: Size, system: str, rival: str) -> float | None:
    """A system's time over a rival's, of one call."""
    ratio = bench.ratio((which, label(size)), rival, system)
    return None if not ratio else 1 / ratio


def _rate(item: dict | None) -> str:
    if item is None or "tflops" not in item:
        return NOT_RUN
    return f"{item['median_us']:,.0f} us, {item['tflops']:.0f} TFLOP/s"


def _row(bench: Bench, size: Size) -> list[str]:
    forward, backward = (bench.get((which, label(size))) for which in ("fwd", "bwd"))
    predicted = (backward or {}).get("predicted")
    lists = (backward or {}).get("order_share")
    return [
        _text(size),
        _rate(forward),
        _over(bench.ratio(("fwd", label(size)), "fa4")),
        _rate(backward),
        _over(slowdown(bench, "bwd", size, "ours", "ours_unordered")),
        _over(predicted and predicted["ratio"]),
        _over(bench.ratio(("bwd", label(size)), "fa4", "ours_unordered")),
        _over(bench.ratio(("bwd", label(size)), "fa4_ordered")),
        _over(bench.ratio(("bwd", label(size)), "flex")),
        NOT_RUN if lists is None else f"{lists:.1%}",
        bits(backward),
        where(backward or forward),
        _next(bench, size),
    ]


def _next(bench: Bench, size: Size) -> str:
    """What to do about a case, from its records alone."""
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
        return f"`python -m perf bench attention {options}` on an H200"
    missed = [
        targets.ATTENTION_SYSTEM_TEXT[t.rival]
        for t in targets.ATTENTION_TARGETS
        if (not t.masks or (mask, s) in t.masks)
        and (slowdown(bench, t.which, size, t.system, t.rival) or 0.0) > t.at_most
    ]
    return f"tune against {', '.join(missed)}" if missed else "none"


def _rows(bench: Bench) -> list[list[str]]:
    """The quick suite's cases, and all others that have a record."""
    measured = {key[2] for key in bench.records}
    quick = set(targets.attention_cases(quick=True))
    shown = [c for c in targets.attention_cases() if c in quick or label(c) in measured]
    return [_row(bench, size) for size in shown]


def _target_row(bench: Bench, target: AttentionTarget) -> list[str]:
    cases = [
        size
        for size in targets.attention_cases()
        if (not target.masks or size[:2] in target.masks)
        and targets.attention_rival_wanted(target.rival, size[0], size[2:])
    ]
    found = {
        size: slowdown(bench, target.which, size, target.system, target.rival) for size in cases
    }
    have = {size: value for size, value in found.items() if value is not None}
    return _verdict(target.text, have, len(cases), target.at_most, _over)


def _verdict(text: str, have: dict[Size, float], total: int, limit: float, shown) -> list[str]:
    """A row: the worst of the cases measured; held only if all were, missed if one is beyond."""
    if not have:
        return [text, NOT_RUN, NOT_RUN]
    worst = max(have, key=have.get)
    measured = f"{shown(have[worst])} ({_text(worst)}; {len(have)} of {total} cases)"
    if have[worst] > limit:
        return [text, measured, "missed"]
    return [text, measured, "held" if len(have) == total else NOT_RUN]


def _other_rows(bench: Bench) -> list[list[str]]:
    """The rate of the full mask at D = 128, and what the lists cost."""
    sizes = targets.attention_cases()
    full = [size for size in sizes if size[0] == "full" and size[2] == 128]
    records = {size: bench.get(("bwd", label(size))) or {} for size in sizes}
    rates = {s: -records[s]["tflops"] for s in full if "tflops" in records[s]}
    lists = {s: r["order_share"] for s, r in records.items() if "order_share" in r}
    least, most = targets.ATTENTION_RATE, targets.ATTENTION_LISTS
    rate_text = f"bwd, full, D = 128: ours >= {least:.0f} TFLOP/s"
    lists_text = f"the tensors of an order, built on the device: <= {most:.0%} of one backward"
    return [
        _verdict(rate_text, rates, len(full), -least, lambda value: f"{-value:.0f} TFLOP/s"),
        _verdict(lists_text, lists, len(sizes), most, lambda value: f"{value:.1%}"),
    ]


def _prediction_rows(bench: Bench) -> list[list[str]]:
    rows = []
    for size in targets.attention_cases():
        item = bench.get(("bwd", label(size)))
        if item is None or "predicted" not in item:
            continue
        told, own = item["predicted"], item["ordered_us"]
        unordered = item.get("unordered_us")
        rows.append(
            [
                _text(size),
                item["schedule"]["name"],
                item["schedule"]["hash"][:12],
                f"{told['makespan_us']:,.0f}",
                f"{own:,.0f}",
                f"{told['unordered_us']:,.0f}",
                f"{unordered:,.0f}" if unordered else NOT_RUN,
                f"{told['ratio']:.3f}",
                _over(slowdown(bench, "bwd", size, "ours", "ours_unordered")),
            ]
        )
    return rows


def order_points(bench: Bench) -> dict[str, tuple[float, float, float]]:
    """Mask and length -> ordered over unordered time: measured, predicted, target.  Quick cases."""
    found = {}
    for size in targets.attention_cases(quick=True):
        item = bench.get(("bwd", label(size)))
        measured = slowdown(bench, "bwd", size, "ours", "ours_unordered")
        if measured is None or "predicted" not in item:
            continue
        limit = next(t.at_most for t in targets.ATTENTION_TARGETS if size[:2] in t.masks)
        found[f"{size[0]} {size[1] // 1024}k"] = measured, item["predicted"]["ratio"], limit
    return found


def render(records: list[dict], certificates: list[dict]) -> list[str]:
    """The lines of the attention part."""
    bench = latest(records, "attention")
    built = [[name, *certified(certificates, name)] for name in KERNELS]
    checks = [_target_row(bench, target) for target in targets.ATTENTION_TARGETS]
    out = [
        "## Attention",
        "",
        f"bf16, 32k tokens a batch.  Of {len(targets.attention_cases())} cases, those without a "
        "record are left out but for the",
        "first seven.  Rates count the scores that a mask allows.  Predicted: the simulator's",
        "ordered over unordered time, for the schedule that ran.",
        "",
        *table(["kernel", "compiled", "certified"], built),
        "",
        *table(_HEAD, _rows(bench)),
        *(
            ["", "![What the order costs](plots/attention_order.svg)"]
            if order_points(bench)
            else []
        ),
        "",
        "### Targets of attention",
        "",
        "The worst case counts.",
        "",
        *table(["target", "measured", "verdict"], checks + _other_rows(bench)),
    ]
    out += ["", *soak_page.render(records)]
    if rows := _prediction_rows(bench):
        head = ["case", "schedule", "hash", "predicted us", "measured us"]
        head += ["predicted unordered us", "measured unordered us", "predicted ratio", "measured"]
        out += ["", "### Schedules: predicted and measured", "", *table(head, rows)]
    absent = {(r["system"], r["why"]) for r in bench.records.values() if r["status"] == "absent"}
    if absent:
        out += ["", "### What a rival of attention cannot do", ""]
        for name, why in sorted(absent):
            where_not = {
                f"{r['mask']} {r['pass']}"
                for r in bench.records.values()
                if (r["system"], r.get("why")) == (name, why)
            }
            out.append(f"- {name} ({', '.join(sorted(where_not))}): {why}")
    return out
