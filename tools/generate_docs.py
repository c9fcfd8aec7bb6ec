"""Write the generated parts of the documentation: tables of pages, and pictures of schedules.

    python tools/generate_docs.py [--check] [--pictures]

A page has a generated part between ``<!-- generated: NAME -->`` and ``<!-- end -->``.  ``--check``
writes nothing and exits with 1 if a part is not what the sources and records say.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT))

from cute_kernels import arch, contracts, settings, systems  # noqa: E402
from cute_kernels.gemm import config  # noqa: E402
from cute_kernels.integrations import grouped_tensor_parallel, tensor_parallel  # noqa: E402
from cute_kernels.logp.policy_losses import LOSSES  # noqa: E402
from cute_kernels.model import aten  # noqa: E402
from cute_kernels.schedulers.__main__ import parse_mask  # noqa: E402
from cute_kernels.schedulers.model import machines as machine_table  # noqa: E402
from cute_kernels.schedulers.model.selection import select  # noqa: E402
from cute_kernels.schedulers.order.kinds import left_to_right, spt  # noqa: E402
from cute_kernels.schedulers.report import picture  # noqa: E402
from cute_kernels.schedulers.report import rows as report  # noqa: E402
from perf import headline  # noqa: E402
from perf import report as perf_report  # noqa: E402
from perf.core import tables  # noqa: E402

#: A generated part of a page: its name, and its text.
PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.S)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table as text."""
    return "\n".join(tables.table(header, rows))


def code(value: object) -> str:
    return f"`{value}`" if str(value) else "empty"


def settings_table() -> str:
    """Every environment variable, from settings.TABLE."""
    rows = []
    for setting in settings.TABLE:
        values = ", ".join(map(code, setting.choices)) or setting.kind
        rows.append([code(settings.PREFIX + setting.name), code(setting.default), values])
        rows[-1].append(setting.help)
    return table(["variable", "default", "values", "meaning"], rows)


def guarantees() -> str:
    """Guarantees of every op, system by system: a row for ops and backends that keep the same."""
    systems.load()
    assert (
        tensor_parallel and grouped_tensor_parallel
    )  # importing them registered the contracts of its ops
    kept = {op: contract.kept for op, contract in contracts._CONTRACTS.items()}
    folders = [list(system.ops) for system in systems.SYSTEMS]
    folders.append([op for op in kept if not any(op in ops for ops in folders)])
    rows = []
    for folder in folders:
        while folder:
            first = kept[folder[0]]
            alike = [op for op in folder if kept[op] == first]
            folder = [op for op in folder if op not in alike]
            for names in dict.fromkeys(first[b] for b in arch.BACKENDS if b in first):
                backends = [b for b in arch.BACKENDS if first.get(b) == names]
                others = [name for name in contracts.MEANING if name not in names]
                keeps = [name for name in contracts.MEANING if name in names]
                rows.append([_codes(cell) for cell in (alike, backends, keeps, others)])
    return table(["op", "backend", "keeps", "does not keep"], rows)


def policy_losses() -> str:
    """The losses of `linear_policy_loss`, from its table."""
    rows, first = [], {}
    for row in LOSSES.values():
        takes = ["advantages"] * row.advantages + ["old_logp"] * row.old_logp
        options = [f"{name}={value}" for name, value in row.options.items()]
        name = first.setdefault(row.formula, row.name)
        formula = code(row.formula.replace("|", "\\|"))
        cells = [code(row.name), formula if name == row.name else f"as {code(name)}"]
        rows.append([*cells, _codes(takes), _codes(options), code(row.reduction), row.source])
    return table(["loss", "of a token", "takes", "options", "reduction", "source"], rows)


def _codes(names: list[str]) -> str:
    return ", ".join(map(code, names)) or "–"


def gemm_plans() -> str:
    """Every constant that a contract id of gemm covers, backend by backend."""
    devices = {
        arch.CUTE_SM90: arch.Device("cuda:0", "cuda", "sm_90a", 132),
        arch.TRITON: arch.Device("cuda:0", "hip", "gfx942", 304),
        arch.CPU: arch.describe("cpu"),
    }
    backends: dict[tuple[str, str], list[str]] = {}
    for backend, device in devices.items():
        for name, value in config.contract_facts(backend, device).items():
            value = "torch's thread count" if name == "threads" else value
            for cells in _cells(name, value):
                backends.setdefault(tuple(cells), []).append(backend)
    rows = [[_codes(names), *cells] for cells, names in backends.items()]
    return table(["backend", "of", "constants"], rows)


def _cells(name: str, value: object) -> Iterator[list[str]]:
    """(name, value) of a constant; of a group of constants one pair, of groups one for each."""
    if not isinstance(value, dict):
        yield [name, code(value)]
    elif all(isinstance(inner, dict) for inner in value.values()):
        for key, inner in value.items():
            yield from _cells(f"{name}, {key}", inner)
    else:
        yield [name, ", ".join(code(f"{key}={inner}") for key, inner in value.items())]


def covered_ops() -> str:
    """The ops of aten that batch_invariant covers: a row for each op of ours."""
    rows = ((row.by, row.op) for row in aten.COVERED)
    return table(["op", "made of"], [[_codes(ops), by] for by, ops in _grouped(rows).items()])


def refused_ops() -> str:
    """The ops of aten that batch_invariant refuses in strict; their sources are in aten.REFUSED."""
    rows = (((row.devices, row.why, row.instead), op) for row in aten.REFUSED for op in row.ops)
    grouped = _grouped(rows).items()
    cells = [[_codes(ops), ", ".join(on), why, instead] for (on, why, instead), ops in grouped]
    return table(["op", "on", "why", "instead"], cells)


def _grouped(pairs: Iterable[tuple[Hashable, str]]) -> dict:
    """Key -> the values that came with it, in their order."""
    out: dict = {}
    for key, value in pairs:
        out.setdefault(key, []).append(value)
    return out


def trials() -> str:
    """What ``select`` tried for one mask, as it prints it."""
    return f"```text\n{select(parse_mask('causal', 2048, (64, 128)), heads=32)}\n```"


def speed() -> str:
    """The README's tables of speed."""
    return "\n".join(perf_report.speed_tables(headline.runs()))


def _signature(name: str, value: Callable) -> str:
    """A call as a reader writes it: parameters and defaults without their types."""
    found = inspect.signature(value)
    shown = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    shown = [p for p in shown if p.kind is not p.VAR_KEYWORD]  # refused by name
    bare = found.replace(parameters=shown, return_annotation=found.empty)
    return re.sub(r"=Options\([^)]*\)", "=Options()", f"{name}{bare}")


def _signatures(section: str) -> str:
    """Signatures of what a section of the reference has, in its order."""
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    text = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)[1]
    lines = []
    for kind, path in re.findall(r"auto(function|class|module):: (\S+)\n", text):
        if kind == "module":
            module = importlib.import_module(path)
            names = (
                getattr(module, "__all__", ())
                if f"automodule:: {path}\n   :members" in text
                else ()
            )
            found = [(f"{path}.{name}", getattr(module, name)) for name in names]
        else:
            module, _, name = path.rpartition(".")
            found = [(path, getattr(importlib.import_module(module), name))]
        for name, value in found:
            if inspect.isclass(value) and issubclass(value, Exception):
                lines.append(f"{_short(name)}({value.__base__.__name__})")
            elif callable(value):
                lines.append(_signature(_short(name), value))
    return "\n".join(["```text", *dict.fromkeys(lines), "```"])


def _short(path: str) -> str:
    """A name as code has it after ``import cute_kernels as ck``."""
    return re.sub(r"^cute_kernels\.", "ck." if path.count(".") < 3 else "cute_kernels.", path)


#: Section of the reference -> the part of the API page with its signatures.
SECTIONS = {
    "Operators": "operators",
    "Modules": "modules",
    "Whole models": "models",
    "Torch's own ops": "torch",
    "Hyper-connections": "mhc",
    "Mixtures of experts": "moe",
    "Tensor parallel": "parallel",
    "What is promised where": "contracts",
    "Schedulers": "schedulers",
    "Errors": "errors",
}

#: Name of a part -> its text.
GENERATED: dict[str, Callable[[], str]] = {
    "settings-table": settings_table,
    "gemm-plans": gemm_plans,
    "schedule-trials": trials,
    "speed": speed,
    "aten-covered": covered_ops,
    "aten-refused": refused_ops,
    "guarantees": guarantees,
    "policy-losses": policy_losses,
    **{f"api-{part}": functools.partial(_signatures, name) for name, part in SECTIONS.items()},
}

#: Picture -> mask of 8192 tokens and 16 heads, and its panels (kind, heads in flight, walk).
PICTURES = {
    "causal": (
        "causal",
        ("left_to_right", 1, "ascending"),
        ("left_to_right", 16, "ascending"),
        ("spt", 16, "ascending"),
        ("select", 16, "ascending"),
    ),
    "window": (
        "sliding_window:1024",
        ("spt", 16, "partial_then_full"),
        ("spt", 16, "ascending"),
    ),
    "random": (
        "random:0.25",
        ("left_to_right", 1, "ascending"),
        ("select", 16, "ascending"),
    ),
}


def draw_pictures(folder: Path = DOCS / "plots") -> None:
    """Draw the pictures of schedulers.md."""
    _draw_steps(folder / "schedule_steps.png")
    for name, panels in PICTURES.items():
        _draw_launches(folder / f"schedule_{name}.png", *panels)


def _draw_steps(path: Path) -> None:
    mask = parse_mask("causal", 384, (64, 64))
    tile = machine_table.Machine("six slots", 6, 2200, 2200, 1200, 2000, tile=(64, 64))
    panels = {"left_to_right": left_to_right(mask), "spt (right to left)": spt(mask)}
    picture.steps(path, panels, machine=tile)


def _draw_launches(path: Path, text: str, *panels: tuple[str, int, str]) -> None:
    mask = parse_mask(text, 8192, (64, 128))
    rows = [
        report.evaluate(mask, kind, heads=16, heads_in_flight=flight, walk=walk)
        for kind, flight, walk in panels
    ]
    drawn = {row.title: row.simulation for row in rows}
    picture.gantt(path, drawn, bound_ns=rows[0].bound.lower_ns, columns=2)


def fill_in(text: str, only: set[str] | None = None) -> str:
    """The page with its generated parts made anew; ``only``: the names of those."""

    def part(match: re.Match) -> str:
        start, name, _, end = match.groups()
        if only is not None and name not in only:
            return match[0]
        return f"{start}{GENERATED[name]()}\n{end}"

    return PART.sub(part, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--pictures", action="store_true")
    options = parser.parse_args()
    stale = False
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        made = fill_in(text)
        stale |= made != text
        if made != text and not options.check:
            path.write_text(made, encoding="utf-8")
    if options.pictures:
        draw_pictures()
    return int(stale and options.check)


if __name__ == "__main__":
    sys.exit(main())
