"""Options of a patch and its report: replaced parts, parts left, and what is known of those."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple


class Kind(enum.Enum):
    """Kind of the reason why a part is left."""

    OPTION = "an option of the patch leaves it"
    HIDDEN = "a forward in the module hides that of its class"
    DRAWN = "random numbers in training"
    SEQUENCES = "it follows the longest sequence of the batch"
    NOT_COVERED = "known not to be covered, before it runs"
    EXPERTS = "experts, whose sums are those of their implementation"
    ATTENTION = "the attention of a config"
    NOT_TAKEN = "no op of ours takes it"
    NAMED = "its code names an op of torch"
    WRAPPED = "a forward around a reviewed one names an op of torch, and may have other ways"
    ELSEWHERE = "computed outside of the rows of the model, or of the model"
    RUNS = "it ran, and is not exact"
    ROWS = "its rows follow more than they may"
    NOT_OBSERVED = "the model did not run"


#: Kinds that no observation can disprove.
STAYING = {
    Kind.OPTION, Kind.HIDDEN, Kind.DRAWN, Kind.SEQUENCES, Kind.NOT_COVERED, Kind.EXPERTS,
    Kind.WRAPPED,
}  # fmt: skip


@dataclass(frozen=True)
class Replaced:
    """One part that one of our ops computes now.

    Attributes:
        name: Of the module, as ``named_modules`` has it; empty for the model itself.
        part: Its class, or what in it was replaced.
        by: What computes it.
    """

    name: str
    part: str
    by: str


@dataclass(frozen=True)
class Left:
    """One part that torch, or another library, still computes.

    Attributes:
        name, part: As in `Replaced`.
        known: Why it was left, and what is known of its bits.
        moves: Whether its bits are known, or have to be expected, to follow the rest of the batch,
            where the model is now.  ``strict`` refuses a model with such parts.
        kind: Of the reason.
    """

    name: str
    part: str
    known: str
    moves: bool = True
    kind: Kind = Kind.NOT_TAKEN


@dataclass(frozen=True)
class Skipped:
    """One part that the caller left out: its outputs and gradients are the caller's promise.

    Attributes:
        name, part: As in `Replaced`.
        trained: Whether a parameter in it requires a gradient.
    """

    name: str
    part: str
    trained: bool


@dataclass(frozen=True)
class Report:
    """Result of `patch`; printed, it is a table.

    Attributes:
        family: transformers' name of the architecture if it is one that we know; else None.
        replaced, left: The parts, in the order of ``named_modules``.
        main_grad_left: Parameters that require a gradient and whose gradient goes to ``grad`` even
            with ``main_grad=True``: biases of linears, and those of parts that were left.
        main_grad_shared: With ``main_grad=True``, parameters that several modules add into, as tied
            embeddings are.  A sum of theirs follows the split into micro-batches: in one batch all
            of one module's tokens come first, in two those of both modules in turn.
        main_grad_broadcast: With ``main_grad=True``, parameters of learned positions that the model
            may look up once and broadcast over the batch: their sums follow the split as well,
            unless position_ids [B, T] are given.  GPT-2's, GPT-BigCode's, GPT-Neo's and BERT's are
            looked up for each sequence.
        granularity: Micro-batches that are cut at multiples of this many tokens leave the bits of
            one batch in every other ``main_grad``.
        skipped: The outermost parts that ``skip`` names; ``complete`` says nothing of them.
        ran: Where a copy of the model was observed, (name of a module, op of ours that it called);
            empty where nothing was observed.
    """

    family: str | None
    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]
    main_grad_left: tuple[str, ...] = ()
    main_grad_shared: tuple[str, ...] = ()
    main_grad_broadcast: tuple[str, ...] = ()
    granularity: int = 1
    ran: tuple[tuple[str, str], ...] = ()
    skipped: tuple[Skipped, ...] = ()

    @property
    def moving(self) -> tuple[Left, ...]:
        """Parts left whose bits follow the batch."""
        return tuple(part for part in self.left if part.moves)

    @property
    def complete(self) -> bool:
        """Whether nothing was left whose bits are known to follow the batch; see ``skipped``."""
        return not self.moving

    def __str__(self) -> str:
        lines = [f"family: {self.family or 'none that is known'}", "replaced:"]
        lines += _grouped((f"{r.part} -> {r.by}", r.name) for r in self.replaced)
        for title, moves in (("left, and moves bits:", True), ("left:", False)):
            rows = [part for part in self.left if part.moves is moves]
            lines += [title] * bool(rows)
            lines += _grouped((f"{part.part}: {part.known}", part.name) for part in rows)
        if self.skipped:
            lines.append("skipped (not promised):")
            rows = [
                (f"{s.part}, {'trained' if s.trained else 'frozen'}", s.name) for s in self.skipped
            ]
            lines += _grouped(rows)
        for title, names in (
            ("is not written:", self.main_grad_left),
            ("follows the micro-batches (several modules add into it):", self.main_grad_shared),
            ("may follow the micro-batches (give position_ids [B, T]):", self.main_grad_broadcast),
        ):
            if names:
                lines += [f"main_grad {title}", f"  {_list_names(names)}"]
        return "\n".join(lines)

    #: A notebook shows the table.
    __repr__ = __str__


def _grouped(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each text, with the count and names of its parts."""
    ordered = sorted(rows, key=lambda row: row[0])
    lines = []
    for text, group in groupby(ordered, key=lambda row: row[0]):
        names = [name or "the model" for _, name in group]
        lines.append(f"  {len(names):4d} x {text}  ({_list_names(names)})")
    return lines


def _list_names(names: Sequence[str]) -> str:
    overflow = f", and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + overflow


# ---- options -------------------------------------------------------------------------------------

LOGP, LOGITS = "linear_logp", "linear"
#: Attribute of a module that is cut over the ranks of a mesh (../parallel).
CUT = "_cute_kernels_parallel"


class Options(NamedTuple):
    """Options of a patch; see `patch.patch`."""

    linear: bool
    norm: bool
    attention: bool
    embedding: bool
    logits: str
    order: str
    main_grad: bool
    skip: str | Sequence[str] | None = ()
