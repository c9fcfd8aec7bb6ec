"""Rule R6: the registers that warpgroups hold after setmaxnreg fit what their CTA started with."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from . import ptx, ptx_paths, sass
from .report import Finding, RegisterPool
from .sass import at

WARPGROUP = 128  # threads


class Registers(NamedTuple):
    """Registers of a thread on a path: now, the most since its first setmaxnreg, the last one."""

    now: int
    most: int | None = None
    last: int = -1


class Pool:
    """R6 for one kernel: a setmaxnreg.inc never waits for registers that do not exist.

    The CTA's pool is what it starts with, the kernel's registers for each thread.  Which
    setmaxnreg a warpgroup executes follows from branches on the thread's index; a branch on
    anything else is taken both ways.  A warpgroup counts with the most that it holds after its
    first setmaxnreg, one that executes none with what it started with; together they must fit.

    Limits: a warpgroup is taken to come to its first setmaxnreg, so one that waits before it for a
    warpgroup that waits for its registers is not seen; nor is one whose threads part on data.
    """

    def __init__(self, function: ptx.Function, registers: int):
        self.function = function
        self.start = -(-registers // 8) * 8  # the hardware gives registers in eights
        self.values = ptx_paths.Values(function)
        self.steps = [i for i in function.instructions if i.base == "setmaxnreg"]
        self.executed: set[int] = set()
        self._found: dict[tuple[int, str], Finding] = {}
        self._walked: dict[frozenset, frozenset[Registers]] = {}
        self._ahead = self._leading_to({function.block_of[i.index] for i in self.steps})
        ends = {
            b.index
            for b in function.blocks
            if b.instructions[-1].base != "trap" and any(e.target == ptx.EXIT for e in b.edges)
        }
        self._ends = self._leading_to(ends)
        self._conditions = self._choices()

    def read(self) -> tuple[RegisterPool | None, list[Finding]]:
        """Registers of the warpgroups, and findings."""
        if self.function.threads is None:
            why = "setmaxnreg without .reqntid: how many warpgroups there are is not known"
            return None, [Finding("R6", self.function.name, why)]
        x, y, z = self.function.threads
        ends = [self._held(thread) for thread in range(x * y * z)]
        held = []
        for first in range(0, len(ends), WARPGROUP):
            group = ends[first : first + WARPGROUP]
            if any(other != group[0] for other in group):
                why = f"threads {first} to {first + len(group) - 1} execute different setmaxnreg"
                self._found[first, why] = Finding("R6", self.function.name, why)
            most = [self.start if end.most is None else end.most for one in group for end in one]
            held.append(max(most, default=self.start))
        pool = RegisterPool(len(ends), self.start, tuple(held))
        if pool.asked > pool.size:
            why = (
                f"warpgroups hold {' + '.join(map(str, held))} registers per thread, {pool.asked} "
                f"> {pool.size} of {pool.threads} threads that start with {pool.start}: a "
                "setmaxnreg.inc waits for ever"
            )
            self._found[-1, why] = Finding("R6", self.function.name, why)
        return pool, list(self._found.values())

    def _leading_to(self, blocks: set[int]) -> set[int]:
        """The blocks that a path leads from to one of `blocks`."""
        found, size = set(blocks), -1
        while size != len(found):
            size = len(found)
            for block in self.function.blocks:
                if any(edge.target in found for edge in block.edges):
                    found.add(block.index)
        return found

    def _choices(self) -> dict[str, tuple]:
        """The conditions that a setmaxnreg may depend on, with the expressions of those known."""
        names = {i.guard[0] for i in self.steps if i.guard}
        for block in self._ahead:
            names |= {e.condition[0] for e in self.function.blocks[block].edges if e.condition}
        found = {name: self.values.expression(name) for name in names}
        return {name: node for name, node in found.items() if node is not None}

    def _held(self, thread: int) -> frozenset[Registers]:
        """How a thread may end; threads for which every known condition is the same share it."""
        known: dict[int, int | None] = {}
        facts = {n: _value(e, thread, self.function, known) for n, e in self._conditions.items()}
        key = frozenset((name, bool(v)) for name, v in facts.items() if v is not None)
        if key not in self._walked:
            self._walked[key] = self._walk(dict(key))
        return self._walked[key]

    def _walk(self, facts: Mapping[str, bool]) -> frozenset[Registers]:
        ends: set[Registers] = set()
        todo = [(0, Registers(self.start))]
        seen = set(todo)
        while todo:
            number, held = todo.pop()
            if number not in self._ahead:
                ends |= {held} if number in self._ends else set()
                continue
            block = self.function.blocks[number]
            for after in self._after(block, held, facts):
                for edge in block.edges:
                    taken = edge.condition is None or _agrees(facts, edge.condition)
                    item = (edge.target, after)
                    if taken and edge.target == ptx.EXIT and number in self._ends:
                        ends.add(after)
                    elif taken and edge.target != ptx.EXIT and item not in seen:
                        seen.add(item)
                        todo.append(item)
        return frozenset(ends)

    def _after(self, block: ptx.Block, held: Registers, facts: Mapping[str, bool]) -> set:
        """Registers that a thread may hold after a block."""
        ways = {held}
        for i in block.instructions:
            if i.base != "setmaxnreg" or (i.guard and not _agrees(facts, i.guard)):
                continue
            skipped = ways if i.guard and i.guard[0] not in facts else set()
            ways = {self._execute(way, i) for way in ways} | skipped
        return ways

    def _execute(self, held: Registers, i: ptx.Instruction) -> Registers:
        count = int(i.operands[0], 0)
        wrong = "above" if "dec" in i.parts and count > held.now else ""
        wrong = "below" if "inc" in i.parts and count < held.now else wrong
        if wrong:
            why = f"{wrong} the {held.now} registers that the thread holds"
            self._found.setdefault((i.index, why), at("R6", self.function, i, why))
        self.executed.add(i.index)
        return Registers(count, max(count, held.most or 0), i.index)


def register_pools(
    module: Iterable[ptx.Function], code: Iterable[sass.Function], cubin: bytes
) -> tuple[list[RegisterPool], list[Finding]]:
    """The pools of the kernels that use setmaxnreg, and the findings of R6."""
    listed = {function.name: _in_sass(function) for function in code}
    used = sass.usage(cubin)
    pools, found = [], []
    for function in module:
        if not any(i.base == "setmaxnreg" for i in function.instructions):
            continue
        if function.name not in used:
            found.append(Finding("R6", function.name, "setmaxnreg outside a kernel: not followed"))
            continue
        reader = Pool(function, used[function.name].registers)
        pool, wrong = reader.read()
        pools += [pool] if pool else []
        found += wrong
        left = listed.get(function.name, set())
        for i in reader.steps:
            kind = "DEALLOC" if "dec" in i.parts else "TRY_ALLOC"
            if i.index in reader.executed and (kind, int(i.operands[0], 0)) not in left:
                found.append(at("R6", function, i, "ptxas has left it out: it is not in SASS"))
    return pools, found


def _in_sass(function: sass.Function) -> set[tuple[str, int]]:
    """(DEALLOC or TRY_ALLOC, registers) of each USETMAXREG."""
    return {
        (i.opcode.split(".")[1], int(i.operands[-1], 0))
        for i in function.instructions
        if i.base == "USETMAXREG"
    }


def _agrees(facts: Mapping[str, bool], condition: tuple[str, bool]) -> bool:
    return facts.get(condition[0], condition[1]) == condition[1]


# What an expression of `ptx_paths.Values` is for one thread: 32-bit words as numbers below 2^32.

_WORD = 1 << 32
_COMPARE = {"eq": operator.eq, "ne": operator.ne}
_COMPARE |= {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
_COMPARE |= {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}
_BITS = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
_SUMS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


def _value(node: Any, thread: int, function: ptx.Function, known: dict) -> int | None:
    """The value for a thread, numbered through x, y, z; None if it depends on anything else."""
    if id(node) not in known:
        known[id(node)] = None
        known[id(node)] = _computed(node, thread, function, known)
    return known[id(node)]


def _computed(node: Any, thread: int, function: ptx.Function, known: dict) -> int | None:
    if node[0] == "literal":
        return int(node[1], 0) % _WORD if re.fullmatch(r"-?(0x[\da-fA-F]+|\d+)", node[1]) else None
    if node[0] == "special":
        return _special(node[1], thread, function.threads or (1, 1, 1))
    if node[0] == "parameter" or node[1] != 0:
        return None
    words, operands = node[0].split("."), node[2:]
    if words[0] == "shfl":
        return _shuffled(words, operands, thread, function)
    values = [_value(operand, thread, function, known) for operand in operands]
    return None if None in values else _calculated(words, values)


def _special(name: str, thread: int, size: tuple[int, int, int]) -> int | None:
    base, _, axis = name.partition(".")
    if base == "%laneid":
        return thread % 32
    if base not in ("%tid", "%ntid") or axis not in ("x", "y", "z"):
        return None
    x, y, _ = size
    places = (thread % x, thread // x % y, thread // (x * y))
    return (places if base == "%tid" else size)["xyz".index(axis)]


def _shuffled(words: list, operands: tuple, thread: int, function: ptx.Function) -> int | None:
    """shfl.sync.idx of a fixed lane: the value that this lane has."""
    lane, clamp = (_computed(o, thread, function, {}) for o in operands[1:3])
    if words[:3] != ["shfl", "sync", "idx"] or clamp != 31 or lane is None:
        return None
    return _value(operands[0], thread // 32 * 32 + lane % 32, function, {})


def _calculated(words: list[str], values: list[int]) -> int | None:
    kind, type_ = words[0], words[-1]
    if type_ not in ("b32", "u32", "s32", "pred"):
        return None
    signed = [v - _WORD if type_ == "s32" and v >= _WORD // 2 else v for v in values]
    if kind == "setp" and len(words) == 3:
        return int(_COMPARE[words[1]](*signed)) if words[1] in _COMPARE else None
    if kind in _BITS:
        return _BITS[kind](*values)
    if kind == "not":
        return 1 - values[0] if type_ == "pred" else _WORD - 1 - values[0]
    if kind in _SUMS and words[1] in ("lo", type_) and len(words) <= 3:
        return _SUMS[kind](*signed) % _WORD
    if kind in ("shl", "shr"):
        by = min(values[1], 32)
        return (signed[0] << by if kind == "shl" else signed[0] >> by) % _WORD
    return None
