"""The status page of `linear` and `matmul`: a pure function of the records."""

from __future__ import annotations

from pathlib import Path

from ..core import figure, section
from ..core.counts import timed
from ..core.section import Section, benched
from ..core.speed import Speed
from ..core.tables import (
    MET,
    MISSED,
    NOT_RUN,
    Bench,
    bits,
    folded,
    geomean,
    kept,
    latest,
    times,
    where,
)
from . import decode_page, targets

TITLE = "`linear` and `matmul`"
KERNELS = ("gemm_sm90", "gemm_skinny_sm90", "gemm_column_sum_sm90")
SPEED = (
    Speed("`linear`, forward and dx", "gemm", ("fwd", "dx"), "cublas", "cuBLAS", targets.SHAPES),
    Speed("`linear`, dW into fp32", "gemm", ("dw",), "cublas", "cuBLAS and an add", targets.SHAPES),
    Speed("`linear`, 1 to 128 rows", "decode", ("fwd",), "cublas", "cuBLAS", ours="chain"),
)
CASES = [(product, targets.label(name, m)) for product, name, m in targets.cases()]
COUNTS = (timed("`linear`, `matmul`: products timed", "gemm", set(CASES)), *decode_page.COUNTS)
NEAR_FLOOR = 0.9  # of the floor: from here on a miss is the rival's doing
_MEASURE = "`python -m perf bench gemm`"


def _next(bench: Bench, product: str, name: str, m: int) -> str:
    """Next step of a case, from its record alone."""
    case = (product, targets.label(name, m))
    item = bench.get(case)
    measure = f"`python -m perf bench gemm --shape {name} --m {m} --product {product}`"
    if item is None or item["status"] == "absent":
        return measure
    if item["status"] != "ok":
        return "fix: " + item["why"].splitlines()[0][:80]
    if not all(item["bitwise"].values()):
        return "fix the bits"
    ratio = bench.ratio(case, "cublas")
    if ratio is None:
        return measure
    target = next(t for t in targets.TARGETS if (t.product, t.rival) == (product, "cublas"))
    met = ratio >= (target.each or target.at_least)
    return "none" if met else f"`python -m perf profile gemm --shape {name} --product {product}`"


def _rate_rows(bench: Bench) -> list[list[str]]:
    rows = []
    for product, name, m in targets.cases():
        case = (product, targets.label(name, m))
        item, cells = bench.get(case), [NOT_RUN, NOT_RUN]
        if item is not None and "tflops" in item:
            cells = [f"{item['tflops']:.0f}", f"{item['floor_fraction']:.0%}"]
        rows.append([*case, *cells, bits(item), where(item), _next(bench, product, name, m)])
    return rows


def _ratio_rows(bench: Bench) -> list[list[str]]:
    return [
        [*case, *(times(bench.ratio(case, rival)) for rival in targets.RIVAL_TEXT)]
        for case in CASES
    ]


def _target_row(bench: Bench, target: targets.Target) -> list[str]:
    cases = [(target.product, name) for name in targets.SHAPES]
    ratios = [bench.ratio(case, target.rival, target.system) for case in cases]
    measured_ratios = [value for value in ratios if value is not None]
    if len(measured_ratios) < len(ratios):
        count = f" ({len(measured_ratios)} of {len(ratios)} shapes)" if measured_ratios else ""
        return [target.text, NOT_RUN + count, NOT_RUN, _MEASURE]
    mean = geomean(measured_ratios)
    measured = f"{mean:.3f}x (lowest {min(measured_ratios):.3f}x)"
    if mean >= target.at_least and (target.each is None or min(measured_ratios) >= target.each):
        return [target.text, measured, MET, "none"]
    return [target.text, measured, MISSED, _after_a_miss(bench, target)]


def _after_a_miss(bench: Bench, target: targets.Target) -> str:
    """A profile of the worst shape; near the floor no speed of ours reaches the ratio."""
    cases = {name: (target.product, name) for name in targets.SHAPES}
    floor = min(bench.get(case, target.system)["floor_fraction"] for case in cases.values())
    rates = [(bench.get(case, target.rival) or {}).get("tflops", 0.0) for case in cases.values()]
    if floor >= NEAR_FLOOR and min(rates) > 0:
        return (
            f"none: ours is at {floor:.0%} of the floor or above, the rival runs at "
            f"{min(rates):.0f} to {max(rates):.0f} TFLOP/s"
        )
    worst = min(cases, key=lambda n: bench.ratio(cases[n], target.rival, target.system))
    return f"`python -m perf profile gemm --shape {worst} --product {target.product}`"


#: Mode of a call -> its product among the records of a whole model, which time the same call.
_HOST_CALLS = {"grad": "host linear, grad", "inference": "host linear"}


def _host_cost(records: list[dict], systems: tuple[str, ...], mode: str) -> dict | None:
    """The newest record of what a forward call costs the host, as {"us", "where"}.

    Calls are timed with the products (one time in each record: the worst of a run counts) and with
    a whole model.
    """
    bench = [r for r in records if r["kind"] == "bench" and r.get("system") in systems]
    with_host = [r for r in bench if r["kernel"] == "gemm" and mode in r.get("host_us", {})]
    costs = [(r["date"], r["host_us"][mode], r) for r in with_host]
    calls = [r for r in bench if r["kernel"] == "model" and r["product"] == _HOST_CALLS[mode]]
    costs += [(r["date"], r["host_us"], r) for r in calls]
    if not costs:
        return None
    _, _, newest = max(costs, key=lambda cost: cost[0])
    run = [us for _, us, r in costs if (r["commit"], r["kernel"]) == _run(newest)]
    return {"us": max(run) if newest["kernel"] == "gemm" else newest["host_us"], "of": newest}


def _run(record: dict) -> tuple[str, str]:
    return record["commit"], record["kernel"]


def _host_rows(records: list[dict]) -> list[list[str]]:
    rows = []
    for mode, limit in targets.HOST_TARGETS.items():
        text = f"host time of one forward call, {mode}: <= {limit:g} us"
        cost = _host_cost(records, ("ours",), mode)
        if cost is None:
            rows.append([text, NOT_RUN, NOT_RUN, _MEASURE])
            continue
        run_records = [r for r in records if (r["commit"], r.get("kernel")) == _run(cost["of"])]
        rival = _host_cost(run_records, ("cublas", "torch"), mode)
        comparison = f"; torch {rival['us']:.1f} us" if rival else ""
        measured = f"{cost['us']:.1f} us{comparison} ({where(cost['of'])})"
        met = cost["us"] <= limit
        step = "none" if met else targets.HOST_NEXT
        rows.append([text, measured, MET if met else MISSED, step])
    return rows


def ratio_points(bench: Bench) -> dict[str, dict[str, float]]:
    """Timed points: product -> shape -> throughput over cuBLAS's."""
    out = {
        product: {
            shape: ratio
            for shape in targets.SHAPES
            if (ratio := bench.ratio((product, shape), "cublas")) is not None
        }
        for product in targets.PRODUCTS
    }
    return {product: ratios for product, ratios in out.items() if ratios}


def sweep_points(bench: Bench) -> dict[str, list[tuple[int, float]]]:
    """Timed points: system -> (M, forward TFLOP/s) at the sweep's K and N."""
    points: dict[str, list[tuple[int, float]]] = {}
    for system in sorted({key[0] for key in bench.records}):
        for m in targets.sweep_sizes():
            item = bench.get(("fwd", targets.label(targets.SWEEP_SHAPE, m)), system)
            if item is not None and "tflops" in item:
                points.setdefault(system, []).append((m, item["tflops"]))
    return points


def plots(records: list[dict], folder: Path) -> list[Path]:
    """The ratios to cuBLAS, and the rates over M."""
    from . import plots as drawn

    return drawn.write(records, folder) + decode_page.plots(records, folder)


def dense_target_rows(records: list[dict]) -> list[list[str]]:
    """Targets of the five shapes, and of the host."""
    bench = latest(records, "gemm")
    return [_target_row(bench, target) for target in targets.TARGETS] + _host_rows(records)


def target_rows(records: list[dict]) -> list[list[str]]:
    """(target, measured, verdict, next step) of every target."""
    return dense_target_rows(records) + decode_page.target_rows(records)


def bits_kept(records: list[dict]) -> list[list[str]]:
    """The promises about bits, as the latest record of each case found them."""
    return [["bits", kept(latest(records, "gemm"), CASES)], *decode_page.bits_kept(records)]


def _rates(records: list[dict]) -> list[str]:
    bench = latest(records, "gemm")
    head = ["product", "shape", "TFLOP/s", "of floor", "bits", "ran on", "next step"]
    ratios = figure.image("Throughput over cuBLAS", "gemm_ratio", bench)
    sweep = figure.image("TFLOP/s over M", "gemm_sweep", bench)
    return [
        *([ratios, ""] if ratio_points(bench) else []),
        *folded(head, _rate_rows(bench), ("bits", "ran on", "next step")),
        *(["", sweep] if sweep_points(bench) else []),
    ]


def _ratios(records: list[dict]) -> list[str]:
    rivals = tuple(targets.RIVAL_TEXT.values())
    return folded(["product", "shape", *rivals], _ratio_rows(latest(records, "gemm")), rivals)


def _counts_for_targets(item: dict) -> bool:
    """Products that were timed, and what a call of one costs the host."""
    host = item["kind"] == "bench" and item.get("product") in _HOST_CALLS.values()
    return host or benched("gemm")(item)


def _is_absent(item: dict) -> bool:
    return item["kind"] == "bench" and (item["kernel"], item["status"]) == ("gemm", "absent")


def _absent(records: list[dict]) -> list[str]:
    rivals = latest(records, "gemm").records.values()
    reasons = sorted({(r["system"], r["why"]) for r in rivals if r["status"] == "absent"})
    return [f"- {name}: {why}" for name, why in reasons]


SECTIONS = (
    Section(
        "Products",
        """
        bf16. The floor is the time of the card's best product or copy. Bits are those of 20
        repeats, of rows alone and in the batch (fwd, dx), and of splits of the tokens (dw).
        """,
        _rates,
        benched("gemm"),
    ),
    Section("Rivals", "", _ratios, benched("gemm")),
    section.targets(
        dense_target_rows,
        _counts_for_targets,
        "Geometric mean over the five shapes at their own M.  Host times are of 64 tokens.",
    ),
    Section("Rivals not measured", "", _absent, _is_absent),
    *decode_page.SECTIONS,
    section.profiles("gemm"),
)
