"""`python -m perf report`: docs/status.md and the plots, from the records and nothing else.

`render` is a pure function of the records and the certificates, both of which are in the repository
(perf/results/), so a test can tell whether the page is up to date.  What no record supports says
"not run".
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from . import cards, record, targets, verdict
from .attention import page
from .digest import page as digests
from .tables import NOT_RUN, Bench, bits, certified, folded, latest, table, times, where
from .targets import Target

STATUS = record.ROOT / "docs" / "status.md"
CERTIFICATES = record.RESULTS / "certificates.json"
#: What `python -m cute_kernels certify` writes; either name.
BUILT = tuple(record.ROOT / "certify" / name for name in ("certificates.json", "report.json"))
NEAR_FLOOR = 0.9  # of the floor: from here on a miss is the rival's doing
KERNELS = ("gemm_sm90", "gemm_column_sum_sm90")
_MEASURE = "`python -m perf bench gemm` on an H200"
_FIELDS = ("name", "constexpr", "ok", "registers", "sass_sha256", "sources", "toolchain")


def load_certificates(path: Path = CERTIFICATES) -> list[dict]:
    """The committed copy of the certificates; none where there is no file."""
    return json.loads(path.read_text()) if path.is_file() else []


def adopt_certificates(kept: Path = CERTIFICATES, built: tuple[Path, ...] = BUILT) -> bool:
    """Copies what is kept of a fresh certificate report (_FIELDS) into the repository."""
    fresh = [path for path in built if path.is_file()]
    if not fresh:
        return False
    made = json.loads(fresh[0].read_text())
    facts = [{k: item[k] for k in _FIELDS if k in item} for item in made]
    kept.parent.mkdir(parents=True, exist_ok=True)
    facts.sort(key=lambda item: json.dumps([item["name"], item.get("constexpr")]))
    kept.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
    return True


def _next(bench: Bench, product: str, name: str, m: int) -> str:
    """What to do about a case, from its record alone."""
    case = (product, targets.label(name, m))
    own = bench.get(case)
    measure = f"`python -m perf bench gemm --shape {name} --m {m} --product {product}` on an H200"
    if own is None or own["status"] == "absent":
        return measure
    if own["status"] != "ok":
        return "fix: " + own["why"].splitlines()[0][:80]
    if not all(own["bitwise"].values()):
        return "fix the bits"
    ratio = bench.ratio(case, "cublas")
    if ratio is None:
        return measure
    target = next(t for t in targets.TARGETS if (t.product, t.rival) == (product, "cublas"))
    held = ratio >= (target.each or target.at_least)
    return "none" if held else f"`python -m perf profile gemm --shape {name} --product {product}`"


def _rate_rows(bench: Bench) -> list[list[str]]:
    rows = []
    for product, name, m in targets.gemm_cases():
        case = (product, targets.label(name, m))
        own, cells = bench.get(case), [NOT_RUN, NOT_RUN]
        if own is not None and "tflops" in own:
            cells = [f"{own['tflops']:.0f}", f"{own['floor_fraction']:.0%}"]
        rows.append([*case, *cells, bits(own), where(own), _next(bench, product, name, m)])
    return rows


def _ratio_rows(bench: Bench) -> list[list[str]]:
    cases = [(product, targets.label(name, m)) for product, name, m in targets.gemm_cases()]
    return [
        [*case, *(times(bench.ratio(case, rival)) for rival in targets.RIVAL_TEXT)]
        for case in cases
    ]


def _kernel_rows(certificates: list[dict]) -> list[list[str]]:
    """Every kernel that has a certificate, and those of the pages that have none."""
    names = dict.fromkeys((*KERNELS, *page.KERNELS, *(c["name"] for c in certificates)))
    return [[f"`{name}`", *certified(certificates, name)] for name in names]


def geomean(values: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(math.log(v) for v in values) / len(values))


def _target_row(bench: Bench, target: Target) -> list[str]:
    cases = [(target.product, name) for name in targets.SHAPES]
    found = [bench.ratio(case, target.rival, target.system) for case in cases]
    have = [value for value in found if value is not None]
    if len(have) < len(found):
        some = f" ({len(have)} of {len(found)} shapes)" if have else ""
        return [target.text, NOT_RUN + some, NOT_RUN, _MEASURE]
    mean = geomean(have)
    measured = f"{mean:.3f}x (lowest {min(have):.3f}x)"
    if mean >= target.at_least and (target.each is None or min(have) >= target.each):
        return [target.text, measured, "held", "none"]
    return [target.text, measured, "missed", _after_a_miss(bench, target)]


def _after_a_miss(bench: Bench, target: Target) -> str:
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


def _host_costs(bench: Bench, system: str, mode: str) -> list[float]:
    costs = [r.get("host_us", {}) for key, r in bench.records.items() if key[0] == system]
    return [cost[mode] for cost in costs if mode in cost]


def _host_rows(bench: Bench) -> list[list[str]]:
    rows = []
    for mode, limit in targets.HOST_TARGETS.items():
        text = f"host time of one forward call, {mode}: <= {limit:g} us"
        values, rival = (_host_costs(bench, system, mode) for system in ("ours", "cublas"))
        if not values:
            rows.append([text, NOT_RUN, NOT_RUN, _MEASURE])
            continue
        beside = f" (`torch.mm`: {max(rival):.1f} us)" if rival else ""
        held = max(values) <= limit
        step = "none" if held else targets.HOST_NEXT
        rows.append([text, f"{max(values):.1f} us{beside}", "held" if held else "missed", step])
    return rows


def _question_rows(records: list[dict]) -> list[list[str]]:
    rows = []
    for question in targets.QUESTIONS:
        answers = [
            r
            for r in records
            if r["kind"] == "probe" and r["probe"] == question.probe and r["case"] == "answer"
        ]
        text = f"{question.number}. {question.text}"
        again = f"`python -m perf probe {question.probe}`"
        if not answers:
            rows.append([text, NOT_RUN, NOT_RUN, question.decides, again])
            continue
        last = max(enumerate(answers), key=lambda pair: (pair[1]["date"], pair[0]))[1]
        unknown = last.get("extreme", {}).get("verdict") == "no"
        step = f"the rule for those operands, then {again}" if unknown else "none"
        rows.append([text, _answer(last), where(last | {"status": "ok"}), question.decides, step])
    return rows


def _answer(last: dict) -> str:
    if last["verdict"] == "failed":
        return "failed: " + last["why"].splitlines()[0][:80]
    parts = [last["verdict"]]
    if "outputs" in last:
        parts[0] += f" ({last['differ']} of {last['outputs']:,} outputs differ)"
        if last["outputs"] < targets.MIN_OUTPUTS:
            parts.append(f"too few outputs, {targets.MIN_OUTPUTS:,} count")
    if "extreme" in last:
        parts.append(f"subnormal and overflowing operands: {last['extreme']['verdict']}")
    if "costs" in last:
        costs = sorted(last["costs"].items(), key=lambda pair: int(pair[0]))
        parts.append(", ".join(f"leaf of {p} groups {cost:+.1%}" for p, cost in costs))
    return "; ".join(parts)


def _profile_rows(records: list[dict]) -> list[list[str]]:
    kept = {}
    for item in sorted((r for r in records if r["kind"] == "profile"), key=lambda r: r["date"]):
        kept[(item["system"], item["product"], item["shape"])] = item
    rows = []
    for key, item in sorted(kept.items()):
        stalls = ", ".join(f"{s['reason']} {s['warps']:.2f}" for s in item["stalls"])
        share = f"{item['floor_fraction']:.0%}"
        traffic = f"{item['bytes_over_least']:.2f}x"
        rows.append([*key, share, traffic, stalls, where(item | {"status": "ok"})])
    return rows


def ratio_points(bench: Bench) -> dict[str, dict[str, float]]:
    """product -> shape -> throughput over cuBLAS's, of what was timed."""
    found = {
        product: {
            shape: ratio
            for shape in targets.SHAPES
            if (ratio := bench.ratio((product, shape), "cublas")) is not None
        }
        for product in targets.PRODUCTS
    }
    return {product: ratios for product, ratios in found.items() if ratios}


def sweep_points(bench: Bench) -> dict[str, list[tuple[int, float]]]:
    """system -> (M, forward TFLOP/s) at the sweep's K and N, of what was timed."""
    points: dict[str, list[tuple[int, float]]] = {}
    for system in sorted({key[0] for key in bench.records}):
        for m in targets.sweep_sizes():
            item = bench.get(("fwd", targets.label(targets.SWEEP_SHAPE, m)), system)
            if item is not None and "tflops" in item:
                points.setdefault(system, []).append((m, item["tflops"]))
    return points


def _first_images(bench: Bench, attention: Bench) -> list[str]:
    lines = []
    if ratio_points(bench):
        lines += ["", "![Throughput over cuBLAS](plots/gemm_ratio.svg)"]
    if page.order_points(attention):
        lines += ["", "![What the order costs](plots/attention_order.svg)"]
    return lines


def _products(records: list[dict], bench: Bench, checks: list[list[str]]) -> list[str]:
    """The lines of `linear` and `matmul`."""
    rivals = tuple(targets.RIVAL_TEXT.values())
    rates = ["product", "shape", "TFLOP/s", "of floor", "bits", "ran on", "next step"]
    sweep = ["", "![TFLOP/s over M](plots/gemm_sweep.svg)"] if sweep_points(bench) else []
    return [
        "## linear and matmul",
        "",
        "bf16.  The floor is the time of the card's best product or copy.  Bits are those of 20",
        "repeats, of rows alone and in the batch (fwd, dx), and of splits of the tokens (dw).",
        "",
        *folded(rates, _rate_rows(bench), ("bits", "ran on", "next step")),
        *sweep,
        "",
        "### Rivals",
        "",
        *folded(["product", "shape", *rivals], _ratio_rows(bench), rivals),
        "",
        "### Targets",
        "",
        "Geometric mean over the five shapes at their own M.",
        "",
        *table(["target", "measured", "verdict", "next step"], checks),
    ]


def _profiles(records: list[dict]) -> list[str]:
    head = ["system", "product", "shape", "of floor", "traffic", "top stalls", "ran on"]
    rows = _profile_rows(records)
    return ["", "## Profiles", "", *folded(head, rows, ("system", "ran on"))] if rows else []


def render(records: list[dict], certificates: list[dict]) -> str:
    """The status page."""
    bench, attention = latest(records), latest(records, "attention")
    checks = [_target_row(bench, target) for target in targets.TARGETS] + _host_rows(bench)
    words = [[row[2] for row in rows] for rows in (checks, page.target_rows(attention))]
    questions = ["question", "answer", "ran on", "decides", "next step"]
    out = [
        "# Status",
        "",
        *verdict.render(records, certificates, *words),
        *_first_images(bench, attention),
        "",
        "Written by `python -m perf report` from `perf/results/`; do not edit.  A ratio is the",
        "rival's time over ours, so above 1 ours is faster.  What no record supports says",
        '"not run".  A `+` after a commit: the tree had changes.',
        "",
        "## What ran where",
        "",
        *cards.render(records),
        "",
        *digests.render(records),
        "",
        "## Kernels",
        "",
        *table(["kernel", "compiled", "certified"], _kernel_rows(certificates)),
        "",
        *_products(records, bench, checks),
        "",
        *page.render(records),
        "",
        "## Questions for the hardware",
        "",
        *folded(questions, _question_rows(records), ("ran on",)),
        *_profiles(records),
    ]
    rivals = bench.records.values()
    absent = sorted({(r["system"], r["why"]) for r in rivals if r["status"] == "absent"})
    if absent:
        out += ["", "## Rivals not measured", ""] + [f"- {name}: {why}" for name, why in absent]
    return "\n".join(out) + "\n"
