"""One pytest session over unchanged test files of vLLM: `determinism` starts it by its path.

    python tests/integrations/vllm/unchanged.py ROOT BACKEND RECORDS PYTEST-ARGUMENT...

ROOT holds vLLM's tests as the package `tests`, so nothing of this repository's is imported here.
RECORDS gets a JSON line for each test.  The files stay as they are; what they import from their
`utils` is changed before they do:

- `BACKENDS`, and the backend that a test names itself, become BACKEND.  Ours is one of its own.
- With cpu as the device, the conditions that skip what has no GPU are false.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
from pathlib import Path

FOLDER = Path("tests/v1/determinism")
#: H100's and H200's, so that a CPU cuts the prompts of the same tests as they do.
TOKENS_OF_A_STEP = 16384
#: Offset of a GPU's generator by which vLLM takes back a token that it drew.
DRAW = 4


class Session:
    """Pytest plug-in: the backend of each test, the end of its engine, and a record of it."""

    def __init__(self, backend: str, records: Path) -> None:
        self.backend, self.records = backend, records

    def pytest_pyfunc_call(self, pyfuncitem) -> None:
        """Replace the attention backend that the test has as a parameter."""
        if "backend" in pyfuncitem.funcargs:
            pyfuncitem.funcargs["backend"] = self.backend

    def pytest_runtest_logreport(self, report) -> None:
        """Write the test's outcome: of its call, or of what ended it before."""
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self.write(report, report.duration)

    def pytest_collectreport(self, report) -> None:
        """Write that a file cannot be imported: what it needs is not installed."""
        if report.failed:
            self.write(report, 0.0)

    def write(self, report, seconds: float) -> None:
        """Append the record of a report."""
        reason = report.longrepr[2] if report.skipped else last_error(report)
        line = {"test": report.nodeid.split("/")[-1], "outcome": report.outcome}
        line |= {"seconds": round(seconds, 1), "reason": reason}
        with self.records.open("a") as file:
            print(json.dumps(line), file=file)

    def pytest_runtest_logfinish(self) -> None:
        """End engines that a failed test's traceback holds: the next one needs their memory."""
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if hasattr(sys, name):
                delattr(sys, name)
        gc.collect()
        for child in multiprocessing.active_children():
            child.terminate()
            child.join()


def last_error(report) -> str:
    """Message of the exception that ended a test, or nothing."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash else str(report.longrepr or "")


def replace_backends(backend: str, lift_skips: bool) -> None:
    """Change what the test files import from vLLM's `utils`."""
    import pytest
    import utils

    utils.BACKENDS[:] = [backend]
    if lift_skips:
        for name in ("skip_unsupported", "skip_if_not_cuda", "skip_if_not_cuda_alike"):
            if hasattr(utils, name):
                setattr(utils, name, pytest.mark.skipif(False, reason="runs on a CPU"))


def prepare_cpu() -> None:
    """Entry point of each process of vLLM: a GPU's tokens a step, generators that can be rewound.

    vLLM draws a token for each chunk of a prefill, drops it and takes the generator back by
    `get_offset` and `set_offset`, which torch has for GPUs only.  Nothing that counts was drawn
    before, as no request is preempted here: back is to the seed.  What VLLM_BATCH_INVARIANT puts in
    the place of torch's softmax and bmm calls Triton, which CPUs have not: it is left out.
    """
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or hasattr(torch.Generator, "is_rewound"):
        return
    from vllm.model_executor.determinism import batch_invariant

    class Generator(torch.Generator):
        """A CPU generator whose offset is taken back to its seed."""

        is_rewound = True

        def get_offset(self) -> int:
            return DRAW

        def set_offset(self, offset: int) -> None:
            assert offset == 0, "vLLM takes back one draw"
            self.manual_seed(self.initial_seed())

    get_batch_defaults = EngineArgs.get_batch_defaults.__func__

    def batch_defaults(cls, world_size: int):
        tokens, sequences = get_batch_defaults(cls, world_size)
        return dict.fromkeys(tokens, TOKENS_OF_A_STEP), sequences

    batch_invariant.enable_batch_invariant_mode = lambda: None
    torch.Generator = Generator
    EngineArgs.get_batch_defaults = classmethod(batch_defaults)


def check_plugin() -> None:
    """Assert that vLLM's processes load the plug-in if CUTE_KERNELS_VLLM asks for it, else not."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    is_active = "cute_kernels.integrations.vllm.layers" in sys.modules
    assert is_active == (os.environ["CUTE_KERNELS_VLLM"] == "1"), f"plug-in active: {is_active}"


def main() -> int:
    """Run pytest on the files of the command line."""
    root, backend, records, *arguments = sys.argv[1:]
    sys.path[0] = root
    sys.path.insert(0, f"{root}/{FOLDER}")
    os.chdir(root)
    import pytest
    from vllm.platforms import current_platform

    check_plugin()
    replace_backends(backend, lift_skips=current_platform.is_cpu())
    options = ["-q", "-rA", "-p", "no:cacheprovider", "-c", f"{root}/pytest.ini"]
    options += ["--rootdir", root, "--confcutdir", f"{root}/{FOLDER}"]
    options += ["--continue-on-collection-errors"]
    return pytest.main([*options, *arguments], plugins=[Session(backend, Path(records))])


if __name__ == "__main__":
    sys.exit(main())
