"""Rule R8: registers of a WGMMA that is in flight are left alone, in the PTX and in the SASS.

A ``wgmma.mma_async`` reads operand A from registers, and reads and writes its accumulators, until a
``wgmma.wait_group`` retires the group that it was committed with.  Until then, on every path,

- no instruction writes a register of its operand A;
- no instruction reads or writes its accumulators, but a WGMMA of the same shape that adds to the
  same ones;
- a ``wgmma.fence`` stands before the first WGMMA, and between a write of a register and the WGMMA
  that uses it, unless both are WGMMA of one shape and it is an accumulator.

Both the PTX and the SASS, where a fence is a ``WARPGROUP.ARRIVE``, are asked for all of it, with
one difference.  LLVM moves arithmetic on accumulators behind the fence that it was written before,
and ptxas puts its ``WARPGROUP.ARRIVE`` behind that: so of a register that is written between a
fence and the commit after it only the SASS is asked.

The state of a path is the age of each WGMMA in flight, the number of groups that were committed
since it was issued: ``wait_group N`` retires those older than N.  Where paths meet the younger age
counts, so a wait, a commit or a fence that may be skipped is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cute_kernels.errors import CertificateError

from . import ptx, sass, sass_registers
from .report import Finding
from .sass import at

#: A WGMMA that no group holds yet has age 0; none is waited for beyond the seventh group.
_OLDEST = 9
#: What is unfenced at the start: any register.
_START = ("", "")


@dataclass(frozen=True)
class Step:
    """Effects of one instruction on registers of WGMMA and on what is in flight.

    Attributes:
        number: of the instruction in its function; of SASS, its address.
        instruction: of PTX or SASS.
        certain: whether it always executes; one with a guard may not.
        reads, writes: registers that are operands of a WGMMA somewhere in the function.
        shape: of a WGMMA, its opcode; else "".
        a: registers of a WGMMA's operand A; none if it is in shared memory.
        accumulators: registers of a WGMMA's accumulators.
        commits, fences: whether it commits a group, whether it is a fence.
        keeps: groups that a wait leaves in flight; None if it is no wait.
    """

    number: int
    instruction: Any
    certain: bool = True
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    shape: str = ""
    a: tuple[str, ...] = ()
    accumulators: tuple[str, ...] = ()
    commits: bool = False
    fences: bool = False
    keeps: int | None = None


@dataclass
class Block:
    """Steps without a branch between them, and the blocks that may follow."""

    steps: list[Step]
    targets: list[int] = field(default_factory=list)


class Flight(NamedTuple):
    """State of a path.

    Attributes:
        ages: number of a WGMMA in flight -> groups committed since it was issued.
        unfenced: registers written since the last fence, and the shape of the WGMMA that did it.
        fenced: whether there was a fence since the last commit.
    """

    ages: dict[int, int]
    unfenced: frozenset[tuple[str, str]]
    fenced: bool

    def meet(self, other: Flight) -> Flight:
        """State that holds on both of two paths: whatever is in flight or unfenced on one."""
        ages = dict(self.ages)
        for product, age in other.ages.items():
            ages[product] = min(age, ages.get(product, age))
        return Flight(ages, self.unfenced | other.unfenced, self.fenced and other.fenced)


class InFlight:
    """R8 for one function: a fixed point over its blocks, then one pass that collects findings.

    late_writes: whether a register may be written between a fence and the commit after it.
    """

    def __init__(self, function: Any, blocks: list[Block], late_writes: bool):
        self.function, self.blocks, self.late_writes = function, blocks, late_writes
        self.products = {s.number: s for b in blocks for s in b.steps if s.shape}
        self._found: dict[tuple, Finding] = {}

    def findings(self) -> list[Finding]:
        """Instructions that touch registers of a WGMMA in flight, or need a fence."""
        if not self.products:
            return []
        before = {0: Flight({}, frozenset({_START}), False)}
        todo = [0]
        while todo:
            number = todo.pop()
            after = self._through(self.blocks[number], before[number], check=False)
            for target in self.blocks[number].targets:
                known = before.get(target)
                met = after if known is None else known.meet(after)
                if met != known:
                    before[target] = met
                    todo.append(target)
        for number, state in sorted(before.items()):
            self._through(self.blocks[number], state, check=True)
        return [self._found[key] for key in sorted(self._found)]

    def _through(self, block: Block, state: Flight, check: bool) -> Flight:
        for step in block.steps:
            if check:
                self._check(step, state)
            after = self._after(step, state)
            state = after if step.certain else state.meet(after)
        return state

    def _after(self, step: Step, state: Flight) -> Flight:
        ages, unfenced, fenced = state
        if step.shape:
            ages = ages | {step.number: 0}
        if not (self.late_writes and fenced):
            unfenced = unfenced | {(register, "") for register in step.writes}
        unfenced = unfenced | {(register, step.shape) for register in step.accumulators}
        if step.fences:
            unfenced, fenced = frozenset(), True
        if step.commits:
            fenced = False
            ages = {product: min(age + 1, _OLDEST) for product, age in ages.items()}
        if step.keeps is not None:
            ages = {product: age for product, age in ages.items() if age <= step.keeps}
        return Flight(ages, unfenced, fenced)

    def _check(self, step: Step, state: Flight) -> None:
        touched = step.reads | step.writes | {*step.a, *step.accumulators}
        for product in sorted(state.ages) if touched else ():
            self._meets(step, self.products[product])
        if not step.shape:
            return
        if _START in state.unfenced:
            self._add(step, "is not fenced", "no fence before it on a path")
        used = {r for r, _ in state.unfenced if r in step.a}
        others = {r for r, shape in state.unfenced if shape != step.shape}
        if used := used | others.intersection(step.accumulators):
            self._add(step, "is late", f"no fence since {_listed(used)} was written, on a path")

    def _meets(self, step: Step, product: Step) -> None:
        """Check a step against one WGMMA in flight."""
        a, accumulators = set(product.a), set(product.accumulators)
        if step.shape:
            same = (step.shape, step.accumulators) == (product.shape, product.accumulators)
            reads, writes = set(step.a), set() if same else set(step.accumulators)
            overwritten = a & set(step.accumulators)
        else:
            reads, writes = set(step.reads), set(step.writes)
            overwritten = a & writes
        issued = f"the WGMMA at {product.instruction.place}, which no wait has retired on a path"
        for kind, what, registers in (
            ("writes", "operand A", overwritten),
            ("writes", "accumulators", writes & accumulators),
            ("reads", "accumulators", reads & accumulators - writes),
        ):
            if registers:
                why = f"{kind} {_listed(registers)}, {what} of {issued}"
                self._add(step, f"{kind} {what}", why)

    def _add(self, step: Step, kind: str, why: str) -> None:
        """Record a finding; of one instruction the first of each kind."""
        found = at("R8", self.function, step.instruction, why)
        self._found.setdefault((step.number, kind), found)


def in_flight(module: Iterable[ptx.Function], code: Iterable[sass.Function]) -> Iterator[Finding]:
    """The findings of R8, of the PTX and of the SASS."""
    for function in module:
        if any(i.base == "wgmma" for i in function.instructions):
            yield from InFlight(function, _written(function), late_writes=True).findings()
    for listed in code:
        if not any(i.base.endswith("GMMA") for i in listed.instructions):
            continue
        try:
            blocks = _compiled(listed)
        except CertificateError as error:
            yield Finding("R8", listed.name, f"not followed: {error}")
        else:
            yield from InFlight(listed, blocks, late_writes=False).findings()


def _listed(registers: Iterable[str]) -> str:
    """Registers by name, the first four of them."""
    names = sorted(registers, key=lambda name: (len(name), name))
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


# PTX


def _written(function: ptx.Function) -> list[Block]:
    products = [i for i in function.instructions if i.opcode.startswith("wgmma.mma_async")]
    used = {name for i in products for name in (*i.results, *_operand_a(i))}
    blocks = []
    for block in function.blocks:
        steps = [_step(i, used) for i in block.instructions]
        targets = [edge.target for edge in block.edges if edge.target != ptx.EXIT]
        blocks.append(Block([step for step in steps if step is not None], targets))
    return blocks


def _operand_a(i: ptx.Instruction) -> tuple[str, ...]:
    """Registers of a WGMMA's operand A, by their unique names."""
    if not i.operands[1].startswith("{"):
        return ()
    unique = {name.split("@")[0]: name for name in i.sources}
    return tuple(unique[name] for name in re.findall(r"[%\w$]+", i.operands[1]) if name in unique)


def _step(i: ptx.Instruction, used: set[str]) -> Step | None:
    certain = i.guard is None
    if i.base == "wgmma":
        kind = i.opcode.split(".")[1]
        if kind == "mma_async":
            a = _operand_a(i)
            return Step(i.index, i, certain, shape=i.opcode, a=a, accumulators=i.results)
        keeps = int(i.operands[0], 0) if kind == "wait_group" else None
        commits, fences = kind == "commit_group", kind == "fence"
        return Step(i.index, i, certain, commits=commits, fences=fences, keeps=keeps)
    reads, writes = used.intersection(i.sources), used.intersection(i.results)
    if not reads and not writes:
        return None
    return Step(i.index, i, certain, frozenset(reads), frozenset(writes))


# SASS


def _compiled(function: sass.Function) -> list[Block]:
    products = [i for i in function.instructions if i.base.endswith("GMMA")]
    used = {name for i in products for part in sass_registers.product(i) for name in part}
    blocks = []
    for run, targets in sass_registers.blocks(function):
        steps = [_machine_step(i, used) for i in run]
        blocks.append(Block([step for step in steps if step is not None], targets))
    return blocks


def _machine_step(i: sass.Instruction, used: set[str]) -> Step | None:
    certain = not i.guard
    if i.base.endswith("GMMA"):
        accumulators, a = sass_registers.product(i)
        last = any(operand.startswith("gsb") for operand in i.operands)
        return Step(
            i.address, i, certain, shape=i.opcode, a=a, accumulators=accumulators, commits=last
        )
    if i.opcode.startswith("WARPGROUP.ARRIVE"):
        return Step(i.address, i, certain, fences=True)
    if i.opcode.startswith("WARPGROUP.DEPBAR"):
        return Step(i.address, i, certain, keeps=int(i.operands[1], 0))
    reads, writes = (used & touched for touched in sass_registers.accesses(i))
    if not reads and not writes:
        return None
    return Step(i.address, i, certain, frozenset(reads), frozenset(writes))
