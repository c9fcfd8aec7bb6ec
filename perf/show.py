"""`python -m perf show`: the newest record of each case, one by one."""

from __future__ import annotations

from collections.abc import Callable

from .core.models import split
from .core.tables import bits, by_card, certified, times, where
from .digest import page as digests
from .probes import page as probes

HEAD = ["product", "shape", "system", "us", "rate", "others' time over it", "bits", "ran on"]

Table = tuple[list[str], list[list[str]]]


def kernels_of(records: list[dict]) -> list[str]:
    """What was benchmarked case by case, by the names in the records."""
    return sorted({r["kernel"] for r in records if r["kind"] == "bench" and "product" in r})


def cases(records: list[dict], kernel: str) -> Table:
    """Rows of the newest record of each (product, shape, system) of a kernel, card by card."""
    rows = []
    for bench in by_card(records, kernel).values():
        for (system, product, shape), item in sorted(
            bench.records.items(), key=lambda pair: (pair[0][1:], pair[0][0])
        ):
            ratios = ", ".join(f"{name} {times(ratio)}" for name, ratio in _ratios(item).items())
            cells = [_time(item), _rate(item), ratios or "-", bits(item), where(item)]
            rows.append([product, shape, system, *cells])
    return HEAD, rows


def _ratios(item: dict) -> dict[str, float]:
    return dict(sorted(item.get("ratio", {}).items()))


def _time(item: dict) -> str:
    value = item.get("median_us", item.get("host_us"))
    if isinstance(value, float | int):
        return f"{value:,.1f}" + (" (host)" if "median_us" not in item else "")
    return item.get("why", "-").splitlines()[0][:60]


def _rate(item: dict) -> str:
    parts = [f"{item['tflops']:.0f} TFLOP/s"] if "tflops" in item else []
    shares = {"floor_fraction": "of the floor", "of_copy": "of a copy"}
    parts += [f"{item[key]:.0%} {text}" for key, text in shares.items() if item.get(key)]
    return ", ".join(parts) or "-"


def kernels(certificates: list[dict]) -> Table:
    """Rows of the kernels that have certificates."""
    names = dict.fromkeys(item["name"] for item in certificates)
    rows = [[name, *certified(certificates, name)] for name in names]
    return ["kernel", "compiled", "certified"], rows


def others(certificates: list[dict]) -> dict[str, Callable[[list[dict]], Table]]:
    """What is shown besides benchmarks: a name, and its table of the records."""
    return {
        "kernels": lambda records: kernels(certificates),
        "digests": digests.rows,
        "probes": probes.rows,
    }


def shown(what: str, records: list[dict], certificates: list[dict], gpu: str = "") -> Table:
    """The table of a kernel's cases, or of one of `others`; ``gpu``: of that model alone."""
    records = split(records).get(gpu, []) if gpu else records
    other = others(certificates).get(what)
    return other(records) if other else cases(records, what)
