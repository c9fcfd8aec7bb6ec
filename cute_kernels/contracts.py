"""The guarantees an op can keep, what each op keeps where, and the hash that names its bits.

docs/guarantees.md states each guarantee in full; tests/contract.py tests them, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from . import arch
from .errors import (
    ArgumentTypeError,
    ArgumentValueError,
    BackendUnavailable,
    NondeterministicError,
    expected,
    one_of,
)

RUN_TO_RUN = "run_to_run"
BATCH_INVARIANT = "batch_invariant"
SPLIT_INVARIANT = "split_invariant"
SCHEDULE_INVARIANT = "schedule_invariant"
TP_INVARIANT = "tp_invariant"

MEANING = {
    RUN_TO_RUN: "same inputs, same contract id: same bits, on any stream and in any process",
    BATCH_INVARIANT: "an output row depends on its own input row and the weights only",
    SPLIT_INVARIANT: "a gradient summed over tokens has the same bits however the stream is split",
    SCHEDULE_INVARIANT: "bits do not depend on SM count, launch order or occupancy",
    TP_INVARIANT: "bits do not depend on the tensor-parallel degree",
}


@dataclass(frozen=True)
class Contract:
    """Guarantees of one op.

    ``kept`` maps a backend to its guarantees.  ``facts`` maps a backend and a device to every
    constant that its bits depend on; nothing else may enter, or ids would differ for no reason.
    ``helpers`` maps a backend to others that make a part of it, whose toolchains count too.
    """

    op: str
    kept: Mapping[str, frozenset[str]]
    facts: Callable[[str, arch.Device], Mapping[str, object]]
    backend: Callable[[torch.device, torch.dtype], str]
    helpers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_CONTRACTS: dict[str, Contract] = {}
#: torch keeps an index in eight bits, and wraps larger ones.
_MAX_INDEX = 127


def _load() -> None:
    """Load the ops of every system; ``on_missing`` replaces this."""


def on_missing(load: Callable[[], None]) -> None:
    """Have ``load()`` called where `facts_of` needs an op that is not registered yet."""
    global _load
    _load = load


def register(contract: Contract) -> None:
    """Adds one op's contract; called where the op is defined."""
    _CONTRACTS[contract.op] = contract


def ops() -> tuple[str, ...]:
    """The ops that have a contract."""
    return tuple(sorted(_CONTRACTS))


def guarantees(
    op: str, device: torch.device | str | int = "cpu", dtype: torch.dtype = torch.bfloat16
) -> frozenset[str]:
    """The guarantees that ``op`` keeps on ``device`` for inputs of ``dtype``.

    Args:
        op: A public name, such as ``"linear"``.
        device: Where the inputs live.  An integer is the index of a CUDA device.
        dtype: Their dtype; it can decide the backend (fp32 runs on Triton on SM90).

    Returns:
        A set of the names in docs/guarantees.md, for example ``{"run_to_run", "batch_invariant"}``.

    Raises:
        ArgumentTypeError: ``op`` is no string, or ``device`` no device, string or integer.
        ArgumentValueError: ``op`` has no contract, or torch knows no such device.
        BackendUnavailable: no backend runs it there; the message says why, backend by backend.

    Example:
        >>> 'batch_invariant' in ck.guarantees('linear', 'cpu')
        True
    """
    contract = _contract(op)
    return contract.kept[_backend(contract, _device(device), dtype)]


def contract_id(
    op: str, device: torch.device | str | int = "cpu", dtype: torch.dtype = torch.bfloat16
) -> str:
    """A hash of everything the bits of ``op`` on ``device`` depend on besides its inputs.

    Two processes of one version of this library whose ids are equal produce equal bits from equal
    inputs: a trainer and a rollout engine can compare them before they start.  It covers the
    summation order, the constants of plans, the instruction family, the backend, the architecture
    and the toolchain's versions; a change of a kernel's arithmetic changes one of these constants.

    Args, Raises: as `guarantees`.

    Returns:
        ``"linear/cute_sm90/sm_90a/<16 hex digits>"``.

    Example:
        >>> ck.contract_id('linear', 'cpu').split('/')[0]
        'linear'
    """
    contract = _contract(op)
    device = _device(device)
    backend = _backend(contract, device, dtype)
    where = arch.describe(device)
    facts = {
        "op": op,
        "backend": backend,
        "arch": where.arch,
        "plan": contract.facts(backend, where),
        "toolchain": arch.toolchain(backend),
        **{other: arch.toolchain(other) for other in contract.helpers.get(backend, ())},
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return f"{op}/{backend}/{where.arch}/{digest}"


def facts_of(op: str, backend: str, device: arch.Device) -> Mapping[str, object]:
    """Contract facts of another op, for the contract of one that is made of that op."""
    if op not in _CONTRACTS:
        _load()
    return _contract(op).facts(backend, device)


def refuse_if_deterministic(what: str, instead: str) -> None:
    """Raises for an unordered variant while torch asks for determinism, read at call time."""
    if torch.are_deterministic_algorithms_enabled():
        raise NondeterministicError(
            f"{what} adds in arrival order and torch.use_deterministic_algorithms(True) is set; "
            f"use {instead}"
        )


def _backend(contract: Contract, device: torch.device, dtype: torch.dtype) -> str:
    """The contract's backend; an error names the op of the contract."""
    try:
        return contract.backend(device, dtype)
    except BackendUnavailable as error:
        _, colon, why = str(error).partition(": no backend")
        raise BackendUnavailable(f"{contract.op}{colon}{why}") from None


def _device(name: object) -> torch.device:
    """The device of that name or index, or an error that names the argument.

    An integer is the index of a CUDA device, as in torch, whether the device exists or not.
    """
    want = 'a torch.device, its name, such as "cpu" or "cuda:0", or an index of a CUDA device'
    if isinstance(name, bool) or not isinstance(name, torch.device | str | int):
        raise ArgumentTypeError(expected("device", want, repr(name)))
    if isinstance(name, int) and not 0 <= name <= _MAX_INDEX:
        raise ArgumentValueError(expected("device", f"an index from 0 to {_MAX_INDEX}", name))
    try:
        return torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
    except RuntimeError:
        raise ArgumentValueError(expected("device", want, repr(name))) from None


def _contract(op: str) -> Contract:
    if not isinstance(op, str):
        raise ArgumentTypeError(expected("op", "the name of one op", repr(op)))
    if op not in _CONTRACTS:
        raise ArgumentValueError(one_of("op", ops(), op))
    return _CONTRACTS[op]
