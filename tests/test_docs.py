"""The documentation is true: names, links, tables, numbers, code blocks, and a strict build."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cute_kernels as ck
from cute_kernels import about, arch, contracts, schedulers, settings
from cute_kernels.gemm import config
from cute_kernels.integrations import grouped_tensor_parallel, tensor_parallel
from cute_kernels.runtime import dispatch

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
ROOT_PAGES = [README, *(ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"))]
PAGES = [*ROOT_PAGES, *(p for p in sorted(DOCS.rglob("*.md")) if "_build" not in p.parts)]
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
MARKER = re.compile(r"<!-- generated: ([\w-]+) -->")


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def read(name: str) -> str:
    return (ROOT / name).read_text()


def rows_of(text: str, *header: str) -> list[list[str]]:
    """The cells of the one table in a page that has this header."""
    lines = [line.strip() for line in text.splitlines()]
    (start,) = [i for i, line in enumerate(lines) if _cells(line) == list(header)]
    out = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        out.append(_cells(line))
    return out


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


# ---- names --------------------------------------------------------------------------------------


def undocumented(names: list[str], module: str, text: str) -> list[str]:
    """The names of a module that no autodoc directive of a page covers."""
    if re.search(rf"automodule:: {re.escape(module)}\n +:members:\n", text):
        return []
    matches = re.findall(r"\.\. auto(?:function|class|module|data):: (\S+)\n", text)
    return [name for name in names if f"{module}.{name}" not in matches]


def test_every_public_name_is_in_the_reference():
    text = read("docs/reference.md")
    assert not undocumented(ck.__all__, "cute_kernels", text)
    assert not undocumented(schedulers.__all__, "cute_kernels.schedulers", text)
    assert not undocumented(ck.mhc.__all__, "cute_kernels.mhc", text)
    assert not undocumented(ck.moe.__all__, "cute_kernels.moe", text)
    assert undocumented(["linear", "new"], "cute_kernels", text) == ["new"]
    assert undocumented(["errors"], "cute_kernels", text.replace("cute_kernels.errors\n", "\n"))


def test_pages_hold_no_placeholders_and_no_dead_pictures():
    allowed = re.compile(r"<!-- (generated: [\w-]+|end|Written by [^>]*) -->")
    for page in PAGES:
        text = FENCE.sub("", page.read_text())
        assert not [x for x in re.findall(r"<!--.*?-->", text, re.S) if not allowed.fullmatch(x)]
        assert "<!-- end -->" not in re.sub(r"<!-- generated.*?<!-- end -->", "", text, flags=re.S)
        pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
        assert all((page.parent / picture).is_file() for picture in pictures)
        assert "_build/" not in " ".join(pictures)


def test_generated_parts_are_up_to_date():
    out = runpy.run_path(str(ROOT / "tools" / "generate_docs.py"))
    texts = {page_id(page): page.read_text() for page in PAGES}
    stale = [name for name, text in texts.items() if out["fill_in"](text) != text]
    assert not stale, "python tools/generate_docs.py"
    assert {name for text in texts.values() for name in MARKER.findall(text)} == set(
        out["GENERATED"]
    )


# ---- links --------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#{1,3} (.+)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def broken_links(page: Path, text: str) -> list[str]:
    """The relative links of a page that lead to no file, or to no heading of it."""
    wrong = []
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (
            anchor and anchor not in anchors(text if file == page else file.read_text())
        ):
            wrong.append(target)
    return wrong


def test_links_resolve():
    wrong = {page_id(page): broken_links(page, page.read_text()) for page in PAGES}
    assert {name: links for name, links in wrong.items() if links} == {}
    text = "[a](docs/gone.md) [b](docs/gemm.md#gone) [c](docs/gemm.md#limits) [d](#e)\n"
    assert broken_links(README, text) == ["docs/gone.md", "docs/gemm.md#gone", "#e"]


# ---- code ---------------------------------------------------------------------------------------


#: First line of a block that needs the names of the blocks before it.
CONTINUES = "# Continues the block above.\n"


def run_blocks(text: str) -> int:
    """Run a page's python blocks; what one prints must be the next block's text.

    A block has a namespace of its own, or that of the block which it says it continues.

    Returns the number of blocks run.
    """
    namespace: dict[str, object] = {}
    fences = FENCE.findall(text)
    count = 0
    for i, (language, code) in enumerate(fences):
        if language != "python":
            continue
        if not code.startswith(CONTINUES):
            namespace = {"__name__": "docs"}
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"block {i}", "exec"), namespace)
        shown = fences[i + 1][1] if i + 1 < len(fences) and fences[i + 1][0] == "output" else ""
        assert printed.getvalue() == shown, code
        count += 1
    return count


@pytest.mark.parametrize("page", [p for p in PAGES if "```python" in p.read_text()], ids=page_id)
def test_code_runs_and_prints_what_the_page_shows(page):
    assert run_blocks(page.read_text()) >= 1


def test_what_a_block_prints_and_reads_is_checked():
    first, second = "```python\nx = 1\n```\n", "```python\ny = x + 1\n```\n"
    with pytest.raises(NameError):
        run_blocks(first + second)
    assert run_blocks(first + second.replace("y =", CONTINUES + "y =")) == 2
    text = "```python\nprint(1 + 1)\n```\n\n```output\n3\n```\n"
    with pytest.raises(AssertionError):
        run_blocks(text)
    assert run_blocks(text.replace("3", "2")) == 1
    for language, code in FENCE.findall(read("docs/add_a_kernel.md")):
        assert language != "py" or ast.parse(code)  # a kernel, which is not run


def test_the_readme_is_short_and_its_example_needs_torch_alone():
    text = read("README.md")
    assert len(re.sub(r"[|#`-]+", " ", text).split()) <= 900
    code, model = [code for language, code in FENCE.findall(text) if language == "python"]
    assert all(len(block.strip().splitlines()) <= 10 for block in (code, model))
    assert "torch.uint8" in code and "token_logps" in model
    imports = {line.split()[1] for line in code.splitlines() if line.startswith(("import", "from"))}
    assert imports == {"torch", "cute_kernels"}
    paragraphs = [p for p in FENCE.sub("", text).split("\n\n") if not p.lstrip().startswith("|")]
    assert max(len(p.strip().splitlines()) for p in paragraphs if not p.startswith("- ")) <= 4


def named_tests(text: str) -> list[tuple[str, str]]:
    """(file, function) of each test that a page names."""
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)


def test_tests_that_pages_name_exist():
    named = {one for page in PAGES for one in named_tests(page.read_text())}
    functions = {file: set(re.findall(r"^def (\w+)", read(file), re.M)) for file, _ in named}
    missing = [(file, name) for file, name in named if name not in functions[file]]
    assert not missing and ("tests/test_docs.py", "test_the_map_names_every_folder") in named
    assert named_tests("`tests/a/b.py::test_c`") == [("tests/a/b.py", "test_c")]


# ---- tables -------------------------------------------------------------------------------------


def chosen(op: str, dtype: torch.dtype) -> str:
    reasons = dispatch.reasons(op, "cuda:0", dtype)
    return next((f"`{name}`" for name, why in reasons.items() if why is None), "none")


def test_the_support_matrix_is_the_dispatchers(monkeypatch):
    monkeypatch.setattr(arch, "_installed", lambda name: True)
    names = {name: dtype for dtype, name in config.DTYPE_NAMES.items()}
    rows = rows_of(read("docs/support.md"), "device", "op", "dtype", "backend", "state")
    recorded = set()
    for device, ops, dtypes, backend, _ in rows:
        assert set(ops.split(", ")) == {"linear", "matmul"}
        if device == "meta":
            assert ck.linear(*(torch.empty(2, 2, device="meta") for _ in "xw")).is_meta
            continue
        kind, name, *_ = (*device.split(), "unknown")
        gpu_facts = arch.Device("cuda:0", kind, name.strip(","), 100)
        monkeypatch.setattr(arch, "describe", lambda _, here=gpu_facts: here)
        for dtype in names if dtypes == "any" else dtypes.split(", "):
            assert chosen("gemm", names[dtype]) == backend, device
            assert chosen("column_sum", names[dtype]) == backend, device
            recorded.add((kind, name, dtype))
    assert len(recorded) == 7 * len(names)


def test_attention_runs_where_the_matrix_says(monkeypatch):
    monkeypatch.setattr(arch, "_installed", lambda name: True)
    page = read("docs/support.md")
    rows = rows_of(page, "device", "forward and gradients", "state")
    for device, backend, state in rows:
        kind, name, *_ = (*device.split(), "unknown")
        gpu_facts = arch.Device("cuda:0", kind, name.strip(","), 100)
        monkeypatch.setattr(arch, "describe", lambda _, here=gpu_facts: here)
        for op in ("block_sparse_attention", "block_sparse_attention_backward"):
            for dtype in (torch.bfloat16, torch.float16):
                assert chosen(op, dtype) == backend, device
            assert chosen(op, torch.float32) == "none", device
        if backend == "`cute_sm90`":
            assert state == "compiled, simulated, [run](#h100-and-h200), timed on an H200"
            assert "tests/sparse_attn/test_gpu.py`" in read("docs/attention.md")
    assert [row[1] for row in rows] == ["`cute_sm90`", *["`triton`"] * 4, "`cpu`"]


def test_the_guarantee_tables_are_the_contracts():
    assert (
        about.info() and tensor_parallel and grouped_tensor_parallel
    )  # importing them registers every contract
    names = list(contracts.MEANING)
    header = ("op", "backend", "keeps", "does not keep")
    rows = [
        [[] if cell == "–" else cell.replace("`", "").split(", ") for cell in cells]
        for cells in rows_of(read("docs/guarantees.md"), *header)
    ]
    pairs = [(op, backend) for ops, backends, *_ in rows for op in ops for backend in backends]
    want = {op: contracts._CONTRACTS[op].kept for op in contracts.ops()}
    assert sorted(pairs) == sorted((op, backend) for op, kept in want.items() for backend in kept)
    for ops, backends, keeps, not_kept in rows:
        for op, backend in itertools.product(ops, backends):
            assert keeps == [name for name in names if name in want[op][backend]]
            assert not_kept == [name for name in names if name not in want[op][backend]]
    readme = rows_of(read("README.md"), "guarantee", "meaning", "`linear`, `matmul`")
    assert [row[0].strip("`") for row in readme] == names


def test_the_map_names_every_folder():
    run = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if run.returncode:
        pytest.skip("an unpacked archive has no git")
    paths = [Path(line).parent.parts for line in run.stdout.splitlines()]
    want = {f"{parts[0]}/" for parts in paths if parts}
    want |= {"/".join(parts[:2]) + "/" for parts in paths if parts[:1] == ("cute_kernels",)} - {
        "cute_kernels/"
    }
    out = [row[0].strip("`") for row in rows_of(read("docs/naming.md"), "folder", "holds")]
    assert want <= set(out), want - set(out)
    assert all((ROOT / folder).is_dir() for folder in out) and len(set(out)) == len(out)


@pytest.mark.nightly
def test_the_strict_build_of_the_pages(tmp_path):
    """Warnings are errors; no page loads anything from another host."""
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    command += ["-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / "html")]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    html = tmp_path / "html"
    pages = {p.relative_to(html).as_posix()[:-5]: p.read_text() for p in html.rglob("*.html")}
    assert all(settings.PREFIX + setting.name in pages["settings"] for setting in settings.TABLE)
    assert "<th" in pages["index"] and "<th" in pages["support"]
    foreign = re.compile(r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)=\"((?:https?:)?//[^\"]*)")
    assert {name: out for name, text in pages.items() if (out := foreign.findall(text))} == {}
