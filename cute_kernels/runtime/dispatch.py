"""(op, device, dtype) -> backend -> launcher.  One table; a refused backend is never replaced by
one that is not in it.

Launchers are named by module path and imported at first use: neither ``cutlass`` nor ``triton`` is
imported by a process that does not run them.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch

from .. import arch, contracts, log, settings, systems
from ..errors import BackendUnavailable, no_backend
from . import plan_cache
from .plan_cache import Plan


@dataclass(frozen=True)
class Implementation:
    """Launcher of one op on one backend, and the dtypes it takes there."""

    launcher: str  # "package.module:function"; "" where the planner's plans are run
    dtypes: frozenset[torch.dtype]
    planner: str = ""  # optional, as "package.module:function"; takes what the launcher takes


@dataclass(frozen=True)
class Run:
    """Record of a launcher that ran in this process: device, dtype, and when it first did.

    ``op`` is the op whose contract covers the launcher, ``contract_id`` its id at that time.
    """

    op: str
    kernel: str
    backend: str
    device: str
    dtype: str
    contract_id: str
    first: str  # UTC, ISO 8601


contracts.on_missing(systems.load)

_ROOT = __package__.rpartition(".")[0]
#: A module with the public functions of a system.
_API = re.compile(rf"{re.escape(_ROOT)}\.(\w+)\.api")

#: Dtypes of launchers: of two bytes, and all that ops take.
HALF = frozenset({torch.bfloat16, torch.float16})
FLOATS = HALF | {torch.float32}
#: Backend -> dtypes of products, whose fp32 is IEEE arithmetic.
OF_PRODUCTS = {arch.CUTE_SM90: HALF, arch.TRITON: FLOATS, arch.CPU: FLOATS}
#: Backend -> the module of a system that has its launchers.
_MODULES = {arch.CUTE_SM90: "launch", arch.TRITON: "triton.launch", arch.CPU: "cpu"}

_TABLE: dict[str, dict[str, Implementation]] = {}
_CONTRACT: dict[str, str] = {}
_ran: dict[tuple[str, ...], Run] = {}


def register(op: str, implementations: dict[str, Implementation], *, contract: str) -> None:
    """Adds the backends of one op, and the op in `contracts` whose contract covers it."""
    _TABLE[op], _CONTRACT[op] = implementations, contract


def named_alike(
    package: str,
    function: str,
    dtypes: dict[str, frozenset[torch.dtype]],
    planned: tuple[str, ...] = (arch.CUTE_SM90,),
) -> dict[str, Implementation]:
    """The implementations of a launcher that has one name in each backend's module of a system.

    planned: Backends with a planner ``plan_<function>`` beside it.
    """
    implementations = {}
    for backend, taken in dtypes.items():
        module = f"{package}.{_MODULES[backend]}"
        planner = f"{module}:plan_{function}" if backend in planned else ""
        implementations[backend] = Implementation(f"{module}:{function}", taken, planner)
    return implementations


def register_contracts(
    ops: Iterable[str],
    kept: Mapping[str, frozenset[str]],
    facts: Callable[[str, arch.Device], dict[str, object]],
    entry: str,
    helpers: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Add the contracts of public ops that one entry's backend computes."""
    chosen = functools.partial(backend, entry)
    for op in ops:
        contracts.register(contracts.Contract(op, kept, facts, chosen, helpers or {}))


def _backends(op: str) -> dict[str, Implementation]:
    """The backends of an op; of one that is not registered yet, after loading every system."""
    if op not in _TABLE:
        systems.load()
    return _TABLE[op]


def reasons(op: str, device: torch.device | str, dtype: torch.dtype) -> dict[str, str | None]:
    """Per backend: None if it can run ``op``, else why it cannot."""
    device_facts = arch.describe(device)
    refusals: dict[str, str | None] = {}
    for backend in arch.BACKENDS:
        implementation = _backends(op).get(backend)
        if implementation is None:
            refusals[backend] = "has no such op"
        elif why := arch.refusal(backend, device_facts):
            refusals[backend] = why
        elif dtype not in implementation.dtypes:
            on_triton = _backends(op).get(arch.TRITON)
            elsewhere = backend == arch.CUTE_SM90 and on_triton and dtype in on_triton.dtypes
            also = " (fp32 in IEEE arithmetic runs on triton)" if elsewhere else ""
            refusals[backend] = f"does not take {dtype}{also}"
        else:
            refusals[backend] = None
    if refusals[arch.TRITON] is None and settings.forced_backend() != arch.TRITON:
        # Where cute_sm90 runs it is taken first, so this matters only where it was refused.
        refusals[arch.TRITON] = _meant_for_sm90(op, device_facts, dtype)
    return refusals


def _meant_for_sm90(op: str, device: arch.Device, dtype: torch.dtype) -> str | None:
    """Why triton must not run on an SM90 GPU unasked: it would change bits silently."""
    product = _backends(op).get(arch.CUTE_SM90)
    if device.arch != "sm_90a" or product is None or dtype not in product.dtypes:
        return None
    return "cute_sm90 is this device's backend; set CUTE_KERNELS_BACKEND=triton for other bits"


def backend(op: str, device: torch.device | str, dtype: torch.dtype) -> str:
    """The backend that runs ``op``; BackendUnavailable with every reason if there is none."""
    return _choose(op, torch.device(device), dtype, settings.forced_backend())


def launcher(op: str, device: torch.device, dtype: torch.dtype) -> Callable:
    """The function that runs ``op`` on tensors of ``device`` and ``dtype``; the caller runs it."""
    # The number of threads is part of a CPU's contract id, and costs less to read than the
    # device's type.
    forced, threads = settings.forced_backend(), torch.get_num_threads()
    return _implementation(op, device, dtype, forced, threads)[0]


def plan(op: str, device: torch.device, dtype: torch.dtype, *operands: object) -> Plan:
    """The backend's launch plan of ``op``; its ``run`` takes these operands, as the launcher does.

    A backend without a planner is called as it is.
    """
    forced, threads = settings.forced_backend(), torch.get_num_threads()
    planner = _implementation(op, device, dtype, forced, threads)[1]
    if planner is not None:
        return planner(*operands)
    return Plan(launcher(op, device, dtype), fresh=False)


class Launches:
    """Kernel launches of one run of an op, in their order.

    All runs of an op's plan make the same launches, so each is planned in the first run.

    plans: Position of a launch -> what runs its plan; those of the runs before.
    """

    def __init__(self, plans: dict[int, Callable] | None = None):
        self._plans, self._position = {} if plans is None else plans, 0

    def __call__(self, entry: str, like: torch.Tensor, *operands: object) -> Any:
        """Launch ``entry`` on the backend for the device and dtype of ``like``."""
        position, self._position = self._position, self._position + 1
        run = self._plans.get(position)
        if run is None:
            run = plan(entry, like.device, like.dtype, *operands).run
            self._plans[position] = run
        return run(*operands)


def plan_launches(run: Callable[..., object]) -> Callable[..., Plan]:
    """The ``plan`` of an op whose plans call ``run(launches, *args)``, with `Launches`."""

    def plan_run(*_) -> Plan:
        plans: dict[int, Callable] = {}
        return Plan(lambda *args: run(Launches(plans), *args), fresh=False)

    return plan_run


def forget() -> None:
    """Forgets every choice and what ran: devices are described anew."""
    _choose.cache_clear()
    _implementation.cache_clear()
    plan_cache.clear()
    _ran.clear()


def ran() -> list[Run]:
    """Launchers that ran in this process, in the order of their first use."""
    return list(_ran.values())


@functools.cache
def _implementation(
    op: str, device: torch.device, dtype: torch.dtype, forced: str, threads: int
) -> tuple[Callable, Callable | None]:
    """(launcher, planner or None)."""
    backend_name = _choose(op, device, dtype, forced)
    implementation = _backends(op)[backend_name]
    planner = _function(implementation.planner) if implementation.planner else None
    launch = (
        _function(implementation.launcher)
        if implementation.launcher
        else plan_cache.launcher(planner)
    )
    _record(op, backend_name, device, dtype)
    return launch, planner


def _function(name: str) -> Callable:
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


def _record(op: str, backend_name: str, device: torch.device, dtype: torch.dtype) -> None:
    identity = contracts.contract_id(_CONTRACT[op], device, dtype)
    facts = (
        _CONTRACT[op],
        op,
        backend_name,
        str(device),
        str(dtype).removeprefix("torch."),
        identity,
    )
    run = Run(*facts, first=datetime.now(timezone.utc).isoformat(timespec="seconds"))
    if _ran.setdefault(facts, run) is run:
        log.say("%s (%s): %s on %s, %s, %s", *facts)


@functools.cache
def _choose(op: str, device: torch.device, dtype: torch.dtype, forced: str) -> str:
    refusals = reasons(op, device, dtype)
    for name, why in refusals.items():
        if why is None:
            return name
    why = {name: str(reason) for name, reason in refusals.items()}
    raise BackendUnavailable(no_backend(_called_op(_CONTRACT[op]), device, why))


def _called_op(contract: str) -> str:
    """Public name of the op that the user called, for an error; else the op of the contract.

    Several public ops share one entry (`matmul` and `linear` are one product), so the name comes
    from the frames: the outermost function of an ``api`` module before the user's code.  A backward
    has none.
    """
    frame, name = sys._getframe(), None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if match := _API.fullmatch(module):
            function, package = frame.f_code.co_name, match[1]
            name = f"{package}.{function}" if package == contract else function
        elif name is not None and not module.startswith(f"{_ROOT}."):
            break
        frame = frame.f_back
    return name or contract
