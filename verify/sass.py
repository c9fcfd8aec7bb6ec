"""Artefacts of a compile, SASS and resources, and the rules that one instruction can break.

Instructions come from ``nvdisasm``; registers, stack and shared memory are read from the cubin's
own ELF sections, so no second tool is needed.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import struct
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from cute_kernels.compile.kernel import Expect
from cute_kernels.errors import CertificateError, expected

from . import ptx
from .report import Finding

ARCH = "sm_90a"

_SECTION = re.compile(r"^\.text\.([^\s:]+):", re.M)
_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.M
)
_LABEL = re.compile(r"\.L_x?_?\d+")
_LABEL_LINE = re.compile(r"^\s*([.$][\w.$]*):\s*$", re.M)
_ATOMICS = re.compile(r"(RED|REDG|REDS|ATOM|ATOMG|ATOMS|UBLKRED|UTMAREDG)$")
_FLOAT = re.compile(r"B?F16|F32|F64|TF32|E4M3|E5M2")
_CLOCK = re.compile(
    r"%(clock|clock_hi|clock64|globaltimer\w*|n?smid|n?warpid|gridid)\b"
    r"|SR_(\w*CLOCK\w*|\w*TIMER\w*|\w*SMID\w*|VIRTID|VIRTCFG|PHYSID)\b"
)
_WHEELS = ("nvidia-cuda-nvdisasm", "triton")  # distributions that carry the program


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction: ``@P0 REDG.E.ADD.F32 [R2], R5`` at a byte address of its function."""

    address: int
    guard: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def base(self) -> str:
        return self.opcode.split(".", 1)[0]

    @property
    def parts(self) -> frozenset[str]:
        return frozenset(self.opcode.split("."))

    @property
    def text(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}".strip()

    @property
    def place(self) -> str:
        return f"SASS {self.address:#06x}"

    @property
    def is_float_atomic(self) -> bool:
        """An atomic or reduction on memory; UTMAREDG has its type in the descriptor: counted."""
        typed = self.base == "UTMAREDG" or any(_FLOAT.match(part) for part in self.parts)
        return typed and bool(_ATOMICS.match(self.base))


@dataclass(frozen=True)
class Function:
    """The instructions of one ``.text`` section, trailing padding left out; label -> address."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Usage:
    """Resources of a kernel: registers and stack bytes per thread, static shared bytes."""

    registers: int
    stack: int
    shared: int


@dataclass(frozen=True)
class Artefacts:
    """Artefacts of a compile: PTX and SASS as text, the cubin, bytes of dynamic shared memory."""

    ptx: str
    cubin: bytes = field(repr=False)
    sass: str
    dynamic_shared: int | None

    @property
    def toolchain(self) -> str:
        """The DSL installed here, and the compiler that the PTX names."""
        found = re.search(r"Cuda compilation tools, (release [\d.]+)", self.ptx)
        try:
            dsl = metadata.version("nvidia-cutlass-dsl")
        except metadata.PackageNotFoundError:
            dsl = "not installed"
        return f"cutlass-dsl {dsl}, CUDA {found.group(1) if found else 'unknown'}"


_COMPILING = threading.Lock()  # the DSL's settings are one object of the process


def artefacts(build: Callable[[], Any], arch: str = ARCH) -> Artefacts:
    """PTX, cubin and SASS of the one ``cute.compile`` that `build` makes, in a folder of its own.

    Raises:
        CertificateError: `build` compiled nothing, or more than once; no disassembler.
    """
    from cutlass.cutlass_dsl import CuTeDSL

    dsl, compiled = CuTeDSL._get_dsl(), []
    with _COMPILING, tempfile.TemporaryDirectory() as folder:
        wanted = {"arch": arch, "keep_ptx": True, "keep_cubin": True, "dump_dir": folder}
        with _settings(dsl.envar, wanted), _recorded(dsl, compiled):
            build()
    if len(compiled) != 1:
        raise CertificateError(expected("build", "one cute.compile", f"{len(compiled)} of them"))
    kept = compiled[0].artifacts
    if not isinstance(kept.CUBIN, bytes) or ".target" not in kept.PTX:
        raise CertificateError(
            expected("build", "a compile that writes PTX and a cubin", "neither")
        )
    text = kept.PTX.rstrip("\0")
    shared = _dynamic_shared(str(compiled[0].ir_module))
    return Artefacts(text, kept.CUBIN, disassemble(kept.CUBIN), shared)


@contextmanager
def _settings(target: Any, wanted: Mapping[str, Any]) -> Iterator[None]:
    before = {name: getattr(target, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


@contextmanager
def _recorded(dsl: Any, compiled: list) -> Iterator[None]:
    """While it lasts, what the DSL compiles is also appended to `compiled`."""
    original = dsl.compile_and_cache

    def compile_and_cache(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        compiled.append(result)
        return result

    dsl.compile_and_cache = compile_and_cache
    try:
        yield
    finally:
        del dsl.compile_and_cache


_CONFIG_FIELD = re.compile(
    r"(%\d+) = llvm\.getelementptr %\d+\[0, 2\] .*struct<\(array<3 x i32>, array<3 x i32>, i64,"
)


def _dynamic_shared(mlir: str) -> int | None:
    """The largest dynamicSmemBytes that the host code stores in a launch configuration."""
    sizes: list[int | None] = []
    constants: dict[str, int] = {}
    fields: set[str] = set()
    for line in mlir.splitlines():
        if "llvm.func" in line:
            constants, fields = {}, set()
        elif found := re.search(r"(%\d+) = llvm\.mlir\.constant\((\d+) : i64\)", line):
            constants[found.group(1)] = int(found.group(2))
        elif found := _CONFIG_FIELD.search(line):
            fields.add(found.group(1))
        elif (found := re.search(r"llvm\.store (%\w+), (%\d+) : i64", line)) and (
            found.group(2) in fields
        ):
            sizes.append(constants.get(found.group(1)))
    return max(sizes) if sizes and None not in sizes else None


@lru_cache(maxsize=1)
def nvdisasm() -> Path:
    """The disassembler, from its wheel, the PATH or triton's wheel; else CertificateError."""
    tried = []
    for place in (_WHEELS[0], "PATH", _WHEELS[1]):
        found = shutil.which("nvdisasm") if place == "PATH" else _in_wheel(place)
        if found and Path(found).is_file():
            return Path(found)
        tried.append(place)
    raise CertificateError(
        f"nvdisasm: not found in {', '.join(tried)}; pip install nvidia-cuda-nvdisasm"
    )


def _in_wheel(distribution: str) -> Path | None:
    try:
        files = metadata.distribution(distribution).files or ()
    except metadata.PackageNotFoundError:
        return None
    named = [f for f in files if f.name == "nvdisasm" and f.parent.name == "bin"]
    return Path(named[0].locate()) if named else None


def disassemble(cubin: bytes) -> str:
    """The code sections of a cubin as text; CertificateError for bytes that are not a cubin."""
    if not isinstance(cubin, bytes) or cubin[:4] != b"\x7fELF":
        raise CertificateError(expected("cubin", "the bytes of an ELF file", _kind(cubin)))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(nvdisasm()), "-c", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CertificateError(f"nvdisasm: {done.stderr.strip() or 'failed without a message'}")
    return done.stdout


def _kind(value: object) -> str:
    return f"{len(value)} other bytes" if isinstance(value, bytes) else type(value).__name__


def parse(text: str) -> list[Function]:
    """The functions of ``disassemble``'s text; CertificateError when there is no code in it."""
    starts = list(_SECTION.finditer(text))
    bounds = [found.start() for found in starts] + [len(text)]
    functions = []
    for found, end in zip(starts, bounds[1:], strict=True):
        code = [
            Instruction(
                int(m.group(1), 16), m.group(2) or "", m.group(3), tuple(m.group(4).split(", "))
            )
            for m in _INSTRUCTION.finditer(text, found.end(), end)
        ]
        while code and code[-1].opcode == "NOP":
            code.pop()
        labels = dict(_labels(text[found.end() : end]))
        functions.append(Function(found.group(1), tuple(code), labels))
    if not any(f.instructions for f in functions):
        raise CertificateError("sass: expected nvdisasm text with a .text section, got no code")
    return functions


def _labels(text: str) -> Iterator[tuple[str, int]]:
    """Labels of a section, each with the address of the instruction after it."""
    waiting: list[str] = []
    for line in text.splitlines():
        if found := _LABEL_LINE.match(line):
            waiting.append(found.group(1))
        elif found := _INSTRUCTION.match(line):
            yield from ((label, int(found.group(1), 16)) for label in waiting)
            waiting = []


def histogram(functions: Iterable[Function]) -> dict[str, int]:
    """Opcode without modifiers -> how many, sorted by name."""
    counts = Counter(i.base for f in functions for i in f.instructions)
    return dict(sorted(counts.items()))


def digest(functions: Iterable[Function]) -> str:
    """SHA-256 of opcodes and operands: the same for the same code at other addresses or names."""
    total = hashlib.sha256()
    for function in functions:
        names: dict[str, str] = {}
        for i in function.instructions:
            text = _LABEL.sub(lambda m, n=names: n.setdefault(m.group(), f"L{len(n)}"), i.text)
            total.update(text.replace(function.name, "self").encode() + b"\n")
        total.update(b"\0")
    return total.hexdigest()


_REGISTER_COUNT, _FRAME_SIZE, _MIN_STACK_SIZE = 0x2F, 0x11, 0x12  # attributes of .nv.info
_HAS_SIZE, _NOBITS = 0x04, 8
_RESERVED = 1024  # bytes at the start of .nv.shared that are the system's on sm_90


def usage(cubin: bytes) -> dict[str, Usage]:
    """Kernel name -> usage, for every function in a cubin."""
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise CertificateError(expected("cubin", "a 64-bit little-endian ELF file", _kind(cubin)))
    sections = _sections(cubin)
    symbols = _symbols(cubin, sections)
    found: dict[str, dict[int, int]] = {}
    for attribute, payload in _info(sections[".nv.info"][0] if ".nv.info" in sections else b""):
        if attribute in (_REGISTER_COUNT, _FRAME_SIZE, _MIN_STACK_SIZE) and len(payload) == 8:
            symbol, value = struct.unpack("<II", payload)
            found.setdefault(symbols[symbol], {})[attribute] = value
    kernels = [name[len(".text.") :] for name in sections if name.startswith(".text.")]
    out = {}
    for kernel in kernels:
        values = found.get(kernel, {})
        if _REGISTER_COUNT not in values:
            raise CertificateError(f"cubin: no register count for {kernel} in .nv.info")
        stack = max(values.get(_FRAME_SIZE, 0), values.get(_MIN_STACK_SIZE, 0))
        shared = sections.get(f".nv.shared.{kernel}", (b"", 0))[1]
        out[kernel] = Usage(values[_REGISTER_COUNT], stack, max(0, shared - _RESERVED))
    return out


def _sections(elf: bytes) -> dict[str, tuple[bytes, int]]:
    """Section name -> (its bytes, its size)."""
    table, count, names = struct.unpack_from("<Q", elf, 40)[0], *struct.unpack_from("<HH", elf, 60)
    heads = [struct.unpack_from("<IIQQQQ", elf, table + 64 * n) for n in range(count)]

    def content(head: tuple) -> bytes:
        return b"" if head[1] == _NOBITS else elf[head[4] : head[4] + head[5]]

    strings = content(heads[names])
    return {_string(strings, head[0]): (content(head), head[5]) for head in heads}


def _symbols(elf: bytes, sections: dict[str, tuple[bytes, int]]) -> list[str]:
    table, strings = sections[".symtab"][0], sections[".strtab"][0]
    return [
        _string(strings, struct.unpack_from("<I", table, at)[0]) for at in range(0, len(table), 24)
    ]


def _string(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def _info(data: bytes) -> Iterable[tuple[int, bytes]]:
    """(attribute, payload) of each entry of .nv.info; short entries hold their value in place."""
    at = 0
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _HAS_SIZE:
            yield attribute, data[at : at + size]
            at += size


def at(rule: str, function: Any, i: Any, why: str) -> Finding:
    """A finding at an instruction of PTX or SASS."""
    return Finding(rule, f"{function.name}: {i.place}", f"{i.text}: {why}")


def float_atomics(code: Iterable[Any]) -> Iterator[Finding]:
    """A1: atomics and reductions on floating-point data, in functions of PTX or SASS."""
    for function in code:
        for i in function.instructions:
            if i.is_float_atomic:
                yield at("A1", function, i, "a floating-point atomic")


def float_swaps(function: ptx.Function) -> Iterator[Finding]:
    """A1: a compare-and-swap whose new value was computed in floating point."""
    for i in function.instructions:
        computed = function.slice(i.sources) if i.base == "atom" and "cas" in i.parts else ()
        if any(ptx.FLOAT.search(step.opcode) for step in computed):
            yield at("A1", function, i, "a compare-and-swap of a floating-point result")


def clocks(code: Iterable[Any]) -> Iterator[Finding]:
    """A2: reads of clocks, timers, SM and warp ids, in functions of PTX or SASS."""
    for function in code:
        for i in function.instructions:
            if found := _CLOCK.search(" ".join(i.operands)):
                yield at("A2", function, i, f"reads {found.group()}")


def naps(module: Iterable[ptx.Function]) -> Iterator[Finding]:
    """A2: nanosleep as the source wrote it; ptxas adds its own to the waits on mbarriers."""
    for function in module:
        for i in function.instructions:
            if i.base == "nanosleep":
                yield at("A2", function, i, "waits for time to pass")


def turnstile_parts(code: list[Function], bulk: bool) -> Iterator[Finding]:
    """R1, R2: each part of a turnstile must be left in SASS; `bulk`: of bulk reductions."""
    every = [i for function in code for i in function.instructions]
    gpu = [i for i in every if {"GPU", "SYS"} & i.parts]
    strong = {i.base for i in gpu if "STRONG" in i.parts}
    bases = {i.base for i in every}
    parts = {
        "R1 a strong gpu-scope load": bool(strong & {"LD", "LDG", "ATOMG"}),
        "R2 a gpu-scope memory barrier": any(i.base == "MEMBAR" for i in gpu),
        "R2 a strong gpu-scope write": bool(strong & {"ST", "STG", "RED", "REDG", "ATOMG"}),
        "R2 a bulk reduction": not bulk or bool(bases & {"UBLKRED", "UTMAREDG"}),
        "R2 a wait for bulk groups": not bulk or "DEPBAR" in bases,
    }
    for part, present in parts.items():
        if not present:
            yield Finding(part[:2], "SASS", f"lacks {part[3:]}")


def local_accesses(code: list[Function]) -> list[tuple[Function, Instruction]]:
    """The instructions that read or write local memory: spills and arrays on the stack."""
    return [(f, i) for f in code for i in f.instructions if i.base in ("STL", "LDL")]


def resources(code: list[Function], made: Artefacts, expect: Expect) -> Iterator[Finding]:
    """R5: spills, stack, registers, shared memory, matrix instructions."""
    spills = local_accesses(code)
    if len(spills) > expect.spills:
        for function, i in spills:
            yield at("R5", function, i, "a spill")
    for kernel, used in usage(made.cubin).items():
        if used.stack and not expect.spills:
            yield Finding("R5", kernel, f"{used.stack} bytes of stack per thread")
        if used.registers > expect.max_registers:
            yield Finding("R5", kernel, f"{used.registers} registers > {expect.max_registers}")
        if expect.max_shared is None:
            continue
        if made.dynamic_shared is None:
            yield Finding("R5", kernel, "dynamic shared memory that is not a constant")
        elif (total := used.shared + made.dynamic_shared) > expect.max_shared:
            yield Finding("R5", kernel, f"{total} bytes of shared memory > {expect.max_shared}")
    yield from _matrix_instructions(code, expect.mma)


def _matrix_instructions(
    code: list[Function], mma: str | tuple[str, ...] | None
) -> Iterator[Finding]:
    meant = (mma,) if isinstance(mma, str) else mma or ()
    unseen = set(meant)
    for function in code:
        for i in function.instructions:
            if not i.base.endswith("MMA"):
                continue
            fits = {m for m in meant if f".{m}." in f".{i.opcode}."}
            unseen -= fits
            if not fits:
                yield at("R5", function, i, f"meant was {mma or 'no matrix instruction'}")
    for missing in sorted(unseen):
        yield Finding("R5", "SASS", f"no matrix instruction {missing}")
