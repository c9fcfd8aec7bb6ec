"""What the status page says first: the promises and the targets in a few rows, from the records."""

from __future__ import annotations

from collections import Counter

from .attention import page, soak_page
from .core.tables import NOT_RUN, Bench, latest, table
from .digest import page as digests
from .gemm import targets


def _bits(bench: Bench, cases: list[tuple[str, str]]) -> str:
    """In how many cases every bitwise promise of the latest record held; those that broke one."""
    found = {case: bench.get(case) for case in cases}
    checked = {case: item["bitwise"] for case, item in found.items() if "bitwise" in (item or {})}
    broken = [" ".join(case) for case, held in checked.items() if not all(held.values())]
    if not checked:
        return NOT_RUN
    kept = f"kept in {len(checked) - len(broken)} of {len(cases)} cases"
    return f"{kept}; broken in {', '.join(broken)}" if broken else kept


def _soaked(records: list[dict]) -> str:
    calls, replays, differing = soak_page.totals(records)
    if not calls:
        return NOT_RUN
    return f"{differing:,} differing bytes in {calls:,} calls and {replays:,} graph replays"


def _targets(words: list[str]) -> str:
    """How many targets are held, missed, not run."""
    counts = Counter(words)
    order = ("held", "missed", NOT_RUN)
    return ", ".join(f"{counts[word]} {word}" for word in order if counts[word])


def _certified(certificates: list[dict]) -> str:
    if not certificates:
        return NOT_RUN
    return f"{sum(c['ok'] for c in certificates)} of {len(certificates)} hold"


def _models(records: list[dict]) -> str:
    words = Counter(digests.verdicts(records))
    both, bad = words[digests.EQUAL], words[digests.DIFFERS]
    if not both + bad:
        return NOT_RUN
    shared = f"equal digests in {both} of {both + bad} cases"
    return f"{shared}, {bad} differ" if bad else shared


def render(
    records: list[dict], certificates: list[dict], gemm: list[str], attention: list[str]
) -> list[str]:
    """Lines of a table; `gemm` and `attention` are the verdicts of their targets."""
    passes = [(way, page.label(s)) for s in targets.attention_cases() for way in ("fwd", "bwd")]
    products = [(way, targets.label(name, m)) for way, name, m in targets.gemm_cases()]
    soak, certificate = "#the-same-bytes-again-and-again", "certificate.md"
    rows = [
        ["[bits of `linear` and `matmul`](#linear-and-matmul)", _bits(latest(records), products)],
        ["[bits of attention](#attention)", _bits(latest(records, "attention"), passes)],
        [f"[bits of attention beside other work]({soak})", _soaked(records)],
        ["[the same bits on H100 and H200](#digests)", _models(records)],
        [f"[certificates]({certificate}) of the compiled kernels", _certified(certificates)],
        ["[speed targets of `linear` and `matmul`](#targets)", _targets(gemm)],
        ["[speed targets of attention](#targets-of-attention)", _targets(attention)],
    ]
    return table(["question", "verdict"], rows)
