"""A walk over every path that a thread can take through a function.

``Values`` tells which registers hold the same number for the whole life of a thread, so that two
branches on ``lane == 0`` are known to go the same way.  ``walk`` carries a small state along every
path and leaves out the paths on which one condition would have to be both true and false; the rules
of a certificate are such states.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cute_kernels.errors import CertificateError

from .ptx import EXIT, SPECIAL, Block, Edge, Function, Instruction

_PURE = {"mov", "add", "sub", "mul", "mad", "shl", "shr", "and", "or", "xor", "not", "neg", "setp"}
_PURE |= {"selp", "cvt", "min", "max", "div", "rem", "abs", "bfe", "bfi", "shfl", "elect", "lop3"}
_FIXED = re.compile(r"%(n?tid|laneid|n?ctaid|n?clusterid|cluster_\w+|lanemask_\w+)\b")
_OWN = re.compile(r"%(tid|laneid|lanemask_\w+)\b")
_LANE = {("special", "%tid.x"), ("literal", "31")}  # the operands of tid & 31
_OPPOSITE = {"ne": "eq", "ge": "lt", "gt": "le", "hs": "lo", "hi": "ls"}


class Values:
    """Registers of a function that are fixed for a thread, and equality between them."""

    def __init__(self, function: Function):
        self.function = function
        self._known: dict[str, tuple | None] = {}

    def expression(self, register: str) -> tuple | None:
        """A canonical form of the register's value, or None if it can change."""
        if register not in self._known:
            self._known[register] = None  # what a register that depends on itself finds
            self._known[register] = self._expression(register)
        return self._known[register]

    def _expression(self, register: str) -> tuple | None:
        definitions = self.function.definitions.get(register, ())
        if len(definitions) != 1 or definitions[0].guard:
            return None
        only = definitions[0]
        if only.base == "ld" and "param" in only.parts:
            return ("parameter", only.operands[1], only.results.index(register))
        if only.base not in _PURE:
            return None
        names = {name.split("@")[0]: name for name in only.sources}
        operands = [self._operand(names.get(text, text)) for text in only.operands[1:]]
        if None in operands:
            return None
        if only.base == "mov" and len(only.results) == 1:
            return operands[0]
        # every execution of elect.sync with one mask elects the same lane (PTX ISA)
        return (only.opcode, only.results.index(register), *operands)

    def _operand(self, text: str) -> tuple | None:
        if SPECIAL.match(text):
            return ("special", text) if _FIXED.match(text) else None
        if text.startswith("%") or text in self.function.definitions:
            return self.expression(text)
        return None if "%" in text else ("literal", text)

    def condition(self, register: str) -> tuple[Any, bool]:
        """(key, polarity): the register is true exactly when the keyed fact equals the polarity.

        The key is a canonical expression for a fixed value, else the name of the register.
        """
        definitions = self.function.definitions.get(register, ())
        only = definitions[0] if len(definitions) == 1 and not definitions[0].guard else None
        if only is not None and only.opcode == "not.pred" and self._beside(only):
            key, polarity = self.condition(only.sources[0])
            return key, not polarity
        fixed = self.expression(register)
        if fixed is None:
            return register, True
        words = fixed[0].split(".")
        if len(words) == 3 and words[0] == "setp" and words[1] in _OPPOSITE and words[2][0] != "f":
            return (f"setp.{_OPPOSITE[words[1]]}.{words[2]}", *fixed[1:]), False
        return fixed, True

    def _beside(self, negation: Instruction) -> bool:
        """Whether a negation and what it negates are always computed together."""
        inner = self.function.definitions.get(negation.sources[0], ())
        block_of = self.function.block_of
        return len(inner) == 1 and block_of[inner[0].index] == block_of[negation.index]

    def selects(self, register: str) -> int:
        """Whom the condition tells apart: 1 lanes of a warp, 2 threads of a CTA, 0 anything else.

        Nonzero only if it depends on nothing but the thread's place, so that a thread for which it
        is false has another one beside it for which it is true.
        """
        key, _ = self.condition(register)
        if not isinstance(key, tuple):
            return 0
        scope, todo = 0, [key]
        while todo:
            node = todo.pop()
            if node[0] == "literal":
                continue
            if node[0] in ("special", "parameter"):
                if node[0] == "parameter" or not _OWN.match(node[1]):
                    return 0
                scope = max(scope, 2 if node[1].startswith("%tid") else 1)
            elif node[0].startswith("elect") or (node[0] == "and.b32" and {*node[2:]} == _LANE):
                scope = max(scope, 1)
            else:
                todo += [item for item in node[2:] if isinstance(item, tuple)]
        return 1 if scope and self._one_warp() else scope

    def _one_warp(self) -> bool:
        size = self.function.threads
        return size is not None and size[0] * size[1] * size[2] <= 32


MAX_STATES = 60_000  # states of one walk; beyond it a function is refused rather than guessed at


class TooManyPaths(CertificateError):
    """A function whose paths are too many to follow; it is then not certified."""


def walk(
    function: Function,
    values: Values,
    start: Any,
    watch: Callable[[Instruction], bool],
    execute: Callable[[Any, Instruction], Any],
    skip: Callable[[Any, Instruction], Any],
    cross: Callable[[Any, Block, Edge], Any],
) -> None:
    """Carry a hashable state along every path of one thread from the entry to the end.

    `watch` names the instructions that matter; `execute` and `skip` (a guard that is false) give
    the state after one, `cross` the state after a branch.  A path is left out when a condition
    known from an earlier branch, and not computed again since, contradicts it.
    """
    tracked = _repeated_conditions(function, values, watch)
    forget = {key for key in tracked if isinstance(key, str)}
    steps = {
        b.index: [i for i in b.instructions if watch(i) or forget.intersection(i.results)]
        for b in function.blocks
    }
    todo: list[tuple[int, Any, frozenset]] = [(0, start, frozenset())]
    seen = set(todo)
    while todo:
        number, state, facts = todo.pop()
        block = function.blocks[number]
        paths = [(state, facts)]
        for i in steps[number]:
            nexts = []
            for state, facts in paths:
                for does, after in _guards(i, values, facts, tracked):
                    if watch(i):
                        state_after = (execute if does else skip)(state, i)
                    else:
                        state_after = state
                    nexts.append((state_after, _forgotten(after, forget, i)))
            paths = nexts
        for state, facts in paths:
            for edge in block.edges:
                after = _with(facts, values, edge.condition, tracked)
                if after is None:
                    continue
                item = (edge.target, cross(state, block, edge), after)
                if edge.target != EXIT and item not in seen:
                    seen.add(item)
                    todo.append(item)
        if len(seen) > MAX_STATES:
            raise TooManyPaths(f"ptx: {function.name}: more than {MAX_STATES} states")


def _repeated_conditions(function: Function, values: Values, watch: Callable) -> set:
    """Keys of the conditions around watched instructions that are met again: by their thread in a
    loop, or on another branch."""
    busy = {b.index for b in function.blocks if any(watch(i) for i in b.instructions)}
    counts: dict[Any, int] = {}
    for block in function.blocks:
        guards = [i.guard for i in block.instructions if i.guard and watch(i)]
        for edge in block.edges[:1]:
            join = function.join[block.index]
            around = function.reach([e.target for e in block.edges], {join})
            if edge.condition and around & busy:
                guards.append(edge.condition)
        for register, _ in guards:
            key, _ = values.condition(register)
            counts[key] = counts.get(key, 0) + (2 if values.selects(register) else 1)
    return {key for key, count in counts.items() if count > 1}


def _with(facts: frozenset, values: Values, condition: tuple | None, tracked: set):
    """The facts after a condition held, or None if they exclude it."""
    if condition is None:
        return facts
    key, polarity = values.condition(condition[0])
    value = condition[1] == polarity
    if (key, not value) in facts:
        return None
    return facts | {(key, value)} if key in tracked else facts


def _guards(i: Instruction, values: Values, facts: frozenset, tracked: set):
    """(executes, facts) for each way in which the guard of an instruction can come out."""
    if i.guard is None:
        return [(True, facts)]
    ways = [(True, i.guard), (False, (i.guard[0], not i.guard[1]))]
    return [
        (does, after)
        for does, condition in ways
        if (after := _with(facts, values, condition, tracked)) is not None
    ]


def _forgotten(facts: frozenset, forget: set, i: Instruction) -> frozenset:
    stale = forget.intersection(i.results)
    return frozenset(f for f in facts if f[0] not in stale) if stale else facts
