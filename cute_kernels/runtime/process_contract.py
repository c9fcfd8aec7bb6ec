"""`Contract`: everything that the bits of one process depend on, in a form that travels.

    trainer:  ck.contract(model=model) ───────────┐
    engine:   ck.contract() -> file, RPC, dict ───┴─> ck.compare_contracts -> ContractError

Ids of single ops are `contracts`'.  This record puts them beside what no id holds: the formulas
that a model is made of, the orders of its layers, the dtype of the logits, the weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import torch

from .. import arch, contracts, systems
from ..errors import (
    ArgumentTypeError,
    ArgumentValueError,
    BackendUnavailable,
    ContractError,
    expected,
    one_of,
)
from . import dispatch

FORMAT = 2
#: Bytes of the largest file that is read.
LIMIT = 1 << 24
#: Entries of a dict besides the fields.
_BESIDES = {"format", "id"}
#: Fields that hold one text for each name -> what a difference calls an entry.  Differences are in
#: this order: what explains others comes first.
_TABLES = {
    "toolchain": "toolchain ",
    "orders": "order of ",
    "formulas": "formula of ",
    "settings": "",
    "ops": "op ",
}
#: Fields that may be None.
_OPTIONAL = ("logits_dtype", "weights", "engine")
#: Lines of a message that differ for one reason.
_MOST_LINES = 12
#: Letters of the longest version that is written out.
_MOST_LETTERS = 64
#: Entry of an op that no backend runs.
UNAVAILABLE = "unavailable"
_PACKAGE = __package__.partition(".")[0]


class Difference(NamedTuple):
    """One entry in which two contracts differ; None: the side does not have it."""

    name: str
    ours: str | None
    theirs: str | None

    def __str__(self) -> str:
        ours, theirs = ("not stated" if x is None else x for x in (self.ours, self.theirs))
        return f"{self.name}: {ours} here, {theirs} there"


@dataclass(frozen=True)
class Contract:
    """What the bits of a process depend on.  ``ck.contract`` makes one.

    Attributes:
        library: Version of cute-kernels.
        arch: Architecture of the device: ``"sm_90a"``, ``"AVX512"``.
        dtype: Of the inputs, for which the ids are: ``"bfloat16"``.
        toolchain: ``"<backend> <distribution>"`` -> version, or a digest of a long text, of the
            backends that the ops run on; and a CPU's threads.
        ops: Op -> contract id, or ``"unavailable"`` if no backend runs it there.
        orders: Kind of layer -> order of its sums.  Empty without a model.
        formulas: Part of the model -> what computes it; foreign hooks.  Empty without a model.
        settings: Name -> value of what the formulas read: windows, scales, heads, experts,
            multipliers, biases.  Empty without a model.  As orders and formulas: once if the layers
            agree, else with the numbers of the layers.
        logits_dtype: Of the logits that log-probs are made of: ``"float32"`` for those of
            ``ck.linear_logp``, which are not rounded.  None without a model.
        weights: ``"version 3, sha256 <digest>"`` of published weights; None: not stated.
        engine: Release of the engine that runs the model, and whether it was run with our plug-in;
            no part of ``id``, and not compared.
    """

    library: str
    arch: str
    dtype: str
    toolchain: Mapping[str, str]
    ops: Mapping[str, str]
    orders: Mapping[str, str] = field(default_factory=dict)
    formulas: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    logits_dtype: str | None = None
    weights: str | None = None
    engine: str | None = field(default=None, compare=False)

    @property
    def id(self) -> str:
        """Hash of all fields but ``engine``: equal ids, equal contracts."""
        compared = {name: value for name, value in asdict(self).items() if name != "engine"}
        text = json.dumps(compared, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, object]:
        """Return the fields as a plain dict of strings, dicts and None, which any RPC carries."""
        return {"format": FORMAT, **asdict(self), "id": self.id}

    @classmethod
    def from_dict(cls, values: Mapping[str, object], source: str = "contract") -> Contract:
        """Return the contract of a dict that `to_dict` made.

        Args:
            values: The dict, in any order.
            source: What an error calls it.

        Raises:
            ArgumentTypeError: it is no mapping.
            ContractError: it is of another format, lacks a field, has one that is not known, or was
                changed after it was written: its id differs.
        """
        if not isinstance(values, Mapping):
            want = "a Contract or the dict of one"
            raise ArgumentTypeError(expected(source, want, type(values).__name__))
        want = "what ck.contract() makes"
        if values.get("format") != FORMAT:
            got = f"format {values.get('format')!r}, this reads {FORMAT}"
            raise ContractError(expected(source, want, got))
        names = [f.name for f in fields(cls)]
        if absent := [name for name in names if name not in values]:
            raise ContractError(expected(source, want, f"no field {absent[0]!r}"))
        if unknown := sorted(values.keys() - {*names, *_BESIDES}, key=str):
            raise ContractError(expected(source, want, f"the unknown field {unknown[0]!r}"))
        for name in names:
            _check_field(source, name, values[name])
        tables = {name: dict(values[name]) for name in _TABLES}
        contract = cls(**{name: values[name] for name in names} | tables)
        if values.get("id") != contract.id:
            raise ContractError(
                f"{source}: changed after it was written: it states the id {values.get('id')}, and "
                f"its fields have {contract.id}"
            )
        return contract

    def save(self, path: str | os.PathLike) -> Path:
        """Write the contract to a JSON file, whole or not at all.

        A reader finds the old file or the new one, whatever kills the writer.
        """
        path = Path(path)
        text = json.dumps(self.to_dict(), indent=1, sort_keys=True) + "\n"
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with open(temporary, "x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        return path

    @classmethod
    def load(cls, path: str | os.PathLike) -> Contract:
        """Read a file that `save` wrote.

        Raises:
            ContractError: it holds no contract, or one that was cut short or changed.
            OSError: it cannot be read.
        """
        path = Path(path)
        with open(path, "rb") as file:
            content = file.read(LIMIT)
        try:
            values = json.loads(content)
        except (ValueError, RecursionError) as error:
            want = "a JSON file that Contract.save wrote"
            raise ContractError(expected(str(path), want, error)) from None
        if not isinstance(values, dict):
            raise ContractError(expected(str(path), "a JSON object", type(values).__name__))
        return cls.from_dict(values, str(path))

    def differences(self, theirs: Contract) -> list[Difference]:
        """Return the entries that differ, what explains others first."""
        mine, others = self._entries(), theirs._entries()
        keys = sorted(mine.keys() | others.keys())
        every = [Difference(key[-1], mine.get(key), others.get(key)) for key in keys]
        return [entry for entry in every if entry.ours != entry.theirs]

    def _entries(self) -> dict[tuple[int, str, str], str | None]:
        """Return what is compared: (place of the field, key in it, name of the entry) -> text."""
        plain = ("library", "arch", "dtype", "weights", "logits_dtype")
        entries = {(i, "", name): getattr(self, name) for i, name in enumerate(plain)}
        for i, (name, label) in enumerate(_TABLES.items(), len(plain)):
            entries |= {(i, key, label + key): text for key, text in getattr(self, name).items()}
        return entries


# ---- making one ---------------------------------------------------------------------------------


def of_device(
    device: torch.device | str | int | None = None,
    ops: Iterable[str] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **described: object,
) -> Contract:
    """Return the contract of this process on a device.

    Args:
        device: None: the current GPU, or the CPU where there is none.
        ops: Names of ops; None: every op that has a contract.
        dtype: Of the inputs.
        described: Fields of the model: orders, formulas, settings, logits_dtype and so on.

    Raises:
        ArgumentTypeError, ArgumentValueError: no such device, op or dtype.
    """
    systems.load()
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(expected("dtype", "a torch.dtype", repr(dtype)))
    ids = {op: _id(op, device, dtype) for op in _chosen(ops)}
    backends = sorted({i.split("/")[1] for i in ids.values() if i != UNAVAILABLE})
    versions = {
        f"{backend} {name}": _short(str(version))
        for backend in backends
        for name, version in arch.toolchain(backend).items()
    }
    facts = arch.describe(contracts._device(device))
    if arch.CPU in backends:
        versions[f"{arch.CPU} threads"] = str(facts.threads)
    return Contract(
        library=sys.modules[_PACKAGE].__version__,
        arch=facts.arch,
        dtype=str(dtype).removeprefix("torch."),
        toolchain=versions,
        ops=ids,
        **described,
    )


def _chosen(ops: Iterable[str] | None) -> list[str]:
    known = contracts.ops()
    if ops is None:
        return list(known)
    if isinstance(ops, str) or not isinstance(ops, Iterable):
        raise ArgumentTypeError(expected("ops", "names of ops, or None", repr(ops)))
    names = sorted(set(ops), key=str)
    if not names:
        raise ArgumentValueError(expected("ops", "at least one op, or None for all", "none"))
    for name in names:
        if name not in known:
            raise ArgumentValueError(one_of("ops", known, name))
    return names


def _short(text: str) -> str:
    """Return the text, or a digest of a long one (torch's build), so that a message is a line."""
    if len(text) <= _MOST_LETTERS:
        return text
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _id(op: str, device: torch.device | str | int, dtype: torch.dtype) -> str:
    try:
        return contracts.contract_id(op, device, dtype)
    except BackendUnavailable:
        return UNAVAILABLE


def ids_that_ran(device: torch.device | str) -> dict[str, str]:
    """Return op -> contract id of the ops that ran on a device in this process so far.

    An op that ran in dtypes with several ids has them all, in their order, with "and" between.

    Args:
        device: Where they ran, such as ``"cuda:0"``; ``"cuda"``: on any of them.
    """
    requested = torch.device(device)
    ids_by_op: dict[str, set[str]] = {}
    for record in dispatch.ran():
        ran_on = torch.device(record.device)
        if ran_on.type == requested.type and requested.index in (None, ran_on.index):
            # Not the id at the first launch: a CPU's number of threads may have changed since.
            dtype = getattr(torch, record.dtype)
            ids_by_op.setdefault(record.op, set()).add(
                contracts.contract_id(record.op, ran_on, dtype)
            )
    return {op: " and ".join(sorted(ids)) for op, ids in sorted(ids_by_op.items())}


# ---- comparing two ------------------------------------------------------------------------------


def compare_contracts(
    ours: Contract | Mapping[str, object], theirs: Contract | Mapping[str, object]
) -> None:
    """Check that two processes have one contract: a trainer and a rollout engine, before a step.

    Args:
        ours, theirs: A `Contract`, or the dict that its `Contract.to_dict` gave.

    Raises:
        ContractError: they differ; the message has a line for each difference, with both sides:
            an op, a formula, an order, the toolchain, the architecture, the weights.  What one
            side does not state differs from what the other states.
        ArgumentTypeError: a side is no contract.

    Example:
        >>> trainer = ck.contract('cpu', dtype=torch.bfloat16)
        >>> engine = ck.contract('cpu', dtype=torch.bfloat16)  # in the other process
        >>> ck.compare_contracts(trainer, engine)  # raises ContractMismatch, or returns None
    """
    sides = [
        side if isinstance(side, Contract) else Contract.from_dict(side, name)
        for name, side in (("ours", ours), ("theirs", theirs))
    ]
    if differing := sides[0].differences(sides[1]):
        raise ContractError(report(differing))


def report(differing: list[Difference]) -> str:
    """Return the message of an error: a line for each difference."""
    lines = ["two processes differ in their bits:"]
    lines += [f"  {difference}" for difference in differing[:_MOST_LINES]]
    if len(differing) > _MOST_LINES:
        lines.append(f"  and {len(differing) - _MOST_LINES} more")
    return "\n".join(lines)


def _check_field(source: str, name: str, value: object) -> None:
    if name in _TABLES:
        if not isinstance(value, Mapping) or not all(
            isinstance(text, str) for pair in value.items() for text in pair
        ):
            raise ContractError(expected(f"{source}[{name!r}]", "texts by name", repr(value)))
    elif not isinstance(value, str) and not (value is None and name in _OPTIONAL):
        raise ContractError(expected(f"{source}[{name!r}]", "a text", repr(value)))
