"""Processes of these tests: each with its own vLLM, whose children end with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from tests.hang import HANG_SECONDS
from tests.integrations.vllm import engine
from tests.ranks import ROOT


def execute(
    command: list[str], environment: Mapping[str, str], log: Path, seconds: float
) -> int | str:
    """Run a command; its exit code, or "timeout".  What it started ends with it."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(*command: object, code: int = 0, **environment: str) -> str:
    """Run ``python COMMAND`` from the root; its output.  It must end with this exit code."""
    variables = os.environ | engine.ENVIRONMENT | environment
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        ended = execute([sys.executable, *map(str, command)], variables, log, HANG_SECONDS)
        text = log.read_text(errors="replace")
    assert ended == code, text[-4000:]
    return text


def end() -> NoReturn:
    """End this process: the end of vLLM's is not what is tested."""
    sys.stdout.flush()
    os._exit(0)


class Background:
    """Jobs of a module's tests, which start processes: two at a time, as there are two cores."""

    def __init__(self, jobs: Mapping[str, Callable[[], object]]) -> None:
        self._pool = ThreadPoolExecutor(2)
        self._futures = {name: self._pool.submit(job) for name, job in jobs.items()}

    def result(self, name: str):
        """Wait for a job; its result."""
        return self._futures[name].result()

    def end(self) -> None:
        """Start no further job, and wait for those that run."""
        self._pool.shutdown(cancel_futures=True)


def selected(session, jobs_of_tests: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Names of the jobs that the tests of a session need: test function -> jobs."""
    tests = {getattr(item, "originalname", None) for item in session.items}
    names = [name for test, jobs in jobs_of_tests.items() if test in tests for name in jobs]
    return list(dict.fromkeys(names))
