import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path

import cute_kernels
from cute_kernels import arch, settings
from cute_kernels.cli.schedule import parse_mask
from cute_kernels.gemm import config, tiles
from cute_kernels.model.batch_invariant import covered, refused
from cute_kernels.schedulers.model import machines as machine_table
from cute_kernels.schedulers.model.selection import select
from cute_kernels.schedulers.order.kinds import left_to_right, spt
from cute_kernels.schedulers.report import picture, quality
from cute_kernels.schedulers.report import rows as report
from perf import cards
from perf.core import record
from perf.core.tables import latest
from perf.digest import page as digests
from perf.gemm import decode_page

project = "cute_kernels"
author = "The cute_kernels authors"
copyright = f"2026, {author}"
release = version = cute_kernels.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"cute_kernels {release}"
html_static_path = ["static"]
html_css_files = ["tables.css"]

myst_heading_anchors = 3

# Docstrings mark code with single backticks and have a section of their own.
default_role = "literal"
napoleon_custom_sections = ["Guarantees"]
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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


def gemm_plans() -> str:
    """Every constant that a contract id of gemm covers, backend by backend."""
    devices = {
        arch.CUTE_SM90: arch.Device("cuda:0", "cuda", "sm_90a", 132),
        arch.TRITON: arch.Device("cuda:0", "hip", "gfx942", 304),
        arch.CPU: arch.describe("cpu"),
    }
    rows = []
    for backend, device in devices.items():
        for name, value in config.plan(backend, device).items():
            value = "torch's thread count" if name == "threads" else value
            rows += [[code(backend), *cells] for cells in _cells(name, value)]
    return table(["backend", "of", "constants"], rows)


def tile_costs() -> str:
    """What the launcher takes an SM to need for each tile of gemm, in ns per element of K."""
    rows = [
        [f"`kernel_sm90`, {config.Config.tile_m} rows by {width} columns", "–", f"{cost:.1f}"]
        for width, cost in tiles.DENSE_COST.items()
    ]
    rows += [
        [
            f"`kernel_skinny_sm90`, {n} rows of W by {m} tokens{', pairs' * (pair > 1)}",
            f"{half:.2f}",
            f"{full:.2f}",
        ]
        for (n, m, pair), (half, full) in tiles.SKINNY_COST.items()
    ]
    return table(["tile", "half", "all"], rows)


def few_rows() -> str:
    """The times of few rows, from the records."""
    bench = latest(record.read_all(), "decode")
    return "\n".join([*decode_page.both_orders(bench), "", *decode_page.both_variants(bench)])


def _cells(name: str, value: object) -> Iterator[list[str]]:
    """(name, value) of a constant; of a group of constants one pair, of groups one for each."""
    if not isinstance(value, dict):
        yield [name, code(value)]
    elif all(isinstance(inner, dict) for inner in value.values()):
        for key, inner in value.items():
            yield from _cells(f"{name}, {key}", inner)
    else:
        yield [name, ", ".join(code(f"{key}={inner}") for key, inner in value.items())]


def machines() -> str:
    """Every constant of the scheduler's model and its source; of later machines what differs."""
    (first, constants), *others = machine_table.TABLE.items()
    rows = [[code(first), code(name), *map(str, told)] for name, told in constants.items()]
    for other, told in others:
        kept = {name: value for name, value in told.items() if value != constants[name]}
        rows += [[code(other), code(name), *map(str, value)] for name, value in kept.items()]
    return table(["machine", "constant", "value", "source"], rows)


def covered_ops() -> str:
    """The ops of aten that batch_invariant covers."""
    rows = [[code(row.op), row.by] for row in covered.COVERED]
    return table(["op", "made of"], rows)


def refused_ops() -> str:
    """The ops of aten that batch_invariant refuses in strict."""
    rows = [
        [", ".join(map(code, row.ops)), ", ".join(row.devices), row.why, row.instead, row.source]
        for row in refused.REFUSED
    ]
    return table(["op", "on", "why", "instead", "source"], rows)


def trials() -> str:
    """What ``select`` tried for one mask, as it prints it."""
    return f"```text\n{select(parse_mask('causal', 2048, (64, 128)), heads=32)}\n```"


def what_ran() -> str:
    """What each GPU model has a record of."""
    return "\n".join(cards.render(record.read_all()))


def digest_state() -> str:
    """Which GPU models have digests, and whether they agree."""
    return "\n".join(digests.state(record.read_all()))


#: What replaces `<!-- name -->` in a page, and the modules that it is made from.
GENERATED = {
    "settings-table": (settings_table, (settings,)),
    "gemm-plans": (gemm_plans, (config, arch)),
    "tile-costs": (tile_costs, (config, tiles)),
    "few-rows": (few_rows, (decode_page,)),
    "schedule-machines": (machines, (machine_table,)),
    "schedule-trials": (trials, (inspect.getmodule(select),)),
    "schedule-quality": (quality.quality_table, (quality,)),
    "what-ran": (what_ran, (cards,)),
    "digest-state": (digest_state, (digests,)),
    "aten-covered": (covered_ops, (covered,)),
    "aten-refused": (refused_ops, (refused,)),
}
#: Made from the records too.
RECORDED = ("what-ran", "digest-state", "few-rows")

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


def draw_pictures(app) -> None:
    """Sphinx's builder-inited event: the pictures of schedulers.md, in docs/_build/pictures."""
    folder = Path(app.srcdir) / "_build" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("steps", *PICTURES):
        # Two builds at once (tests do that) never see half a file.
        draft = folder / f"{name}.{os.getpid()}.svg"
        _draw_steps(draft) if name == "steps" else _draw_launches(draft, *PICTURES[name])
        draft.replace(folder / f"{name}.svg")


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


def fill_in(app, docname: str, source: list[str]) -> None:
    """Sphinx's source-read event: puts generated tables where pages ask for them."""
    for name, (make, modules) in GENERATED.items():
        marker = f"<!-- {name} -->"
        if marker in source[0]:
            source[0] = source[0].replace(marker, make())
            files = [inspect.getfile(module) for module in modules]
            files += record.RESULTS.glob("*.jsonl") if name in RECORDED else ()
            for file in files:
                app.env.note_dependency(str(file))


#: A first cell, then two or more spaces; a sentence would have a full stop before them.
COLUMNS = re.compile(r"\w[^.:;?!\n]*[\w\]] {2,}\S")


def keep_columns(app, what, name, obj, options, lines: list[str]) -> None:
    """autodoc's docstring event: a paragraph laid out in columns becomes a literal block."""
    found = []
    for paragraph in "\n".join(lines).split("\n\n"):
        if COLUMNS.match(paragraph):
            paragraph = "::\n\n" + "\n".join("    " + line for line in paragraph.split("\n"))
        found.append(paragraph)
    lines[:] = "\n\n".join(found).split("\n")


def setup(app) -> dict[str, bool]:
    app.connect("builder-inited", draw_pictures)
    app.connect("source-read", fill_in)
    app.connect("autodoc-process-docstring", keep_columns, priority=400)  # before napoleon
    return {"parallel_read_safe": True}
