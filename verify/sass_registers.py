"""Registers that a SASS instruction reads and writes, and the blocks of a function of SASS.

SASS names the first register of each operand.  How many follow is in the opcode's modifiers; where
it is not known for certain, more count as touched, never fewer.
"""

from __future__ import annotations

import re

from cute_kernels.errors import CertificateError

from .sass import Function, Instruction

_REGISTER = re.compile(r"(?<![\w])R(\d+)\b(\.64)?")
_PREDICATE = re.compile(r"!?U?P(\d|T)$")
_LABEL = re.compile(r"`\((.+?)\)")
_SHAPE = re.compile(r"\.64x(\d+)x\d+\.(\w+)")
#: No result in a register, though their first operand may be one.
_NO_RESULT = {"BAR", "BRX", "JMX", "RET", "CALL", "NANOSLEEP", "WARPSYNC", "R2UR", "BREAK", "BPT"}
#: A predicate first, and then a register that is read.
_ONLY_PREDICATE = {"FCHK", "R2P", "SYNCS", "BRA", "WARPSYNC"}
#: Control goes nowhere else than to the label, or to no place in this function.
_LEAVES = {"EXIT", "RET", "KILL", "BPT"}
_JUMPS = {"BRA", "JMP"}


def product(i: Instruction) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Registers of the accumulators and of operand A of a WGMMA: A may have none.

    Raises:
        CertificateError: an opcode or operands of another form.
    """
    shape = _SHAPE.search(i.opcode)
    operands = [operand.removesuffix(".reuse") for operand in i.operands]
    descriptor = next((n for n, text in enumerate(operands) if text.startswith("gdesc[")), 0)
    # D, A if it is in registers, descriptors, and C, which is D or zero.
    registers, addend = operands[:descriptor], operands[descriptor + 1 : descriptor + 2]
    known = shape is not None and 1 <= descriptor <= 2 and addend in (["RZ"], operands[:1])
    numbers = [int(found.group(1)) for o in registers if (found := _REGISTER.fullmatch(o))]
    if shape is None or not known or len(numbers) != descriptor:
        raise CertificateError(f"sass: a WGMMA of an unknown form: {i.text}")
    count = int(shape.group(1)) // (4 if shape.group(2) == "F16" else 2)
    return _names(numbers[0], count), _names(numbers[1], 4) if descriptor == 2 else ()


def accesses(i: Instruction) -> tuple[set[str], set[str]]:
    """Registers that an instruction, which is no WGMMA, reads, and those that it writes."""
    width = _width(i)
    reads: set[str] = set()
    writes: set[str] = set()
    position = _result(i)
    for index, operand in enumerate(i.operands):
        for found in _REGISTER.finditer(operand):
            number = int(found.group(1))
            if index == position:
                writes |= set(_names(number, width))
            else:
                reads |= set(_names(number, _read(i, operand, bool(found.group(2)), width)))
    return reads, writes


def _result(i: Instruction) -> int | None:
    """Index of the operand that is the result, None if no register is written."""
    first = i.operands[0]
    if i.base in _NO_RESULT or "[" in first:
        return None
    if _REGISTER.match(first):
        return 0
    if not _PREDICATE.match(first) or i.base in _ONLY_PREDICATE or len(i.operands) < 2:
        return None
    return 1 if _REGISTER.match(i.operands[1]) else None


def _width(i: Instruction) -> int:
    """Registers of a result, and of the value that a store writes."""
    if i.base == "CS2R":
        return 1 if "32" in i.parts else 2
    if i.base in ("LDSM", "STSM", "MOVM"):
        return max((int(n) for n in i.parts & {"2", "4"}), default=1)
    if i.base.endswith("MMA"):
        return 4
    wide = {"64", "WIDE", "F64", "TRANS64"} | ({"S64", "U64"} if i.base == "F2I" else set())
    if "128" in i.parts:
        return 4
    double = i.base in ("DADD", "DMUL", "DFMA", "DMNMX", "DSETP")
    return 2 if double or wide & i.parts else 1


def _read(i: Instruction, operand: str, pair: bool, width: int) -> int:
    """Registers that a source operand has."""
    if "[" in operand:
        return 2 if pair else 1
    if i.base == "SYNCS":  # a count, a parity, or the upper word of a barrier's state
        return 1
    if "WIDE" in i.parts:
        sources = [o for o in i.operands[1:] if not _PREDICATE.match(o)]
        return 2 if sources[2:] and operand is sources[2] else 1
    return width


def _names(first: int, count: int) -> tuple[str, ...]:
    return tuple(f"R{number}" for number in range(first, first + count))


def blocks(function: Function) -> list[tuple[list[Instruction], list[int]]]:
    """Each block of a function's instructions, with the numbers of those that may follow it.

    A ``BSYNC`` goes on behind itself or where a ``BSSY`` of its register that reaches it says; a
    call enters what it calls, and goes on behind it.

    Raises:
        CertificateError: a branch to a register, or to a label that is not in the function.
    """
    code = function.instructions
    index_of = {i.address: n for n, i in enumerate(code)}
    ends = {label: index_of.get(address, len(code)) for label, address in function.labels.items()}
    joins = {i: _target(function, i, ends) for i in code if i.base == "BSSY"}
    after = {n: _following(function, n, ends) for n, i in enumerate(code) if _branches(i)}
    places = {0, *(n + 1 for n in after), *(t for ts in after.values() for t in ts)}
    starts = sorted(start for start in places | set(joins.values()) if start < len(code))
    number = {start: n for n, start in enumerate(starts)}
    out = []
    for start, end in zip(starts, [*starts[1:], len(code)], strict=True):
        targets = [number[t] for t in after.get(end - 1, [end]) if t in number]
        out.append((list(code[start:end]), targets))
    _add_joins(out, {i: number[start] for i, start in joins.items() if start in number})
    return out


def _add_joins(out: list[tuple[list[Instruction], list[int]]], joins: dict) -> None:
    """Add to each block that ends with a BSYNC where the BSSY that reach it say.

    joins: BSSY -> the block that it names.  A register that a BMOV restores may be any of them.
    """
    restored: dict[str, frozenset[int]] = {}
    for bssy, place in joins.items():
        restored[bssy.operands[0]] = restored.get(bssy.operands[0], frozenset()) | {place}
    reaching: dict[int, dict[str, frozenset[int]]] = {0: {}}
    todo = [0] if out else []
    while todo:
        number = todo.pop()
        run, targets = out[number]
        state = dict(reaching[number])
        for i in run:
            register = i.operands[0]
            if i in joins:
                state[register] = frozenset({joins[i]})
            elif i.base == "BMOV" and register in restored:
                state[register] = restored[register]
        if run[-1].base == "BSYNC":
            targets += sorted(state.get(run[-1].operands[0], frozenset()) - {*targets})
        for target in targets:
            known = reaching.get(target)
            met = dict(known or {})
            for register, places in state.items():
                met[register] = met.get(register, frozenset()) | places
            if known is None or met != known:
                reaching[target] = met
                todo.append(target)


def _branches(i: Instruction) -> bool:
    labelled = any(_LABEL.search(operand) for operand in i.operands) and i.base != "BSSY"
    return labelled or i.base in _LEAVES | {"BSYNC", "BRX", "JMX", "BRXU", "JMXU", "CALL"}


def _target(function: Function, i: Instruction, ends: dict[str, int]) -> int:
    label = next((m.group(1) for o in i.operands if (m := _LABEL.search(o))), "")
    if label not in ends:
        raise CertificateError(f"sass: {function.name}: {i.place}: {i.text}: not followed")
    return ends[label]


def _following(function: Function, n: int, ends: dict[str, int]) -> list[int]:
    i = function.instructions[n]
    if i.base in _LEAVES:
        return [n + 1] if i.guard else []
    if i.base == "BSYNC":
        return [n + 1]
    target = _target(function, i, ends)
    always = i.base in _JUMPS and not i.guard and len(i.operands) == 1
    return [target] if always and not i.opcode.startswith("BRA.") else [target, n + 1]
