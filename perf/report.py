"""`python -m perf report`: docs/status.md and the plots, from the records and nothing else.

`render` is a pure function of the records and the certificates, both of which are in the repository
(perf/results/), so a test can tell whether the page is up to date.  What no record supports says
"not run".
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from . import record, targets
from .targets import Target

STATUS = record.ROOT / "docs" / "status.md"
CERTIFICATES = record.RESULTS / "certificates.json"
#: What `python -m cute_kernels certify` writes; either name.
BUILT = tuple(record.ROOT / "certify" / name for name in ("certificates.json", "report.json"))
NOT_RUN = "not run"
_FIELDS = ("name", "constexpr", "ok", "registers", "sass_sha256", "toolchain")

Case = tuple[str, str]  # product, shape label


@dataclass(frozen=True)
class Bench:
    """The latest record of each (system, product, shape label)."""

    records: dict[tuple[str, str, str], dict]

    def get(self, case: Case, system: str = "ours") -> dict | None:
        return self.records.get((system, *case))

    def ratio(self, case: Case, rival: str, system: str = "ours") -> float | None:
        """The rival's time over the system's, of one call's record."""
        own = self.get(case, system)
        return None if own is None else own.get("ratio", {}).get(rival)


def latest(records: list[dict]) -> Bench:
    """Of several records of a case the one with the latest date counts, then the last line.

    One that took no time replaces a timed one only if it failed.
    """
    kept: dict[tuple[str, str, str], dict] = {}
    for item in sorted((r for r in records if r["kind"] == "bench"), key=lambda r: r["date"]):
        key = (item["system"], item["product"], item["shape"])
        if (
            "median_us" in item
            or item["status"] == "failed"
            or "median_us" not in kept.get(key, {})
        ):
            kept[key] = item
    return Bench(kept)


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


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _commit(item: dict) -> str:
    mark = "+" if item.get("dirty") else ""
    return item["commit"][:10] + mark


def _where(item: dict | None) -> str:
    """GPU, commit and date of a record that holds."""
    if item is None or item["status"] == "absent":
        return NOT_RUN
    verdict = "" if item["status"] == "ok" else f"{item['status']} "
    return f"{verdict}{item['gpu']}, {_commit(item)}, {item['date'][:10]}"


def _times(value: float | None) -> str:
    return NOT_RUN if value is None else f"{value:.2f}x"


def _bits(item: dict | None) -> str:
    if item is None or "bitwise" not in item:
        return NOT_RUN
    held = item["bitwise"]
    return "; ".join(f"{name} {'same' if held[name] else 'differs'}" for name in sorted(held))


def _certified(certificates: list[dict], kernel: str) -> tuple[str, str]:
    """("compiled", "certified") cells of a kernel: as the catalogue names it."""
    own = [c for c in certificates if c["name"] == kernel]
    if not own:
        return NOT_RUN, NOT_RUN
    good = [c for c in own if c["ok"]]
    registers = [c["registers"] for c in own if "registers" in c]
    limit = f", <= {max(registers)} registers" if registers else ""
    return f"{len(own)} configurations", f"{len(good)} of {len(own)}{limit}"


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


def _kernel_rows(bench: Bench, certificates: list[dict]) -> list[list[str]]:
    compiled, certified = _certified(certificates, "gemm_sm90")
    rows = []
    for product, name, m in targets.gemm_cases():
        case = (product, targets.label(name, m))
        own = bench.get(case)
        rate = NOT_RUN
        if own is not None and "tflops" in own:
            rate = f"{own['tflops']:.0f} TFLOP/s, {own['floor_fraction']:.0%} of floor"
        ratios = [_times(bench.ratio(case, rival)) for rival in targets.RIVAL_TEXT]
        rows.append(
            ["gemm", product, case[1], compiled, certified, _where(own), rate, *ratios]
            + [_bits(own), _next(bench, product, name, m)]
        )
    return rows


def geomean(values: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(math.log(v) for v in values) / len(values))


def _target_row(bench: Bench, target: Target) -> list[str]:
    cases = [(target.product, name) for name in targets.SHAPES]
    found = [bench.ratio(case, target.rival, target.system) for case in cases]
    have = [value for value in found if value is not None]
    if len(have) < len(found):
        some = f" ({len(have)} of {len(found)} shapes)" if have else ""
        return [target.text, NOT_RUN + some, NOT_RUN]
    mean = geomean(have)
    held = mean >= target.at_least and (target.each is None or min(have) >= target.each)
    return [target.text, f"{mean:.3f}x (lowest {min(have):.3f}x)", "held" if held else "missed"]


def _host_rows(bench: Bench) -> list[list[str]]:
    costs = [
        r["host_us"] for key, r in bench.records.items() if key[0] == "ours" and "host_us" in r
    ]
    rows = []
    for mode, limit in targets.HOST_TARGETS.items():
        text = f"host time of one forward call, {mode}: <= {limit:g} us"
        values = [cost[mode] for cost in costs if mode in cost]
        if values:
            held = "held" if max(values) <= limit else "missed"
            rows.append([text, f"{max(values):.1f} us", held])
        else:
            rows.append([text, NOT_RUN, NOT_RUN])
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
        if not answers:
            step = f"`python -m perf probe {question.probe}`"
            rows.append([text, NOT_RUN, NOT_RUN, question.decides, step])
            continue
        last = max(enumerate(answers), key=lambda pair: (pair[1]["date"], pair[0]))[1]
        rows.append(
            [text, _answer(last), _where(last | {"status": "ok"}), question.decides, "none"]
        )
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
        rows.append([*key, share, traffic, stalls, _where(item | {"status": "ok"})])
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


def _images(bench: Bench) -> list[str]:
    lines = []
    if ratio_points(bench):
        lines += ["", "![Throughput over cuBLAS](plots/gemm_ratio.svg)"]
    if sweep_points(bench):
        lines += ["", "![TFLOP/s over M](plots/gemm_sweep.svg)"]
    return lines


def render(records: list[dict], certificates: list[dict]) -> str:
    """The status page."""
    bench = latest(records)
    rivals = [f"vs {text}" for text in targets.RIVAL_TEXT.values()]
    head = ["kernel", "product", "shape", "compiled", "certified", "ran on", "rate", *rivals]
    out = [
        "# Status",
        "",
        "Written by `python -m perf report` from `perf/results/`; do not edit.  A ratio is the",
        "rival's time over ours, so above 1 ours is faster.  What no record supports says",
        '"not run".  A `+` after a commit: the tree had changes.',
        "",
        "## Kernels",
        "",
        *_table([*head, "bits", "next step"], _kernel_rows(bench, certificates)),
        *_images(bench),
        "",
        "## Targets",
        "",
        "Geometric mean over the five shapes at their own M.",
        "",
        *_table(
            ["target", "measured", "verdict"],
            [_target_row(bench, target) for target in targets.TARGETS] + _host_rows(bench),
        ),
        "",
        "## Questions for the hardware",
        "",
        *_table(["question", "answer", "ran on", "decides", "next step"], _question_rows(records)),
    ]
    if profiles := _profile_rows(records):
        head = ["system", "product", "shape", "of floor", "traffic", "top stalls", "ran on"]
        out += ["", "## Profiles", "", *_table(head, profiles)]
    rivals = bench.records.values()
    absent = sorted({(r["system"], r["why"]) for r in rivals if r["status"] == "absent"})
    if absent:
        out += ["", "## Rivals not measured", ""] + [f"- {name}: {why}" for name, why in absent]
    return "\n".join(out) + "\n"
