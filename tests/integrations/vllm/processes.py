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

from tests.hang import HANG_SECONDS
from tests.integrations.vllm import engine
from tests.ranks import ROOT


def run(*command: object, code: int = 0, **environment: str) -> str:
    """Run ``python COMMAND`` from the root; its output.  It must end with this exit code."""
    variables = os.environ | engine.ENVIRONMENT | environment
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=ROOT,
            env=variables,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            ended = process.wait(HANG_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        text = log.read()
    assert ended == code, text[-4000:]
    return text


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
