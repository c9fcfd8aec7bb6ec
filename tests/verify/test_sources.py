"""The digest of what a certificate depends on: complete, and different when code is."""

from __future__ import annotations

import dataclasses
import io
import keyword
import shutil
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from cute_kernels import about
from cute_kernels.compile.kernel import Expect
from tests import conftest
from tests.import_graph import import_graph, modules
from verify import sources

KERNELS = sorted({entry.kernel.name for entry in about.catalogue()})
FORWARD = "sparse_attn_fwd_sm90"

#: Imports that end at what is not in the machine code, and why it is not.
OUTSIDE = {
    "arch": "which backend a device gets",
    "compile.cache": "where objects are kept",
    "compile.call": "how they are called",
    "compile.toolchain": "names the versions that the digest holds as they are installed",
    "contracts": "names of guarantees",
    "cpu": "another backend",
    "errors": "texts",
    "gemm.triton.plan": "another backend",
    "log": "texts",
    "mhc.__init__": "public names, loaded at first use",
    "mhc.triton.plan": "another backend",
    "norm.triton.plan": "another backend",
    "schedulers.__init__": "public names, loaded at first use",
    "schedulers.masks": "lists that a kernel is handed at run time",
    "schedulers.model": "predictions of time",
    "schedulers.order": "lists that a kernel is handed at run time",
    "schedulers.version": "a part of contract ids",
    "moe.triton.plan": "another backend",
    "settings": "no kernel is compiled by them",
    "sparse_attn.pack_gqa": "rows that a kernel is handed at run time",
    "sparse_attn.triton.plan": "another backend",
}


def outside(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in OUTSIDE)


def reached(kernel: str) -> set[str]:
    """The files that the kernel's module and the certifier import, and theirs."""
    graph, paths = import_graph(), modules()
    system = sources.system_of(kernel)
    left = [f"{system}.kernel_{kernel.removeprefix(f'{system}_')}"]
    left += ["verify.certificate", "verify.sources"]
    recorded: set[str] = set()
    while left:
        name = left.pop()
        if name not in recorded and not outside(name):
            recorded.add(name)
            left += graph[name]
    return {_file(name) for name in recorded if paths[name].read_text().count("\n") > 1}


def _file(module: str) -> str:
    return module.replace(".", "/") + ".py"


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_a_kernel_imports_is_in_the_digest(kernel):
    out = reached(kernel)
    assert len(out) >= 15
    with conftest.IMPORTED_ONCE:
        files = set(sources.files(kernel))
    assert out <= files, out - files


def test_a_file_that_is_not_in_the_digest_is_named(monkeypatch):
    """The mutant: one pattern fewer."""
    monkeypatch.setattr(sources, "OWN", tuple(p for p in sources.OWN if p != "device/*.py"))
    assert reached("sparse_attn_bwd_sm90") - set(sources.files("sparse_attn_bwd_sm90"))


def test_every_pattern_finds_something():
    out = dict.fromkeys((*sources.SHARED, *sources.DSL, *sources.OWN), 0)
    for pattern in (*sources.SHARED, *sources.DSL):
        out[pattern] = len(list(sources.PACKAGE.glob(pattern)))
    for pattern in sources.OWN:
        out[pattern] = len(list(sources.PACKAGE.glob(f"*/{pattern}")))
    assert all(out.values()), out


@pytest.fixture
def copies(tmp_path):
    """(cute_kernels, schedulers/tiles, verify) of our own, to change."""
    for name, path in (sources.files("gemm_sm90") | sources.files(FORWARD)).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, tmp_path / name)
    return tmp_path, tmp_path / "schedulers" / "tiles", tmp_path / "verify"


def unseen(copies, digest=sources.digest) -> Iterator[str]:
    """The files of which another name in the code does not change the forward's digest.

    Each third file: what digests have of one they have of all.
    """
    before = digest(FORWARD, *copies)
    for name, path in list(sources.files(FORWARD, *copies).items())[::3]:
        content = path.read_bytes()
        path.write_bytes(renamed(path))
        if path.read_bytes() != content and digest(FORWARD, *copies) == before:
            yield name
        path.write_bytes(content)


def renamed(path: Path) -> bytes:
    """The file with another first letter of the last name in its code, as long as it was."""
    text = path.read_text()
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    names = [t for t in tokens if t.type == tokenize.NAME and not keyword.iskeyword(t.string)]
    lines = text.splitlines(keepends=True)
    if names:
        (row, column), letter = names[-1].start, names[-1].string[0]
        line = lines[row - 1]
        lines[row - 1] = line[:column] + ("x" if letter == "q" else "q") + line[column + 1 :]
    return "".join(lines).encode()


def test_a_changed_name_in_any_file_changes_the_digest(copies):
    assert sources.digest(FORWARD, *copies) == sources.digest(FORWARD)
    assert not list(unseen(copies))


def test_comments_docstrings_and_empty_lines_do_not_count(copies):
    before = sources.digest(FORWARD, *copies)
    path = copies[0] / "dsl" / "smem.py"
    path.write_text(path.read_text().replace('"""', '"""Other words.  ', 1) + "\n\n# More.\n")
    assert sources.digest(FORWARD, *copies) == before


@pytest.mark.parametrize(
    ("text", "other", "same"),
    [
        ("x = 1  # one\n", "x = 1\n", True),
        ("x = '# one'\n", "x = '# two'\n", False),
        ('def f():\n    """One."""\n    return 1\n', "def f():\n    return 1\n", True),
        ('def f():\n    return """One."""\n', 'def f():\n    return """Two."""\n', False),
        ("x = 1\n\n\ny = 2\n", "x = 1\ny = 2\n", True),
        ("if x:\n    y = 1\nz = 2\n", "if x:\n    y = 1\n    z = 2\n", False),
        ('x = """a\n# b\n"""\n', 'x = """a\n# c\n"""\n', False),
    ],
)
def test_code(tmp_path, text, other, same):
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "b.py").write_text(other)
    assert (sources.code(tmp_path / "a.py") == sources.code(tmp_path / "b.py")) is same


def test_a_new_file_that_is_imported_and_one_that_went_change_the_digest(copies):
    before = sources.digest(FORWARD, *copies)
    new = copies[0] / "dsl" / "new.py"
    new.write_text("from .further import line")
    new.with_name("further.py").write_text("")
    assert sources.digest(FORWARD, *copies) == before
    smem = copies[0] / "dsl" / "smem.py"
    smem.write_text(smem.read_text() + "\n\ndef late():\n    from . import new\n")
    assert {"dsl/new.py", "dsl/further.py"} <= set(sources.files(FORWARD, *copies))
    out = {before, sources.digest(FORWARD, *copies)}
    smem.unlink()
    out.add(sources.digest(FORWARD, *copies))
    assert len(out) == 3


def test_another_version_changes_the_digest():
    true = sources.versions()
    assert "nvidia-cutlass-dsl" in true and "release" in true["nvdisasm"]
    others = [true] + [true | {name: true[name] + ".1"} for name in true]
    assert len({sources.digest(FORWARD, installed=other) for other in others}) == len(others)


def test_another_limit_changes_the_digest():
    """A certificate that was held to other limits is not the one that is asked for."""
    entry = next(e for e in about.catalogue() if e.kernel.name == FORWARD)
    digests, limits = set(), [f.name for f in dataclasses.fields(Expect)]
    for limit in limits:
        value = getattr(entry.expect, limit)
        changed = {limit: ("64x8x16",) if limit == "mma" else (value or 0) + 1}
        other = entry._replace(expect=dataclasses.replace(entry.expect, **changed))
        digests.add(sources.digest(FORWARD, entries=[other]))
    assert len(digests | {sources.digest(FORWARD, entries=[entry])}) == len(limits) + 1


def test_another_systems_files_do_not(copies):
    before = [sources.digest(name, *copies) for name in (FORWARD, "gemm_sm90")]
    path = copies[0] / "gemm" / "kernel_sm90.py"
    path.write_bytes(path.read_bytes() + b"pass\n")
    after = [sources.digest(name, *copies) for name in (FORWARD, "gemm_sm90")]
    assert after[0] == before[0] and after[1] != before[1]


MUTANTS = {
    "names only": lambda name, path: name,
    "sizes only": lambda name, path: (name, path.stat().st_size),
    "without the certifier": lambda name, path: (
        "" if name.startswith("verify") else (name, path.read_bytes())
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_digest_that_sees_less_is_killed(copies, mutant):
    def digest(kernel, *where) -> str:
        return str([MUTANTS[mutant](*item) for item in sources.files(kernel, *where).items()])

    assert next(unseen(copies, digest), None)
