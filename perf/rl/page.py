"""The status page of an RL step: a pure function of the records."""

from __future__ import annotations

from pathlib import Path

from ..core import section
from ..core.counts import timed
from ..core.section import Section, benched
from ..core.speed import Speed
from ..core.tables import MET, MISSED, NOT_RUN, Bench, folded, latest, times, where
from .bench import PARTS, SYSTEMS
from .size import CARD

TITLE = "An RL step with vLLM"
KERNELS = ()
STEPS = {name: ("step", size.label) for name, size in CARD.items()}
SPEED = (Speed("a GRPO step, 3 B parameters", "rl", ("step",), "native", "vLLM and torch"),)
COUNTS = (timed("RL steps with vLLM timed", "rl", set(STEPS.values())),)
#: Time of our step over that of stock vLLM and a torch trainer.
AT_MOST = 1.05
RIVAL = "native"


def _steps_of(bench: Bench) -> dict[str, dict]:
    """Size -> our step, of those that have a time."""
    items = {name: bench.get(case) for name, case in STEPS.items()}
    return {name: item for name, item in items.items() if "median_us" in (item or {})}


def _counted(bench: Bench) -> tuple[int, int] | None:
    """Log-probs that differ, and all, of our steps; None: no step has a time."""
    items = _steps_of(bench).values()
    return (sum(i["differ"] for i in items), sum(i["tokens"] for i in items)) if items else None


def bits_kept(records: list[dict]) -> list[list[str]]:
    """Whether the engine's log-probs are the trainer's."""
    counted = _counted(latest(records, "rl"))
    return [["bits", NOT_RUN if counted is None else "{} of {} log-probs differ".format(*counted)]]


def target_rows(records: list[dict]) -> list[list[str]]:
    """(target, measured, verdict, next step) of every target."""
    bench, rows = latest(records, "rl"), []
    for name, case in STEPS.items():
        measure = f"`python -m perf bench rl --size {name}`"
        text = f"step, {name}: at most {AT_MOST:.2f}x the time of stock vLLM and a torch trainer"
        ratio = bench.ratio(case, RIVAL) if name in _steps_of(bench) else None
        if ratio is None:
            rows.append([text, NOT_RUN, NOT_RUN, measure])
            continue
        verdict = (MET, "none") if 1 / ratio <= AT_MOST else (MISSED, "shorten its longest part")
        rows.append([text, f"{1 / ratio:.2f}x", *verdict])
    text, counted = "log-probs of the rollout that are not the trainer's: 0", _counted(bench)
    if counted is None:
        return [*rows, [text, NOT_RUN, NOT_RUN, "`python -m perf bench rl`"]]
    verdict = (MISSED, "compare the contracts") if counted[0] else (MET, "none")
    return [*rows, [text, "{} of {}".format(*counted), *verdict]]


def _rows(bench: Bench) -> list[list[str]]:
    """A row for each shape and system whose step was timed."""
    shapes = sorted({shape for _, product, shape in bench.records if product == "step"})
    rows = []
    for shape in shapes:
        for system in SYSTEMS:
            item = bench.get(("step", shape), system)
            if item is None or "median_us" not in item:
                continue
            parts = [bench.get((part, shape), system) for part in PARTS]
            cells = [f"{part['median_us'] / 1e3:.0f}" for part in (*parts, item)]
            ratio = bench.ratio(("step", shape), RIVAL, system)
            against = times(None if ratio is None else 1 / ratio, "-")
            counted = f"{item['differ']} of {item['tokens']}"
            rows.append([shape.replace("/", " "), system, *cells, against, counted, where(item)])
    return rows


def _lines(records: list[dict]) -> list[str]:
    rows = _rows(latest(records, "rl"))
    names = [f"{part}, ms" for part in (*PARTS, "step")]
    head = ["shape", "system", *names, f"over {RIVAL}", "log-probs that differ"]
    return folded([*head, "ran on"], rows, ("ran on",)) if rows else [f"Steps: {NOT_RUN}."]


_SIZES = ", ".join(f"{name} is {size.label.replace('/', ' ')}" for name, size in CARD.items())


SECTIONS = (
    Section(
        "Steps",
        f"""
        A Llama of random bf16 weights; shape: hidden size x layers, prompts x completions of each,
        tokens of a prompt + of a completion; {_SIZES}.
        Generate: vLLM draws all completions, with the log-prob of each token. Log-probs: the
        trainer scores them. Update: forward, backward, clipping, AdamW. native: stock vLLM, and
        transformers on torch. native_invariant: the same, vLLM with `VLLM_BATCH_INVARIANT=1`. ours:
        the plug-in and a patched model. Engines and trainers run one after the other, each in its
        own process. Differing: in a byte, of all log-probs that were drawn in the timed steps.
        """,
        _lines,
        lambda item: benched("rl")(item) and item["product"] == "step",
    ),
    section.targets(target_rows, benched("rl")),
)


def plots(records: list[dict], folder: Path) -> list[Path]:
    """None so far."""
    return []
