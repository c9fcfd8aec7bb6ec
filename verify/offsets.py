"""Rule R4: offsets into global memory are widened to 64 bits before they are multiplied."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from . import ptx
from .report import Finding
from .sass import at

_NARROW_PRODUCT = re.compile(r"(mul|mad)\.lo\.[sub]32$|shl\.b32$")
_WIDENS = re.compile(r"cvt\.[su]64\.[su]32$|(mul|mad)\.wide\.[su]32$|mov\.b64$")
_LINEAR = {"add", "sub", "mul", "mad", "shl", "neg", "mov", "selp", "min", "max", "or", "cvt"}
_SIZES = {"%laneid": 31, "%ctaid.y": 65535, "%ctaid.z": 65535, "%cluster_ctarank": 15}
_INT32 = 1 << 31


def _literal(text: str) -> int | None:
    return int(text, 0) if re.match(r"-?(0x[0-9a-fA-F]+|0|[1-9]\d*)$", text) else None


def touches_global(i: ptx.Instruction) -> bool:
    """Whether an instruction reads or writes global memory."""
    if i.base in ("ld", "st", "atom", "red", "multimem", "ldu"):
        return not {"param", "shared", "local", "const"} & i.parts
    if i.base == "cp":
        return "async" in i.parts and not {"wait_group", "commit_group", "wait_all"} & i.parts
    return False


class Offsets:
    """R4 for one function: no 32-bit product that may wrap is part of a global address.

    Followed from every 32-bit multiplication or shift that may exceed 2^31 in magnitude, through
    additions, copies and further multiplications, to a 64-bit register and from there to the
    address of an access to global memory.  A product may wrap if both factors are unknown, or if
    one is unknown and the other a constant above ``max_step``.  Bounds come from tid, laneid,
    ctaid.y, ctaid.z, masks, shifts, remainders and narrow loads.

    Limits: ``max_step`` draws the line between a coordinate (``block * 128 + thread``, which the
    caller keeps below 2^31) and an offset (``row * 7168``): an offset with a stride of at most
    ``max_step`` passes.  A product that is divided again counts as an index, and x - q * d as a
    remainder where q comes from dividing x.  Offsets that a loop only adds to are not seen, nor are
    32-bit coordinates of tensor copies, which are 32-bit by definition.
    """

    def __init__(self, function: ptx.Function, max_step: int):
        self.function, self.max_step = function, max_step
        self._bounds: dict[str, int | None] = {}
        self.readers: dict[str, list[ptx.Instruction]] = {}
        for i in function.instructions:
            for register in i.sources:
                self.readers.setdefault(register, []).append(i)

    def findings(self) -> Iterator[Finding]:
        for i in self.function.instructions:
            wraps = _NARROW_PRODUCT.match(i.opcode) and self._may_wrap(i)
            if wraps and (access := self._reaches(i)):
                why = f"32 bits wide, but part of the address on line {access.line}"
                yield at("R4", self.function, i, why)

    def _may_wrap(self, i: ptx.Instruction) -> bool:
        a, b = i.operands[1:3]
        if i.base == "shl" and a.isdigit():
            return False  # a mask
        literals = [n for text in (a, b) if (n := _literal(text)) is not None]
        bounds = [self.bound(a), self.bound(b)]
        if i.base == "shl" and bounds[1] is not None:
            bounds[1] = 1 << min(bounds[1], 32)
            literals = [1 << literals[0]] if literals else []
        if None not in bounds and bounds[0] * bounds[1] < _INT32:
            return False
        return abs(literals[0]) > self.max_step if literals else not self._is_remainder(i)

    def _is_remainder(self, i: ptx.Instruction) -> bool:
        """Whether i computes x - q * d with a factor q that comes from dividing x."""
        if i.base == "mad":
            factors, whole = i.operands[1:3], i.operands[3]
        elif i.base == "sub" and len(made := self.function.definitions.get(i.operands[2], ())) == 1:
            factors, whole = made[0].operands[1:3], i.operands[1]
            if not made[0].opcode.startswith("mul.lo"):
                return False
        else:
            return False
        return any(
            whole in step.sources and step.base in ("div", "mul") and "lo" not in step.parts
            for step in self.function.slice(factors)
        )

    def _reaches(self, product: ptx.Instruction) -> ptx.Instruction | None:
        """The access to global memory that a 32-bit product ends in, widened after it."""
        seen: set[tuple[str, bool]] = set()
        todo = [(register, False) for register in product.results]
        while todo:
            register, wide = todo.pop()
            if (register, wide) in seen:
                continue
            seen.add((register, wide))
            for i in self.readers.get(register, ()):
                if wide and touches_global(i) and self._addresses(i, register):
                    return i
                linear = i.base in _LINEAR and "hi" not in i.parts
                if linear and not ptx.FLOAT.search(i.opcode) and not self._is_remainder(i):
                    todo += [(r, wide or bool(_WIDENS.match(i.opcode))) for r in i.results]
        return None

    @staticmethod
    def _addresses(i: ptx.Instruction, register: str) -> bool:
        name = re.compile(re.escape(register.split("@")[0]) + r"\b")
        return any(operand.startswith("[") and name.search(operand) for operand in i.operands)

    def bound(self, text: str) -> int | None:
        """The largest magnitude of an operand; None if nothing is known."""
        if (number := _literal(text)) is not None:
            return abs(number)
        if text.startswith("%tid."):
            size = self.function.threads or (1024, 1024, 64)
            return size["xyz".index(text[-1])] - 1
        if text in _SIZES:
            return _SIZES[text]
        if text not in self._bounds:
            self._bounds[text] = None
            definitions = self.function.definitions.get(text, ())
            if len(definitions) == 1 and len(definitions[0].results) == 1:
                self._bounds[text] = self._computed(definitions[0])
        return self._bounds[text]

    def _computed(self, i: ptx.Instruction) -> int | None:
        known = [self.bound(operand) for operand in i.operands[1:]]
        if i.base == "ld":
            return {"u8": 255, "u16": 65535}.get(i.opcode.rsplit(".", 1)[-1])
        if i.base in ("and", "rem"):  # a mask, a divisor
            least = [n for text in i.operands[1:] if (n := _literal(text)) is not None and n > 0]
            return min(least) if least else None
        if i.base == "shr" and known[1] is not None:
            return (2 * _INT32 if known[0] is None else known[0]) >> known[1]
        if None in known or i.base not in _BOUNDS:
            return None
        return _BOUNDS[i.base](*known[:3])


_BOUNDS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("mov", "cvt", "shfl", "neg", "abs"), lambda a, *_: a),
    **dict.fromkeys(("add", "sub", "or", "xor"), lambda a, b: a + b),
    **dict.fromkeys(("min", "max"), max),
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "shl": lambda a, b: a << min(b, 32),
}
