"""Targets and bits of `linear` and `matmul` on the status page: pure functions of the records."""

from __future__ import annotations

from ..core.speed import Speed
from ..core.tables import MISSED, Bench, kept, latest, mean_row, target_row
from . import decode_page, targets

TITLE = "`linear` and `matmul`"
BENCHES = ("gemm", "decode")
SPEED = (
    Speed("`linear`, forward and dx", "gemm", ("fwd", "dx"), "cublas", "cuBLAS", targets.SHAPES),
    Speed("`linear`, dW into fp32", "gemm", ("dw",), "cublas", "cuBLAS and an add", targets.SHAPES),
    Speed("`linear`, 1 to 128 rows", "decode", ("fwd",), "cublas", "cuBLAS", ours="chain"),
)
CASES = [(product, targets.label(name, m)) for product, name, m in targets.cases()]
NEAR_FLOOR = 0.9  # of the floor: from here on a miss is the rival's doing
_MEASURE = "`python -m perf bench gemm`"


def _target_row(bench: Bench, target: targets.Target) -> list[str]:
    cases = [(target.product, name) for name in targets.SHAPES]
    values = [bench.ratio(case, target.rival, target.system) for case in cases]
    row = mean_row(target.text, values, target.at_least, target.each, (_MEASURE, ""))
    return row if row[2] != MISSED else [*row[:3], _after_a_miss(bench, target)]


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
    rows, steps = [], (_MEASURE, targets.HOST_NEXT)
    for mode, limit in targets.HOST_TARGETS.items():
        text = f"host time of one forward call, {mode}: <= {limit:g} us"
        cost = _host_cost(records, ("ours",), mode)
        if cost is None:
            rows.append(target_row(text, None, False, steps))
            continue
        run_records = [r for r in records if (r["commit"], r.get("kernel")) == _run(cost["of"])]
        rival = _host_cost(run_records, ("cublas", "torch"), mode)
        comparison = f"; torch {rival['us']:.1f} us" if rival else ""
        measured = f"{cost['us']:.1f} us{comparison}"
        rows.append(target_row(text, measured, cost["us"] <= limit, steps))
    return rows


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
