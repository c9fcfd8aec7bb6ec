"""Identity, catalogue entry and expected properties of a compiled kernel."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ..errors import ArgumentTypeError, ArgumentValueError, expected

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Kernel:
    """One configuration of one kernel, and how to compile it.

    Args:
        name: Lower case, such as ``"gemm_sm90"``; part of file and symbol names.
        constexpr: (name, value) pairs of str, int or bool; kept sorted.  Everything that `build`
            reads besides the package's source must be in it.
        build: Returns what ``cute.compile(..., options="--enable-tvm-ffi")`` returned.  It imports
            ``cutlass`` only when called.  Not part of equality.

    Raises:
        ArgumentValueError, ArgumentTypeError: a name or value that cannot enter a key.
    """

    name: str = field(compare=False)
    constexpr: tuple[tuple[str, str | int | bool], ...] = field(compare=False)
    build: Callable[[], Any] = field(compare=False, repr=False)
    identity: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ArgumentValueError(expected("name", "lower case letters, digits, _", self.name))
        names = [name for name, _ in self.constexpr]
        if len(set(names)) != len(names):
            raise ArgumentValueError(expected("constexpr", "each name once", sorted(names)))
        for name, value in self.constexpr:
            if type(value) not in (str, int, bool):
                got = type(value).__name__
                raise ArgumentTypeError(expected(f"constexpr {name}", "str, int or bool", got))
        object.__setattr__(self, "constexpr", tuple(sorted(self.constexpr)))
        # JSON keeps 1, "1" and true apart.
        object.__setattr__(self, "identity", json.dumps([self.name, self.constexpr]))

    @classmethod
    def of(cls, name: str, module: str, config: Any) -> Kernel:
        """Kernel that ``build(config)`` of a module compiles; ``config``: a frozen dataclass."""

        def build() -> Any:
            return importlib.import_module(module).build(config)

        return cls(name, tuple(asdict(config).items()), build)

    @classmethod
    def in_file(cls, package: str, name: str, config: Any) -> Kernel:
        """Kernel of ``kernel_<name>.py`` in a system's ``package``; ``config``: as in `of`."""
        system = package.rpartition(".")[2]
        return cls.of(f"{system}_{name}", f"{package}.kernel_{name}", config)

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(f'{name}={value}' for name, value in self.constexpr)})"


def symbol_of(kernel: Kernel, arch: str) -> str:
    """The name of the kernel's function inside its object file, unique per configuration."""
    digest = hashlib.sha256(f"{kernel.identity}\n{arch}".encode()).hexdigest()
    return f"ck_{kernel.name}_{digest[:16]}"


@dataclass(frozen=True)
class Expect:
    """Properties that a kernel's machine code must have.

    Attributes:
        mma: the matrix instructions meant, by shape (``"64x256x16"``) or from the opcode on
            (``"HGMMA.64x256x16.F32.BF16"``), several for several; each must occur and no other
            may.  None: there must be none.
        max_registers: registers per thread.
        max_shared: static and dynamic shared memory in bytes; None: any.
        pdl: the kernel is launched with programmatic dependent launch, so R3 applies.
        max_step: the largest constant that a coordinate is multiplied by in 32 bits, see R4.
        spills: instructions that may read or write local memory, see R5: of a kernel off the path
            that is fast.
    """

    mma: str | tuple[str, ...] | None
    max_registers: int
    max_shared: int | None = None
    pdl: bool = False
    max_step: int = 512
    spills: int = 0


class Entry(NamedTuple):
    """A kernel in the catalogue.

    ``kind``: the class of its certificate (docs/certificate.md); None: it adds in arrival order,
    which no class allows.
    """

    kernel: Kernel
    kind: str | None
    expect: Expect
