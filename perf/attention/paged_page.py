"""Attention over paged caches on attention's status page: times, targets, bits."""

from __future__ import annotations

from ..core.tables import Bench, field_of, kept, latest, target_row

KERNEL = "paged_attention"
#: (sequences, keys of each) of a decoding batch.
SIZES = (
    (1, 16384),
    (1, 131072),
    (8, 32768),
    (32, 4096),
    (64, 4096),
    (128, 2048),
    (256, 1024),
)
#: Shape of the mixed batch: decoding sequences and their keys, prompts and their tokens.
MIXED = (200, 4096, 4, 2048)
RIVALS = ("cudnn", "flash", "fa4")
_OURS = {16: "page 16", 256: "page 256"}
_STEPS = ("python -m perf.attention.decode", "docs/notes/attention_sm90.md")
#: Milliseconds of 1 x 131072, by card, and what 32 x 4096 may take on an H200 (TileOPs, 1.1 times).
LONG_US, SHORT_US = {"H100": 210.0, "H200": 160.0}, 148.5
#: Sizes of 64 MB of keys and values or more in batches of 8 or more.
FULL = tuple(size for size in SIZES if size[0] >= 8)
AT_LEAST_OF_COPY = 0.8


def key(size: tuple[int, int]) -> tuple[str, str]:
    """Product and shape of a decoding batch."""
    return "decode", f"{size[0]}x{size[1]}"


def mixed_key() -> tuple[str, str]:
    """Product and shape of the mixed batch."""
    decodes, keys, prompts, tokens = MIXED
    return "mixed", f"{decodes}x{keys}+{prompts}x{tokens}"


def _over_best(bench: Bench, case: tuple[str, str], system: str) -> float | None:
    """The fastest rival's time over ours."""
    ratios = [bench.ratio(case, rival, system) for rival in RIVALS]
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def _verdict(text: str, values: list[float | None], form: str, at_least: float) -> list[str]:
    measured = [value for value in values if value is not None]
    if not measured:
        return target_row(text, None, False, _STEPS)
    return target_row(text, form.format(min(measured)), min(measured) >= at_least, _STEPS)


def _at_most(bench: Bench, size: tuple[int, int], limit: float) -> list[str]:
    us = field_of("median_us", _OURS[256])(bench, key(size))
    measured, met = (None, False) if us is None else (f"{us:.1f} us", us <= limit)
    return target_row(f"{key(size)[1]}: at most {limit:g} us", measured, met, _STEPS)


def target_rows(records: list[dict]) -> list[list[str]]:
    """(target, measured, verdict, next step) of every target of paged attention."""
    bench = latest(records, KERNEL)
    shares = [field_of("of_copy", _OURS[256])(bench, key(size)) for size in FULL]
    best = [_over_best(bench, key(size), _OURS[256]) for size in FULL]
    pages = [bench.ratio(key(size), _OURS[256], _OURS[16]) for size in SIZES]
    rows = [
        _at_most(bench, (1, 131072), LONG_US.get(bench.card, min(LONG_US.values()))),
        _verdict(
            "1x16384: >= 0.91x of the best rival",
            [_over_best(bench, key((1, 16384)), _OURS[256])], "{:.2f}x", 0.91,
        ),
        _verdict(
            f"8 to 256 sequences: >= {AT_LEAST_OF_COPY:.0%} of a copy's bandwidth", shares,
            "{:.0%} at least", AT_LEAST_OF_COPY,
        ),
        _verdict("8 to 256 sequences: >= 1.00x of the best rival", best, "{:.2f}x at least", 0.995),
        _verdict("pages of 16: >= 0.95x of pages of 256", pages, "{:.2f}x at least", 0.95),
        _verdict(
            "mixed batch: >= 0.95x of FA4's varlen",
            [bench.ratio(mixed_key(), "fa4", _OURS[256])], "{:.2f}x", 0.95,
        ),
    ]  # fmt: skip
    if bench.card == "H200":
        rows.insert(1, _at_most(bench, (32, 4096), SHORT_US))
    return rows


def bits_kept(records: list[dict]) -> list[list[str]]:
    """Rows over pages have the dense forward's bytes."""
    by_case = latest(records, KERNEL).records
    ours = {("ours", *k[1:]): r for k, r in by_case.items() if k[0] == _OURS[256]}
    return [["bits over pages", kept(Bench(ours), [*map(key, SIZES), mixed_key()])]]
