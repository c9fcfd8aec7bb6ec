import re

import cute_kernels

project = "cute_kernels"
author = "The cute_kernels authors"
copyright = f"2026, {author}"
release = version = cute_kernels.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
suppress_warnings = ["misc.highlighting_failure"]  # mermaid, which GitHub draws
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
    app.connect("autodoc-process-docstring", keep_columns, priority=400)  # before napoleon
    return {"parallel_read_safe": True}
