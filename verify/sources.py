"""Digest of what a kernel's certificate depends on: our files, its limits, compiler, disassembler.

As long as the digest stays, compiling the kernel again would prove what is proved already.  It is
over bytes, so a comment changes it: cheap to be wrong in that direction.
"""

from __future__ import annotations

import functools
import hashlib
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import cute_kernels
from cute_kernels.compile import toolchain
from cute_kernels.compile.kernel import Entry
from cute_kernels.errors import CertificateError
from cute_kernels.schedulers import tiles

from . import sass

PACKAGE = Path(cute_kernels.__file__).parent
#: What reads the machine code.
RULES = Path(__file__).parent
#: Of every kernel, under the package.
SHARED = ("compile/fake.py", "compile/kernel.py", "dsl/*.py")
#: Of a kernel's own system, under its folder.  Not every system has every one of them.
OWN = (
    "config.py",
    "device/*.py",
    "kernel_*.py",
    "masks.py",
    "watchdog.py",
)


def files(
    kernel: str, package: Path = PACKAGE, tile_orders: Path | None = None, rules: Path = RULES
) -> dict[str, Path]:
    """Name -> file of all that the kernel called ``kernel``, and whoever certifies it, is made of.

    ``package``, ``tile_orders`` and ``rules``: where cute_kernels, schedulers/tiles and verify lie.

    Raises:
        CertificateError: no system's folder begins the kernel's name.
    """
    system = system_of(kernel, package)
    # A wheel holds schedulers/ inside the package, the source tree beside it: one name.
    folder = tile_orders or Path(tiles.__file__).parent
    found = {f"schedulers/tiles/{path.name}": path for path in folder.glob("*.py")}
    found |= {f"schedulers/{path.name}": path for path in folder.parent.glob("version.py")}
    found |= {f"verify/{path.name}": path for path in rules.glob("*.py")}
    for pattern in (*SHARED, *(f"{system}/{name}" for name in OWN)):
        for path in package.glob(pattern):
            found[path.relative_to(package).as_posix()] = path
    return found


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
    """SHA-256 over the names and bytes of `files`, `versions` or those given, and ``entries``.

    entries: The kernel's in the catalogue, with the limits that its certificates are held to.
    """
    total = hashlib.sha256()
    for line in sorted(f"{kernel.identity} {kind} {expect}" for kernel, kind, expect in entries):
        total.update(f"{line}\0".encode())
    for name, text in sorted((versions() if installed is None else installed).items()):
        total.update(f"{name}\0{text}\0".encode())
    for name, path in sorted(files(kernel, package, tile_orders, rules).items()):
        content = path.read_bytes()
        total.update(f"{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()
