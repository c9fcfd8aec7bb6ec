"""Registers that machine code reads though nothing wrote them: a fault of ptxas.

ptxas 12.8 moves an addition to a WGMMA's descriptor to before what it adds to is made, where the
upper half of the descriptor is negative as a number: where rows of a tile have 16 or 32 numbers of
16 bits.  Such a product reads any shared memory; PTX and simulator know nothing of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from verify import sass, sass_registers

_REGISTER = re.compile(r"\b(U?R\d+)\b")
_UNIFORM = re.compile(r"UR(\d+)")
_DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
_PREDICATE = re.compile(r"!?U?P(\d|T)$")
#: Instructions without a result in uniform registers, whose operands they may be.
_NO_RESULT = re.compile("UTMA|UBLK|UCGABAR|USETM|SYNCS|ST|RED|WARPSYNC|BAR")
#: Of these alone all operands count: other instructions keep flags in bits of a register, or copy
#: what is not used.
_LOOKED_AT = {"IADD3", "UIADD3", "HGMMA"}
#: The stack's, which the driver writes.
_GIVEN = {"R1"}


def unwritten(cubin: bytes) -> list[str]:
    """Each sum or product of a cubin that reads a register which no path to it writes."""
    functions = sass.parse(sass.disassemble(cubin))
    return [f"{function.name}: {place}" for function in functions for place in _of(function)]


def _of(function: sass.Function) -> Iterator[str]:
    blocks = sass_registers.blocks(function)
    before: dict[int, set[str]] = {0: set(_GIVEN)}
    todo = [0]
    while todo:
        number = todo.pop()
        run, targets = blocks[number]
        after = before[number].union(*map(_written, run))
        for target in targets:
            if target not in before or not after <= before[target]:
                before[target] = after | before.get(target, set())
                todo.append(target)
    for number, written in before.items():  # of blocks that a path comes to
        for i in blocks[number][0]:
            if missing := _read(i) - written:
                yield f"{i.place}: {i.text}: {', '.join(sorted(missing))}"
            written |= _written(i)


def _result(i: sass.Instruction) -> int | None:
    """Index of the operand that is a result in uniform registers."""
    first = 1 if _PREDICATE.match(i.operands[0]) and len(i.operands) > 1 else 0
    if _NO_RESULT.match(i.base) or (first and "SETP" in i.base):
        return None
    return first if _UNIFORM.fullmatch(i.operands[first]) else None


def _written(i: sass.Instruction) -> set[str]:
    """Registers of the result: more where their number is not known."""
    if i.base == "HGMMA":
        return set(sass_registers.product(i)[0])
    out, place = sass_registers.accesses(i)[1], _result(i)
    if place is not None:
        number = int(_UNIFORM.match(i.operands[place]).group(1))
        wide = 2 if {"64", "S64", "U64", "WIDE"} & i.parts else 1
        out |= {f"UR{n}" for n in range(number, number + wide)}
    return out


def _read(i: sass.Instruction) -> set[str]:
    """Registers that it reads: the first of an operand, all of a product's descriptors."""
    out: set[str] = set()
    if i.base not in _LOOKED_AT:
        return out
    results = {_result(i), None if i.base == "HGMMA" else sass_registers._result(i)}
    for index, operand in enumerate(i.operands):
        if found := _DESCRIPTOR.search(operand):
            first = int(found.group(1))  # A's, which is not read if A is in registers, and B's
            out |= {f"UR{n}" for n in range(first + (0 if index == 1 else 2), first + 4)}
        elif index not in results and (i.base != "HGMMA" or index):
            out |= set(_REGISTER.findall(operand))
    return out
