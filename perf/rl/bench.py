"""`python -m perf bench rl`: engines and trainers one after the other, each in its own process."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ..core import record, timing
from ..core.stage import Outcome, Stage, run_stage
from ..core.work import ratios
from . import engine
from .size import Size, results

SYSTEMS = tuple(engine.SYSTEMS)
#: What makes up a step, in its order; "load" is timed beside it.
PARTS = ("generate", "log-probs", "update")
PRODUCTS = (*PARTS, "step", "load")
LOG = "rl.log"


def environment(system: str, work: Path, device: str) -> dict[str, str]:
    """Variables of an engine and of its trainer."""
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    known = "cute_kernels" in {plugin.name for plugin in plugins}
    folders = [record.ROOT, *(() if known else (engine.plugin_folder(work / "site"),))]
    path = os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))
    of_device = engine.CPU_ENVIRONMENT if device == "cpu" else {}
    variables = engine.ENVIRONMENT | of_device | engine.SYSTEMS.get(system, {})
    return variables | {"PYTHONPATH": path}


def stages(systems: list[str], work: Path, limit_s: float, device: str) -> list[Stage]:
    """The model, then engine and trainer of each system."""
    order = [("llama", ""), *((part, s) for s in systems for part in ("engine", "trainer"))]
    return [
        Stage(
            f"{part} {system}".strip(),
            ("-m", f"perf.rl.{part}", str(work), *filter(None, [system])),
            limit_s,
            environment=environment(system, work, device),
        )
        for part, system in order
    ]


def measured(
    size: Size, systems: list[str], work: Path, *, limit_s: float, budget_s: float, device: str
) -> Iterator[dict | str]:
    """Records' own fields of each system, and a line of text for each stage."""
    work.mkdir(parents=True, exist_ok=True)
    size.save(work)
    end, failures = time.monotonic() + budget_s, {}
    for stage in stages(systems, work, limit_s, device):
        part, _, system = stage.name.partition(" ")
        failure = failures.get("") or (part == "trainer" and _not_drawn(size, system, work))
        if failure:
            outcome = Outcome(stage.name, "not run", 0.0, failures.get(system, failure))
        else:
            outcome = _run(stage, end, work)
        yield f"{outcome.stage:<24} {outcome.status:<18} {outcome.seconds:6.1f} s"
        if outcome.status != "ok":
            failures.setdefault(system, f"{outcome.stage}: {outcome.status}: {outcome.last}")
        if part == "trainer":
            yield from bodies(size, system, work, failures.get(system))


def _not_drawn(size: Size, system: str, work: Path) -> str | None:
    """Why a trainer has nothing to score; None: its engine drew all steps."""
    count = len(results(work, system).get("generate", {}).get("seconds", ()))
    return None if count == size.steps else f"{count} of {size.steps} steps were drawn"


def _run(stage: Stage, end: float, work: Path) -> Outcome:
    left = end - time.monotonic()
    if left < 1:
        return Outcome(stage.name, "not run", 0.0, "the time is spent")
    return run_stage(stage, min(stage.limit_s, left), work / LOG)


# ---- records -------------------------------------------------------------------------------------


def bodies(size: Size, system: str, work: Path, failure: str | None) -> Iterator[dict]:
    """A record's own fields for each thing that a system timed, or why it did not."""
    by_product = results(work, system)
    seconds = {
        p: by_product[p]["seconds"][: size.steps] for p in (*PARTS, "load") if p in by_product
    }
    if all(part in seconds for part in PARTS):
        columns = zip(*(seconds[part] for part in PARTS), strict=True)
        seconds["step"] = [sum(column) for column in columns]
    facts = {
        k: v for k, v in by_product.get("engine", {}).items() if k not in ("system", "product")
    }
    for product in PRODUCTS:
        common = {"product": product, "shape": size.label, "system": system, "dtype": "bf16"}
        if product in seconds:
            yield common | _timed(size, product, seconds[product], by_product) | {"engine": facts}
        else:
            yield common | {"status": "failed", "why": failure or "no result"}


def _timed(size: Size, product: str, seconds: list[float], by_product: dict[str, dict]) -> dict:
    median, p10, p90 = (1e6 * timing.quantile(seconds, q) for q in (0.5, 0.1, 0.9))
    body = {"status": "ok", "median_us": median, "p10_us": p10, "p90_us": p90}
    body |= {"samples": len(seconds), "backlog": False}
    if product != "load":
        body["tokens_s"] = size.tokens / (median / 1e6)
    counted = by_product.get("update" if product == "update" else "log-probs", {})
    if product in ("log-probs", "update", "step") and "differ" in counted:
        names = ("tokens", "differ", "mean_away", "most_away", "distinct")
        body |= {name: counted[name] for name in names}
        body["bitwise"] = {"engine and trainer": counted["differ"] == 0}
    if product == "step":
        error = by_product["log-probs"]["contract_error"]
        body["contract"] = "equal" if error is None else error
        body["peak_gib"] = by_product["update"]["peak_gib"]
    return body


def rl(
    size: Size,
    systems: list[str],
    *,
    output: Path,
    work: Path,
    limit_s: float,
    budget_s: float,
    device: str,
    commit: str | None = None,
) -> Iterator[dict | str]:
    """Yields each record as it is written, and lines of text."""
    common = record.environment(commit) | {"kind": "bench", "kernel": "rl"}
    medians: dict[str, dict[str, float]] = {product: {} for product in PRODUCTS}
    limits = {"limit_s": limit_s, "budget_s": budget_s, "device": device}
    for body in measured(size, systems, work, **limits):
        if isinstance(body, dict):
            if "median_us" in body:
                of_product = medians[body["product"]]
                of_product[body["system"]] = body["median_us"]
                body["ratio"] = ratios(of_product, body["system"])
            body |= common | {"clocks": record.clocks()}
            record.append(output, body)
        yield body


def line(body: dict) -> str:
    """One record for the terminal."""
    head = f"{body['product']:<9} {body['system']:<16}"
    if body["status"] != "ok":
        return f"{head} {body['status']}: {body['why'][:160]}"
    parts = [f"{head} {body['median_us'] / 1e3:9.1f} ms"]
    if "tokens_s" in body:
        parts.append(f"{body['tokens_s']:.0f} tokens/s")
    parts += [f"{1 / ratio:.2f}x {other}" for other, ratio in body["ratio"].items()]
    if "differ" in body:
        parts.append(f"differ {body['differ']}/{body['tokens']}")
    if body.get("contract", "equal") != "equal":
        parts.append(f"contract: {len(body['contract'].splitlines()) - 1} lines differ")
    return ", ".join(parts)


def tail(work: Path, lines: int = 15) -> str:
    """The end of the log of the last stage, for who has only the output."""
    path = work / LOG
    text = path.read_text().rsplit("==== ", 1)[-1] if path.is_file() else ""
    return "\n".join(text.splitlines()[-lines:])


def interrupted(*_: object) -> None:
    """Handler of SIGTERM: end as an exception does, so that the stage ends too."""
    sys.exit(143)
