"""Digest of what a kernel's certificate depends on: our files, its limits, compiler, disassembler.

As long as the digest stays, compiling the kernel again would prove what is proved already.
Comments, docstrings and empty lines do not count: no machine code follows from them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import subprocess
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import cute_kernels
from cute_kernels.compile import toolchain
from cute_kernels.compile.kernel import Entry
from cute_kernels.errors import CertificateError
from cute_kernels.schedulers import tiles

from . import sass

PACKAGE = Path(cute_kernels.__file__).parent
#: What reads the machine code: the files of this folder but for those of the command.
RULES = Path(__file__).parent
_COMMAND = ("__main__.py", "command.py")
#: Of every kernel, under the package: its arguments, and the options that it is compiled with.
SHARED = ("compile/fake.py", "compile/kernel.py")
#: Of the modules that a kernel imports, those that shape its machine code: under the package,
DSL = ("dsl/*.py",)
#: and under its own system's folder.  Not every system has every one of them.
OWN = (
    "config.py",
    "device/*.py",
    "kernel_*.py",
    "masks.py",
)


def files(
    kernel: str, package: Path = PACKAGE, tile_orders: Path | None = None, rules: Path = RULES
) -> dict[str, Path]:
    """Name -> file of all that the kernel called ``kernel``, and whoever certifies it, is made of.

    A file that matches a pattern counts if the kernel's module imports it, itself or through others
    that count: so a new file of ``dsl`` leaves the certificates of kernels that do not use it.

    ``package``, ``tile_orders`` and ``rules``: where cute_kernels, schedulers/tiles and verify lie.

    Raises:
        CertificateError: no system's folder begins the kernel's name.
    """
    system = system_of(kernel, package)
    found = {
        f"verify/{path.name}": path for path in rules.glob("*.py") if path.name not in _COMMAND
    }
    # A wheel holds schedulers/ inside the package, the source tree beside it: one name.
    folder = tile_orders or Path(tiles.__file__).parent
    shapes_code = {f"schedulers/tiles/{path.name}": path for path in folder.glob("*.py")}
    shapes_code |= {
        path.relative_to(package).as_posix(): path
        for pattern in (*SHARED, *DSL, *(f"{system}/{name}" for name in OWN))
        for path in package.glob(pattern)
    }
    left = [*SHARED, f"{system}/kernel_{kernel.removeprefix(f'{system}_')}.py"]
    while left:
        name = left.pop()
        if name in shapes_code and name not in found:
            found[name] = shapes_code[name]
            left += imported(name, shapes_code[name])
    return found


def imported(name: str, path: Path) -> Iterator[str]:
    """The files that ``path``, called ``name`` below the package, may import, anywhere in it."""
    here = name.split("/")[:-1]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            stem = [*base, *(node.module or "").split(".")] if node.module else base
            modules = [stem, *([*stem, alias.name] for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name.split(".") for alias in node.names]
        else:
            continue
        for parts in modules:
            inside = parts[1:] if parts[:1] == [PACKAGE.name] else parts
            yield "/".join(inside) + ".py"
            for end in range(1, len(inside) + 1):
                yield "/".join((*inside[:end], "__init__.py"))


def system_of(kernel: str, package: Path = PACKAGE) -> str:
    """The folder with the kernel: its name is the folder's and what follows ``kernel_`` there."""
    for folder in {path.parent.name for path in package.glob("*/kernel_*.py")}:
        own = kernel.removeprefix(f"{folder}_")
        if own != kernel and (package / folder / f"kernel_{own}.py").is_file():
            return folder
    raise CertificateError(f"{kernel}: no folder of {package.name} has a kernel of that name")


@functools.cache
def versions() -> dict[str, str]:
    """The installed DSL, part by part, and what the disassembler says of itself."""
    try:
        command = [str(sass.nvdisasm()), "--version"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except CertificateError:
        said = "none"
    return dict(toolchain.dsl_distributions()) | {"nvdisasm": said.strip()}


def digest(
    kernel: str,
    package: Path = PACKAGE,
    tile_orders: Path | None = None,
    rules: Path = RULES,
    installed: Mapping[str, str] | None = None,
    *,
    entries: Iterable[Entry] = (),
) -> str:
    """SHA-256 over the names and `code` of `files`, `versions` or those given, and ``entries``.

    entries: The kernel's in the catalogue, with the limits that its certificates are held to.
    """
    total = hashlib.sha256()
    for line in sorted(f"{kernel.identity} {kind} {expect}" for kernel, kind, expect in entries):
        total.update(f"{line}\0".encode())
    for name, text in sorted((versions() if installed is None else installed).items()):
        total.update(f"{name}\0{text}\0".encode())
    for name, path in sorted(files(kernel, package, tile_orders, rules).items()):
        content = code(path)
        total.update(f"{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code(path: Path) -> bytes:
    """A Python file without comments, docstrings, empty lines and blanks at the ends of lines."""
    return _code(path.read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=1024)
def _code(text: str) -> bytes:
    """By its text: kernels share most of their files."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first, last = node.body[0].lineno - 1, node.body[0].end_lineno
            lines[first:last] = [""] * (last - first)
    return "\n".join(line.rstrip() for line in lines if line.strip()).encode()
