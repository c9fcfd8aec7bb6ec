"""How ranks end when one of them is killed."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from tests.ranks import Ended, run_ranks


def after_a_kill(module: str, world: int, folder: Path) -> list[Ended]:
    """Each rank of a script that kills one; none may hang."""
    return run_ranks(module, world, folder, KILL="1")


def assert_error_not_hang(ended: list[Ended], killed: int) -> None:
    """That one rank was killed, and all others ended by an error of theirs."""
    for rank, (code, _, text) in enumerate(ended):
        if rank == killed:
            assert code == -signal.SIGKILL
        else:
            assert code not in (0, -signal.SIGKILL), text
            assert re.search(r"Error.*(Connection|peer|gloo)", text), text
