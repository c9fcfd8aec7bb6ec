"""How ranks end when one of them is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.hang import HANG_SECONDS
from tests.ranks import ROOT


def after_a_kill(module: str, world: int, folder: Path) -> list[tuple[int, str]]:
    """(exit code, standard error) of each rank of a script that kills one; none may hang.

    Raises:
        subprocess.TimeoutExpired: a rank did not end by itself.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "KILL": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(folder / "store")],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [p.communicate(timeout=HANG_SECONDS)[1] for p in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


def assert_error_not_hang(ended: list[tuple[int, str]], killed: int) -> None:
    """That one rank was killed, and all others ended by an error of theirs."""
    for rank, (code, text) in enumerate(ended):
        if rank == killed:
            assert code == -signal.SIGKILL
        else:
            assert code not in (0, -signal.SIGKILL), text
            assert re.search(r"Error.*(Connection|peer|gloo)", text), text
