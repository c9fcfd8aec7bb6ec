"""Runs a system's Triton kernels without a GPU, through its launcher and Triton's specialisation.

    RUNNER = Runner(cute_kernels.blend.triton, {"scaled_add_kernel": ("out_ptr",)})
    CHECKS = [case(engine, scaled, 0.3) for engine in ENGINES]
    MUTANTS = {"not_scaled": (INTERPRETER, scaled, 0.3, (" * scale", ""))}

    @pytest.mark.parametrize(("engine", "check", "options"), CHECKS)
    def test_values(engine, check, options):
        with RUNNER.running(engine, **options) as launch:    # on CPU tensors
            check(launch)

    @pytest.mark.parametrize(("engine", "check", "edits"), mutants(MUTANTS))
    def test_killed(engine, check, edits):
        RUNNER.kill(engine, check, *edits)

    @pytest.mark.parametrize(("engine", "check"), unedited(MUTANTS))
    def test_unedited(engine, check):    # where no table of checks has these
        with RUNNER.running(engine) as launch:
            check(launch)

    (kernel,) = RUNNER.compiled("gfx942", lambda: RUNNER.launch.scaled_add(a, b, 0.3))

Engines: `SM90` is the sm_90 code in ptxsim, `INTERPRETER` the source in Triton's interpreter, which
multiplies the bit patterns of bf16 and truncates where it stores bf16: there private functions of a
launcher that take ``interpret`` multiply in fp32 and round outside of the kernel.  `CARD` is the
machine's GPU, in tests marked so.  For any other target kernels compile only.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect as python
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from triton.runtime import interpreter

from cute_kernels import arch
from ptxsim.skips import requires_core
from tests import on_gpu, triton_copies, triton_in_numpy

from . import triton_harness as harness
from . import triton_inspect as inspect
from .old_memory import old_memory

SM90, INTERPRETER, CARD = "sm_90", "interpreter", "card"
ENGINES = SM90, INTERPRETER, CARD
TARGETS = harness.TARGETS
#: Target -> the device that a launcher is told about.
DEVICES = {
    "sm_90": arch.Device("cuda:0", "cuda", "sm_90a", 132),
    "sm_80": arch.Device("cuda:0", "cuda", "sm_80", 108),
    "gfx942": arch.Device("cuda:0", "hip", "gfx942", 304),
    "gfx950": arch.Device("cuda:0", "hip", "gfx950", 256),
}
#: Options of the simulator: the truncating adder; everything as late and as odd as it may be.
HOPPER = {"wgmma_math": 2}
LATE = {"async_mode": 1, "wgmma_mode": 1, "warp_order": 1, "cta_order": 1, "seed": 9}
sizes_of_float_sums = inspect.sizes_of_float_sums
_COPIES = tempfile.TemporaryDirectory(prefix="triton-copies-")


@pytest.fixture(autouse=True)
def device_guard():
    """Launchers take a CPU for a device, and new memory holds NaN; for Triton's interpreter."""
    with harness.guarded(), old_memory():
        yield


def case(engine: str, check: Callable, *args, night: bool = False, **options):
    """Parameters (engine, check, options) of a test that calls ``check(launch, *args)``."""
    label = "-".join(map(_label, (engine, check, *args, *options)))
    return pytest.param(engine, _call(check, args), options, id=label, marks=_marks(engine, night))


def mutants(table: Mapping[str, tuple]) -> list:
    """Parameters (engine, check, edits) of name -> (engine, check, *arguments, *edits).

    An edit is a pair of texts.
    """
    out = []
    for name, (engine, check, *rest) in table.items():
        args, edits = _parted(rest)
        marks = _marks(engine, night=False)
        out.append(pytest.param(engine, _call(check, args), edits, id=name, marks=marks))
    return out


def unedited(table: Mapping[str, tuple]) -> list:
    """Parameters (engine, check) of the checks in a table of mutants, each once, by night."""
    out = {}
    for name, (engine, check, *rest) in table.items():
        args, _ = _parted(rest)
        param = pytest.param(engine, _call(check, args), id=name, marks=_marks(engine, night=True))
        out.setdefault((engine, check, args), param)
    return list(out.values())


def _parted(values: list) -> tuple[tuple, list[tuple[str, str]]]:
    """The arguments of a check, and the edits after them."""
    edits = [v for v in values if isinstance(v, tuple) and all(isinstance(t, str) for t in v)]
    return tuple(v for v in values if v not in edits), edits


def _call(check: Callable, args: tuple) -> Callable:
    return lambda launch, **others: check(launch, *args, **others)


def _marks(engine: str, night: bool) -> list:
    marks = [pytest.mark.sim, requires_core] if engine == SM90 else []
    if engine == CARD:
        needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
        marks = [pytest.mark.gpu, needs_gpu]
    return [*marks, pytest.mark.nightly] if night else marks


def _label(value: object) -> str:
    return getattr(value, "__name__", str(value)).replace("torch.", "").replace("float", "fp")


@dataclass(frozen=True, eq=False)
class Runner:
    """Runner of the kernels of one ``triton`` package.

    written: Kernel -> the tensors that it may write; all others are read-only in ptxsim.
    files: The modules of the kernels and, last, of their launcher, which has the kernels as
        ``kernels`` or ``token_kernels``.
    arithmetic: What the interpreter does as a GPU: functions that take a monkeypatch.
    """

    package: ModuleType
    written: Mapping[str, tuple[str, ...]]
    files: tuple[str, ...] = ("kernel", "launch")
    arithmetic: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
        triton_in_numpy.round_as_gpus_do,
    )

    @property
    def launch(self) -> ModuleType:
        """The package's launcher."""
        return importlib.import_module(f"{self.package.__name__}.{self.files[-1]}")

    def copy_of(self, folder: Path, *edits: tuple[str, str]) -> ModuleType:
        """The launcher of a copy of the kernels in which each (old, new) is replaced: a mutant."""
        return triton_copies.copy_of(self.package, folder, *edits, files=self.files)

    def texts(self, *edits: tuple[str, str]) -> dict[str, str]:
        """The sources of a mutant."""
        return triton_copies.texts(self.package, self.files, *edits)

    def mutant(self, *edits: tuple[str, str]) -> ModuleType:
        """`copy_of` in a folder of this process; the package's launcher without edits."""
        return self.copy_of(Path(_COPIES.name), *edits) if edits else self.launch

    @functools.lru_cache(32)  # noqa: B019  (runners are modules' constants)
    def _interpreted(self, *edits: tuple[str, str]) -> ModuleType:
        """`mutant` of kernels of the interpreter, with ``interpret`` where there is a choice."""
        launch = triton_copies.copy_of(
            self.package,
            Path(_COPIES.name),
            *edits,
            files=self.files,
            surroundings=triton_in_numpy.jitting(),
        )
        for name, function in list(vars(launch).items()):
            if python.isfunction(function):
                option = python.signature(function).parameters.get("interpret")
                if option is not None and option.kind is option.KEYWORD_ONLY:
                    setattr(launch, name, functools.partial(function, interpret=True))
        return launch

    @contextlib.contextmanager
    def running(self, engine: str, *edits: tuple[str, str], **options: int) -> Iterator[ModuleType]:
        """While it lasts, the launcher that it yields, of a mutant, runs on CPU tensors.

        The device is an H200, memory that the launcher leaves unwritten holds NaN, and a launch
        outside of the launcher's device guard fails.  ``options``: the simulator's.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(old_memory())
            if engine == CARD:
                yield on_gpu.launcher(self.mutant(*edits))
                return
            h200 = mock.patch.object(arch, "describe", lambda device: DEVICES["sm_90"])
            stack.enter_context(h200)
            devices = stack.enter_context(harness.guarded())

            def check(values: dict) -> None:
                assert devices, "launched outside of the device guard"

            if engine == SM90:
                launch = self.mutant(*edits)
                stack.enter_context(harness.simulated(launch, self.written, options, check))
            else:
                launch = self._interpreted(*edits)
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                for function in self.arithmetic:
                    function(patch)
                stack.enter_context(triton_in_numpy.interpreting())
                patch.setattr(interpreter.GridExecutor, "__call__", _checked(check))
            yield launch

    def kill(self, engine: str, check: Callable, *edits: tuple[str, str], **options: int) -> None:
        """Assert that a check fails with the edits, or that the simulator stops the kernel."""
        failure = pytest.raises((AssertionError, harness.WildAccess))
        with self.running(engine, *edits, **options) as launch, failure:
            check(launch)

    def compiled(
        self, target: str, call: Callable[[], object], launch: ModuleType | None = None
    ) -> list:
        """The kernels that ``call`` would launch, compiled for one of `TARGETS`; nothing runs."""
        described = mock.patch.object(arch, "describe", lambda device: DEVICES[target])
        with harness.guarded(), described:
            return harness.compiled(launch or self.launch, TARGETS[target], self.written, call)

    @contextlib.contextmanager
    def simulated(self, launch: ModuleType | None = None, **options: int) -> Iterator[list]:
        """While it lasts, launches of the sm_90 code run on CPU tensors in ptxsim.

        Yields the list of kernels launched.  Results that a launcher leaves unwritten are NaN, and
        a launch outside of the launcher's device guard fails.  ``options``: the simulator's.
        """
        with harness.guarded() as devices, old_memory():

            def check(values):
                assert devices, "launched outside of the device guard"

            launch = launch or self.launch
            with harness.simulated(launch, self.written, options, check) as kernels:
                yield kernels


def _checked(check: Callable[[dict], None]) -> Callable:
    true_call = interpreter.GridExecutor.__call__

    def call(self, *args, **kwargs):
        check(kwargs)
        return true_call(self, *args, **kwargs)

    return call


#: Types of offsets that are too narrow: any; of tensors; of tensors of two axes or more.
NARROW = r"tt\.addptr .*: .*\bi32|tt\.addptr .*xi32>"
NARROW_TENSORS = r"tt\.addptr .*: .*, tensor<[\dx]+xi32>"
NARROW_TILES = r"tt\.addptr .*: .*, tensor<\d+x\d+x(\d+x)?i32>"


def complaints(kernel, stack: int = 0, narrow: str = NARROW_TENSORS) -> list[str]:
    """What is wrong with the code of a kernel without products; empty if nothing is.

    No atomics, spills beyond so many bytes of stack or matrix instructions, nothing fused, IEEE
    division and roots, wide offsets, and no sum of floats in an order that the compiler chooses.
    """
    out = inspect.code_complaints(kernel, stack, narrow)
    return out + ["matrix instruction"] * bool(inspect.matrix_instructions(kernel))
