import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import cute_kernels
from cute_kernels import arch, settings
from cute_kernels.gemm import config

project = "cute_kernels"
author = "The cute_kernels authors"
copyright = f"2026, {author}"
release = version = cute_kernels.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"cute_kernels {release}"

myst_enable_extensions = ["dollarmath"]
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
        values = ", ".join(map(code, setting.choices)) or "any"
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


def _cells(name: str, value: object) -> Iterator[list[str]]:
    """(name, value) of a constant; of a group of constants one pair, of groups one for each."""
    if not isinstance(value, dict):
        yield [name, code(value)]
    elif all(isinstance(inner, dict) for inner in value.values()):
        for key, inner in value.items():
            yield from _cells(f"{name}, {key}", inner)
    else:
        yield [name, ", ".join(code(f"{key}={inner}") for key, inner in value.items())]


#: What replaces `<!-- name -->` in a page, and the files that it is made from.
GENERATED = {
    "settings-table": (settings_table, (settings,)),
    "gemm-plans": (gemm_plans, (config, arch)),
}


def fill_in(app, docname: str, source: list[str]) -> None:
    """Sphinx's source-read event: puts generated tables where pages ask for them."""
    for name, (make, modules) in GENERATED.items():
        marker = f"<!-- {name} -->"
        if marker in source[0]:
            source[0] = source[0].replace(marker, make())
            for module in modules:
                app.env.note_dependency(str(Path(inspect.getfile(module))))


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
    app.connect("source-read", fill_in)
    app.connect("autodoc-process-docstring", keep_columns, priority=400)  # before napoleon
    return {"parallel_read_safe": True}
