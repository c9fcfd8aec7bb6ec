"""PTX text as control-flow graphs: `parse` reads the functions of a module.

Nothing here knows a rule, a kernel or the DSL.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from cute_kernels.errors import CertificateError

EXIT = -1  # the block index that stands for the end of a thread

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_FUNCTION = re.compile(r"\.(entry|func)\b")
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_TOKEN = re.compile(r"%?[A-Za-z_$][\w$]*(?:\.[xyzw]\b)?")
SPECIAL = re.compile(
    r"%(n?tid|laneid|n?warpid|n?ctaid|n?smid|gridid|n?clusterid|cluster_\w+|is_explicit_cluster"
    r"|lanemask_\w+|clock\w*|globaltimer\w*|pm\d+\w*|envreg\d+|\w*_smem_\w+|current_graph_exec)\b"
)
FLOAT = re.compile(r"\.(b?f16(x2)?|tf32|f32(x2)?|f64|e[45]m[23](x2)?)\b")
_NO_RESULT = {"bra", "brx", "ret", "exit", "trap", "brkpt", "bar", "barrier", "cp", "setmaxnreg"}
_NO_RESULT |= {"nanosleep", "pmevent", "griddepcontrol", "fence", "membar"}
_ENDS = {"ret", "exit", "trap"}


@dataclass(frozen=True)
class Instruction:
    """One PTX instruction; ``guard`` is (register, value for which it executes)."""

    index: int
    line: int
    guard: tuple[str, bool] | None
    opcode: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    sources: tuple[str, ...]

    @property
    def base(self) -> str:
        return self.opcode.split(".", 1)[0]

    @cached_property
    def parts(self) -> frozenset[str]:
        """The words of the opcode: ``{"red", "release", "gpu", "global", "add", "s32"}``."""
        return frozenset(re.split(r"\.|::", self.opcode))

    @property
    def place(self) -> str:
        return f"PTX line {self.line}"

    @property
    def is_float_atomic(self) -> bool:
        """An atomic or reduction on memory; a tensor's has its type in the descriptor: counted."""
        if self.base in ("cp", "multimem") and not {"reduce", "red", "ld_reduce"} & self.parts:
            return False
        known = self.base in ("red", "atom", "cp", "multimem")
        return known and bool(FLOAT.search(self.opcode) or "tensor" in self.parts)

    @property
    def text(self) -> str:
        guard = f"@{'' if self.guard[1] else '!'}{self.guard[0]} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}".strip()


@dataclass(frozen=True)
class Edge:
    """A step to another block, taken when the condition's register has the condition's value."""

    target: int
    condition: tuple[str, bool] | None = None


@dataclass
class Block:
    """Instructions without a branch between them, and where they lead."""

    index: int
    instructions: list[Instruction]
    edges: list[Edge] = field(default_factory=list)


@dataclass
class Function:
    """One ``.entry`` or ``.func`` with a body."""

    name: str
    is_entry: bool
    threads: tuple[int, int, int] | None  # from .reqntid
    instructions: list[Instruction]
    blocks: list[Block]

    @cached_property
    def definitions(self) -> dict[str, list[Instruction]]:
        """Register -> the instructions that write it."""
        table: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for register in instruction.results:
                table.setdefault(register, []).append(instruction)
        return table

    @cached_property
    def block_of(self) -> dict[int, int]:
        return {i.index: block.index for block in self.blocks for i in block.instructions}

    @cached_property
    def join(self) -> dict[int, int]:
        """Block -> the first block that every path from it must reach; EXIT if there is none."""
        return _immediate_postdominators(self.blocks)

    def reach(self, starts: Iterable[int], stops: set[int]) -> set[int]:
        """Blocks that a path from one of `starts` visits before it visits one of `stops`."""
        found, todo = set(), list(starts)
        while todo:
            block = todo.pop()
            if block not in found and block not in stops and block != EXIT:
                found.add(block)
                todo += [edge.target for edge in self.blocks[block].edges]
        return found

    @cached_property
    def loops(self) -> list[frozenset[int]]:
        """The natural loops of a reducible graph, smallest first."""
        predecessors: dict[int, list[int]] = {}
        for block in self.blocks:
            for edge in block.edges:
                predecessors.setdefault(edge.target, []).append(block.index)
        bodies: dict[int, set[int]] = {}
        for block, head in _back_edges(self.blocks):
            body, todo = bodies.setdefault(head, {head}), [block]
            while todo:
                b = todo.pop()
                if b not in body:
                    body.add(b)
                    todo += predecessors[b]
        return sorted((frozenset(body) for body in bodies.values()), key=len)

    def slice(self, registers: Iterable[str]) -> Iterator[Instruction]:
        """Every instruction that registers are computed by, back to loads and atomics."""
        todo = list(registers)
        seen = set(todo)
        while todo:
            for i in self.definitions.get(todo.pop(), ()):
                yield i
                if i.base not in ("ld", "atom"):
                    todo += [r for r in i.sources if r not in seen]
                    seen |= set(i.sources)


def parse(text: str) -> list[Function]:
    """The functions of a PTX module that have a body; CertificateError for text that is not PTX."""
    target(text)
    text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
    text = re.sub(r"^[ \t]*\.(loc|file)\b[^\n]*", "", text, flags=re.M)
    functions, position = [], 0
    while found := _FUNCTION.search(text, position):
        stop = re.compile(r"[{;]").search(text, found.end())
        if stop is None:
            raise CertificateError(f"ptx: a .{found.group(1)} without a body or a semicolon")
        header, position = text[found.end() : stop.start()], stop.end()
        if stop.group() == "{":
            end = _closing_brace(text, stop.start())
            line = text.count("\n", 0, stop.end()) + 1
            functions.append(_function(found.group(1), header, text[stop.end() : end], line))
            position = end
    return functions


def target(text: str) -> str:
    """The ``.target`` of a PTX module, ``"sm_90a"``."""
    found = re.search(r"^\s*\.target\s+(\w+)", text, re.M)
    if not found:
        raise CertificateError("ptx: expected a PTX module with a .target line, got other text")
    return found.group(1)


def _closing_brace(text: str, start: int) -> int:
    depth = 0
    for found in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if found.group() == "{" else -1
        if depth == 0:
            return found.start()
    raise CertificateError("ptx: unbalanced braces")


class _Scope:
    """One pair of braces: the labels and registers declared in it."""

    def __init__(self, parent: _Scope | None, number: int):
        self.parent, self.number = parent, number
        self.labels: dict[str, int] = {}
        self.registers: set[str] = set()

    def register(self, token: str) -> str | None:
        """The unique name of a register, or None for a token that is not one."""
        if SPECIAL.match(token):
            return None
        scope: _Scope | None = self
        while scope:
            if token in scope.registers:
                return f"{token}@{scope.number}" if scope.parent else token
            scope = scope.parent
        return token if token.startswith("%") else None

    def label(self, name: str) -> int:
        scope: _Scope | None = self
        while scope:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        raise CertificateError(f"ptx: a branch to {name!r}, a label that is not there")


def _statements(body: str, line: int) -> Iterator[tuple[str, str, int]]:
    """("open" | "close" | "label" | "statement", text, line) in order."""
    at = 0
    while at < len(body):
        char = body[at]
        if char.isspace():
            line += char == "\n"
            at += 1
        elif char in "{}":
            yield ("open" if char == "{" else "close"), char, line
            at += 1
        elif found := _LABEL.match(body, at):
            yield "label", found.group(1), line
            line += found.group().count("\n")
            at = found.end()
        else:
            end = body.find(";", at)
            if end < 0:
                raise CertificateError(f"ptx: line {line}: a statement without a semicolon")
            yield "statement", body[at:end], line
            line += body.count("\n", at, end)
            at = end + 1


def _function(kind: str, header: str, body: str, line: int) -> Function:
    name = re.sub(r"^\s*\([^)]*\)", "", header).strip().split("(")[0].split()[0]
    scope, scopes = _Scope(None, 0), 1
    raw: list[tuple[str, int, _Scope]] = []
    tables: dict[str, list[str]] = {}
    last_label = ""
    for what, text, at in _statements(body, line):
        if what == "open":
            scope, scopes = _Scope(scope, scopes), scopes + 1
        elif what == "close":
            scope = scope.parent or scope
        elif what == "label":
            scope.labels[text], last_label = len(raw), text
        elif text.startswith(".reg"):
            declared = text.split(None, 2)[2] if len(text.split(None, 2)) > 2 else ""
            scope.registers |= {t for t in re.findall(r"[%\w$]+", declared) if not t.isdigit()}
        elif text.startswith(".branchtargets"):
            tables[last_label] = re.findall(r"[\w$]+", text[len(".branchtargets") :])
        elif not text.startswith("."):
            raw.append((" ".join(text.split()), at, scope))
    instructions = [_instruction(i, text, at, where) for i, (text, at, where) in enumerate(raw)]
    threads = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", header)
    size = tuple(int(n or 1) for n in threads.groups()) if threads else None
    blocks = _blocks(instructions, [where for _, _, where in raw], tables)
    return Function(name, kind == "entry", size, instructions, blocks)


def _split(text: str) -> list[str]:
    """Operands separated by the commas that are outside brackets."""
    out, depth, begin = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "[{(") - (char in "]})")
        if char == "," and depth == 0:
            out.append(text[begin:at].strip())
            begin = at + 1
    last = text[begin:].strip()
    return [*out, last] if last else out


def _instruction(index: int, text: str, line: int, scope: _Scope) -> Instruction:
    guard = None
    if found := re.match(r"@(!?)([%\w$]+)\s+", text):
        guard = (scope.register(found.group(2)) or found.group(2), not found.group(1))
        text = text[found.end() :]
    opcode, _, rest = text.partition(" ")
    operands = _split(rest)

    def registers(some: Iterable[str]) -> tuple[str, ...]:
        tokens = (scope.register(t) for operand in some for t in _TOKEN.findall(operand))
        return tuple(t for t in tokens if t)

    base = opcode.split(".", 1)[0]
    writes = bool(operands) and base not in _NO_RESULT and not operands[0].startswith("[")
    if base == "call":
        writes = operands[0].startswith("(")
    results = registers(operands[:1]) if writes else ()
    # a wgmma accumulator is read as well as written
    sources = registers(operands if base == "wgmma" or not writes else operands[1:])
    return Instruction(index, line, guard, opcode, tuple(operands), results, sources)


def _blocks(
    instructions: list[Instruction], scopes: list[_Scope], tables: dict[str, list[str]]
) -> list[Block]:
    end = len(instructions)

    def targets(i: Instruction) -> list[int]:
        if i.base == "bra":
            return [scopes[i.index].label(i.operands[0])]
        if i.base == "brx":
            return [scopes[i.index].label(name) for name in tables[i.operands[1]]]
        return []

    leaders = {0}
    for i in instructions:
        if i.base in _ENDS or i.base in ("bra", "brx"):
            leaders |= {i.index + 1, *targets(i)}
    starts = sorted(s for s in leaders if s < end)
    number = {start: n for n, start in enumerate(starts)}
    number[end] = EXIT
    blocks = []
    for n, start in enumerate(starts):
        stop = starts[n + 1] if n + 1 < len(starts) else end
        block = Block(n, instructions[start:stop])
        last = instructions[stop - 1]
        jumps = [number[t] for t in targets(last)] or ([EXIT] if last.base in _ENDS else [])
        block.edges = [Edge(t, last.guard) for t in jumps]
        if not jumps:
            block.edges = [Edge(number[stop])]
        elif last.guard:
            block.edges.append(Edge(number[stop], (last.guard[0], not last.guard[1])))
        blocks.append(block)
    return blocks


def _back_edges(blocks: list[Block]) -> list[tuple[int, int]]:
    """(from, to) of the edges that return to a block on the current path of a depth-first walk."""
    found: list[tuple[int, int]] = []
    done: set[int] = {EXIT}
    path: dict[int, Iterator[Edge]] = {0: iter(blocks[0].edges)}
    while path:
        block = next(reversed(path))
        for edge in path[block]:
            if edge.target in path:
                found.append((block, edge.target))
            elif edge.target not in done:
                path[edge.target] = iter(blocks[edge.target].edges)
                break
        else:
            done.add(block)
            del path[block]
    return found


def _immediate_postdominators(blocks: list[Block]) -> dict[int, int]:
    """Post-dominators by the iteration of Cooper, Harvey and Kennedy (2001), from EXIT."""
    before: dict[int, list[int]] = {}
    for block in blocks:
        for edge in block.edges:
            before.setdefault(edge.target, []).append(block.index)
    order, seen, stack = [], {EXIT}, [(EXIT, iter(before.get(EXIT, ())))]
    while stack:
        node, rest = stack[-1]
        other = next((b for b in rest if b not in seen), None)
        if other is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(other)
            stack.append((other, iter(before.get(other, ()))))
    rank = {node: n for n, node in enumerate(order)}  # EXIT ranks highest
    found = {EXIT: EXIT}

    def meet(a: int, b: int) -> int:
        while a != b:
            if rank[a] < rank[b]:
                a = found[a]
            else:
                b = found[b]
        return a

    changed = True
    while changed:
        changed = False
        for node in order[-2::-1]:
            known = [e.target for e in blocks[node].edges if e.target in found]
            best = functools.reduce(meet, known)
            if found.get(node) != best:
                found[node], changed = best, True
    return {block.index: found.get(block.index, EXIT) for block in blocks}
