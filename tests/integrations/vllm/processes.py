"""Processes of these tests: each with its own vLLM, whose children end with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile

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
